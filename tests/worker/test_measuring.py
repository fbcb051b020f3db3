"""A change is measured on the live run by turns, which leave nothing behind: no weight, no setting, no error."""

import json

import numpy as np
import pytest
import torch

from upsnb.errors import ConfigError
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import Launch
from upsnb.training import checkpoint
from upsnb.training.parallel import Ranks
from upsnb.worker.flips import Flips
from upsnb.worker.measuring import LEAST_ROUNDS, OVER, WITH, WITHOUT, Measuring

CHECKPOINTING = {"operator.pdet.use_activation_checkpoint": True}


@pytest.fixture
def begun(tiny_setup, tmp_path):
    """`begun(overlay, steps=...)`: a measurement that has begun, or was refused; its setup and its run's events."""

    def make(overlay, within=0.05, steps=1000, **settings):
        setup = tiny_setup(("darcy",), **settings)
        folder = runfolder.create(setup.config, tmp_path / "run")
        events = runfolder.EventWriter(folder)
        measuring = Measuring(Flips(setup.config, setup, Ranks(), events, folder, Launch()))
        measuring.begin(3, {"overlay": overlay, "within": within, "steps": steps}, 0)
        return measuring, setup, lambda *kinds: runfolder.read_events(folder, kinds)

    return make


def go_on(measuring, rate, unsteady=2):
    """Take the steps that are due, each at `rate(arm, step)` samples per second; the arm of each."""
    arms, settling = [], unsteady
    while (arm := measuring.due(len(arms))) != OVER:
        if arm != measuring.arm:
            measuring.take_turn(arm, len(arms))
            settling = unsteady
        arms.append(arm)
        # a step that is not steady is a hundred times slower: counted, it would be seen
        measuring.observe(len(arms), rate(arm, len(arms)) / (100 if settling > 0 else 1), 10.0, settling <= 0)
        settling -= 1
    measuring.take_turn(OVER, len(arms))
    return arms


def test_turns_find_a_gain_that_a_drifting_machine_hides_from_one_flip(begun):
    measuring, setup, events = begun(CHECKPOINTING, within=0.02)
    start, draws = setup.config, np.random.default_rng(0)

    # the machine loses a tenth of its speed on the way, more than the change gains
    def rate(arm, step):
        return (1.08 if arm == WITH else 1.0) * (500 - step) * draws.normal(1, 0.01)

    arms = go_on(measuring, rate)
    (effect,) = events("flip_effect")
    low, high = effect["ci95"]
    assert low <= 1.08 <= high and high - effect["ratio"] <= 0.02 * effect["ratio"] and effect["ended"] == "within"
    assert (effect["method"], effect["revision"], effect["phases"]) == (
        "interleaved",
        3,
        {"activation_checkpointing": True},
    )
    assert (
        effect["changes"] == CHECKPOINTING and effect["num_rounds"] >= LEAST_ROUNDS and len(effect["memory_gib"]) == 2
    )
    turns = [turn["arm"] for turn in events("turn")]
    assert turns == [WITH, WITHOUT] * (len(turns) // 2) + [WITH] * (len(turns) % 2), "A B B A A B B A"
    assert abs(arms.count(WITH) - arms.count(WITHOUT)) <= 10
    assert setup.config == start and measuring.configs is None


def test_a_budget_ends_what_no_turn_can_settle_and_two_equal_arms_come_out_equal(begun):
    measuring, _, events = begun({}, within=1e-6, steps=200)
    draws = np.random.default_rng(1)
    arms = go_on(measuring, lambda arm, step: draws.normal(100, 5))
    (effect,) = events("flip_effect")
    assert len(arms) == 200 and effect["ended"] == "budget" and effect["changes"] == effect["phases"] == {}
    assert effect["ci95"][0] < 1 < effect["ci95"][1] and abs(effect["ratio"] - 1) < 0.05


def test_what_ends_too_early_says_so_and_measures_nothing(begun):
    measuring, setup, events = begun(CHECKPOINTING, steps=20)
    start = setup.config
    go_on(measuring, lambda arm, step: 100)
    began, ended = events("measuring")
    assert began["applied"] and not ended["applied"] and "budget, before two rounds" in ended["reason"]
    assert not events("flip_effect") and setup.config == start


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"training.use_fsdp2": True}, "training.use_fsdp2: takes a relaunch"),
        ({"evaluation.every_epochs": 5, "checkpoint.async_save": True}, "no step depends on it"),
        ({"latent.dim": 64}, "latent.dim: cannot change while training runs"),
        ({"training.batch_size": 10**6}, "lower batch_size"),
        ({"training": [1]}, "training"),
        ({"no.such": 1}, "unknown setting"),
    ],
)  # fmt: skip
def test_what_cannot_take_turns_is_refused_and_the_run_is_as_it_was(begun, overlay, said):
    measuring, setup, events = begun(overlay)
    (refused,) = events("measuring")
    assert not refused["applied"] and said in refused["reason"] and refused["changes"] == {}
    assert measuring.configs is None and measuring.due(5) == WITHOUT == measuring.arm
    setup.step(list(setup.loader.epoch(0))[:1], 0)


def test_a_step_that_fails_because_of_the_change_is_taken_again_without_it(begun):
    measuring, setup, events = begun(CHECKPOINTING)
    start, full = setup.config, torch.OutOfMemoryError("out of memory")
    assert not measuring.blame(full), "the run's own settings are to blame for that"
    measuring.take_turn(WITH, 9)
    assert not measuring.blame(ValueError("something else")) and measuring.blame(full) and measuring.due(9) == OVER
    measuring.take_turn(OVER, 9)
    assert setup.config == start and "OutOfMemoryError" in events("measuring")[-1]["reason"]


def test_a_precision_keeps_the_scale_that_it_found_in_its_last_turn(begun):
    measuring, setup, _ = begun({"training.amp_dtype": "bfloat16"}, **{"training.amp": True})
    own = setup.scaler
    measuring.take_turn(WITH, 9)
    assert setup.scaler is not own
    measuring.take_turn(WITHOUT, 19)
    assert setup.scaler is own


def test_turns_leave_weights_moments_and_settings_to_the_last_bit(tiny_config, train_here, tmp_path):
    """Activation checkpointing changes no number, so whatever differs is the toggling's doing."""
    settings = {"training.batch_size": 2, "training.ema_decay": 0.9, "training.noise": 0.01, "operator.pdet.depth": 1}
    config, run = tiny_config(("advection",), **settings), handle.Run(tmp_path / "turns")

    def at_step(step):
        if not (run.folder / runfolder.CONTROL).exists():
            run.measure("activation_checkpointing", within=1e-9, steps=75)

    train_here(config, tmp_path / "alone")
    events = train_here(config, run.folder, at_step)
    (effect,) = (event for event in events if event["kind"] == "flip_effect")
    assert (effect["revision"], effect["ended"], effect["step"], effect["num_rounds"]) == (1, "budget", 76, 2)
    assert len([event for event in events if event["kind"] == "turn"]) == 5
    assert not [event for event in events if event["kind"] in ("flip", "warning")]
    assert run.current_config == config and runfolder.read_manifest(run.folder)["applied"]["overlay"] == {}
    alone, turns = (checkpoint.load(tmp_path / name) for name in ("alone", "turns"))
    assert turns["config"] == alone["config"]
    for part in ("model", "moments", "ema"):
        flat = [dict(leaves(state["setup"][part])) for state in (alone, turns)]
        assert flat[0].keys() == flat[1].keys() and len(flat[0]) > 10
        assert all(torch.equal(flat[0][name], flat[1][name]) for name in flat[0]), part


def leaves(tree, path=""):
    """(path, tensor) of all that a nested mapping holds."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}", torch.as_tensor(value)


@pytest.mark.parametrize("arm", [WITHOUT, WITH])
def test_a_flip_ends_a_measurement_whatever_turn_it_is_and_is_obeyed(tiny_config, train_here, tmp_path, arm):
    run, ended_at = handle.Run(tmp_path), []

    def turns():
        return [event["arm"] for event in runfolder.read_events(tmp_path, ("turn",))]

    def at_step(step):
        revision = runfolder.read_control(tmp_path).revision
        if step == 2 and revision == 0:
            run.measure("activation_checkpointing")
        elif revision == 1 and step >= 9 and [WITHOUT, *turns()][-1] == arm:
            run.update({"noise": 0.01})
            ended_at.append(step + 1)

    events = train_here(tiny_config(("darcy",), **{"training.batch_size": 1}), tmp_path, at_step)
    began, ended = [event for event in events if event["kind"] == "measuring"]
    assert (began["applied"], ended["applied"], [ended["step"]]) == (True, False, ended_at)
    assert "another request came" in ended["reason"]
    (flip,) = [event for event in events if event["kind"] == "flip"]
    assert flip["applied"] and [flip["step"]] == ended_at and flip["changes"] == {"training.noise": 0.01}
    assert events[-1]["kind"] == "end" and run.current_config.operator.pdet.use_activation_checkpoint is False


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fsdp2", "training.use_fsdp2: takes a relaunch -> flip it, or compare two runs"),
        ("async_checkpoints", "no step depends on it"),
        ("compil", "did you mean compile"),
        ({"batchsize": 3}, "did you mean"),
    ],
)
def test_what_cannot_be_measured_is_not_asked(tiny_config, tmp_path, what, said):
    run = handle.Run(runfolder.create(tiny_config(("darcy",)), tmp_path / "run"))
    with pytest.raises(ConfigError, match=".") as caught:
        run.measure(what)
    assert said in str(caught.value) and not (run.folder / runfolder.CONTROL).exists()


def test_a_request_to_measure_outlives_the_next_request(tiny_config, tmp_path):
    run = handle.Run(runfolder.create(tiny_config(("darcy",)), tmp_path / "run"))
    assert run.measure("compile", within=0.1, steps=500) == 1 and run.checkpoint() == 2
    control = runfolder.read_control(run.folder)
    assert control.asked == {"measure": 1, "checkpoint": 2}
    assert control.measure == {"overlay": {"training.compile": True}, "within": 0.1, "steps": 500}
    assert json.loads((run.folder / runfolder.CONTROL).read_text())["overlay"] == {}

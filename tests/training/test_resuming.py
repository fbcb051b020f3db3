"""A run that was stopped and continued is the run that was never stopped."""

import pytest
import torch
from saved import expect_same_state, losses
from waiting import until

from upsnb import overlays
from upsnb.runs import checkpoint_index, runfolder
from upsnb.training import checkpoint

EVERYTHING = {  # all that draws at random or remembers
    "operator.pdet.drop_path": 0.3,
    "training.noise": 0.1,
    "training.ema_decay": 0.9,
    "training.query_sampling.num_queries": 24,
    "training.lambda_inv_enc": 0.1,
    "training.inverse_loss_frequency": 2,
    "data.datasets.advection.augment": True,
    "data.datasets.darcy.augment": True,
    "data.mixing.by": "loss",
    "stages.operator.epochs": 2,
    "stages.operator.scheduler.name": "plateau",
    "stages.operator.scheduler.plateau_patience": 1,
    "checkpoint.interval": 10,
    "training.batch_size": 16,
}


class Killed(Exception):
    """Stands for a process that is gone."""


@pytest.fixture
def whole(cache, tiny_config, train_here, tmp_path_factory):
    """The folder of a run that was never stopped; residency of data and how checkpoints are saved change no number."""
    if not cache:
        cache["folder"] = tmp_path_factory.mktemp("whole")
        train_here(tiny_config(**EVERYTHING), cache["folder"])
    return cache["folder"]


@pytest.mark.parametrize(
    ("residency", "ending", "asynchronous", "at"),
    [  # in the first epoch, which is mixed uniformly, or in the second, which follows the first one's validation
        ("device", "stopped", False, 33),
        ("workers", "killed", True, 13),
        pytest.param("workers", "stopped", False, 13, marks=pytest.mark.long),
        pytest.param("device", "killed", True, 33, marks=pytest.mark.long),
    ],
)
def test_a_continued_run_is_the_run_that_was_never_stopped(
    tiny_config, train_here, whole, tmp_path, residency, ending, asynchronous, at
):
    config = tiny_config(**EVERYTHING, **{"data.residency": residency, "checkpoint.async_save": asynchronous})
    folder = tmp_path / "parts"

    def interrupt(step):
        if step == at and ending == "stopped":
            runfolder.write_control(folder, None, runfolder.STOP)
        if step == at and ending == "killed":
            raise Killed

    try:
        train_here(config, folder, interrupt)
    except Killed:
        until(lambda: checkpoint_index.is_there(folder, at - 3))  # the thread that writes it lives on in this process
    kept = checkpoint.load(folder)["step"]
    assert kept == (at + 1 if ending == "stopped" else at - 3)  # in the middle of an epoch either way
    (folder / runfolder.CONTROL).unlink(missing_ok=True)
    events = train_here(overlays.apply(config, {"checkpoint.resume": True}), folder)
    expected = losses(runfolder.read_events(whole))
    assert losses(events) == expected and len(expected) == 40
    states = [checkpoint.load(path)["setup"] for path in (whole, folder)]
    expect_same_state(*states)
    evals = [
        [(event["step"], event["val_nrmse"]) for event in runfolder.read_events(path, ("eval",))]
        for path in (whole, folder)
    ]
    assert evals[0] == evals[1]


def test_resuming_a_finished_run_trains_no_further(tiny_config, train_here, tmp_path):
    config = tiny_config(("darcy",), **{"checkpoint.resume": True})
    train_here(config, tmp_path)
    before = checkpoint.load(tmp_path)
    events = train_here(config, tmp_path)
    assert [event["reason"] for event in events if event["kind"] == "end"] == ["epochs", "epochs"]
    expect_same_state(before["setup"]["model"], checkpoint.load(tmp_path)["setup"]["model"])


def test_without_resume_a_run_starts_anew(tiny_config, train_here, tmp_path):
    config = tiny_config(("darcy",))
    first = losses(train_here(config, tmp_path))
    again = [event for event in train_here(config, tmp_path) if event["kind"] == "step"]
    assert [event["step"] for event in again] == 2 * sorted(first)


@pytest.mark.parametrize(
    "change",
    (
        {"training.accum_steps": 3, "training.amp": True, "training.amp_dtype": "float16"},
        {"training.batch_size": 16, "training.amp": True, "training.amp_dtype": "bfloat16"},
        {"training.ema_decay": 0.5, "data.residency": "workers"},
    ),
    ids=lambda change: ", ".join(f"{key.split('.')[-1]} {value}" for key, value in change.items()),
)
def test_a_run_continues_under_another_config(tiny_config, train_here, tmp_path, change):
    config = tiny_config()
    train_here(
        config, tmp_path, lambda step: runfolder.write_control(tmp_path, None, runfolder.STOP) if step == 4 else None
    )
    (tmp_path / runfolder.CONTROL).unlink()
    events = train_here(overlays.apply(config, {"checkpoint.resume": True, **change}), tmp_path)
    assert events[-1]["kind"] == "end" and min(e["step"] for e in events[-5:]) > 5
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_continued_run_follows_its_new_optimizer_settings(tiny_setup):
    old = tiny_setup(**{"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.3})
    batches = list(old.loader.epoch(0))[:2]
    old.step(batches, 0)
    new = tiny_setup(**{"optimizer.lr": 5e-4, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.8, 0.9]})
    new.load_state_dict(old.state_dict())
    for optimizer, before in zip(new.optimizers, old.optimizers):
        for group in optimizer.param_groups:
            assert group["peak_lr"] == 5e-4 and group["weight_decay"] in (0.01, 0.0)
            assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
        expect_same_state(optimizer.state_dict()["state"], before.state_dict()["state"])


def test_a_scaled_learning_rate_follows_flips_of_the_batch_and_a_resume(tiny_config, train_here, tmp_path):
    def at_step(step):
        if (step, runfolder.read_control(tmp_path).revision) in ((2, 0), (4, 1)):
            runfolder.write_control(tmp_path, {"training.accum_steps": 4}, runfolder.STOP if step == 4 else None)

    scaled = {"optimizer": {"lr": 1e-3, "lr_scaling": "linear", "lr_reference_batch": 2}}
    steady = {"stages.operator": {"epochs": 4, "scheduler": {"name": "constant", "warmup_fraction": 0.0}}}
    config = tiny_config(("darcy",), **scaled, **steady, **{"training.batch_size": 2})
    train_here(config, tmp_path, at_step)
    (tmp_path / runfolder.CONTROL).unlink()
    again = overlays.apply(config, {"checkpoint.resume": True, "training.accum_steps": 8})
    rates = [event["learning_rate"] for event in train_here(again, tmp_path) if event["kind"] == "step"]
    assert rates[:6] == pytest.approx([1e-3] * 3 + [4e-3] * 2 + [8e-3])


def test_averaging_that_starts_late_starts_from_the_loaded_weights(tiny_setup):
    old = tiny_setup()
    for value in old.model.parameters():
        value.data += 1.0
    new = tiny_setup(**{"training.ema_decay": 0.9})
    new.load_state_dict(old.state_dict())
    assert all(torch.equal(average, p) for average, p in zip(new.ema.average, new.model.parameters()))


def test_data_that_changed_since_the_checkpoint_are_told_and_the_same_are_not(tiny_config, train_here, tmp_path):
    settings = {"stages.operator.epochs": 1, "checkpoint.resume": True}
    train_here(tiny_config(**settings), tmp_path)
    settings["stages.operator.epochs"] = 2
    for changes, told in (({}, []), ({"data.datasets.advection.num_samples": 10}, ["output_mean", "output_std"])):
        events = train_here(tiny_config(**settings, **changes), tmp_path)
        settings["stages.operator.epochs"] += 1
        warnings = [event["message"] for event in events if event["kind"] == "warning"]
        found = [message for message in warnings if "changed since" in message]
        assert bool(found) == bool(told) and all(word in message for word in told for message in found), warnings

"""Flips of live runs: acknowledged with revision and step, on all ranks at once, refused without harm, measured."""

import json

import numpy as np
import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from upsnb import overlays
from upsnb.errors import ConfigError, UpsError
from upsnb.runs import handle, runfolder
from upsnb.runs.events import last_events
from upsnb.runs.postmortem import Ending
from upsnb.runs.runfolder import Launch
from upsnb.runs.supervisor import Supervisor
from upsnb.runs.throughput import throughput_ratio
from upsnb.training import checkpoint
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker import flips, loop
from upsnb.worker.flips import Flips, rates, steady_steps_before


def test_an_effect_of_two_is_found_and_its_interval_holds_it():
    draws = np.random.default_rng(0)
    before = [(8.0, 0.1 * noise) for noise in draws.uniform(0.9, 1.1, 40)]
    after = [(8.0, 0.05 * noise) for noise in draws.uniform(0.9, 1.1, 40)]
    found = throughput_ratio(rates(after, cycle=2), rates(before, cycle=2))
    low, high = found["ci95"]
    assert low < found["median"] < high
    assert low < 2.0 < high


def test_a_cold_flip_is_compared_with_what_ran_right_before_it():
    def step(number, steady=True):
        return {"kind": "step", "step": number, "steady": steady}

    segment, flip, nothing = {"kind": "segment"}, {"kind": "flip", "changes": {"x": 1}}, {"kind": "flip", "changes": {}}
    first = [segment, step(1), segment, step(2), flip, step(3), step(4, steady=False), nothing, step(5), segment]
    assert [event["step"] for event in steady_steps_before(first)] == [3, 5]
    assert [event["step"] for event in steady_steps_before([*first, step(6), segment])] == [6]
    assert steady_steps_before([segment]) == []


def asking(folder, requests):
    """Called with each beat, writes the requests of a step: `{step: [(overlay, command), ...]}`."""

    def at_step(step):
        for overlay, command in requests.pop(step, ()):
            runfolder.write_control(folder, overlay, command)

    return at_step


def kinds(events, *chosen):
    return [event for event in events if event["kind"] in chosen]


def test_a_flip_right_after_another_is_not_compared_with_what_ran_before_both(tiny_setup, tmp_path):
    setup = tiny_setup()
    folder = runfolder.create(setup.config, tmp_path / "run")
    events = runfolder.EventWriter(folder)
    asked, done = Flips(setup.config, setup, Ranks(), events, folder, Launch()), 0
    for revision, samples_per_s, num_steps in ((0, 100.0, 40), (1, 10.0, 4), (2, 10.0, 40), (3, 20.0, 40)):
        if revision:
            assert asked.apply(revision, {"optimizer.lr": 1e-3 * revision}, done) == "changed"
        for _ in range(num_steps):
            done += 1
            asked.observe(done, samples_per_s, 10.0, True)
    events.close()
    effects = runfolder.read_events(folder, ("flip_effect",))
    assert [(effect["revision"], effect["ratio"]) for effect in effects] == [(3, 2.0)]


def test_memory_before_a_flip_is_without_what_the_flip_takes(tiny_setup, tmp_path, monkeypatch):
    setup, peak = tiny_setup(), [1.0]
    folder = runfolder.create(setup.config, tmp_path / "run")
    events = runfolder.EventWriter(folder)
    asked = Flips(setup.config, setup, Ranks(), events, folder, Launch())
    monkeypatch.setattr(flips, "peak_memory_gib", lambda device: peak[-1])
    monkeypatch.setattr(asked.setup, "try_compile", lambda: peak.append(2.0))
    for step in range(80):
        if step == 40:
            asked.apply(1, {"optimizer.lr": 1e-3}, step)
        asked.observe(step, 100.0, 10.0, True)
    events.close()
    (effect,) = runfolder.read_events(folder, ("flip_effect",))
    assert effect["memory_gib"] == [1.0, 2.0]


def test_an_asked_checkpoint_is_saved_once_and_is_no_flip(tiny_config, tmp_path, train_here):
    events = train_here(tiny_config(), tmp_path, asking(tmp_path, {3: [(None, "checkpoint")]}))
    asked = [event for event in kinds(events, "checkpoint") if event["revision"]]
    assert [(event["step"], event["revision"]) for event in asked] == [(4, 1)]
    assert not kinds(events, "flip")


def test_back_to_best_brings_the_best_weights_back_and_training_goes_on(tiny_config, tmp_path, train_here):
    def at_step(step):
        found = last_events(tmp_path, ("eval",))
        if runfolder.read_control(tmp_path).revision == 0 and step == 2:
            runfolder.write_control(tmp_path, None, "restore")  # too early
        if runfolder.read_control(tmp_path).revision == 1 and found and step == found["eval"]["step"] + 3:
            # The same boundary makes every later step too small to be seen.
            runfolder.write_control(tmp_path, {"optimizer.lr": 1e-30}, "restore")

    events = train_here(tiny_config(**{"stages.operator.epochs": 2}), tmp_path, at_step)
    early, restored = kinds(events, "restored")
    assert not early["applied"] and "no validation" in early["reason"]
    best = kinds(events, "eval")[0]["step"]
    assert restored["applied"] and (restored["step"], restored["from_step"]) == (best + 4, best)
    assert kinds(events, "step")[-1]["step"] > best + 4
    kept, last = (checkpoint.load(tmp_path, which)["setup"]["model"] for which in ("best", "latest"))
    assert all(torch.equal(kept[name], last[name]) for name in kept)


def test_requests_between_two_boundaries_are_all_obeyed(tiny_config, tmp_path, train_here):
    overlay = {"data.mixing.by": "size"}
    requests = [(None, "pause"), (overlay, None), (None, "checkpoint"), (None, "resume")]
    events = train_here(tiny_config(), tmp_path, asking(tmp_path, {3: requests}))
    (flip,) = kinds(events, "flip")
    assert flip["revision"] == 2 and flip["applied"] and not flip["cold"]
    assert [event["step"] for event in kinds(events, "checkpoint") if event["revision"] == 3] == [4]
    assert not kinds(events, "paused"), "resumed before it began"
    assert runfolder.read_manifest(tmp_path)["applied"] == {"revision": 2, "overlay": overlay}
    # the rest of the running epoch is the other mixture's: ten pairs of advection to each of Darcy
    names = [name for event in kinds(events, "step") for name in event["datasets"]]
    assert names[:4] == ["advection", "darcy"] * 2 and len(names) == 40
    assert names[4:].count("darcy") == 4


def test_a_pause_stops_the_clocks_obeys_flips_and_spoils_no_sample(
    tiny_config, tmp_path, train_here, clock, monkeypatch
):
    monkeypatch.setattr("upsnb.worker.requests.time.sleep", clock.advance)
    beats = []

    def at_step(step):
        if step == 12:
            beats.append(step)
            if len(beats) == 1:  # step 12 begins; its boundary is 12 steps done
                return
            if len(beats) == 12:
                runfolder.write_control(tmp_path, {"training.noise": 0.01})
            if len(beats) == 16:
                runfolder.write_control(tmp_path, None, "resume")
        if step == 11 and runfolder.read_control(tmp_path).revision == 0:
            runfolder.write_control(tmp_path, None, "pause")

    events = train_here(tiny_config(**{"training.time_limit_s": 3600.0}), tmp_path, at_step)
    paused, flip, resumed = kinds(events, "paused", "flip", "resumed")
    assert (paused["revision"], flip["revision"], resumed["revision"]) == (1, 2, 3)
    assert paused["step"] == flip["step"] == resumed["step"] == 12
    assert resumed["paused_s"] > 1.0 and len(beats) > 15, "hearts beat on"
    steps = kinds(events, "step")
    before, after = steps[11], steps[12]
    assert after["step"] == 13 and after["time_s"] - before["time_s"] < 0.1 and after["step_time_ms"] < 100
    assert not any(event["steady"] for event in steps[12:17])
    (end,) = kinds(events, "end")
    assert end["train_time_s"] < 0.5, "on this clock all that takes long is the pause"


def test_a_paused_run_can_be_stopped(tiny_config, tmp_path, train_here):
    beats = []

    def at_step(step):
        beats.append(step)
        if len(beats) == 4:
            runfolder.write_control(tmp_path, None, "pause")
        if len(beats) == 12:
            runfolder.write_control(tmp_path, None, "stop")

    events = train_here(tiny_config(), tmp_path, at_step)
    assert kinds(events, "paused", "resumed", "end")[-1]["reason"] == "stopped"
    assert len(kinds(events, "paused")) == 1 and not kinds(events, "resumed")


def continue_from(config, folder, relaunch):
    """What the supervisor does after a `relaunch` event, in this process; the events."""
    events = runfolder.EventWriter(folder)
    events.write("segment", relaunch["step"], number=1, num_ranks=1)
    resumed = overlays.apply(config, {"checkpoint.resume": True})
    start = Launch(1, relaunch["overlay"], relaunch["revision"], relaunch)
    loop.train(resumed, folder, Ranks(), events, runfolder.Heartbeat(folder, 0), start)
    events.close()
    return runfolder.read_events(folder)


def test_a_cold_flip_leaves_a_state_that_another_launch_continues(tiny_config, tmp_path, train_here):
    config = tiny_config(**{"optimizer.name": "adamw", "stages.operator.epochs": 2})
    cold = {"training.ema_decay": 0.9, "optimizer.name": "muon_hybrid", "training.batch_size": 4}
    hot = ({"training.noise": 0.01}, None)
    events = train_here(config, tmp_path, asking(tmp_path, {3: [hot], 6: [({**cold, "training.noise": 0.01}, None)]}))
    (relaunch,) = kinds(events, "relaunch")
    assert relaunch["step"] == 7 and relaunch["changes"] == cold and not kinds(events, "end")
    assert kinds(events, "checkpoint")[-1]["step"] == 7
    assert len(kinds(events, "flip")) == 1, "not acknowledged before the ranks are there again"

    events = continue_from(config, tmp_path, relaunch)
    first, flip = kinds(events, "flip")
    assert flip["revision"] == 2 and flip["cold"] and flip["applied"] and flip["step"] == 8
    assert flip["changes"] == cold and flip["overlay"] == {**cold, "training.noise": 0.01}
    steps = kinds(events, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert all(np.isfinite(event["loss"]) for event in steps)
    seen = sum(round(event["samples_per_s"] * event["step_time_ms"] / 1e3) for event in steps)
    per_epoch = 2 * 16 * 10  # both datasets take turns, the larger has 16 samples x 10 starts
    assert abs(seen - 2 * per_epoch) <= 16, "the place in the epoch is found again under another microbatch"


def test_a_settings_request_during_the_relaunch_waits_for_its_first_step(tiny_config, tmp_path, train_here):
    config = tiny_config()
    events = train_here(config, tmp_path, asking(tmp_path, {3: [({"training.ema_decay": 0.9}, None)]}))
    runfolder.write_control(tmp_path, {"training.ema_decay": 0.9, "training.noise": 0.01})
    events = continue_from(config, tmp_path, kinds(events, "relaunch")[0])
    assert [(flip["revision"], flip["step"], flip["cold"]) for flip in kinds(events, "flip")] == [
        (1, 5, True),
        (2, 5, False),
    ]


def test_a_stop_asked_while_relaunching_is_obeyed_and_the_flip_still_answered(tiny_config, tmp_path, train_here):
    config = tiny_config()
    events = train_here(config, tmp_path, asking(tmp_path, {3: [({"training.ema_decay": 0.9}, None)]}))
    runfolder.write_control(tmp_path, None, "stop")
    events = continue_from(config, tmp_path, kinds(events, "relaunch")[0])
    flip, end = kinds(events, "flip", "end")
    assert flip["applied"] and flip["step"] == end["step"] == 4 and end["reason"] == "stopped"


FLIP = {
    "kind": "relaunch",
    "step": 7,
    "revision": 2,
    "overlay": {"training.num_gpus": 2},
    "changes": {"training.num_gpus": 2},
    "since": 0.0,
    "phases_on": [],
}
RELAUNCHING = Ending("relaunching", relaunch=FLIP)


@pytest.mark.parametrize(
    ("ends", "is_answered", "launched"),
    [
        ([RELAUNCHING, Ending("failed", "rank 1 died", crashed=True), Ending("finished")], False, [1, 2, 1]),
        ([RELAUNCHING, Ending("failed", "rank 1 hung", hung=True), Ending("finished")], False, [1, 2, 1]),
        ([RELAUNCHING, Ending("failed", "rank 1 died", crashed=True)], True, [1, 2]),  # a crash, and no restarts
        ([RELAUNCHING, Ending("failed", "no space left")], False, [1, 2]),  # a relaunch cannot help
        ([RELAUNCHING, RELAUNCHING, Ending("finished")], True, [1, 2, 2]),
    ],
)
def test_only_a_flip_without_a_step_is_rolled_back(tmp_path, monkeypatch, ends, is_answered, launched):
    folder = runfolder.create(overlays.resolve({"device": "cpu"}), tmp_path / "run")
    watcher, ends, ranks = Supervisor(folder), list(ends), []

    def segment(restarts, flip):
        watcher._open_segment(restarts, flip)
        ranks.append(watcher.config.training.num_gpus)
        if flip and is_answered:
            applied = {"revision": flip["revision"], "overlay": flip["overlay"]}
            runfolder.update_manifest(folder, applied=applied)
        return ends.pop(0)

    monkeypatch.setattr(watcher, "_segment", segment)
    watcher._launch_until_done()
    assert ranks == launched and not ends
    flips = runfolder.read_events(folder, ("flip",))
    assert [flip["applied"] for flip in flips] == ([False] if launched[2:] == [1] else [])
    assert all(flip["revision"] == 2 and "rank 1" in flip["reason"] for flip in flips)
    assert runfolder.read_manifest(folder)["applied"]["revision"] == (2 if flips or is_answered else 0)


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"training.ema_decay": 0.9, "latent.dim": 16}, "latent.dim: cannot change while training runs"),
        ({"training.num_gpus": 40}, "40 x training.batch_size"),
        ({"training.device": "cuda"}, "there is no CUDA device"),
        ({"training.nccl_tuning": True}, "training.nccl_tuning"),
    ],
)
def test_a_cold_flip_that_cannot_work_is_refused_and_nothing_stops(tiny_config, tmp_path, train_here, overlay, said):
    events = train_here(tiny_config(), tmp_path, asking(tmp_path, {3: [(overlay, None)]}))
    (flip,) = kinds(events, "flip")
    assert not flip["applied"] and said in flip["reason"] and flip["changes"] == {}
    assert kinds(events, "end") and not kinds(events, "relaunch")
    assert runfolder.read_manifest(tmp_path)["applied"] == {"revision": 1, "overlay": {}}


def test_under_skip_a_live_flip_leaves_out_what_cannot_run_and_names_it(tiny_config, tmp_path, train_here):
    asked = {"training.on_missing": "skip", "training.nccl_tuning": True, "training.noise": 0.01}
    events = train_here(tiny_config(), tmp_path, asking(tmp_path, {3: [(asked, None)]}))
    (flip,) = kinds(events, "flip")
    assert flip["applied"] and flip["skipped"].keys() == {"nccl"} and "on the CPU" in flip["skipped"]["nccl"]
    assert flip["changes"] == {"training.noise": 0.01, "training.on_missing": "skip"}
    assert json.loads((tmp_path / "manifest.json").read_text())["applied"]["overlay"] == flip["changes"]


@pytest.mark.parametrize("in_a_pause", [False, True])
def test_a_flip_that_compiles_for_long_takes_nothing_from_the_time_limit(
    tiny_config, tmp_path, train_here, clock, monkeypatch, in_a_pause
):
    monkeypatch.setattr("upsnb.worker.requests.time.sleep", clock.advance)
    monkeypatch.setattr(Setup, "try_compile", lambda self: clock.advance(511.0))
    requests = [(None, "pause")] * in_a_pause + [({"training.noise": 0.01}, None)]
    beats = []

    def at_step(step):
        beats.append(step)
        asking(tmp_path, {3: requests} if len(beats) == 8 else {})(3)
        if in_a_pause and len(beats) == 20:
            runfolder.write_control(tmp_path, None, "resume")

    events = train_here(tiny_config(**{"training.time_limit_s": 150.0}), tmp_path, at_step)
    (flip,), (end,), steps = (kinds(events, kind) for kind in ("flip", "end", "step"))
    assert flip["applied"] and flip["duration_ms"] > 511e3
    assert end["reason"] == "epochs" and end["train_time_s"] < 10
    assert [step["step"] for step in steps if step["time_s"] > 10] == []


@pytest.mark.parametrize("flipped", [False, True])
def test_what_a_step_compiles_after_a_flip_takes_nothing_from_the_time_limit(
    tiny_config, tmp_path, train_here, clock, monkeypatch, flipped
):
    def compiling_step(self, batches, step, real=Setup.step):
        if step == 6:
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
                clock.advance(100.0)
                seen.append(runfolder.read_heartbeats(tmp_path)[0]["state"])
            with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
                clock.advance(411.0)
        return real(self, batches, step)

    seen, listening = [], list(callback_handler.start_callbacks)
    monkeypatch.setattr(Setup, "step", compiling_step)
    requests = {3: [({"training.noise": 0.01}, None)]} if flipped else {}
    events = train_here(tiny_config(**{"training.time_limit_s": 150.0}), tmp_path, asking(tmp_path, requests))
    (end,) = kinds(events, "end")
    assert (end["reason"], end["train_time_s"] < 10) == (("epochs", True) if flipped else ("time", False))
    assert seen == ["compiling"] and callback_handler.start_callbacks == listening


def test_a_run_that_is_refused_when_it_goes_on_listens_to_no_compiling(tiny_config, tmp_path, train_here):
    train_here(tiny_config(), tmp_path)
    listening = list(callback_handler.start_callbacks)
    with pytest.raises(UpsError):
        train_here(tiny_config(**{"latent.dim": 16, "checkpoint.resume": True}), tmp_path)
    assert callback_handler.start_callbacks == listening


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_live_run_obeys_refuses_and_measures(tiny_config, tmp_path, num_ranks):
    config = tiny_config(**{"training.num_gpus": num_ranks, "training.batch_size": 2, "stages.operator.epochs": 100000})
    run = handle.start(config, tmp_path / "run", attached=True)
    try:
        run.wait_for("step", step=60)
        assert run.flip("activation_checkpointing", True) == 1
        flip = run.wait_for("flip", 1)
        assert flip["revision"] == 1 and flip["applied"]
        assert flip["phases"] == {"activation_checkpointing": True}

        effect = run.wait_for("flip_effect")
        assert effect["revision"] == 1
        assert effect["ci95"][0] <= effect["ratio"] <= effect["ci95"][1]

        measured = run.wait_for("flip_effect", run.measure("activation_checkpointing", within=1e-9, steps=120))
        assert measured["method"] == "interleaved" and measured["phases"] == {"activation_checkpointing": False}
        assert measured["ci95"][0] <= measured["ratio"] <= measured["ci95"][1] and measured["ended"] == "budget"

        larger = run.wait_for("flip", run.update({"batch_size": 4}))
        assert larger["changes"]["training.batch_size"] == 4
        refused = run.wait_for("flip", run.update({"latent.dim": 16}))
        assert not refused["applied"] and "cannot change while training runs" in refused["reason"]
        run.wait_for("step", step=refused["step"] + 20)
        with pytest.raises(ConfigError, match="did you mean training.batch_size"):
            run.update({"batchsize": 4})
        back = run.wait_for("flip", run.back_to_start())
        assert back["phases"] == {"activation_checkpointing": False}
    finally:
        run.stop()
        run.wait()
    steps = run.events(("step",))
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))  # no step lost, none twice
    large = [event for event in steps if flip["step"] < event["step"]]
    assert large and all(event["loss"] is not None for event in large)

"""Cold flips with real processes: the workers are launched again, the curve goes on, failures are undone."""

from pathlib import Path

import numpy as np
import pytest

from upsnb.runs import handle, runfolder

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "killed_worker.py"
TWO_RANKS = {"num_gpus": 2, "batch_size": 4}  # the same microbatch of all ranks, so the same curve
SHARDED = {**TWO_RANKS, "use_fsdp2": True}
ONE_RANK = {"num_gpus": 1, "batch_size": 8, "use_fsdp2": False}


@pytest.fixture
def start(tiny_config, tmp_path, monkeypatch):
    """`start(kill, **settings)`: a run that ends with the test."""
    started = []

    def begin(kill="-1:0:0", **settings):
        monkeypatch.setenv("UPSNB_KILL", kill)
        settings = {"stages.operator.epochs": 100000, "optimizer.name": "adamw", "training.ema_decay": 0.9, **settings}
        settings.setdefault("stages.operator.scheduler.name", "constant")
        run = handle.start(tiny_config(**settings), tmp_path / "run", attached=True, worker=WORKER)
        started.append(run)
        return run

    yield begin
    for run in started:
        run._process.kill()


def test_ranks_come_and_go_and_the_curve_goes_on(start, train_here, tmp_path):
    run = start()
    run.wait_for("step", step=10)
    flip = run.wait_for("flip", run.flip("activation_checkpointing", True))
    assert flip["cold"] is False
    run.wait_for("step", step=flip["step"] + 35)  # at least 20 are steady: the next flip's effect can be measured
    revision = run.update(SHARDED)
    flip = run.wait_for("flip", revision)
    assert flip["revision"] == revision == 2 and flip["applied"] and flip["cold"]
    left, started = run.wait_for("relaunch")["time"], run.events(("start",))[-1]["time"]
    assert flip["duration_ms"] > 1e3 * (started - left), "it lasts until its ranks have done a step"
    assert flip["changes"] == {"training.batch_size": 4, "training.num_gpus": 2, "training.use_fsdp2": True}
    assert flip["phases"] == {"fsdp2": True}
    effect = run.wait_for("flip_effect", revision)
    assert effect["cold"] and effect["ci95"][0] <= effect["ratio"] <= effect["ci95"][1]
    assert len(runfolder.read_heartbeats(run.folder)) == 2 and run.current_config.training.num_gpus == 2
    flip = run.wait_for("flip", run.update(ONE_RANK))
    assert flip["phases_on"] == ["activation_checkpointing"], "the hot flip of the first launch is kept"
    run.wait_for("step", step=flip["step"] + 10)
    run.stop()
    assert run.wait() == "finished"

    assert [(s["num_ranks"], s["status"]) for s in run.manifest["segments"]] == [
        (1, "relaunching"),
        (2, "relaunching"),
        (1, "finished"),
    ]
    assert run.manifest["segments"][1]["overlay"]["operator.pdet.use_activation_checkpoint"]
    assert [event["num_ranks"] for event in run.events(("start",))] == [1, 2, 1]
    assert [event["revision"] for event in run.events(("flip",))] == [1, 2, 3]
    steps = run.events(("step",))
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1)), "no step lost, none twice"
    times = [event["time_s"] for event in steps]
    assert times == sorted(times)

    alone = tmp_path / "alone"

    def stop_there(step):
        if step == len(steps) - 1:
            runfolder.write_control(alone, None, runfolder.STOP)

    uninterrupted = train_here(run.config, alone, stop_there)
    expected = [event["loss"] for event in uninterrupted if event["kind"] == "step"]
    np.testing.assert_allclose([event["loss"] for event in steps], expected, rtol=1e-3)


@pytest.mark.long
def test_a_relaunch_that_fails_is_rolled_back_and_the_run_goes_on(start):
    run = start(kill="1:1:0")
    run.wait_for("step", step=10)
    refused = run.wait_for("flip", run.update({"num_gpus": 40}))
    assert not refused["applied"] and "training pairs" in refused["reason"]
    assert len(run.manifest["segments"]) == 1, "what can be foreseen is refused before anything is stopped"
    failed = run.wait_for("flip", run.update(TWO_RANKS))
    assert not failed["applied"] and failed["cold"] and failed["revision"] == 2
    assert "rank 1 was killed by SIGKILL" in failed["reason"]
    run.wait_for("step", step=failed["step"] + 5)
    noisy = run.wait_for("flip", run.update({"noise": 0.01}))
    assert noisy["changes"] == {"training.noise": 0.01}, "what failed is not asked for again"
    run.stop()
    assert run.wait() == "finished"
    assert [s["num_ranks"] for s in run.manifest["segments"]] == [1, 2, 1]
    steps = [event["step"] for event in run.events(("step",))]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.long
def test_a_rank_killed_after_a_cold_flip_is_a_crash_and_its_relaunch_keeps_all_flips(start):
    run = start(kill="1:1:6", **{"training.max_restarts": 1, "checkpoint.interval": 3})
    run.wait_for("step", step=10)
    run.flip("activation_checkpointing", True)
    run.wait_for("paused", run.pause())
    flip = run.wait_for("flip", run.update(TWO_RANKS))
    assert flip["cold"]
    run.wait_for("resumed", run.resume())
    paused = [event["step"] for event in run.events(("paused",))]
    assert paused == [flip["step"]] * 2, "launched again, it still waits"
    run.wait_for("step", step=flip["step"] + 12)  # the sixth after the flip was the last of the launch before
    run.stop()
    assert run.wait() == "finished"
    relaunched, crashed, finished = run.manifest["segments"]
    assert crashed["status"] == "failed" and "rank 1 was killed" in crashed["cause"]
    assert finished["num_ranks"] == 2 and finished["overlay"] == crashed["overlay"]
    assert len(run.events(("flip",))) == 2, "nothing is flipped a second time"
    assert set(range(1, run.events(("step",))[-1]["step"] + 1)) == {event["step"] for event in run.events(("step",))}

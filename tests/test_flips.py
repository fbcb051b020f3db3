"""Flips of live runs: acknowledged with revision and step, on all ranks at once, refused without harm, measured."""

import time

import numpy as np
import pytest

from upsnb import launch
from upsnb.errors import ConfigError
from upsnb.flips import throughput_ratio


def wait_for(run, kind: str, count: int, seconds: float = 60.0) -> list[dict]:
    """Events of a kind, once there are so many."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        events = run.events((kind,))
        if len(events) >= count:
            return events
        assert run.status() in ("starting", "running"), run.cause()
        time.sleep(0.05)
    raise AssertionError(f"{len(run.events((kind,)))} {kind} events after {seconds} s: {run.log_tail()}")


def test_an_effect_of_two_is_found_and_its_interval_holds_it():
    draws = np.random.default_rng(0)
    before = [(8.0, 0.1 * noise) for noise in draws.uniform(0.9, 1.1, 40)]
    after = [(8.0, 0.05 * noise) for noise in draws.uniform(0.9, 1.1, 40)]
    ratio, (low, high) = throughput_ratio(before, after, cycle=2)
    assert low < ratio < high
    assert low < 2.0 < high


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_live_run_obeys_refuses_and_measures(tiny_config, tmp_path, num_ranks):
    config = tiny_config(**{"training.num_gpus": num_ranks, "training.batch_size": 2, "stages.operator.epochs": 100000})
    run = launch.start(config, tmp_path / "run", attached=True)
    try:
        wait_for(run, "step", 60)
        assert run.flip("activation_checkpointing", True) == 1
        (flip,) = wait_for(run, "flip", 1)
        assert flip["revision"] == 1 and flip["applied"]
        assert flip["phases"] == {"activation_checkpointing": True}

        (effect,) = wait_for(run, "flip_effect", 1)
        assert effect["revision"] == 1
        assert effect["ci95"][0] <= effect["ratio"] <= effect["ci95"][1]

        run.update({"batch_size": 4})
        assert wait_for(run, "flip", 2)[1]["changes"]["training.batch_size"] == 4
        run.update({"latent.dim": 16})
        refused = wait_for(run, "flip", 3)[2]
        assert not refused["applied"] and "cannot change while training runs" in refused["reason"]
        steps = len(run.events(("step",)))
        wait_for(run, "step", steps + 20)
        with pytest.raises(ConfigError, match="did you mean training.batch_size"):
            run.update({"batchsize": 4})
        run.back_to_start()
        assert wait_for(run, "flip", 4)[3]["phases"] == {"activation_checkpointing": False}
    finally:
        run.stop()
        run.wait(60)
    steps = run.events(("step",))
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))  # no step lost, none twice
    large = [event for event in steps if flip["step"] < event["step"]]
    assert large and all(event["loss"] is not None for event in large)

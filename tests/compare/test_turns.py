"""Turns cancel what drifts: their order, and ratios of throughput with intervals."""

import inspect
import json

import numpy as np
import pytest
from made_runs import step

from upsnb.compare import arms, ladder, scaling
from upsnb.compare.turns import LEAST_STEADY, PATIENCE, Block, Turns, interleave, ratio_of_turns
from upsnb.compare.verdict import NOISE
from upsnb.config import RunConfig
from upsnb.errors import RunTimeout
from upsnb.runs import handle
from upsnb.widgets.progress import rewrite


def blocks(rates: dict[str, list[float]], seed: int = 0) -> list[Block]:
    """Turns of one second; `rates` by arm, one a round."""
    return [Block(arm, seed, turn, rate, 1.0) for arm, those in rates.items() for turn, rate in enumerate(those)]


def test_drift_that_hits_both_arms_leaves_the_ratio_alone():
    drift = np.linspace(1.0, 0.4, 12)
    found = ratio_of_turns(blocks({"a": list(10 * drift), "b": list(30 * drift)}), "b", "a")
    assert found["median"] == pytest.approx(3.0)
    assert found["ci95"] == pytest.approx([3.0, 3.0])


def test_equal_arms_have_an_interval_around_one_and_noise_widens_it():
    draw = np.random.default_rng(0)
    widths = []
    for noise in (0.01, 0.1):
        rates = {arm: list(10 * draw.normal(1, noise, 30)) for arm in ("a", NOISE)}
        low, high = ratio_of_turns(blocks(rates), NOISE, "a")["ci95"]
        assert low < 1 < high
        widths.append(high - low)
    assert widths[0] < widths[1]


def test_rounds_in_which_one_arm_had_no_turn_do_not_count():
    found = ratio_of_turns(blocks({"a": [1.0, 1.0], "b": [2.0, 2.0, 50.0]}), "b", "a")
    assert found["num_rounds"] == 2 and found["median"] == 2.0
    assert ratio_of_turns(blocks({"a": [1.0]}), "b", "a")["median"] is None


def test_what_goes_wrong_while_it_starts_stops_the_run(tmp_path, monkeypatch):
    """Or it would train on for ever beside what is measured next."""
    stopped = []

    class Slow(handle.Run):
        def wait_for(self, kind, revision=0):
            raise RunTimeout("still starting after 900 s")

        def stop(self):
            stopped.append(self.folder)

        def status(self):
            return "running"

    ends_with_us = []

    def start(config, folder, attached=False):
        ends_with_us.append(attached)
        return Slow(folder)

    monkeypatch.setattr(handle, "start", start)
    with pytest.raises(RunTimeout):
        Turns.start(RunConfig(), tmp_path)
    assert stopped == [tmp_path]
    assert ends_with_us == [True], "nobody else would ever give it a turn"


class Arm:
    """A run by what its turns give: (samples, seconds) of steady steps, None for the turn in which it ends."""

    def __init__(self, name: str, order: list[str], *found):
        self.name, self.order, self.found, self.last_step = name, order, list(found), 0

    def is_alive(self) -> bool:
        return bool(self.found)

    def take(self, seconds: float):
        self.order.append(self.name)
        return self.found.pop(0)


def test_turns_go_back_and_forth_and_one_without_a_steady_step_changes_neither_order_nor_ratio():
    order: list[str] = []
    a = Arm("a", order, (8.0, 1.0), (0.0, 0.0), (8.0, 1.0), None)
    b = Arm("b", order, (16.0, 1.0), (99.0, 1.0), (16.0, 1.0), (50.0, 1.0), None)
    found = interleave({"a": a, "b": b}, 0, 1.0, lambda text: None)
    assert "".join(order) == "ab" + "ba" + "ab" + "ba" + "b"
    assert [(block.arm, block.round) for block in found if block.round < 3] == [
        *(("a", 0), ("b", 0), ("b", 1), ("a", 2), ("b", 2)),
    ]
    assert ratio_of_turns(found, "b", "a")["num_rounds"] == 2 and ratio_of_turns(found, "b", "a")["median"] == 2.0


class SlowRun:
    """A run whose steps take a second of the clock each; the first three of a turn are not steady."""

    def __init__(self, folder, clock, steady):
        self.folder, self.clock, self.steady, self.steps = folder, clock, steady, 0
        self.resume = lambda: None
        self.pause = self.wait_for = lambda *_: 0

    def status(self):
        self.clock.advance(1.0)
        self.steps += 1
        event = step(self.steps, 1e3, 8.0, self.steady and self.steps > 3, time=self.clock.now)
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
        return "running"


@pytest.mark.parametrize(("steady", "least", "most"), [(True, LEAST_STEADY, 8), (False, 0, 0)])
def test_a_turn_of_slow_steps_lasts_until_some_were_steady_but_not_for_ever(
    tmp_path, clock, monkeypatch, steady, least, most
):
    monkeypatch.setattr("upsnb.compare.turns.time.monotonic", clock)
    monkeypatch.setattr("upsnb.compare.turns.time.sleep", lambda seconds: None)
    samples, seconds = Turns(SlowRun(tmp_path, clock, steady)).take(2.0)
    assert least <= seconds <= most and samples == 8.0 * seconds
    assert clock.now < 1000.0 + 2.0 * PATIENCE + 10


@pytest.mark.parametrize("measure", [arms.compare, ladder.measure, scaling.measure])
def test_studies_of_many_turns_rewrite_their_line(measure):
    assert inspect.signature(measure).parameters["log"].default is rewrite

"""Comparisons: arms that differ in one thing, turns that cancel drift, ratios with intervals, honest verdicts."""

import json

import numpy as np
import pytest

from upsnb import overlays
from upsnb.compare import arms, figures, verdict
from upsnb.compare.turns import Block, interleave, ratio_of_turns
from upsnb.compare.verdict import NOISE
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.runs.handle import Run

BATCH = {"training.batch_size": 4, "training.accum_steps": 2}


def blocks(rates: dict[str, list[float]], seed: int = 0) -> list[Block]:
    """Turns of one second; `rates` by arm, one a round."""
    return [Block(arm, seed, turn, rate, 1.0) for arm, those in rates.items() for turn, rate in enumerate(those)]


@pytest.mark.parametrize(
    "stray", [{"latent.dim": 64}, {"optimizer.lr": 1e-2}, {"training.seed": 7}, {"training.lambda_spectral": 0.1}]
)
def test_arms_that_differ_in_more_than_asked_are_refused_by_name(stray):
    optimized = overlays.resolve({"training.compile": True, **stray})
    with pytest.raises(ConfigError, match=next(iter(stray))):
        arms.check_arms(RunConfig(), optimized)


def test_arms_may_differ_in_what_phases_change():
    optimized = overlays.resolve({"training.compile": True, "training.amp": True, **BATCH})
    assert arms.check_arms(RunConfig(), optimized).keys() == {"training.compile", "training.amp", *BATCH}


def test_equal_arms_are_refused():
    with pytest.raises(ConfigError, match="nothing differs|equal"):
        arms.check_arms(RunConfig(), overlays.resolve({"logging.name": "other"}))


def test_arms_that_end_by_the_clock_are_refused(tmp_path):
    short = overlays.resolve({"training.time_limit_s": 5.0})
    with pytest.raises(ConfigError, match="equal samples"):
        arms.compare(short, overlays.apply(short, {"training.compile": True}), tmp_path)


def test_an_isolated_phase_keeps_batch_accumulation_and_learning_rate():
    base = overlays.resolve(BATCH)
    changed = overlays.difference(base, arms.isolated(base, "activation_checkpointing"))
    assert changed == {"operator.pdet.use_activation_checkpoint": True}
    with pytest.raises(ConfigError, match="is no phase"):
        arms.isolated(base, "turbo")


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


def test_time_to_quality_is_the_first_validation_that_reaches_it():
    events = [
        {"kind": "eval", "time_s": time_s, "val_nrmse": {"one": error, "two": error}}
        for time_s, error in ((1.0, 0.9), (2.0, 0.5), (3.0, 0.6))
    ]
    assert verdict.time_to_quality(events, 0.55) == 2.0
    assert verdict.time_to_quality(events, 0.4) is None


RUN = {"device_name": "a processor"}


def made_up_report(**changes) -> dict:
    """What `compare_report` leaves, as far as the summary reads it."""
    criteria = [
        {"name": "speedup", "required": 3.0, "measured": 1.523, "passed": False},
        {"name": "nrmse_ratio", "required": 1.03, "measured": 1.012, "passed": True},
        {"name": "nonfinite_steps", "required": 0, "measured": 0, "passed": True},
    ]
    given = {"kind": verdict.KIND, "baseline": "slow", "optimized": "fast", "arms": {"slow": [RUN], "fast": [RUN]}}
    given |= {"interleaved": True, "aa_ratio": {"median": 1.004, "ci95": [0.987, 1.021], "num_rounds": 9}}
    given |= {"aa_nrmse_ratio": {"waves": 1.011, "darcy": 0.97}, "aa_loss_delta": 0.0005}
    given |= {"speedup": {"median": 1.523, "ci95": [1.482, 1.561], "num_rounds": 9}, "time_to_quality_speedup": 1.25}
    given |= {"nrmse_ratio": {"waves": 1.012, "darcy": 0.98}, "criteria": criteria, "verdict": "failed"}
    return {**given, **changes}


def test_the_summary_has_the_ratio_beside_its_noise_and_every_criterion_beside_its_measurement():
    said = verdict.summary(made_up_report())
    assert "throughput over the baseline's: 1.52 [1.48, 1.56]" in said and "(A/A): 1.00 [0.99, 1.02]" in said
    assert "1.25 times as fast" in said and "waves: 1.012 (A/A 1.011)" in said and "darcy: 0.98 (A/A 0.97)" in said
    assert "speedup: required >= 3, measured 1.523, A/A 1.004: failed" in said
    assert "nrmse_ratio: required <= 1.03, measured 1.012, A/A 0.97: passed" in said, "the one farthest from 1"
    assert "nonfinite_steps: required = 0, measured 0: passed" in said
    assert said.endswith("verdict: failed")
    assert verdict.failed(made_up_report()) == "speedup: required >= 3, measured 1.523, A/A 1.004"


def test_the_summary_claims_nothing_that_was_not_measured():
    known = {"median": 1.5, "ci95": [None, None], "num_rounds": 0}
    missing = dict.fromkeys(("aa_ratio", "aa_nrmse_ratio", "aa_loss_delta", "time_to_quality_speedup"))
    said = verdict.summary(made_up_report(speedup=known, interleaved=False, **missing))
    assert "over the baseline's: 1.50 (no interval)" in said and "A/A" not in said
    assert "time to quality: not reached" in said and "no interval" in said and "None" not in said


@pytest.mark.slow
def test_two_arms_take_turns_to_their_ends_and_leave_a_report(tiny_config, tmp_path, turns_of_steps):
    """And the report of the same runs as two that merely ended earlier has the same errors and no interval."""
    base = tiny_config(**{"stages.operator.epochs": 2})
    other = overlays.apply(base, {"operator.pdet.use_activation_checkpoint": True})
    said: list[str] = []
    runs = arms.compare(base, other, tmp_path / "ab", block_s=2.0, log=said.append)
    assert {name: [run.status() for run in those] for name, those in runs.items()} == {
        name: ["finished"] for name in ("baseline", "optimized", NOISE)
    }
    record = json.loads((tmp_path / "ab" / arms.ARMS).read_text())
    assert {block["arm"] for block in record["blocks"]} == runs.keys()

    made = arms.compare_report(tmp_path / "ab", {"speedup": 1e-9}, price_per_hour=3600.0)
    assert made["speedup"]["num_rounds"] > 1 and made["aa_ratio"]["num_rounds"] > 1
    seen = {one["samples"] for those in made["arms"].values() for one in those}
    assert len(seen) == 1, "all arms see the same samples"
    (first,), (noise,) = made["arms"]["baseline"], made["arms"][NOISE]
    assert first["nrmse"] == noise["nrmse"], "equal arms on one rank train alike bit for bit"
    assert set(made["aa_nrmse_ratio"].values()) == {1.0} and made["aa_loss_delta"] == 0.0
    assert first["cost_dollars"] == pytest.approx(first["train_time_s"])
    assert made["verdict"] == "passed", made["criteria"]
    (tight,) = (c for c in arms.compare_report(tmp_path / "ab", {"speedup": 1e9})["criteria"] if c["name"] == "speedup")
    assert not tight["passed"]
    assert {path.name for path in figures.write_figures(tmp_path / "ab").values()} == {
        *("speed.png", "quality.png", "outcome.png")
    }

    later = verdict.compare(Run.attach(runs["baseline"][0].folder), runs["optimized"][0])
    assert later["nrmse_ratio"] == made["nrmse_ratio"]
    assert later["speedup"]["ci95"] == [None, None] and not later["interleaved"]

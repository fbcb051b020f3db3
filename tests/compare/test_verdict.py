"""Verdicts on two arms: what they left is compared, and nothing is claimed that was not measured."""

import json
import re

import pytest
from made_runs import END, START, TOKENS, finished, step, write_run

from upsnb import overlays
from upsnb.compare import arms, figures, models, sweep, verdict
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.runs import handle, runfolder


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
    assert "throughput over the baseline's: 1.52 [1.48, 1.56]" in said and "(A/A 1.00 [0.99, 1.02])" in said
    assert "1.25 times as fast" in said and "waves: 1.012 (A/A 1.011)" in said and "darcy: 0.98 (A/A 0.97)" in said
    assert "speedup: required >= 3, measured 1.523, A/A 1.004: failed" in said
    assert "nrmse_ratio: required <= 1.03, measured 1.012, A/A 0.97: passed" in said, "the one farthest from 1"
    assert "nonfinite_steps: required = 0, measured 0: passed" in said
    assert said.endswith("verdict: failed")
    assert verdict.failed(made_up_report()) == "speedup: required >= 3, measured 1.523, A/A 1.004"


def test_the_summary_claims_nothing_that_was_not_measured():
    known = {"median": 1.5, "ci95": [None, None], "num_rounds": 0}
    missing = dict.fromkeys(("aa_ratio", "aa_nrmse_ratio", "aa_loss_delta", "time_to_quality_speedup"))
    missing["time_to_quality_s"] = {"slow": [9.0], "fast": [None]}
    said = verdict.summary(made_up_report(speedup=known, interleaved=False, **missing))
    assert "over the baseline's: 1.50 (no interval)" in said and "A/A" not in said
    assert "quality: not reached" in said and "no interval" in said and "None" not in said


def test_where_a_seed_misses_the_quality_of_its_baseline_the_others_are_told_beside_how_many_they_are():
    times = {"slow": [90.0, 80.0, 100.0], "fast": [30.0, None, 50.0], verdict.NOISE: [None, 81.0, 99.0]}
    said = verdict.summary(made_up_report(time_to_quality_speedup=None, time_to_quality_s=times))
    assert "quality: reached in 2 of 3 seeds, there 2.38 times as fast" in said


def both(tmp_path, **second) -> tuple[handle.Run, handle.Run]:
    """Two runs that ended, in places of the same name; the second with changes."""
    first = finished(tmp_path / "one" / "run", validated=(0.3, 0.2))
    return first, finished(tmp_path / "two" / "run", **{"validated": (0.3, 0.2), **second})


def files(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_saved_runs_are_compared_by_what_they_left(tmp_path):
    a, b = both(tmp_path, ms=50.0, darcy=0.06, validated=(0.3, 0.1))
    before = files(tmp_path)
    made = verdict.compare(a, b)
    assert files(tmp_path) == before, "without a folder nothing is written"
    assert (made["baseline"], made["optimized"]) == ("one/run", "two/run")
    assert made["speedup"]["median"] == pytest.approx(2.0) and made["speedup"]["ci95"] == [None, None]
    assert made["nrmse_ratio"] == pytest.approx({"waves": 1.0, "darcy": 1.2})
    assert made["loss_delta"] == pytest.approx(-0.05) and made["time_to_quality_speedup"] == pytest.approx(2.0)
    assert made["arms"]["two/run"][0]["samples"] == 59 * 16 and made["aa_ratio"] is None
    judged = {item["name"]: item["passed"] for item in made["criteria"]}
    assert not judged["nrmse_ratio"] and judged["loss_delta"] and made["verdict"] == "failed"
    assert verdict.summary(made).startswith("two/run against one/run, 1 seed(s), no turns")


def test_of_two_saved_runs_nobody_asks_a_speedup(tmp_path):
    """They took no turns, and may be any two: equal ones keep what they are to keep."""
    assert verdict.compare(*both(tmp_path))["verdict"] == "passed"


def test_a_comparison_is_written_where_it_is_asked_for_and_never_over_a_run(tmp_path):
    a, b = both(tmp_path)
    made = verdict.compare(a, b, tmp_path / "ab", {"speedup": 1.0, "memory_gib": None})
    assert json.loads((tmp_path / "ab" / "report.json").read_text()) == made and made["verdict"] == "passed"
    with pytest.raises(RunError, match="holds a run"):
        verdict.compare(a, b, b.folder)
    with pytest.raises(RunError, match="with itself"):
        verdict.compare(a, handle.Run(a.folder))


def test_errors_that_are_not_finite_hold_no_criterion(tmp_path):
    made = verdict.compare(*both(tmp_path, validated=(0.3, None), darcy=None), criteria={"speedup": 1.0})
    judged = {item["name"]: (item["measured"], item["passed"]) for item in made["criteria"]}
    assert judged["loss_delta"] == judged["nrmse_ratio"] == (None, False) and made["verdict"] == "failed"
    assert made["nrmse_ratio"]["darcy"] is None and made["time_to_quality_speedup"] is None


def test_runs_that_say_nothing_about_each_other_are_not_compared(tmp_path):
    a, b = both(tmp_path, split="validation")
    with pytest.raises(RunError, match=r"different data: .*one/run: darcy, waves \(test split\); .*\(validation split"):
        verdict.compare(a, b)
    runfolder.update_manifest(b.folder, status="failed", cause="it broke")
    with pytest.raises(RunError, match="two/run: failed: it broke"):
        verdict.compare(a, b)
    stopped = write_run(tmp_path / "stopped", [step(1), {"kind": "end", "step": 1, **END, "reason": "stopped"}])
    with pytest.raises(RunError, match=r"no final errors \(it ended by stopped\)"):
        verdict.compare(a, stopped)


def test_runs_of_equal_names_and_other_data_are_not_compared(tmp_path):
    a, b = both(tmp_path)
    for run, data in ((a, "12ab"), (b, "34cd")):
        path = run.folder / runfolder.EVALUATION
        written = json.loads(path.read_text())
        written["datasets"]["darcy"]["test"]["protocol"] = {
            "samples": 3,
            "data": data,
            "training data": run.folder.name,
        }
        path.write_text(json.dumps(written))
    with pytest.raises(RunError, match="darcy: judged by different data: run: samples: 3, data: 12ab; run: .*34cd"):
        verdict.compare(a, b)


def test_equal_arms_and_seeds_say_how_exact_the_errors_are(tmp_path):
    ended = {"slow": (0.05, 0.04), "fast": (0.06, 0.03), verdict.NOISE: (0.055, 0.038)}  # of darcy, one a seed
    arms = {
        name: [
            finished(tmp_path / f"{number}-{seed}", validated=(0.3, 0.2), darcy=error)
            for seed, error in enumerate(errors)
        ]
        for number, (name, errors) in enumerate(ended.items())
    }
    made = verdict.compare_arms(arms, None, None)
    assert made["nrmse_ratio"]["darcy"] == pytest.approx(0.975)
    assert made["nrmse_ratio_range"]["darcy"] == pytest.approx([0.75, 1.2])
    assert made["aa_nrmse_ratio"] == pytest.approx({"waves": 1.0, "darcy": 1.025}) and made["aa_loss_delta"] == 0.0
    assert "darcy: 0.975 (0.75 to 1.2 over seeds; A/A 1.025)" in verdict.summary(made)
    rows = figures.table(made).set_index("criterion")
    assert rows.loc["nRMSE over the baseline's, darcy", "measured"] == "0.975 (0.75 to 1.2 over seeds; A/A 1.025)"
    assert rows["two equal arms"][: len(made["criteria"])].to_dict() == {
        "speedup": "-",
        "loss_delta": "0",
        "nrmse_ratio": "1.025",
        "memory_gib": "-",
        "nonfinite_steps": "-",
        "out_of_memory": "-",
    }
    del arms[verdict.NOISE]
    alone = verdict.compare_arms(arms, None, None)
    assert alone["aa_nrmse_ratio"] is alone["aa_loss_delta"] is None
    assert set(figures.table(alone)["two equal arms"]) == {"-"}


def test_the_summary_says_where_two_machines_were_compared(tmp_path):
    a, b = both(tmp_path)
    there = {**b.manifest["hardware"], "device_name": "another machine"}
    runfolder.update_manifest(b.folder, hardware=there)
    assert "on different machines" in verdict.summary(verdict.compare(a, b))
    assert "on different machines" not in verdict.summary(verdict.compare(a, finished(tmp_path / "c", "test")))


def test_a_comparison_of_another_workload_calls_its_error_by_its_name(of_tokens, tmp_path):
    made = verdict.compare(*both(tmp_path))
    said = verdict.summary(made)
    assert "perplexity over the baseline's, darcy: 1" in said and "nrmse_ratio (of perplexity): required" in said
    assert {"tokens", "tokens/s", "darcy perplexity"} <= {*figures.arms_table(made)} and "nRMSE" not in said


def test_errors_of_two_names_are_not_compared(tmp_path):
    a, b = both(tmp_path)
    writer = runfolder.EventWriter(b.folder)
    writer.write("start", 59, **START, **TOKENS)
    writer.close()
    with pytest.raises(RunError, match="different errors: nRMSE, perplexity -> compare runs of one workload"):
        verdict.compare(a, b)


@pytest.mark.parametrize(
    ("criteria", "said"),
    [
        ({"speed": 2}, "criteria.speed: unknown -> known are speedup"),
        ({"speedup": "2"}, "criteria.speedup: got '2' -> write a number, or null"),
        ({"nrmse_ratio": True}, "criteria.nrmse_ratio: got True"),
    ],
)
def test_a_criterion_that_cannot_be_judged_by_is_refused_before_anything_trains(criteria, said):
    verdict.check_criteria({"speedup": 2, "cost_ratio": 0.5, "memory_gib": None})
    variables = {"baseline": "cpu_baseline", "optimized": "cpu_optimized", "isolate": "", "criteria": criteria}
    with pytest.raises(ConfigError, match=re.escape(said)):
        arms.arms_from_notebook(variables)


def test_what_nobody_could_judge_is_refused_before_it_trains(tmp_path):
    blind = overlays.apply(RunConfig(), {"data.split.validation_fraction": 0.0})
    other = overlays.apply(blind, {"training.compile": True})
    found = "data.split.validation_fraction"
    with pytest.raises(ConfigError, match=found):
        arms.compare(blind, other, tmp_path)
    with pytest.raises(ConfigError, match=found):
        models.plan(overlays.apply(blind, {"training.time_limit_s": 5.0}), ["fno"])
    with pytest.raises(ConfigError, match=found):
        sweep.plan(blind, grid={"lr": [1e-3, 2e-3]})

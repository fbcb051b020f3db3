"""Reports of made-up run folders: what is counted, what is not, and what a run that failed still says."""

import json
import os
import time

import numpy as np
import pytest

from upsnb.compare import figures as comparison_figures
from upsnb.compare import verdict
from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.report import figures, file, results
from upsnb.runs import handle, runfolder
from upsnb.runs.processes import process_identity
from upsnb.widgets import progress

CONFIG = RunConfig.model_validate_json(
    json.dumps({"data": {"datasets": {"waves": {"family": "advection1d"}, "darcy": {"family": "darcy2d"}}}})
)
KEYS = {
    *("format", "kind", "status", "device", "num_ranks", "parameters", "samples_per_s", "time_to_first_step_s"),
    *("train_time_s", "peak_memory_gib", "phases_on", "phases_skipped", "datasets"),
    *(
        "cause",
        "end_reason",
        "steps",
        "samples",
        "overall_samples_per_s",
        "epochs",
        "split",
        "weights",
        "loss",
        "compile_s",
        "data_wait_share",
    ),
    *("memory_kind", "hardware", "versions", "code_revision", "date", "seeds", "num_launches", "settings"),
}
START = {
    "num_ranks": 1, "device": "cpu", "parameters": 1234, "total_steps": 100, "time_limit_s": None,
    "samples_per_step": 16, "datasets": {"waves": {"pairs": 9}},
}  # fmt: skip
END = {
    "reason": "time", "train_time_s": 9.5, "epochs": 2, "peak_memory_gib": [0.25, 0.5],
    "memory_kind": "resident set, peak",
}  # fmt: skip


def step(number, ms=100.0, rate=None, steady=True, names=("waves",), **fields):
    """A step event of 16 samples; `time_s` grows with the number."""
    rate = 16e3 / ms if rate is None else rate
    common = {"epoch": 0, "time_s": number * ms / 1e3, "data_wait_ms": ms / 10, "peak_memory_gib": 0.125}
    event = {"kind": "step", "step": number, "step_time_ms": ms, "samples_per_s": rate, "steady": steady, **common}
    return event | {"datasets": list(names), "loss": 1 / number, "losses": {"relative": 1 / number}} | fields


def write_run(folder, events, status="finished", cause=None, evaluation=None, examples=None):
    runfolder.create(CONFIG, folder)
    runfolder.update_manifest(folder, status=status, cause=cause)
    writer = runfolder.EventWriter(folder)
    for event in events:
        fields = {key: value for key, value in event.items() if key not in ("kind", "step")}
        writer.write(event["kind"], event["step"], **fields)
    writer.close()
    if evaluation:
        (folder / runfolder.EVALUATION).write_text(json.dumps(evaluation))
    if examples:
        np.savez(folder / runfolder.EXAMPLES, **examples)
    return handle.Run.attach(folder)


def finished(folder, split="test", ms=100.0, validated=(0.3, None), darcy=0.05):
    """A whole run: two datasets that take turns, one validation, evaluation and examples.

    `ms`: of a step; `validated`: nRMSE of the validation; `darcy`: nRMSE in the end.
    """
    random = np.random.default_rng(0)
    events = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}]
    events += [step(n, ms, steady=n > 5, names=[("waves", "darcy")[n % 2]]) for n in range(1, 60)]
    events.insert(3, {"kind": "first_step", "step": 1, "since_launch_s": 2.5})
    events.insert(3, {"kind": "compile", "step": 1, "graphs": 3, "duration_s": 1.5})
    errors = dict(zip(("waves", "darcy"), validated))
    events += [{"kind": "eval", "step": 40, "time_s": 40 * ms / 1e3, "val_nrmse": errors, "best": True}]
    events += [{"kind": "end", "step": 59, **END}]
    waves = {
        "num_samples": 3, "baseline": "persistence", "nrmse_mean": 0.02, "nrmse_median": 0.01, "max_error": None,
        "persistence_nrmse_mean": 0.8, "rollout_nrmse_mean": 0.1, "rollout_persistence_nrmse_mean": 1.0,
        "per_sample": {"samples": [7, 8, 9], "nrmse": [0.1, 0.2, 0.3], "rollout_nrmse": [0.1, None, 0.3]},
        "per_time": {
            "time": [0.5, 1.0], "given_until": 0.25, "rollout_nrmse": [0.1, None], "persistence_nrmse": [1.0, 1.1],
            "rollout_nrmse_quartiles": [[0.05, 0.1], [0.2, None]],
        },
    }  # fmt: skip
    darcy = {
        "num_samples": 3, "baseline": "training mean", "nrmse_mean": darcy, "nrmse_median": 0.04,
        "baseline_nrmse_mean": 0.7, "per_sample": {"samples": [1, 2, 3], "nrmse": [0.1, 0.2, 0.3]}, "per_time": {},
    }  # fmt: skip
    evaluation = {
        "format": 1, "split": split, "weights": "last",
        "datasets": {"waves": {split: waves}, "darcy": {split: darcy}},
    }  # fmt: skip
    arrays = {"x": np.linspace(0, 1, 8), "nrmse": np.array([0.1, 0.2, 0.3]), "samples": np.array([7, 8, 9])}
    examples = {f"{name}/{key}": value for name in ("waves", "darcy") for key, value in arrays.items()}
    examples |= {"waves/times": np.linspace(0, 1, 6), "darcy/times": np.zeros(1)}
    for key, frames in (("inputs", 4), ("truth", 2), ("forecast", 2)):
        examples[f"waves/{key}"] = random.random((3, frames, 1, 8), dtype=np.float32)
        examples[f"darcy/{key}"] = random.random((3, 1, 1, 8, 8), dtype=np.float32)
    return write_run(folder, events, evaluation=evaluation, examples=examples)


# -- throughput ----------------------------------------------------------------------------------------------------


def test_only_steady_steps_count():
    events = [step(n, ms=5000.0, steady=False) for n in range(1, 6)] + [step(n) for n in range(6, 46)]
    speed = results.steady_throughput(events)
    assert speed["num_windows"] == 4
    assert speed["median"] == pytest.approx(160) and speed["ci95"] == pytest.approx([160, 160])


def test_interval_contains_the_median_and_repeats():
    random = np.random.default_rng(1)
    events = [step(n, ms=ms) for n, ms in enumerate(random.uniform(50, 150, 400), start=1)]
    speed = results.steady_throughput(events)
    low, high = speed["ci95"]
    assert low < speed["median"] < high and high - low < 20
    assert results.steady_throughput(events) == speed


def test_window_is_samples_over_seconds_and_not_a_mean_of_rates():
    events = [step(n, ms=(100.0, 300.0)[n % 2]) for n in range(1, 41)]
    assert results.steady_throughput(events)["median"] == pytest.approx(16 / 0.2, rel=0.01)


def test_window_passes_over_validations_but_not_over_a_relaunch():
    validated_every_half_second = [step(n, ms=100.0 if n % 6 else 9000.0, steady=n % 6 > 0) for n in range(1, 61)]
    speed = results.steady_throughput(validated_every_half_second)
    assert speed["num_windows"] == 5 and speed["median"] == pytest.approx(160)
    relaunched = [step(n) for n in range(1, 7)] + [{"kind": "segment", "step": 6}] + [step(n) for n in range(7, 13)]
    assert results.steady_throughput(relaunched)["num_windows"] == 0
    assert results.steady_throughput([e for e in relaunched if e["kind"] == "step"])["num_windows"] == 1


def test_window_holds_as_many_steps_as_there_are_datasets():
    events = [step(n, ms=2000.0, names=[("a", "b", "c")[n % 3]]) for n in range(1, 10)]
    assert results.steady_throughput(events)["num_windows"] == 3


@pytest.mark.parametrize("events", [[], [step(1, steady=False)], [step(1)]])
def test_without_a_window_nothing_is_claimed(events):
    assert results.steady_throughput(events) == {"median": None, "ci95": [None, None], "num_windows": 0}


def test_one_window_has_no_interval():
    speed = results.steady_throughput([step(n) for n in range(1, 12)])
    assert speed["median"] == pytest.approx(160) and speed["ci95"] == [None, None] and speed["num_windows"] == 1


# -- report --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split, key", [("test", "test"), ("validation", "val")])
def test_report_of_a_finished_run(tmp_path, split, key):
    run = finished(tmp_path / "run", split)
    made = results.train_report(run)
    assert made.keys() == KEYS
    assert made == json.loads((run.folder / "report.json").read_text())
    assert made["format"] == 1 and made["kind"] == "train" and made["status"] == "finished"
    assert made["samples_per_s"].keys() == {"median", "ci95", "num_windows"}
    assert made["datasets"]["waves"].keys() == made["datasets"]["darcy"].keys() == {key}
    assert made["datasets"]["waves"][key] == {
        "num_samples": 3, "baseline": "persistence", "nrmse_mean": 0.02, "nrmse_median": 0.01, "max_error": None,
        "persistence_nrmse_mean": 0.8, "rollout_nrmse_mean": 0.1, "rollout_persistence_nrmse_mean": 1.0,
    }  # fmt: skip
    assert made["peak_memory_gib"] == 0.5 and made["time_to_first_step_s"] == 2.5 and made["compile_s"] == 1.5
    assert made["data_wait_share"] == pytest.approx(0.1) and made["train_time_s"] == 9.5
    assert made["overall_samples_per_s"] == pytest.approx(59 * 16 / 9.5)
    assert made["loss"]["last"] < made["loss"]["first"]
    assert made["settings"].keys() == {"data.datasets"}


@pytest.mark.parametrize("status", ["failed", "died"])
def test_run_that_did_not_finish_says_so_and_claims_no_accuracy(tmp_path, status):
    whole = finished(tmp_path / "run")
    runfolder.update_manifest(whole.folder, status="failed", cause="rank 0 ran out of memory")
    if status == "died":
        runfolder.update_manifest(whole.folder, status="running", supervisor="1:never")
    writer = runfolder.EventWriter(whole.folder)  # a second launch, which did not get to its end
    writer.write("segment", 59, number=1, num_ranks=1)
    writer.write("step", 60, **{k: v for k, v in step(60, loss=float("nan")).items() if k not in ("kind", "step")})
    writer.close()
    made = results.train_report(whole)
    assert made.keys() == KEYS and made["status"] == status and made["cause"]
    assert made["datasets"] == {} and made["train_time_s"] is None and made["split"] is None
    assert made["steps"] == 60 and made["peak_memory_gib"] == 0.125
    assert status in results.costs(made) and results.table(made).empty
    assert set(results.write_figures(figures.RunFigures.of(whole))) == {"loss", "throughput"}


def test_run_that_failed_before_its_first_step(tmp_path):
    run = write_run(tmp_path / "run", [], status="failed", cause="rank 0 raised DataError")
    made = results.train_report(run)
    assert made.keys() == KEYS and made["steps"] == 0 and made["loss"] == {"first": None, "last": None}
    assert made["device"] is None and made["peak_memory_gib"] is None and made["data_wait_share"] is None
    assert results.costs(made) and results.write_figures(figures.RunFigures.of(run)) == {}


def test_report_is_readable_while_it_is_replaced(tmp_path, monkeypatch):
    run = finished(tmp_path / "run")
    before = results.train_report(run)

    def fail(*_):
        raise OSError("torn")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="torn"):
        results.train_report(run)
    assert json.loads((run.folder / "report.json").read_text()) == before


def test_a_running_run_has_a_report_too(tmp_path):
    run = write_run(tmp_path / "run", [step(1)], status="running")
    runfolder.update_manifest(run.folder, supervisor=process_identity(os.getpid()), created=time.time())
    assert results.train_report(run)["status"] == "running"


# -- tables, figures, progress -------------------------------------------------------------------------------------


def test_table_names_each_baseline_and_what_is_gained_over_it(tmp_path):
    made = results.train_report(finished(tmp_path / "run"))
    waves, darcy = results.table(made).to_dict("records")
    assert waves["without a model"] == "persistence 0.8" and waves["gain"] == "40" and waves["rollout gain"] == "10"
    assert darcy["without a model"] == "training mean 0.7" and darcy["gain"] == "14" and darcy["rollout"] == "-"
    assert results.gains(made) == pytest.approx({"waves": 40, "darcy": 14})


def test_unknown_error_is_no_gain():
    made = {"datasets": {"waves": {"test": {"nrmse_mean": None, "persistence_nrmse_mean": 0.8}}}}
    assert results.table(made)["gain"].tolist() == ["-"] and not results.gains(made)["waves"] > 1


def test_every_figure_is_drawn_from_the_folder_alone(tmp_path):
    run = finished(tmp_path / "run")
    written = results.write_figures(figures.RunFigures.of(run))
    assert set(written) == {
        *("loss", "throughput", "error_distribution", "rollout_waves"),
        *("prediction_waves", "spectrum_waves", "prediction_darcy", "spectrum_darcy"),
    }
    assert all(path.parent == run.folder / "figures" and path.stat().st_size > 5000 for path in written.values())


def test_a_figure_that_was_shown_is_not_drawn_again_to_be_saved(tmp_path, monkeypatch):
    drawn = figures.RunFigures.of(finished(tmp_path / "run"))
    shown = drawn.prediction("darcy")
    monkeypatch.setattr(figures.plots, "prediction_truth_error_2d", None)
    assert drawn.prediction("darcy") is shown and results.write_figures(drawn)["prediction_darcy"].is_file()


def test_two_dimensional_fields_are_drawn_upright(tmp_path):
    run = finished(tmp_path / "run")
    kept = dict(np.load(run.folder / runfolder.EXAMPLES))
    kept["darcy/truth"][:, 0, 0] = np.arange(8)[:, None]  # grows with x, the first axis of the files
    np.savez(run.folder / runfolder.EXAMPLES, **kept)
    image = figures.RunFigures.of(run).prediction("darcy").axes[1].images[0].get_array()
    assert (np.diff(image, axis=1) > 0).all() and (np.diff(image, axis=0) == 0).all()


def test_repeated_steps_of_a_resumed_run_count_once():
    events = [step(n, loss=1.0) for n in range(1, 11)] + [step(n, loss=2.0) for n in range(8, 12)]
    latest = figures._latest(events)
    assert list(latest) == list(range(1, 12)) and latest[8]["loss"] == 2.0 and latest[7]["loss"] == 1.0


def test_progress_prints_means_every_few_seconds_and_validation_when_it_comes():
    lines: list[str] = []
    follow = progress.Progress(lines.append)
    follow({"kind": "start", "step": 0, **START, "time_limit_s": 12.0})
    for n in range(1, 101):
        follow(step(n, names=[("waves", "darcy")[n % 2]], loss=n % 2 + 0.0))
    follow({"kind": "eval", "step": 100, "val_nrmse": {"waves": 0.25, "darcy": None}, "best": False})
    follow({"kind": "checkpoint", "step": 100})
    follow({"kind": "end", "step": 100, **END})
    assert lines[0].startswith("1,234 parameters on 1 x cpu")
    assert lines[2] == "step 51 | epoch 1 | loss darcy 1, waves 0 | 160 samples/s | 5 s, 5 s left"
    assert lines[-3:] == [
        "step 100 | validation nRMSE: waves 0.25, darcy not finite",
        "step 100 | epoch 1 | loss darcy 1, waves 0 | 160 samples/s | 10 s, 0 s left",
        "ended by time after 10 s of training",
    ]
    assert len(lines) == 6


def test_progress_says_what_was_changed_and_what_was_refused():
    lines: list[str] = []
    follow = progress.Progress(lines.append)
    follow({"kind": "relaunch", "step": 9, "changes": {"training.num_gpus": 2}})
    skipped = {"nccl": "no second device"}
    change = {"kind": "flip", "step": 10, "revision": 3, "changes": {"training.num_gpus": 2}, "skipped": skipped}
    follow({**change, "applied": True, "reason": None})
    follow({**change, "applied": False, "reason": "too few pairs"})
    follow({"kind": "paused", "step": 12})
    follow({"kind": "resumed", "step": 12, "paused_s": 65.0})
    assert lines == [
        "step 9: saved, to be launched again with training.num_gpus 2",
        "step 10: change 3: training.num_gpus 2; skipped nccl: no second device",
        "step 10: change 3 was refused: too few pairs",
        "step 12: paused",
        "step 12: goes on after a pause of 1 min 5 s",
    ]


def test_overall_throughput_counts_each_step_by_its_own_batch():
    events = [step(n) for n in range(1, 11)] + [step(n, rate=320.0) for n in range(9, 21)]
    assert results._overall(events, {"train_time_s": 4.0}) == pytest.approx((8 * 16 + 12 * 32) / 4)


def test_progress_survives_a_loss_that_is_not_finite():
    lines: list[str] = []
    progress.Progress(lines.append)(step(1, loss=None))
    assert "loss not finite" in lines[0]


# -- two runs ------------------------------------------------------------------------------------------------------


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
    assert not judged["speedup"] and not judged["nrmse_ratio"] and judged["loss_delta"] and made["verdict"] == "failed"
    assert verdict.summary(made).startswith("two/run against one/run, 1 seed(s), no turns")


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
    with pytest.raises(RunError, match=r"no final errors, because it ended early \(stopped\)"):
        verdict.compare(a, stopped)


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
    rows = comparison_figures.table(made).set_index("criterion")
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
    assert set(comparison_figures.table(alone)["two equal arms"]) == {"-"}


def test_the_outcome_shows_every_seed_of_every_arm_equal_ones_too():
    ended = {"slow": (0.05, 0.04), "fast": (0.06, 0.03), verdict.NOISE: (0.055, 0.038)}
    arms = {name: [{"nrmse": {"darcy": e}, "peak_memory_gib": 1.0} for e in errors] for name, errors in ended.items()}
    errors, memory = comparison_figures.outcome(arms).axes
    dots = {line.get_xdata()[0]: tuple(line.get_ydata()) for line in errors.lines}
    names = [tick.get_text() for tick in errors.get_xticklabels()]
    assert {names[place]: those for place, those in dots.items()} == ended and len(memory.lines) == 3


def test_the_summary_says_where_two_machines_were_compared(tmp_path):
    a, b = both(tmp_path)
    there = {**b.manifest["hardware"], "device_name": "another machine"}
    runfolder.update_manifest(b.folder, hardware=there)
    assert "on different machines" in verdict.summary(verdict.compare(a, b))
    assert "on different machines" not in verdict.summary(verdict.compare(a, finished(tmp_path / "c", "test")))


# -- what all reports share ----------------------------------------------------------------------------------------


def test_every_report_says_where_and_when_and_holds_no_nan(tmp_path):
    made = file.finish({"kind": "plan", "ratio": float("nan"), "rows": [{"factor": float("inf")}]}, tmp_path / "a")
    assert made == json.loads((tmp_path / "a" / "report.json").read_text())
    assert made["ratio"] is None and made["rows"] == [{"factor": None}]
    assert made["hardware"]["num_cores"] >= 1 and made["versions"]["torch"] and made["code_revision"]
    assert time.strptime(made["date"], "%Y-%m-%d")


def test_a_report_of_a_run_says_where_the_run_was_and_not_where_it_is_read(tmp_path, monkeypatch):
    there = {"hardware": {"device_name": "another"}, "versions": {"torch": "1"}, "code_revision": "abc", "created": 0.0}
    monkeypatch.chdir(tmp_path)
    made = file.finish({"kind": "train"}, None, {**there, "host": "not for reports"})
    assert made == {"kind": "train", **{key: there[key] for key in list(there)[:3]}, "date": "1970-01-01"}
    assert not list(tmp_path.iterdir()), "a report without a folder is written nowhere"

"""Reports of made-up run folders: what is counted, what is not, and what a run that failed still says."""

import json
import os
import time

import numpy as np
import pytest
from figure_checks import check
from made_runs import END, START, finished, make_event, step, write_run

from upsnb.compare import board, verdict
from upsnb.data import datasets
from upsnb.models.geometry import resample
from upsnb.report import figures, file, results
from upsnb.runs import runfolder, table, throughput
from upsnb.runs.processes import process_identity
from upsnb.training.evaluation import read_samples

KEYS = {
    *("unit", "metric"),
    *(
        "format",
        "kind",
        "status",
        "leaks",
        "device",
        "num_ranks",
        "parameters",
        "samples_per_s",
        "time_to_first_step_s",
    ),
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
    *("memory_kind", "hardware", "versions", "code_revision", "date", "seeds", "num_launches", "verdicts", "settings"),
    "stages",
    *("cost", "energy_wh", "epoch_s", "gpu_utilisation_percent"),
}


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
    writer.write(**step(60, loss=float("nan")))
    writer.close()
    made = results.train_report(whole)
    assert made.keys() == KEYS and made["status"] == status and made["cause"]
    assert made["datasets"] == {} and made["train_time_s"] is None and made["split"] is None
    assert made["steps"] == 60 and made["peak_memory_gib"] == 0.125
    assert status in results.costs(made) and results.table(made).empty
    assert set(results.write_figures(figures.RunFigures.of(whole))) == {"loss", "throughput"}


def test_turns_with_what_was_measured_are_shaded_where_they_were(tmp_path):
    run = finished(tmp_path / "run")
    writer = runfolder.EventWriter(run.folder)
    for number, (at, arm) in enumerate(((20, 1), (30, 0), (40, 1))):
        writer.write("turn", at, revision=1, arm=arm, num_rounds=number)
    writer.write(**make_event("flip_effect", 50))
    writer.close()
    (ax,) = figures.RunFigures.of(run).throughput().axes
    shaded = [patch for patch in ax.patches if "in turns" in patch.get_label()]
    assert [(patch.get_x(), patch.get_width()) for patch in shaded] == [pytest.approx((2, 1)), pytest.approx((4, 1))]


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


def test_costs_are_told_in_the_unit_and_the_error_that_the_run_named(of_tokens, tmp_path):
    made = results.train_report(finished(tmp_path / "run"))
    stage = {"stage": "operator", "steps": 9, "train_time_s": 1.0, "samples_per_s": {"median": 5.0}}
    said = results.costs({**made, "stages": [{**stage, "val_nrmse": {"text": 7.5}}]})
    assert "5 tokens/s; its last validation perplexity: text 7.5" in said
    assert "nRMSE" not in said and "samples/s" not in said


# -- tables and figures -----------------------------------------------------------------------------------------------


def test_table_names_each_baseline_and_what_is_gained_over_it(tmp_path):
    made = results.train_report(finished(tmp_path / "run"))
    waves, darcy = results.table(made).to_dict("records")
    assert waves["without a model"] == "persistence 0.8" and waves["gain"] == "40" and waves["rollout gain"] == "10"
    assert darcy["without a model"] == "training mean 0.7" and darcy["gain"] == "14" and darcy["rollout"] == "-"
    assert results.gains(made) == pytest.approx({"waves": 40, "darcy": 14})


def test_where_the_split_leaks_it_is_said_first_and_distinct_samples_are_the_headline(tmp_path):
    run = finished(tmp_path / "run")
    path = run.folder / runfolder.EVALUATION
    told = json.loads(path.read_text())
    waves = told["datasets"]["waves"]["test"]
    distinct = {**{key: value for key, value in waves.items() if "nrmse_" in key}, "num_samples": 1}
    distinct |= {"baseline": "persistence", "nrmse_mean": 0.9, "rollout_nrmse_mean": 0.7}
    waves["leak"] = {"seen": 1, "near": 2, "distinct": distinct}
    told["datasets"]["darcy"]["test"]["leak"] = {"seen": 0, "near": 3, "distinct": None}
    path.write_text(json.dumps(told))
    made = results.train_report(run)
    assert made["leaks"] == [
        "waves: the test split leaks, 2 of 3 samples begin within 1% of a training sample, 1 exactly so -> read the "
        "error of the other 1, or train with data.split.convention: distinct",
        "darcy: the test split leaks, 3 of 3 samples begin within 1% of a training sample, 0 exactly so -> none is "
        "left to judge by",
    ]
    assert list(made).index("leaks") < list(made).index("datasets")
    rows = results.table(made).set_index("dataset")["nRMSE"].to_dict()
    assert rows == {"waves: 1 distinct samples": "0.9", "waves": "0.02", "darcy": "0.05"}
    assert results.gains(made) == pytest.approx({"waves": 0.8 / 0.9, "darcy": 14})
    assert "waves: a forecast without a model is as good" in results.unmet(made)
    assert verdict.run_summary(run, made, 0.0)["nrmse"] == {"waves": 0.7, "darcy": 0.05}
    assert board.quality(made["datasets"]["waves"]["test"])["nRMSE"] == 0.7
    for _ in ("from the report", "from the evaluation"):
        assert table.table(tmp_path).loc[0, ["nrmse_waves", "nrmse_darcy"]].tolist() == [0.7, 0.05]
        (run.folder / runfolder.REPORT).unlink(missing_ok=True)


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


@pytest.mark.parametrize("steady", [True, False])
def test_every_figure_says_what_is_seen_with_swatches_and_ticks_that_can_be_read(tmp_path, steady):
    run = finished(tmp_path / "run", ms=100.0 if steady else 1.0)  # too short for a window
    for draw in figures.RunFigures.of(run).all().values():
        check(draw())


def test_a_spectrum_is_of_the_whole_split_and_says_where_the_error_reaches_the_truth(tmp_path):
    figure = figures.RunFigures.of(finished(tmp_path / "run")).spectrum("waves")
    title = " ".join(figure.get_suptitle().split())
    assert "reaches the truth from wavenumber 2 on; mean of all 3 samples" in title
    curves = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert curves == {"truth": [0.1, 0.01], "prediction": [0.1, 0.02], "error": [0.02, 0.03]}


def test_validations_that_a_resumed_run_repeats_count_once(tmp_path):
    checks = [(20, 0.5), (40, 0.4), (60, 0.3), (40, 0.35)]
    events = [step(n) for n in range(1, 61)]
    events += [{"kind": "eval", "step": n, "val_nrmse": {"waves": error}} for n, error in checks]
    figure = figures.RunFigures(tmp_path, None, events, "", {}).losses()
    (line,) = figure.axes[1].lines
    assert line.get_xdata().tolist() == [20, 40] and line.get_ydata().tolist() == [0.5, 0.35]


def test_losses_of_stages_are_not_compared_with_each_other(tmp_path):
    """A stage's score may be a hundredth of the operator's loss and mean nothing of the kind."""
    events = [step(n, loss=loss) | {"stage": "operator"} for n, loss in enumerate((2.0, 1.0), start=1)]
    events += [step(n, loss=loss) | {"stage": "crps"} for n, loss in enumerate((0.01, 0.02), start=3)]
    title = " ".join(figures.RunFigures(tmp_path, None, events, "", {}).losses().get_suptitle().split())
    assert title.endswith(
        "first tenth of a stage's steps to the last: waves (operator) 2 to 1, waves (crps) 0.01 to 0.02"
    )


def test_a_figure_that_was_shown_is_not_drawn_again_to_be_saved(tmp_path, monkeypatch):
    drawn = figures.RunFigures.of(finished(tmp_path / "run"))
    shown = drawn.prediction("darcy")
    monkeypatch.setattr(figures.plots, "prediction_truth_error_2d", None)
    assert drawn.prediction("darcy") is shown and results.write_figures(drawn)["prediction_darcy"].is_file()


@pytest.mark.parametrize("name", ["advection", "darcy"])
def test_answers_on_several_grids_stand_in_one_figure_with_their_errors(tiny_config, data_root, name):
    dataset = datasets.open_dataset(name, tiny_config((name,)), data_root)
    fields, truth, _ = read_samples(dataset, dataset.splits["test"][:1], "cpu")
    half = tuple(size // 2 for size in dataset.spec.grid_shape)
    coarse = [resample(field, half, dataset.spec.periodic) for field in (fields, truth)]
    found = {dataset.spec.grid_shape: (fields, truth, 1.1 * truth), half: (*coarse, 1.2 * coarse[1])}
    drawn = figures.answers(dataset, found)
    check(drawn)
    whole, halved = (" x ".join(map(str, grid)) for grid in found)
    assert f"an nRMSE of 0.1 on {whole} points, 0.2 on {halved} points" in " ".join(drawn.get_suptitle().split())


def test_two_dimensional_fields_are_drawn_upright(tmp_path):
    run = finished(tmp_path / "run")
    kept = dict(np.load(run.folder / runfolder.EXAMPLES))
    kept["darcy/truth"][:, 0, 0] = np.arange(8)[:, None]  # grows with x, the first axis of the files
    np.savez(run.folder / runfolder.EXAMPLES, **kept)
    image = figures.RunFigures.of(run).prediction("darcy").axes[1].images[0].get_array()
    assert (np.diff(image, axis=1) > 0).all() and (np.diff(image, axis=0) == 0).all()


def test_repeated_steps_of_a_resumed_run_count_once():
    events = [step(n, loss=1.0) for n in range(1, 11)] + [step(n, loss=2.0) for n in range(8, 12)]
    latest = figures.latest(events, "step")
    assert list(latest) == list(range(1, 12)) and latest[8]["loss"] == 2.0 and latest[7]["loss"] == 1.0


def test_overall_throughput_counts_each_step_by_its_own_batch():
    events = [step(n) for n in range(1, 11)] + [step(n, rate=320.0) for n in range(9, 21)]
    assert throughput.samples_seen(events) == pytest.approx(8 * 16 + 12 * 32)


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


def test_what_a_run_has_not_shown_is_said_and_a_short_one_is_told_apart(tmp_path):
    good = results.run_numbers(finished(tmp_path / "good"))
    assert results.is_short(good) and results.unmet({**good, "samples_per_s": {"num_windows": 3}}) == []
    start = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}]
    end = {"kind": "end", "step": 0, **END}
    nothing = results.run_numbers(write_run(tmp_path / "nothing", [*start, end]))
    assert results.unmet(nothing) == [
        "the loss did not fall",
        "it was too short for one steady second, so its speed was not measured",
    ]
    worse = {"waves": {"test": {"persistence_nrmse_mean": 0.5, "nrmse_mean": 0.6, "rollout_nrmse_mean": None}}}
    worse["waves"]["test"]["rollout_persistence_nrmse_mean"] = 0.7
    assert results.unmet({**good, "datasets": worse, "samples_per_s": {"num_windows": 3}}) == [
        "waves: a forecast without a model is as good",
        "waves: a rollout without a model is as good",
    ]

"""The ladder: what is measured against what, and a recommendation that rests on measurements alone."""

import contextlib
import json

import pytest
import yaml
from made_runs import START

from upsnb import hardware, overlays
from upsnb.compare import ladder, ladder_figures, search
from upsnb.compare.turns import Turns
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError, RunFailed
from upsnb.hardware import Hardware
from upsnb.phases import BY_NAME, is_on, setting

LAPTOP = Hardware("cpu", 1, "a laptop", 16.0, 2)


def plan(chosen=(), **overlay):
    return ladder.plan(overlays.resolve({"training.device": "cpu", **overlay}), LAPTOP, chosen)


def row(kind: str, phase: str, median: float | None, **changes) -> dict:
    ends = [None, None] if median is None else [0.97 * median, 1.03 * median]
    ratio = {"median": median, "ci95": ends, "num_rounds": 6}
    given = {"kind": kind, "phase": phase, "ratio": ratio, "memory_gib": 1.0, "reference_memory_gib": 1.0}
    given |= {"nrmse_ratio": 1.0, "changes": {f"setting.{phase}": True}, "promised": 1.2, "against": "baseline"}
    return {**given, **changes}


def test_a_phase_alone_keeps_batch_accumulation_and_learning_rate():
    entries, off, _ = plan(**{"training.batch_size": 6, "training.accum_steps": 3})
    for entry in entries:
        changed = overlays.difference(off, entry.config)
        if entry.kind == "alone":
            assert changed.keys() <= BY_NAME[entry.phase].on.keys() and changed
            assert entry.against == ladder.BASELINE


def test_the_recipe_s_batch_is_a_rung_of_its_own_and_no_phase_is_credited_with_it():
    entries, off, _ = plan(**{"training.batch_size": 6, "training.accum_steps": 3})
    recipe = {"training.batch_size": 24, "training.accum_steps": 2}
    batch, *rungs = [entry for entry in entries if entry.kind == "ladder"]
    assert batch.phase == ladder.BATCH and overlays.difference(off, batch.config) == recipe
    before = batch.config
    for rung in rungs:
        assert overlays.difference(before, rung.config).keys() <= BY_NAME[rung.phase].on.keys()
        before = rung.config
    assert all(is_on(BY_NAME[rung.phase], before) for rung in rungs)
    (without,) = (e for e in entries if e.kind == "leave_one_out" and e.phase == ladder.BATCH)
    back = {"training.batch_size": 6, "training.accum_steps": 3}
    assert overlays.difference(before, without.config) == back and without.against == ladder.FULL
    assert ladder.BATCH not in {entry.phase for entry in plan(("compile", "bf16"))[0]}, "these bring none along"


def test_what_is_left_out_differs_from_the_full_set_in_one_phase_alone():
    entries, off, _ = plan()
    full = [entry for entry in entries if entry.kind == "ladder"][-1].config
    for entry in (entry for entry in entries if entry.kind == "leave_one_out" and entry.phase != ladder.BATCH):
        assert entry.against == ladder.FULL
        assert overlays.difference(full, entry.config).keys() <= BY_NAME[entry.phase].on.keys()
        assert not is_on(BY_NAME[entry.phase], entry.config)
        # as without any phase: without bf16 a laptop computes in float32, and not in the recipe's float16
        for path in BY_NAME[entry.phase].on:
            assert setting(entry.config, path) == setting(off, path)


def test_phases_of_the_base_are_switched_off_and_its_own_precision_stays():
    _, off, _ = plan(**{"training.compile": True, "training.inverse_loss_frequency": 4})
    assert not off.training.compile and off.training.inverse_loss_frequency == 1 and not off.training.amp


def test_phases_that_cannot_run_are_named_with_their_reason_and_not_measured():
    entries, _, skipped = plan()
    assert {"optimizer_offload"} <= skipped.keys() and all(skipped.values())
    assert not {entry.phase for entry in entries} & skipped.keys()


def test_an_unknown_phase_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match="turbo.*compile"):
        plan(chosen=("turbo",))


def recommended(**changes) -> dict:
    """What a search returns."""
    ratio = {"median": 1.5, "ci95": [1.45, 1.55]}
    given = {"changes": {"training.compile": True, "training.batch_size": 16}, "ratio": ratio, "basis": "turns"}
    return {**given, "refused": {}, "tried": [], **changes}


def test_the_recommended_file_says_where_it_was_measured_and_loads(tmp_path):
    report = {"recommended": recommended(), "hardware": LAPTOP.as_dict(), "num_ranks": 1, "date": "2026-01-02"}
    path = ladder.write_params(report, tmp_path / "recommended.yaml")
    assert "a laptop" in path.read_text() and "1.50 [" in path.read_text()
    assert yaml.safe_load(path.read_text())["training"] == {"compile": True, "batch_size": 16}
    assert overlays.load(path).training.compile


def made_up_report(*rows: dict) -> dict:
    """A ladder's report, as far as its summary reads it."""
    listed = {kind: [one for one in rows if one["kind"] == kind] for kind in ladder.KINDS}
    return {"kind": ladder.KIND, **listed, "skipped": {"fused": "needs CUDA"}, "recommended": recommended()}


def test_the_summary_has_promise_beside_measurement_and_the_reason_where_there_is_none():
    report = made_up_report(
        row("alone", "compile", 1.5, promised=1.36),
        row("ladder", "bf16", None, failed="RunError: it broke\nand a log"),
        row("leave_one_out", "compile", 1.1),
    )
    said = ladder.summary(report).splitlines()
    assert said[0] == "Recommended: compile + batch size 16, 1.50 [1.45, 1.55] times the baseline; rests on turns."
    assert said[1:] == [
        "alone: compile: promised 1.36, 1.50 [1.46, 1.54]",
        "added in order: bf16: promised 1.2, failed: RunError: it broke",
        "what it adds to the full set: compile: 1.10 [1.07, 1.13]",
        "fused is left out: needs CUDA",
    ]


def test_the_summary_recommends_nothing_where_nothing_gained():
    report = made_up_report(row("alone", "compile", 0.9), row("alone", "bf16", None))
    nothing = recommended(changes={}, basis="nothing beat it", tried=[{"change": "compile"}])
    said = ladder.summary({**report, "recommended": nothing})
    assert "Recommended: the baseline, because nothing beat it." in said
    assert "ecommended" not in ladder.summary({**report, "recommended": ladder.NOTHING})
    assert "bf16: promised 1.2, no steady step in its turns" in said and "None" not in said


def test_failed_and_skipped_phases_stand_in_table_and_figure_with_the_reason():
    report = made_up_report(
        row("alone", "compile", 1.5),
        row("alone", "bf16", None, failed="RunError: it broke"),
        row("ladder", "compile", 0.8),
    ) | {"baseline": {"memory_gib": 1.0}}
    text = ladder_figures.table(report).to_string()
    assert "it broke" in text and "needs CUDA" in text
    figure = ladder_figures.promise_and_measurement(report)
    written = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert "failed" in written and "not possible here" in written and "0.80" in written


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """`measure(broken, minutes)`: two phases measured by made-up runs, of which the one in `broken` does not start."""

    def make(broken="", minutes=0.0):
        def start(config, folder):
            if folder.name == broken:
                raise RunError(f"{folder}: rank 0 raised ValueError\nand more")
            return Waiting()

        def beside(reference, config, folder, *arguments):
            ratio = {"median": 1.5, "ci95": [1.4, 1.6], "num_rounds": 3}
            return {"ratio": ratio, "memory_gib": 1.0, "reference_memory_gib": 1.0}

        monkeypatch.setattr(Turns, "start", start)
        monkeypatch.setattr(ladder, "measure_beside", beside)
        monkeypatch.setattr(hardware, "detect", lambda: LAPTOP)
        base = overlays.resolve({"training.device": "cpu"})
        chosen = ["compile", "bf16"]
        return ladder.measure(base, tmp_path, chosen=chosen, minutes=minutes, log=lambda text: None)

    return make


def test_a_full_set_that_does_not_start_takes_nothing_else_with_it(measure):
    report = measure("full-set")
    assert {row["phase"]: row["ratio"]["median"] for row in report["alone"]} == {"compile": 1.5, "bf16": 1.5}
    assert report["ladder"] and all("failed" not in row for row in report["ladder"])
    assert {row["failed"].splitlines()[0].partition(": ")[0] for row in report["leave_one_out"]} == {
        "the full set did not start or train"
    }
    assert "rank 0 raised ValueError" in ladder.summary(report) and "and more" not in ladder.summary(report)
    assert "did not start" in ladder_figures.table(report).to_string()
    ladder_figures.promise_and_measurement(report)


def test_nothing_is_measured_beside_a_baseline_that_does_not_start(measure):
    with pytest.raises(RunError, match="rank 0 raised ValueError"):
        measure("baseline")


@pytest.mark.parametrize("error", [RunError("the run died\nand more"), KeyboardInterrupt()], ids=["failed", "stopped"])
def test_a_search_that_ends_badly_leaves_what_was_measured_before(measure, monkeypatch, tmp_path, error):
    def search(*arguments):
        raise error

    monkeypatch.setattr(ladder, "recommend", search)
    if isinstance(error, RunError):
        report = measure(minutes=1.0)
        assert ladder.recommended(report) == "Nothing is recommended: the search failed: the run died."
    else:
        with pytest.raises(KeyboardInterrupt):
            measure(minutes=1.0)
    written = json.loads((tmp_path / "report.json").read_text())
    assert [row["ratio"]["median"] for row in written["alone"]] == [1.5, 1.5]


def test_a_search_that_trained_nothing_is_a_table_too():
    tried = [{"change": "compile", "ratio": {"median": 0.9, "ci95": [0.8, 1.0], "num_rounds": 3}, "kept": False}]
    table = ladder_figures.tried({"recommended": recommended(tried=tried, accuracy={})})
    assert table.loc[0].tolist()[2:] == ["-", "-", "no"]


def test_a_search_is_drawn_in_its_order_with_what_was_kept_in_bold_and_what_was_refused_by_name():
    tried = [
        {"change": "compile", "ratio": {"median": 1.3, "ci95": [1.2, 1.4]}, "kept": True},
        {"change": "bf16", "ratio": {"median": None, "ci95": [None, None], "why": "no such units"}, "kept": False},
        {"change": "compile", "ratio": {"median": 0.9, "ci95": [0.8, 0.95]}, "kept": False},
    ]
    of_sets = {"epochs": 2, "tolerance": 1.05}
    sets = {
        "all that gains": {**of_sets, "nrmse_ratio": 1.2, "holds": False},
        "without compile": {**of_sets, "nrmse_ratio": 1.01, "holds": True},
        "without bf16": {**of_sets, "nrmse_ratio": float("inf"), "holds": False},
        "without either": {**of_sets, "nrmse_ratio": None, "holds": False},  # infinity, in a file
    }
    report = {"recommended": recommended(tried=tried, accuracy=sets, noise_floor=0.02)}
    figure = ladder_figures.climb(report)
    figure.draw_without_rendering()
    speed, error = figure.axes
    labels = [(label.get_text(), label.get_fontweight()) for label in speed.get_yticklabels()]
    assert labels == [("1 compile", "bold"), ("2 bf16", "normal"), ("3 compile", "normal")]
    assert [text.get_text() for text in error.texts] == ["1.200, refused", "1.010", "failed", "failed"]
    report["recommended"]["accuracy"] = {}  # nothing gained
    assert len(ladder_figures.climb(report).axes) == 1


def test_a_ladder_of_another_workload_calls_its_error_by_its_name(of_tokens, measure):
    report = measure()
    told = {"all that gains": {"epochs": 2, "nrmse_ratio": 1.01, "tolerance": 1.02, "holds": True}}
    report["recommended"] = recommended(accuracy=told)
    phases, tried = ladder_figures.table(report), ladder_figures.tried(report)
    assert "perplexity ratio alone" in phases and list(tried["perplexity / baseline's"]) == ["1.01"]
    assert not [column for column in (*phases, *tried) if "nRMSE" in column]
    del report["metric"]  # as in a report of before
    assert "nRMSE ratio alone" in ladder_figures.table(report)


def test_a_file_without_a_set_claims_none(tmp_path):
    for basis, said in (
        ("nothing was searched", "Nothing was searched for"),
        ("the search failed: no", "search failed"),
    ):
        nothing = {**ladder.NOTHING, "basis": basis}
        report = {"recommended": nothing, "hardware": LAPTOP.as_dict(), "num_ranks": 1, "date": "2026-01-02"}
        text = ladder.write_params(report, tmp_path / "recommended.yaml").read_text()
        assert said in text and "fastest" not in text


class Waiting:
    """What others are measured against, of which nobody asks more than that it is stopped."""

    def __init__(self, said=None):
        self.run, self.said = self, [] if said is None else said
        self.events = [{"kind": "start", **START}]

    def stop(self):
        self.said.append("stop")

    def end(self):
        self.said.append("end")


def test_all_that_wait_are_asked_to_stop_before_one_of_them_is_waited_for(tmp_path):
    """Whoever interrupts a second time does not wait for the first of them, and must leave none behind."""
    measured, said = ladder.Measurements(tmp_path, 1.0, 1, 0, print), []
    measured.references = {"baseline": Waiting(said), "full set": Waiting(said)}
    measured.close()
    assert said == ["stop", "stop", "end", "end"]


def test_one_training_that_fails_costs_no_other_row_and_each_is_written_at_once(tmp_path, monkeypatch):
    """A ladder takes hours, and is interrupted, or runs out of memory in one of its trainings."""
    waiting, trained = [], []
    ratio = {"median": 1.5, "ci95": [1.4, 1.6], "num_rounds": 3}

    class Failing:
        folder = tmp_path

        def stopped_by_errors(self):
            return contextlib.nullcontext()

        def wait(self):
            trained.append(1)
            if len(trained) == 2:
                raise RunFailed(tmp_path, "failed", "out of memory")
            if len(trained) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(ladder.Turns, "start", lambda *_: waiting.append(Waiting()) or waiting[-1])
    monkeypatch.setattr(search.handle, "start", lambda *_: Failing())
    monkeypatch.setattr(search, "last_score", lambda run: 0.1)
    row = {"ratio": ratio, "memory_gib": 1.0, "reference_memory_gib": 1.0}
    monkeypatch.setattr(ladder, "measure_beside", lambda *_: dict(row))
    with pytest.raises(KeyboardInterrupt):
        ladder.measure(RunConfig(), tmp_path, quality_epochs=1, log=lambda text: None)
    alone = json.loads((tmp_path / "report.json").read_text())["alone"]
    assert ["out of memory" in one.get("failed", "") for one in alone][:3] == [True, False, False]
    assert waiting[0].said == ["stop", "end"]

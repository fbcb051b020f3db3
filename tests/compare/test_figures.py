"""Figures of runs beside each other: nothing covered, nothing unsaid, and any runs in one."""

import json

import numpy as np
import pytest
from figure_checks import check
from made_runs import START, TOKENS, finished, step, write_run

from upsnb.compare import figures, ladder, ladder_figures, scaling_figures, verdict
from upsnb.compare.verdict import NOISE
from upsnb.errors import RunError
from upsnb.phases import BY_NAME
from upsnb.runs import runfolder

KEPT = runfolder.project_root() / "outputs" / "reference"
ENDED = {"slow": (0.05, 0.04), "fast": (0.06, 0.03), NOISE: (0.055, 0.04)}  # nRMSE of darcy, one a seed


def kept(name: str) -> dict:
    return json.loads((KEPT / name / "report.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """Of two arms and the first one's double, two seeds each, that took turns."""
    folder = tmp_path_factory.mktemp("arms")
    arms = {
        name: [
            finished(folder / f"{number}-{seed}", validated=(0.3, 0.2), darcy=error)
            for seed, error in enumerate(errors)
        ]
        for number, (name, errors) in enumerate(ENDED.items())
    }
    ratios = {name: {"median": median, "ci95": [0.97 * median, 1.03 * median], "num_rounds": 9}
              for name, median in (("fast", 1.5), (NOISE, 1.0))}  # fmt: skip
    made = verdict.compare_arms(arms, ratios, None, {"speedup": 2.0}, turns=TURNS)
    for run in (run for those in made["arms"].values() for run in those):
        run["validations"] = {"time_s": [10.0, 20.0, 30.0], "samples": [100, 200, 300], "nrmse": [0.13, None, 0.05]}
    return made


TURNS = [
    {"arm": arm, "samples": rate + turn % 3, "seconds": 1.0}
    for turn in range(8)
    for arm, rate in (("slow", 90), ("fast", 140), (NOISE, 90))
]


def test_figures_of_a_comparison_say_what_is_seen_and_can_be_read(report):
    drawn = figures.draw(report)
    assert list(drawn) == ["speed", "quality", "outcome"]
    for figure in drawn.values():
        check(figure)


@pytest.mark.parametrize("name", ["compare", "compare_files"])
def test_the_kept_comparisons_can_be_drawn_again(name):
    check(figures.outcome(kept(name)))


def test_the_double_of_the_baseline_covers_it_nowhere(report):
    turns, _ = figures.speed(report).axes
    time, _ = figures.quality(report).axes
    for ax in (turns, time):
        for line in (line for line in ax.lines if line.get_color() == figures.GREY):
            assert line.get_linestyle() in ("--", "None") and line.get_markerfacecolor() == "none"


def test_each_seed_has_its_own_quality_to_reach_and_the_marker_of_its_curves(report):
    targets = [pytest.approx(1.03 * one["val_loss"]) for one in report["arms"]["slow"]]
    for ax in figures.quality(report).axes:
        wanted = [(line.get_marker(), line.get_ydata()[0]) for line in ax.lines if line.get_linestyle() == ":"]
        for colour in (figures.BLUE, figures.VERMILLION, figures.GREY):
            curves = [line.get_marker() for line in ax.lines if line.get_color() == colour]
            assert wanted == [*zip(curves, targets, strict=True)] and len(set(curves)) == len(curves) > 1


def test_intervals_and_what_is_required_stand_beside_the_ratios(report):
    _, ratios = figures.speed(report).axes
    bars = [tuple(line.get_xdata()) for line in ratios.lines if len(set(line.get_xdata())) == 2]
    assert bars == [tuple(report["speedup"]["ci95"]), tuple(report["aa_ratio"]["ci95"])]
    assert ratios.get_legend().texts[-1].get_text() == "required 2" and ratios.get_xlim()[1] > 2.0
    errors = figures.outcome(report).axes[1]
    (limit,) = (line.get_ydata()[0] for line in errors.lines if line.get_linestyle() == ":")
    assert limit == pytest.approx(1.03 * np.mean(ENDED["slow"]))


def test_the_outcome_shows_every_seed_of_every_arm_equal_ones_too(report):
    errors, memory = figures.outcome(report).axes[1:]
    dots = [line for line in errors.lines if line.get_marker() == "o"]
    names = [tick.get_text() for tick in errors.get_xticklabels()]
    assert {names[round(line.get_xdata().mean())]: tuple(line.get_ydata()) for line in dots} == ENDED
    for line in memory.lines:
        assert len(set(line.get_xdata())) == len(line.get_ydata()), "equal ones stand beside each other"


# -- any runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", figures.OVER)
def test_an_overlay_has_every_run_once_in_each_panel_by_its_name(tmp_path, over):
    speeds = {"one": 100.0, "two": 50.0}
    runs = [finished(tmp_path / "runs" / name, ms=ms, validated=(0.3, 0.2)) for name, ms in speeds.items()]
    figure = figures.overlay([runs[0], runs[1].folder], over)
    check(figure)
    for ax in figure.axes:
        assert [line.get_label() for line in ax.lines] == ["one", "two"]
    loss, validation, throughput = figure.axes
    ends = {"step": (59, 59), "seconds": (5.9, 2.95)}[over]
    assert [line.get_xdata()[-1] for line in loss.lines] == pytest.approx(ends)
    assert [len(line.get_xdata()) for line in validation.lines] == [1, 1]
    assert [line.get_ydata()[0] for line in throughput.lines] == pytest.approx((160, 320))


def test_an_overlay_draws_runs_in_any_state(tmp_path):
    started = write_run(tmp_path / "a$^{" / "run", [], status="running")
    first = write_run(tmp_path / "b$^{" / "run", [step(1), step(2, loss=None)], status="failed")
    check(figures.overlay([started, first, finished(tmp_path / "c" / "run")]))


def test_an_overlay_of_nothing_or_over_something_else_is_an_error(tmp_path):
    with pytest.raises(RunError, match="give one or more"):
        figures.overlay([])
    with pytest.raises(RunError, match="step or seconds"):
        figures.overlay([finished(tmp_path / "run")], "epochs")


def test_an_overlay_names_unit_and_error_of_its_runs(of_tokens, tmp_path):
    started = write_run(tmp_path / "run", [], status="running")  # it has not said yet what it is
    figure = figures.overlay([started, finished(tmp_path / "other")])
    _, validation, throughput = figure.axes
    assert validation.get_ylabel() == "validation perplexity [-]" and throughput.get_ylabel() == "throughput [tokens/s]"
    assert "validation perplexity at last" in " ".join(figure.get_suptitle().split())


def test_an_overlay_of_two_workloads_names_both_errors(tmp_path):
    other = finished(tmp_path / "other")
    writer = runfolder.EventWriter(other.folder)
    writer.write("start", 59, **START, **TOKENS)
    writer.close()
    _, validation, _ = figures.overlay([finished(tmp_path / "run"), other]).axes
    assert validation.get_ylabel() == "validation nRMSE or perplexity [-]"


# -- ladder and scaling --------------------------------------------------------------------------------------------


def row(kind: str, phase: str, median: float | None, **changes) -> dict:
    ends = [None, None] if median is None else [0.97 * median, 1.03 * median]
    return {"kind": kind, "phase": phase, "ratio": {"median": median, "ci95": ends}, "promised": 1.2, **changes}


def test_phases_stand_in_their_order_wherever_they_were_measured_or_left_out():
    rows = [row("alone", name, 1.1) for name in ("nccl", "bf16", "compile")]
    made = {"alone": rows, "ladder": [], "leave_one_out": [], "skipped": {"optimizer_offload": "no GPU"}}
    made["recommended"] = {"changes": {}, "basis": "nothing beat the baseline"}
    figure = ladder_figures.promise_and_measurement(made)
    check(figure)
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert [name.split()[-1] for name in names] == ["compile", "optimizer_offload", "bf16", "nccl"]
    assert names[0] == "1 compile" and [name for name in BY_NAME if name in " ".join(names)][-1] == "nccl"


def test_phases_are_added_in_their_order_whatever_order_they_were_chosen_in():
    from upsnb import overlays
    from upsnb.hardware import Hardware

    base, machine = overlays.resolve({"training.device": "cpu"}), Hardware("cpu", 1, "a laptop", 16.0, 2)
    entries, *_ = ladder.plan(base, machine, ("foreach", "bf16", "compile"))
    assert [entry.phase for entry in entries if entry.kind == "ladder"] == ["compile", "bf16", "foreach"]


def test_the_kept_ladder_and_scaling_can_be_drawn_again():
    check(ladder_figures.promise_and_measurement(kept("phases")))
    check(scaling_figures.throughput(kept("scaling")))

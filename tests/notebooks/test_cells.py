"""Single cells of notebooks, after what the cells above them may leave: what they assert, and what they claim."""

import ast
import contextlib
import json
from types import SimpleNamespace

import pandas as pd
import pytest

from upsnb import overlays
from upsnb.compare import check, ladder, models
from upsnb.overlays import project_root
from upsnb.phases import PHASES
from upsnb.report import worth


def cells(name: str) -> dict[str, str]:
    found = json.loads((project_root() / f"notebooks/{name}.ipynb").read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in found if cell["cell_type"] == "code"}


def run(name: str, cell: str, **variables) -> dict:
    """The names that a cell leaves; `value` is that of its last line, if it is an expression."""
    body = ast.parse(cells(name)[cell]).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else ast.Expr(ast.Constant(None, lineno=1, col_offset=0))
    exec(compile(ast.Module(body, []), cell, "exec"), variables)
    return {**variables, "value": eval(compile(ast.Expression(last.value), cell, "eval"), variables)}


def check_rows(*verdicts: str) -> dict:
    return {"kind": "check", "rows": [{"name": f"n{i}", "verdict": v, "why": "so"} for i, v in enumerate(verdicts)]}


def test_a_check_in_which_something_failed_fails():
    last = [*cells("00_check")][-1]
    assert run("00_check", last, check=check, summary=check_rows(check.RAN))["value"]["failed"] == []
    with pytest.raises(AssertionError, match="failed, as the table says: n1"):
        run("00_check", last, check=check, summary=check_rows(check.RAN, check.FAILED))


def phases_summary(*names: str, recommended: dict | None = None, **row) -> dict:
    rows = [{"phase": name, **row} for name in names]
    return {"alone": rows, "ladder": [], "leave_one_out": [], "skipped": {}, "recommended": recommended or {}}


@pytest.mark.parametrize(("chosen", "summary", "said"), [
    (["compile"], phases_summary("compile"), None),
    ([], phases_summary(*(phase.name for phase in PHASES)), None),
    ([], phases_summary("compile"), "phases that are missing: .*bf16"),
    (["compile", "bf16"], phases_summary("compile"), "phases that are missing: {'bf16'}"),
    (["compile"], phases_summary("compile", failed="it broke"), "it broke"),
    (["compile"], phases_summary("compile", recommended={"failed": "no", "basis": "no search"}), "no search"),
])  # fmt: skip
def test_a_ladder_fails_where_a_phase_or_the_search_is_missing_or_failed(chosen, summary, said):
    known = {"chosen": chosen, "summary": summary, "ladder": ladder, "path": None, "baseline": None}
    known |= {"overlays": SimpleNamespace(resolve=lambda *_, **__: None, read=lambda path: {})}
    known |= {"hardware": SimpleNamespace(check_runnable=lambda *_: None, detect=lambda: None)}
    known |= {"phases": SimpleNamespace(PHASES=PHASES)}
    with pytest.raises(AssertionError, match=said) if said else contextlib.nullcontext():
        run("04_phases", "phases-14", **known)


def test_memory_that_nothing_measured_is_told_and_no_error(capsys):
    """A laptop asks for a machine of four GPUs, as the notebook invites it to."""
    rows = [{"config": "as configured", "measured": None, "reason": "four GPUs are needed"}]
    found = run("03_memory", "cell-13", rows=rows, plan=None)
    assert found["errors"] == [] and "as configured is not measured: four GPUs" in capsys.readouterr().out
    report = {"kind": "memory", "rows": [{"measured_gib": None}]}
    told = run("03_memory", "cell-25", errors=[], report=report, claims=[], fits=[])["value"]
    assert not told["measured"] and not told["within 10 %"]


@pytest.mark.parametrize(("largest", "smallest", "errors", "said"), [
    (8, 4, [1.0], None), (0, 0, [], None), (4, 4, [], "more memory fits less"), (8, 4, [11.0], "10 % off"),
])  # fmt: skip
def test_memory_is_judged_once_all_is_drawn_and_nothing_that_fits_is_no_error(largest, smallest, errors, said):
    saved = []
    names = ("step_figure", "module_figure", "bars_figure", "fits_figure", "folder", "config", "claims")
    known = dict.fromkeys(names) | {"rows": [], "fits": [], "history_figures": [], "errors": errors}
    style = SimpleNamespace(save=lambda figure, folder, name: SimpleNamespace(name=saved.append(name)))
    plan = SimpleNamespace(report=lambda *_: {})
    with pytest.raises(AssertionError, match=said) if said else contextlib.nullcontext():
        known |= {"largest": largest, "smallest": smallest, "folder": project_root()}
        run("03_memory", "cell-24", **known, style=style, plan=plan)
    assert len(saved) == 4


def test_a_comparison_is_judged_again_without_training_and_drawn_without_a_turn():
    assert "compare_report" not in cells("02_compare")["compare-05"]
    assert "arms.compare(" not in cells("02_compare")["judge-runs"]
    figures = SimpleNamespace(draw=lambda summary: {"quality": 1})
    value = run("02_compare", "compare-07", summary={}, comparison_figures=figures)["value"]
    assert value == "no turn was finished: choose a smaller block_s"


def test_runs_that_are_of_no_use_without_their_notebook_end_with_it_and_others_are_attached_to():
    assert "attached=True" in cells("08_profile")["cell-05"]
    for name in ("01_train", "06_pipeline"):
        assert "handle.start_or_attach(" in "".join(cells(name).values())


def test_a_run_that_was_stopped_in_its_first_stage_says_so(capsys):
    drawn = SimpleNamespace(trained={"operator": {}}, table=lambda: pd.DataFrame())
    results = SimpleNamespace(train_report=lambda run: {"leaks": [], "end_reason": "stopped"}, costs=lambda report: "")
    known = {"results": results, "Stages": SimpleNamespace(of=lambda run: drawn), "run": None, "pd": pd}
    run("06_pipeline", "pipeline-11", **known, display=lambda frame: None)
    assert "The run ended in its first stage (stopped)" in capsys.readouterr().out


def test_what_cannot_be_known_is_not_claimed():
    known = {"summary": {"status": "finished", "datasets": {}}, "unmet": [], "written": []}
    results = SimpleNamespace(gains=lambda summary: {})
    assert not run("01_train", "cell-36", **known, results=results)["value"]["better than no model"]
    survey = {"kind": "cloud", "needs": {"num_gpus": 1, "gpu_gib": None}, "offers": []}
    assert run("09_cloud", "cell-11", survey=survey)["value"]["offers"] == 0
    points = [{"seeds": 0, "nrmse": {"median": None}}]
    known = {"summary": {"kind": "sweep"}, "points": points, "planned": SimpleNamespace(points=points)}
    last = [*cells("11_sweep")][-1]
    told = run("11_sweep", last, **known, share="2/3", seeds=[42], written=[])["value"]
    assert told["every point is there"] and not told["best has the lowest error"]


def test_one_model_that_failed_is_shown_beside_the_others(capsys, tmp_path):
    summary = {"rows": [], "failed": {"yours-seed42": "out of memory"}, "time_limit_s": 5.0}
    known = {"models": SimpleNamespace(train=lambda *_: summary, YOURS=models.YOURS), "configs": {}, "seeds": [42]}
    table = SimpleNamespace(table=lambda summary: None)
    found = run("10_models", "models-09", **known, models_figures=table, folder=tmp_path)
    assert "yours-seed42 failed: out of memory" in capsys.readouterr().out
    config = overlays.load(project_root() / "params/minute.yaml")
    for cell in ("worth", "models-19"):
        run("10_models", cell, trained=found["trained"], worth=worth, config=config)

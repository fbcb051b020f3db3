"""What each stage has made of its model, from the run folder alone: a table of verdicts, and figures."""

import numpy as np
import pytest
from figure_checks import check

from upsnb.report import figures
from upsnb.report.stages import Stages
from upsnb.runs import handle, runfolder
from upsnb.training import gates
from upsnb.widgets import html
from upsnb.widgets.history import History
from upsnb.widgets.progress import Progress

THREE = {"stages.finetune.epochs": 1, "stages.crps.epochs": 1, "evaluation.members": 4, "training.ema_decay": 0.9}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_config, train_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gates, "FEWEST", 2)
        train_here(tiny_config(**THREE), folder)
    return handle.Run(folder)


def test_every_stage_of_every_dataset_is_a_row_and_the_one_that_answers_is_marked(run):
    found = Stages.of(run)
    table = found.table()
    assert list(table.index) == [(name, s) for name in ("advection", "darcy") for s in ("operator", "finetune", "crps")]
    assert {stage for (_, stage), row in table.iterrows() if row["answers"]} == {found.answers}
    verdicts = {event["stage"]: event["verdict"] for event in run.events(("gate",))}
    for (_, stage), row in table.iterrows():
        assert row["verdict"].startswith(verdicts.get(stage, ""))
        assert bool(row["spread / skill"]) == (stage == "crps")
        assert bool(row["verdict"]) == (stage != "operator")


def test_figures_say_what_is_seen_and_are_left_in_the_folder(run):
    found = Stages.of(run)
    drawings = found.all()
    kinds = {name.split("_")[0] for name in drawings}
    assert kinds == {"crps", "correlation", "calibration", "stages", "cost"}
    assert {name for name in drawings if "darcy" in name} == {
        "calibration_darcy_crps",
        "stages_spectrum_darcy",
        "cost_darcy",
    }
    for draw in drawings.values():
        check(draw())
    assert {path.stem for path in (run.folder / runfolder.FIGURES).glob("*.png")} == set()
    written = found.write_figures()
    assert written.keys() == drawings.keys() and all(path.stat().st_size > 0 for path in written.values())


def test_members_are_drawn_beside_the_truth(run, tiny_setup):
    datasets = tiny_setup().datasets
    for name, shape in (("advection", (5, 3, 1, 32)), ("darcy", (5, 1, 1, 16, 16))):
        dataset = datasets[name]
        truth = dataset.source.read(dataset.splits["validation"][:1], dataset.frames)[1][0][-shape[1] :]
        members = truth[None] + 0.1 * np.random.default_rng(0).normal(size=(5, *truth.shape))
        check(figures.members(dataset, truth, members))


def test_a_run_of_one_stage_has_nothing_to_compare(tiny_config, train_here, tmp_path):
    train_here(tiny_config(), tmp_path)
    assert not Stages.of(handle.Run(tmp_path)).found


def test_a_run_that_is_stopped_in_its_first_stage_shows_that_one(tiny_config, train_here, tmp_path):
    def stop(step):
        runfolder.write_control(tmp_path, None, runfolder.STOP)

    train_here(tiny_config(**THREE), tmp_path, stop)
    found = Stages.of(handle.Run(tmp_path))
    assert list(found.table().index) == [("advection", "operator"), ("darcy", "operator")]
    for draw in found.all().values():
        check(draw())


def test_a_run_that_is_stopped_before_anything_is_measured_has_an_empty_table(tmp_path):
    table = Stages(tmp_path, None, {}, {}, None).table()
    assert table.empty and table.index.names == ["dataset", "stage"] and "verdict" in table


def test_panel_and_log_say_each_verdict(run):
    history, said = History(run.folder), []
    events = history.read()
    tell = Progress(said.append)
    for event in events:
        tell(event)
    header = html.header(history, "run", "finished", None, run.config.stages, 0.0, 0.0, None)
    judged = [event for event in events if event["kind"] == "gate"]
    assert len(judged) == 2
    for event in judged:
        assert f"{event['stage']}: {event['verdict']}: " in header
        assert any(f"{event['stage']}: {event['verdict']}: " in line for line in said)

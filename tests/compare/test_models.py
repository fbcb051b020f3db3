"""Models beside each other: same data, same time, each with its own file; what is wrong is said before one trains."""

import contextlib
import copy
import time

import pytest
from figure_checks import check

from upsnb import overlays
from upsnb.compare import models, models_figures
from upsnb.data.datasets import open_all
from upsnb.errors import ConfigError, RunError, RunFailed
from upsnb.runs import runfolder
from upsnb.training import stages

FILES = sorted((runfolder.project_root() / "params/models").glob("*.yaml"))
HERE = [path.stem for path in FILES if path.stem != "neuralop"]  # which is in an environment of its own


@pytest.fixture(scope="module")
def report() -> dict:
    """Of two models, two seeds each, on two datasets."""
    rows = [
        {
            "model": name,
            "seed": seed,
            "parameters": parameters,
            "steps": 100,
            "samples_per_s": 50.0,
            "peak_memory_gib": memory,
            "nrmse": {"waves": 0.1 * place + 0.01 * seed, "darcy": None if name == "yours" and seed else 0.3 / place},
            "validations": [[10.0, {"waves": 0.5, "darcy": None}], [20.0, {"waves": 0.1 * place, "darcy": 0.3}]],
            "references": {
                "waves": {"persistence": 0.9, "look-up": 0.7},
                "darcy": {"training mean": 0.8, "look-up": 0.6},
            },
            "frame_ms": {"waves": 1.5 * place, "darcy": 4.0},
        }
        for place, (name, parameters, memory) in enumerate((("yours", 1000, 0.5), ("fno", 2_000_000, 0.8)), 1)
        for seed in (0, 1)
    ]
    return {"rows": rows, "families": {"waves": "advection1d", "darcy": "darcy2d"}, "time_limit_s": 20.0}


def test_every_figure_says_what_is_seen_and_can_be_read(report):
    for figure in models_figures.draw(report).values():
        check(figure)


def test_the_lowest_error_is_that_of_the_mean_over_seeds_and_one_that_diverged_is_none(report):
    assert models_figures.best(report) == {"waves": ("yours", pytest.approx(0.105)), "darcy": ("fno", 0.15)}


def test_the_table_has_a_row_for_each_training_and_one_for_each_forecast_without_a_model(report):
    table = models_figures.table(report)
    assert list(table["model"]) == ["yours", "yours", "fno", "fno", "persistence", "look-up", "training mean"]
    assert list(table["waves: nRMSE"])[-3:] == ["0.9", "0.7", ""]


def test_a_model_keeps_what_all_share_and_adds_its_own(tiny_config):
    base = tiny_config(**{"training.time_limit_s": 5.0})
    configs = models.plan(base, HERE, {"model.build": "upsnb.models.fno:FNO", "lr": 0.5})
    assert list(configs) == ["yours", *HERE] and configs["yours"].optimizer.lr == 0.5
    assert all(config.data == base.data and config.training.time_limit_s == 5.0 for config in configs.values())


@pytest.mark.parametrize(
    ("others", "yours", "limit", "said"),
    [
        (["unett"], None, 5.0, "others: 'unett' is no model -> choose from fno"),
        (["unet"], None, None, "training.time_limit_s: is empty -> "),
        ([], {"model.build": "upsnb.models.nowhere:Net"}, 5.0, "model.build: "),
        ([], {"training": {"time_limit_s": 50.0}}, 5.0, "training.time_limit_s: all models share it -> "),
        ([], {"data.datasets.darcy.augment": True}, 5.0, "data.datasets.darcy.augment: all models share it -> "),
        ([], {"stages.finetune.epochs": 1}, 5.0, "stages.finetune: would train for longer than the others -> "),
    ],
)
def test_what_is_wrong_is_said_before_anything_trains(tiny_config, others, yours, limit, said):
    with pytest.raises(ConfigError, match=said):
        models.plan(tiny_config(**{"training.time_limit_s": limit}), others, yours)


@pytest.mark.parametrize("name", HERE)
def test_a_model_s_file_goes_on_top_of_every_other_file(name, tiny_setup):
    """Whatever UPS needs there is switched off for a model that has no latents, attention or points of its own."""
    path = runfolder.project_root() / f"params/models/{name}.yaml"
    objective = tiny_setup(**overlays.flatten(overlays.read(path))).objective
    for file in sorted((runfolder.project_root() / "params").glob("*.yaml")):
        stages.check(objective, overlays.load(file, path))


def test_what_has_finished_is_not_trained_again_and_what_was_interrupted_goes_on(tiny_config, tmp_path, monkeypatch):
    config, started = tiny_config(), []
    monkeypatch.setattr(models.handle, "start", lambda config, folder: started.append(config.checkpoint.resume))
    models._started(config, tmp_path / "run")
    runfolder.create(config, tmp_path / "run")
    runfolder.update_manifest(tmp_path / "run", status="failed")
    models._started(config, tmp_path / "run")
    assert started == [config.checkpoint.resume, True]
    runfolder.update_manifest(tmp_path / "run", status="finished", end_reason="time")
    assert models._started(config, tmp_path / "run").folder == tmp_path / "run" and len(started) == 2
    runfolder.update_manifest(tmp_path / "run", status="starting", end_reason=None, created=time.time())
    assert models._started(config, tmp_path / "run").status() == "starting" and len(started) == 2, "it is waited for"
    runfolder.write_control(tmp_path / "run", None, runfolder.STOP)
    end = {"status": "finished", "end_reason": "stopped"}
    monkeypatch.setattr(models.Run, "wait", lambda run: runfolder.update_manifest(run.folder, **end))
    models._started(config, tmp_path / "run")
    assert len(started) == 3 and started[-1], "what an interrupt still stops is not taken for a whole training"


@pytest.fixture
def trained(tiny_config, tmp_path, monkeypatch):
    """`trained(failing)`: two models, of which one fails; their configs."""

    class Made:
        def __init__(self, folder, failing):
            self.folder, self.failing = folder, failing

        def stopped_by_errors(self):
            return contextlib.nullcontext()

        def wait(self, on_event):
            if self.folder.name.startswith(self.failing):
                raise RunFailed(self.folder, "failed", "out of memory")

    def make(failing):
        monkeypatch.setattr(models.handle, "start", lambda config, folder: Made(folder, failing))
        monkeypatch.setattr(models, "_row", lambda name, run, opened: {"model": name})
        monkeypatch.setattr(models, "_line", lambda row: row["model"])
        return models.plan(tiny_config(**{"training.time_limit_s": 5.0}), ["fno", "unet"])

    return make


def test_one_model_that_fails_costs_no_other_and_each_is_written_at_once(trained, tmp_path, monkeypatch):
    configs, written = trained("fno"), []
    monkeypatch.setattr(models, "finish", lambda report, folder: written.append(copy.deepcopy(report)) or report)
    made = models.train(configs, tmp_path, [0, 1], log=lambda text: None)
    assert [(len(one["rows"]), len(one["failed"])) for one in written] == [(0, 1), (1, 1), (1, 2), (2, 2)]
    assert [row["model"] for row in made["rows"]] == ["unet", "unet"] and "out of memory" in made["failed"]["fno-seed0"]
    assert "fno-seed1: failed: run" in models.summary(made)
    with pytest.raises(RunError, match="no model was trained to its end\n.*out of memory"):
        models.train(trained(""), tmp_path, log=lambda text: None)


def test_a_folder_of_other_settings_is_refused_before_anything_trains(trained, tmp_path):
    configs = trained("")
    other = overlays.apply(configs["unet"], {"optimizer.lr": 0.5, "training.seed": 42})
    runfolder.create(other, tmp_path / "runs/unet-seed42")
    with pytest.raises(RunError, match="was trained with another optimizer.lr -> choose another folder"):
        models.train(configs, tmp_path, log=pytest.fail)


def test_what_a_run_reached_and_cost_is_one_row(tiny_config, train_here, tmp_path, monkeypatch):
    config = tiny_config(**{"model.build": "upsnb.models.fno:FNO", "optimizer.name": "adamw"})
    monkeypatch.setattr(models, "TIMED_S", 0.0)
    train_here(config, tmp_path)
    runfolder.update_manifest(tmp_path, status="finished")
    opened = open_all(config, runfolder.project_root())
    row = models._row("fno", models.Run.attach(tmp_path), opened)
    report = {"rows": [row], "families": dict.fromkeys(opened), "time_limit_s": 1.0}
    assert row["nrmse"].keys() == row["frame_ms"].keys() == opened.keys() and min(row["frame_ms"].values()) > 0
    assert list(row["references"]["darcy"]) == ["training mean", "look-up"]
    assert f"1 s for each model\nfno, seed {row['seed']}: nRMSE " in models.summary(report)

"""Models beside each other: same data, same time, each with its own file; what is wrong is said before one trains."""

import pytest
from figure_checks import check

from upsnb import overlays
from upsnb.compare import models, models_figures
from upsnb.data.datasets import open_all
from upsnb.errors import ConfigError
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

"""A model is judged on other data by what it has not seen of them, and a run's test split stays its test split."""

import json
import shutil

import h5py
import numpy as np
import pytest

from upsnb import __main__, overlays
from upsnb.data.datasets import ensure_generated, generated_path
from upsnb.errors import ConfigError, DataError
from upsnb.report import transfer
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import REPORT

FILES, SEED = "data.datasets.{}.files", "data.datasets.{}.generate.seed"


@pytest.fixture(scope="module")
def trained(tiny_config, train_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transfer") / "run"
    train_here(tiny_config(), folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained, tmp_path / "run"))


def generated_file(run, name, root, **changes):
    config = overlays.resolve({f"data.datasets.{name}.generate.{key}": value for key, value in changes.items()},
                              base=run.config).data.datasets[name]  # fmt: skip
    ensure_generated(config, root, lambda message: None)
    return generated_path(config, root)


def judged(run, changes, folder, **chosen):
    return json.loads((transfer.transfer(run, changes, folder, **chosen) / REPORT).read_text())


def looks(run):
    return [event["split"] for event in run.events(("opened",))]


def test_the_run_s_own_file_under_another_name_gives_its_test_split_again(run, tmp_path, data_root):
    own = run.config.data.datasets["advection"]
    copy = shutil.copy(generated_path(own, data_root), tmp_path / "renamed.hdf5")
    report = judged(run, {FILES.format("advection"): [str(copy)]}, tmp_path / "found")
    about, scores = report["about"]["advection"], report["datasets"]["advection"]
    assert list(report["datasets"]) == ["advection"], "what is as it was is not judged again"
    assert about["seen"] + about["samples"] == own.generate.num_samples and about["files"] == ["renamed.hdf5"]
    for key in ("num_samples", "nrmse_mean", "rollout_nrmse_mean", "persistence_nrmse_mean"):
        assert scores["transfer"][key] == pytest.approx(scores["test"][key], rel=1e-5), key
    assert looks(run) == ["test", "test"], "a second look at the test split is told"
    assert (tmp_path / "found/figures/rollout_advection.png").is_file() and (tmp_path / "found/examples.npz").is_file()


def test_of_a_file_of_old_and_new_samples_the_new_ones_judge(run, tmp_path, data_root):
    old, new = (generated_file(run, "darcy", data_root, seed=seed) for seed in (0, 5))
    both = shutil.copy(old, tmp_path / "both.hdf5")
    with h5py.File(both, "r+") as file, h5py.File(new) as other:
        for key in ("nu", "tensor"):
            values = np.concatenate([other[key][:3], file[key][:-1]])  # without one that was trained on
            del file[key]
            file[key] = values
    report = judged(run, {FILES.format("darcy"): [str(both)]}, tmp_path / "found")
    alone = judged(run, {FILES.format("darcy"): [str(new)], "data.datasets.darcy.num_samples": 3}, tmp_path / "new")
    num_test = report["datasets"]["darcy"]["test"]["num_samples"]
    assert report["about"]["darcy"]["samples"] == 3 + num_test
    assert alone["about"]["darcy"]["seen"] == 0 and alone["about"]["darcy"]["samples"] == 3
    assert alone["datasets"]["darcy"]["transfer"]["baseline"] == "training mean"
    assert looks(run) == ["test", "test"], "new samples are no look at the test split"


def test_on_another_grid_nothing_is_compared_with_training_and_that_is_said(run, tmp_path, data_root):
    finer = generated_file(run, "darcy", data_root, resolution=32)
    report = judged(run, {FILES.format("darcy"): [str(finer)]}, tmp_path / "found")
    about, found = report["about"]["darcy"], report["datasets"]["darcy"]["transfer"]
    assert about["seen"] is None and about["grid"] == [32, 32] != about["trained_grid"]
    assert found["baseline"] == "their own mean" and "leak" not in found


def test_a_coarser_reading_of_the_same_file_leaves_out_what_was_trained_on(run, tmp_path):
    report = judged(run, {"data.datasets.advection.reduced_resolution": 2}, tmp_path / "found")
    about, scores = report["about"]["advection"], report["datasets"]["advection"]
    assert about["samples"] == scores["test"]["num_samples"] and about["seen"] > 0
    assert 2 * about["grid"][0] == about["trained_grid"][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "are those of the run -> name other files"),
        ({"evaluation.rollout": False}, "are those of the run"),
        ({"training.lr": 1e-3}, "unknown setting"),
        ({"optimizer.lr": 1e-3}, "optimizer.lr: training has decided it"),
        ({"data.datasets.waves": {"family": "advection1d"}}, "waves: the model was not trained on it"),
        (
            {"data.datasets.advection": {"family": "burgers1d"}},
            "is burgers1d, and the model was trained on advection1d",
        ),
        ({"data.datasets.advection.files": ["none.hdf5"]}, "none.hdf5 not found"),
        ({"data.datasets.advection.reduced_resolution_t": 2}, "the model was trained on steps of"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_a_folder_is_made(run, tmp_path, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transfer.runfolder, "project_root", lambda: tmp_path)
    before = looks(run)
    with pytest.raises((ConfigError, DataError), match=said):
        transfer.transfer(run, changes)
    assert not (tmp_path / "outputs").exists() and looks(run) == before


def test_time_steps_that_a_stride_would_make_equal_name_it(run, tmp_path, data_root):
    own = run.config.data.datasets["advection"].generate
    finer = generated_file(run, "advection", data_root, num_times=2 * (own.num_times - 1) + 1)
    asked = {FILES.format("advection"): [str(finer)]}
    with pytest.raises(DataError, match="set data.datasets.advection.reduced_resolution_t to 2"):
        judged(run, asked, tmp_path / "found")
    found = judged(run, {**asked, "data.datasets.advection.reduced_resolution_t": 2}, tmp_path / "found")
    assert found["about"]["advection"]["samples"] == found["datasets"]["advection"]["test"]["num_samples"]


def test_the_command_prints_both_errors_and_where_the_figures_are(run, tmp_path, capsys):
    folder = tmp_path / "found"
    code = __main__.main(["evaluate", str(run.folder), "-p", f"{SEED.format('advection')}=7", "-o", str(folder)])
    out = capsys.readouterr().out
    assert code == 0 and "advection transfer" in out and "advection     test" in out
    assert "prediction_advection.png" in out and "darcy" not in out
    assert __main__.main(["evaluate", str(run.folder), "-p", "lerning_rate=1", "-o", str(folder)]) == 2
    assert "-p lerning_rate=1: lerning_rate: unknown setting" in capsys.readouterr().err


def test_a_stage_that_draws_is_judged_as_an_ensemble(tiny_config, train_here, tmp_path):
    later = {"stages.crps": {"epochs": 1, "unroll": 1}, "evaluation.members": 3}
    train_here(tiny_config(("advection",), **later), tmp_path / "run")
    asked = {SEED.format("advection"): 7}
    found = judged(Run(tmp_path / "run"), asked, tmp_path / "found", stage="crps")["ensembles"]["advection"]
    assert found["members"] == 3 and 0 < found["crps"] and 0 <= found["spread_skill"] < 10
    assert "3 members: CRPS" in transfer.summary(json.loads((tmp_path / "found/report.json").read_text()))
    alone = judged(Run(tmp_path / "run"), asked, tmp_path / "alone", stage="operator")
    assert alone["ensembles"] == {} and alone["weights"] == "operator"

"""The training notebook headless: what it leaves behind, and how it fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import nbformat
import numpy as np
import pytest
from waiting import until

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.runs import handle

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_train.ipynb"
MADE = {"num_samples": 20, "resolution": 32, "num_times": 41, "parameter": 0.4}
pytestmark = pytest.mark.slow


def execute(*arguments) -> subprocess.CompletedProcess:
    call = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)


def parameters(tmp_path: Path, **data) -> Path:
    """A params file for a run of a few seconds on one dataset, everything below tmp_path."""
    path = tmp_path / "params.yaml"
    wave = {"family": "advection1d", "input_frames": 4, "output_frames": 4, **data}
    values = {
        "preset": "",
        "data": {"root": str(tmp_path / "data"), "datasets": {"waves": wave}},
        "latent": {"dim": 32, "tokens": 32},
        "operator": {"pdet": {"hidden_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}},
        "training": {"device": "cpu", "threads_per_rank": 1},
        "stages": {"operator": {"epochs": 4}},  # steps and no clock: as good on a busy machine as on a quiet one
        "logging": {"root": str(tmp_path / "outputs")},
    }
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def truncated(path: Path) -> Path:
    """A PDEBench file whose download broke off."""
    generate(FAMILIES["advection1d"], path, 20, {"beta": 0.4}, resolution=32)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_run_command_leaves_report_figures_and_notebook_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "known-to-the-environment-alone")
    done = execute("upsnb", "run", NOTEBOOK, "-f", parameters(tmp_path, generate=MADE), "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "persistence" in done.stdout
    written = json.loads((tmp_path / "run" / "report.json").read_text())
    assert written["status"] == "finished" and written["datasets"]["waves"]["test"]["nrmse_mean"] > 0
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) == 6
    cells = nbformat.read(tmp_path / "run" / "notebook.ipynb", as_version=4).cells
    pictures = [output for cell in cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    assert len(pictures) == 9  # data, panel, prediction, rollout, spectrum, distribution, losses, throughput, answers
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 15 and not [path for path in files if b"known-to-the-environment" in path.read_bytes()]


@pytest.mark.long
@pytest.mark.parametrize("limit_s", [0.001, 1.0])
def test_a_run_that_was_too_short_is_warned_of_and_drawn(tmp_path, limit_s):
    file, short = parameters(tmp_path, generate=MADE), f"time_limit_s={limit_s}"
    done = execute("upsnb", "run", NOTEBOOK, "-f", file, "-p", short, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "too few to judge it by" in done.stdout
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) >= 4


@pytest.mark.parametrize("at", ["command", pytest.param("kernel", marks=pytest.mark.long)])
def test_ctrl_c_stops_the_run_and_tells_of_it(tmp_path, at):
    call = ["upsnb", "run", NOTEBOOK, "-f", parameters(tmp_path, generate=MADE), "-p", "stages.operator.epochs=100000"]
    folder = tmp_path / "run"
    command = subprocess.Popen(
        [sys.executable, "-m", *map(str, call), "-o", folder], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    run = until(lambda: (folder / "manifest.json").exists() and handle.Run.attach(folder))
    run.wait_for("step", step=3)
    kernel = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/status")
        if f"PPid:\t{command.pid}\n" in path.read_text() and b"ipykernel" in (path.parent / "cmdline").read_bytes()
    )
    os.kill(command.pid if at == "command" else kernel, signal.SIGINT)
    _, said = command.communicate()
    assert command.returncode == 130 and "stopped by its user" in said, said
    assert run.wait() == "finished" and run.manifest["end_reason"] == "stopped"
    assert at == "kernel" or (folder / "report.json").exists() and list((folder / "figures").glob("*.png"))


@pytest.mark.parametrize("through", [pytest.param("papermill", marks=pytest.mark.long), "upsnb run"])
def test_broken_file_fails_and_is_named(tmp_path, through):
    broken = truncated(tmp_path / "data" / "1D_Advection_Sols_beta0.4.hdf5")
    file = parameters(tmp_path, files=[broken.name])
    executed = tmp_path / "out.ipynb"
    if through == "papermill":
        done = execute("papermill", NOTEBOOK, executed, "-f", file, "--log-level", "ERROR")
    else:
        done = execute("upsnb", "run", NOTEBOOK, "-f", file, "-o", tmp_path / "run")
    assert done.returncode == 1
    said = done.stderr[done.stderr.rindex("DataError") :]
    assert f"{broken.name}: truncated or damaged" in said and "download or generate it again" in said
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long  # much like one of test_main.py
def test_failing_run_fails_the_notebook_with_its_cause_in_one_sentence(tmp_path):
    """The file is whole and its training split is fine: only the worker, which reads all of it, meets the NaN."""
    path = tmp_path / "data" / "1D_Advection_Sols_beta0.4.hdf5"
    generate(FAMILIES["advection1d"], path, 20, {"beta": 0.4}, resolution=32)
    with h5py.File(path, "r+") as handle:
        handle["tensor"][0, 20] = np.nan  # the first samples are the test split
    done = execute("upsnb", "run", NOTEBOOK, "-f", parameters(tmp_path, files=[path.name]), "-o", tmp_path / "run")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("FAILED")]
    assert "RunFailed" in line and "rank 0 raised DataError before its first step" in line
    assert f"{path.name}: tensor: NaN or infinity in sample 0" in line
    assert not (tmp_path / "run" / "figures").exists()

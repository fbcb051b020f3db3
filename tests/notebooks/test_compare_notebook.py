"""The comparing notebook headless: a verdict that fails is the exit code, and all that led to it stays."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {  # two arms of a few seconds on one small dataset, without a noise floor
    "preset": "",
    "isolate": "activation_checkpointing",
    "seeds": [42],
    "block_s": 1.0,
    "noise_floor": False,
    "criteria": {"speedup": 1000.0, "loss_delta": None, "nrmse_ratio": None},
    "data": {
        "datasets": {
            "waves": {
                "family": "advection1d",
                "input_frames": 2,
                "output_frames": 2,
                "generate": {"num_samples": 20, "resolution": 32, "num_times": 13, "parameter": 0.4},
            }
        }
    },
    "latent": {"dim": 32, "tokens": 16},
    "operator": {"pdet": {"hidden_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}},
    "training": {"device": "cpu", "threads_per_rank": 1},
    "stages": {"operator": {"epochs": 5}},
}


@pytest.mark.long
def test_a_verdict_that_fails_is_the_exit_code_and_everything_stays(tmp_path):
    values = {**PARAMETERS, "data": {**PARAMETERS["data"], "root": str(tmp_path / "data")}}
    (tmp_path / "params.yaml").write_text(json.dumps(values))  # JSON is YAML
    call = ["run", "notebooks/02_compare.ipynb", "-f", tmp_path / "params.yaml", "-o", tmp_path / "ab"]
    call = [sys.executable, "-m", "upsnb", *call, "-p", "fail_on_verdict=true"]
    done = subprocess.run(list(map(str, call)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("FAILED")]
    assert "the criteria do not hold: speedup: required >= 1000, measured " in line
    assert "verdict: failed" in done.stdout
    assert json.loads((tmp_path / "ab" / "report.json").read_text())["verdict"] == "failed"
    assert {path.name for path in (tmp_path / "ab" / "figures").iterdir()} == {
        *("speed.png", "quality.png", "outcome.png")
    }
    cells = nbformat.read(tmp_path / "ab" / "notebook.ipynb", as_version=4).cells
    assert any("the criteria do not hold" in json.dumps(cell.get("outputs")) for cell in cells)

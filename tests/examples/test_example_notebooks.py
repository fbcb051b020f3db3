"""The notebooks of the examples, headless and small: each runs to its end and leaves its figures."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from upsnb.runs import handle

ROOT = Path(__file__).resolve().parents[2]
SMALL = {  # over each example's params/cpu.yaml
    "affinity": {
        "data": {
            "workload_settings": {"num_clusters": 30, "num_pairs": 600, "shortest": 12, "longest": 18, "sites": 2}
        },
        "model": {"settings": {"width": 16, "num_layers": 1}},
        "training": {"batch_size": 16},
    },
    "long_context": {
        "data": {"workload_settings": {"context": 96, "vocabulary": 400, "chunks": 40, "needles": 1}},
        "training": {"batch_size": 4},
    },
    "mmdit": {
        "data": {"workload_settings": {"pictures": 60, "steps": 2}},
        "model": {"settings": {"width": 16, "depth": 2, "num_heads": 2}},
        "training": {"batch_size": 8},
        "stages": {"operator": {"epochs": 1}},  # too short for anything to be expected of it
    },
}
FIGURES = {"affinity": 3, "long_context": 3, "mmdit": 4}  # at least


def test_every_example_has_one():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*/*.ipynb")) == sorted(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("affinity", marks=pytest.mark.long), "long_context", "mmdit"])
def test_it_runs_to_its_end_and_leaves_its_figures(name, tmp_path):
    values = yaml.safe_load((ROOT / f"examples/{name}/params/cpu.yaml").read_text())
    for section, given in SMALL[name].items():
        values[section] = {**values.get(section, {}), **given}
    values["training"] |= {"device": "cpu", "threads_per_rank": 1, "time_limit_s": 4}
    values["data"] |= {"root": str(tmp_path / "data"), "datasets": {}}
    values.pop("workload_settings", None)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    command = ["upsnb", "run", f"examples/{name}/{name}.ipynb", "-f", tmp_path / "small.yaml", "-o", tmp_path / "run"]
    found = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) >= FIGURES[name]
    assert handle.Run.attach(tmp_path / "run").status() == "finished"

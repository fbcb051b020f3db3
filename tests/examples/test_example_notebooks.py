"""The examples, headless and small: their notebooks, and what the workbench does with fields, done with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from upsnb import hardware, overlays, phases
from upsnb.runs import handle, runfolder
from upsnb.training import workload
from upsnb.training.losses import Objective

ROOT = Path(__file__).resolve().parents[2]
SMALL = {  # over each example's params/cpu.yaml
    "affinity": {
        "data": {
            "workload_settings": {"num_clusters": 30, "num_pairs": 600, "shortest": 12, "longest": 18, "sites": 2}
        },
        "model": {"settings": {"width": 16, "num_layers": 1}},
        "training": {"batch_size": 16},
        "stages": {"operator": {"epochs": 1}},  # too short for anything to be expected of it
    },
    "long_context": {
        "data": {"workload_settings": {"context": 96, "vocabulary": 400, "chunks": 40, "needles": 1}},
        "training": {"batch_size": 4},
    },
    "mmdit": {
        "data": {"workload_settings": {"pictures": 60, "steps": 2}},
        "model": {"settings": {"width": 16, "depth": 2, "num_heads": 2}},
        "training": {"batch_size": 8},
        "stages": {"operator": {"epochs": 1}},
    },
}
FIGURES = {"affinity": 3, "long_context": 3, "mmdit": 4}  # at least


def test_every_example_has_one():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*/*.ipynb")) == sorted(SMALL)


def small_file(name: str, folder: Path) -> Path:
    """A params file of an example that trains in seconds, on data of its own."""
    values = yaml.safe_load((ROOT / f"examples/{name}/params/cpu.yaml").read_text())
    for section, given in SMALL[name].items():
        values[section] = {**values.get(section, {}), **given}
    values["training"] |= {"device": "cpu", "threads_per_rank": 1, "time_limit_s": 4, "compile": False}
    values["data"] |= {"root": str(folder / "data"), "datasets": {}}
    values.pop("workload_settings", None)
    (folder / "small.yaml").write_text(yaml.safe_dump(values))
    return folder / "small.yaml"


def execute(notebook: str, folder: Path, *arguments) -> dict:
    """Run a notebook headless; its report."""
    command = ["upsnb", "run", notebook, *arguments, "-o", folder]
    found = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return json.loads((folder / runfolder.REPORT).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("affinity", "long_context")), "mmdit"]
)
def test_it_runs_to_its_end_and_leaves_its_figures(name, tmp_path):
    execute(f"examples/{name}/{name}.ipynb", tmp_path / "run", "-f", small_file(name, tmp_path))
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) >= FIGURES[name]
    assert handle.Run.attach(tmp_path / "run").status() == "finished"


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_its_phases_are_measured_by_the_notebook_for_fields_and_its_error_has_its_name(name, tmp_path):
    short = {"chosen": ["activation_checkpointing"], "rounds": 2, "block_s": 1.0, "search_minutes": 0.0}
    short["quality_epochs"] = 1
    words = [word for key, value in short.items() for word in ("-p", f"{key}={json.dumps(value)}")]
    words += ["-p", f"preset={small_file(name, tmp_path)}"]
    report = execute("notebooks/04_phases.ipynb", tmp_path / "run", *words)
    (row,) = report["alone"]
    assert row["ratio"]["median"] > 0 and row["nrmse_ratio"] > 0
    metric = {"affinity": "1 - Spearman", "long_context": "perplexity", "mmdit": "attribute error"}[name]
    assert report["metric"] == metric
    shown = (tmp_path / "run/notebook.ipynb").read_text()
    assert f"{metric} ratio" in shown and "nRMSE" not in shown


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_its_steps_are_profiled_by_the_notebook_for_fields(name, tmp_path):
    words = ("-p", f"preset={small_file(name, tmp_path)}", "-p", "warm_up_s=2.0")
    report = execute("notebooks/08_profile.ipynb", tmp_path / "run", *words)
    assert sum(report["shares"].values()) == pytest.approx(1) and report["shares"]["backward"] > 0.1
    assert report["flops_per_step"] > 0 and report["findings"]


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_four_ranks_train_it(name, tmp_path):
    overlay = {"training.num_gpus": 4, "training.batch_size": 2, "stages.operator.epochs": 1}
    run = handle.start(overlays.load(small_file(name, tmp_path), overrides=overlay), tmp_path / "run")
    assert run.wait() == "finished", run.cause()
    assert run.events(("start",))[0]["num_ranks"] == 4 and run.events(("eval",))


@pytest.mark.parametrize("name", SMALL)
def test_a_microbatch_of_it_that_does_not_fit_is_halved_and_training_goes_on(name, tmp_path, train_here, monkeypatch):
    overlay = {"guards.out_of_memory": True, "training.batch_size": 8, "training.time_limit_s": None}
    config = overlays.load(small_file(name, tmp_path), overrides={**overlay, "stages.operator.epochs": 1})
    config, _ = phases.skip_missing(config, hardware.detect())  # not every CPU has bfloat16
    real = Objective.forward

    def forward(self, batch, *rest):
        if len(next(iter(batch.tensors().values()))) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, batch, *rest)

    monkeypatch.setattr(Objective, "forward", forward)
    workload.of(config).prepare(ROOT, print)
    events = train_here(config, tmp_path / "run")
    (act,) = (event for event in events if event["kind"] == "guard")
    assert act["action"] == "shrink" and act["step"] == 0
    assert [event for event in events if event["kind"] == "step"] and events[-1]["kind"] == "end"

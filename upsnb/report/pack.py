"""A run as a folder to give away: its model, and a card that says what it is, what it reached and how to use it."""

from __future__ import annotations

import shutil
from pathlib import Path

from upsnb.models.surrogate import Surrogate, count_parameters
from upsnb.report import results
from upsnb.runs import runfolder
from upsnb.runs.files import own_folder
from upsnb.runs.handle import Run
from upsnb.training import packed

FOLDER, CARD = "packed", "README.md"


def pack(run: Run, folder: Path | None = None, which: str = "latest") -> Path:
    """Write the model of a run, its programs, its figures and its card; returns their folder.

    Args:
        folder: replaced where it was packed before; empty: `packed` in the run's folder.
        which: checkpoint, by its role, as of `Run.load_model`.
    Raises:
        ConfigError: safetensors is not installed.
        RunError: the run has no such checkpoint, or the folder holds something else.
    """
    packed.needs_package()
    model, folder = run.load_model(which), folder or run.folder / FOLDER
    own_folder(folder)
    packed.write(folder, model, run.current_config, run.manifest["stage"])
    failed = {name: packed.write_program(folder, model, name) for name in model.specs}
    for figure in sorted((run.folder / runfolder.FIGURES).glob("*.png")):
        (folder / runfolder.FIGURES).mkdir(exist_ok=True)
        shutil.copy(figure, folder / runfolder.FIGURES)
    (folder / CARD).write_text(card(run, model, which, failed))
    return folder


def card(run: Run, model: Surrogate, which: str, failed: dict[str, str]) -> str:
    """What somebody has to know who was given the folder, in Markdown.

    Args:
        failed: why a dataset has no program, empty where it has one.
    """
    report, manifest = results.run_numbers(run), run.manifest
    made = f"upsnb {manifest['code_revision'][:12]} and torch {manifest['versions']['torch']}"
    machine = f"{report['num_ranks']} x {manifest['hardware']['device_name']}"
    size, table = f"{count_parameters(model):,} parameters", results.table(report)
    judged = (
        f"Errors of the {report['split']} split, with the {report['weights']} weights and seed "
        f"{manifest['seeds']['training']}; beside them what forecasts without a model reach. Lower is better."
    )
    blocks = [
        f"# {run.folder.name}",
        f"{model.called} with {size}: the {which} weights of a run with {made} on {machine}.",
        "## What goes in, and what comes out",
        "\n".join([*HEAD, *map(_row, model.specs.values())]),
        "Fields are in physical units, on the cell centres of the whole domain: (samples, frames, channels, *grid).",
        "## What it reached",
        *(["Its errors were not measured."] if table.empty else [judged, f"```\n{table.to_string(index=False)}\n```"]),
        f"```\n{results.costs(report)}\n```",
        *(f"**{said}**" for said in report["leaks"]),
        *(f"![{path.stem}](figures/{path.name})" for path in sorted((run.folder / runfolder.FIGURES).glob("*.png"))),
        "## How to use it",
        USE.format(name=next(iter(model.specs))),
        *(f"There is no program for {name}: {why}." for name, why in failed.items() if why),
    ]
    return "\n\n".join(blocks) + "\n"


HEAD = ("| dataset | equation | given | forecast | grid | parameters |", "|---|---|---|---|---|---|")
# for str.format, with the name of a dataset
USE = """With upsnb:
```python
from upsnb.models.inference import predict
from upsnb.training.setup import load_model

predict(load_model("this folder"), fields, "{name}", parameters=parameters)
```
With torch alone, at the resolution of training, any number of samples:
```python
import torch

torch.export.load("{name}.pt2").module()(fields, parameters)
```
The settings of its training are in `config.yaml`. Where `model.build` there names a file, loading the model runs the
code that stands below it; the programs run none."""


def _row(spec) -> str:
    frames = (f"{spec.input_frames} x {spec.input_channels}", f"{spec.output_frames} x {spec.output_channels}")
    told = ", ".join(spec.parameter_names) or "none"
    grid = " x ".join(map(str, spec.grid_shape))
    return f"| {spec.name} | {spec.family} | {' | '.join(frames)} | {grid} | {told} |"

"""A run as a folder to give away: its model, and a card that says what it is, what it reached and how to use it."""

from __future__ import annotations

import shutil
from pathlib import Path

from upsnb.errors import RunError
from upsnb.models.surrogate import Surrogate, count_parameters
from upsnb.report import results
from upsnb.runs import runfolder
from upsnb.runs.files import own_folder
from upsnb.runs.handle import Run
from upsnb.training import packed

FOLDER, CARD = "packed", "README.md"


def pack(run: Run, folder: Path | None = None, which: str = "latest", onnx: bool = False) -> Path:
    """Write the model of a run, its programs, its figures and its card; returns their folder.

    Args:
        folder: replaced where it was packed before; empty: `packed` in the run's folder.
        which: checkpoint, by its role, as of `Run.load_model`.
        onnx: write each program for ONNX runtimes too, where it can be translated.
    Raises:
        ConfigError: safetensors, or what translates to ONNX, is not installed.
        RunError: the run has no such checkpoint, or the folder holds something else.
    """
    packed.needs_package()
    if onnx:
        packed.needs_package(*packed.TRANSLATOR)
    model, folder = run.load_model(which), folder or run.folder / FOLDER
    own_folder(folder)
    packed.write(folder, model, run.current_config)
    failed = {"program": {name: packed.write_program(folder, model, name) for name in model.specs}}
    if onnx:
        failed["ONNX program"] = {name: packed.write_onnx(folder, name) for name in model.specs}
    for figure in sorted((run.folder / runfolder.FIGURES).glob("*.png")):
        (folder / runfolder.FIGURES).mkdir(exist_ok=True)
        shutil.copy(figure, folder / runfolder.FIGURES)
    (folder / CARD).write_text(card(run, model, which, failed))
    return folder


def push(folder: Path, name: str, public: bool = False) -> str:
    """Put a packed model on the Hugging Face hub, with the account that `hf auth login` knows; its address.

    Args:
        name: user/model; made if it is not there.
        public: for everybody to see; one that is there stays as it is.
    Raises:
        ConfigError: huggingface_hub is not installed.
        RunError: the hub refused, or cannot be reached.
    """
    packed.needs_package("huggingface_hub", "hub")
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(name, private=not public, exist_ok=True)
        done = hub.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {folder.parent.name}")
    except Exception as error:  # its own, those of its HTTP library, and refused names
        said = " ".join(str(error).split())[:300]
        raise RunError(f"{name}: not on the hub ({said}) -> hf auth login, and a name like user/model") from None
    return str(done.repo_url)


def card(run: Run, model: Surrogate, which: str, failed: dict[str, dict[str, str]]) -> str:
    """What somebody has to know who was given the folder, in Markdown.

    Args:
        failed: of each kind of program, why a dataset has none, empty where it has one.
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
        *([ONNX.format(name=next(iter(model.specs)))] if "ONNX program" in failed else []),
        *(f"There is no {kind} for {name}: {why}." for kind, of in failed.items() for name, why in of.items() if why),
    ]
    return "\n\n".join(blocks) + "\n"


HEAD = ("| dataset | equation | given | forecast | grid | parameters |", "|---|---|---|---|---|---|")
# for str.format, with the name of a dataset
USE = """With upsnb:
```python
from upsnb.models.inference import predict
from upsnb.training.trained import load_model

predict(load_model("this folder"), fields, "{name}", parameters=parameters)
```
With torch alone, at the resolution of training, any number of samples:
```python
import torch

torch.export.load("{name}.pt2").module()(fields, parameters)
```
The settings of its training are in `config.yaml`. Where `model.build` there names a file, loading the model runs the
code that stands below it; the programs run none."""

ONNX = """Without torch, at the resolution of training, arrays in float32:
```python
import onnxruntime

session = onnxruntime.InferenceSession("{name}.onnx")
session.run(None, {{"fields": fields, "parameters": parameters}})
```"""


def _row(spec) -> str:
    frames = (f"{spec.input_frames} x {spec.input_channels}", f"{spec.output_frames} x {spec.output_channels}")
    told = ", ".join(spec.parameter_names) or "none"
    grid = " x ".join(map(str, spec.grid_shape))
    return f"| {spec.name} | {spec.family} | {' | '.join(frames)} | {grid} | {told} |"

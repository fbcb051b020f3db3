"""A trained model as files to give away: weights in safetensors, what it takes to build it again, and programs.

A program is one call of one dataset, physical fields to physical fields at the resolution of training, written down by
torch.export: it runs where torch is, without this package; translated to ONNX, without torch too.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from upsnb import config as configs
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.models.surrogate import Surrogate
from upsnb.runs import runfolder
from upsnb.runs.files import read_json, write_json
from upsnb.runs.recovery import in_one_line
from upsnb.training import stages

FORMAT = 1
WEIGHTS, SPECS, PROGRAM, ONNX = "model.safetensors", "specs.json", ".pt2", ".onnx"
COMPLEX = "#complex"  # ends the names of weights that are stored as pairs of real numbers
TRANSLATOR = ("onnxscript", "onnx")  # a package and the extra that has it
MOST_PAIRS = 1024  # in one call of a program


def needs_package(package: str = "safetensors", extra: str = "pack") -> None:
    """Refuse where a package is missing.

    Raises:
        ConfigError: it is; with what installs it.
    """
    if find_spec(package) is None:
        remedy = f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
        raise ConfigError([f"{package} is not installed -> {remedy}"], "a packed model")


def write(folder: Path, model: Surrogate, config: RunConfig) -> None:
    """Weights, config and specs of a model that was saved, and its stage."""
    from safetensors.torch import save_file

    stored = {}
    for name, value in model.state_dict().items():
        plain = torch.view_as_real(value) if value.is_complex() else value
        stored[name + COMPLEX * value.is_complex()] = plain.detach().cpu().contiguous().clone()
    save_file(stored, folder / WEIGHTS)
    configs.save(config, folder / runfolder.CONFIG)
    specs = {name: vars(spec) for name, spec in model.specs.items()}
    write_json(folder / SPECS, {"format": FORMAT, "stage": model.stage, "specs": specs})


def load(folder: Path, device: torch.device | str) -> Surrogate:
    """The model of such a folder, in evaluation mode. Where `model.build` names a file, its text in the config is run.

    Raises:
        RunError: a file is missing, damaged or of another model.
    """
    needs_package()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        known, config = read_json(folder / SPECS, FORMAT), configs.load(folder / runfolder.CONFIG)
        model = stages.saved_model(config, known["specs"], known["stage"])
        weights = {}
        for name, value in load_file(folder / WEIGHTS).items():
            weights[name.removesuffix(COMPLEX)] = torch.view_as_complex(value) if name.endswith(COMPLEX) else value
        model.load_state_dict(weights)
    except (OSError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        found = in_one_line(error)
        raise RunError(f"{folder}: is not what this version packs ({found}) -> pack the run again") from None
    return model.to(device).eval()


class _Call(nn.Module):
    """One call of one dataset."""

    def __init__(self, model: Surrogate, name: str):
        super().__init__()
        self.model, self.name, self.dt = model, name, model.specs[name].dt

    def forward(self, fields: Tensor, parameters: Tensor) -> Tensor:
        return self.model(self.name, fields, parameters, self.dt)


def write_program(folder: Path, model: Surrogate, name: str) -> str:
    """Write a dataset's program, for any number of samples; why it could not be written, or an empty text."""
    spec = model.specs[name]
    fields = torch.zeros(2, spec.input_frames, spec.input_channels, *spec.grid_shape)
    parameters = torch.zeros(2, spec.num_parameters)
    batch = torch.export.Dim("batch", min=1, max=MOST_PAIRS)
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Call(model, name),
                (fields, parameters),
                dynamic_shapes={"fields": {0: batch}, "parameters": {0: batch}},
            )
        torch.export.save(program, folder / f"{name}{PROGRAM}")
    except Exception as error:  # whatever torch finds in a model of somebody's own
        return in_one_line(error)
    return ""


def write_onnx(folder: Path, name: str) -> str:
    """Write a dataset's program for ONNX runtimes too; why it could not be written, or an empty text.

    Raises:
        ConfigError: onnxscript, which translates, is not installed.
    """
    needs_package(*TRANSLATOR)
    if not (folder / f"{name}{PROGRAM}").exists():
        return "torch could not export it either"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own deprecations
            program = torch.export.load(folder / f"{name}{PROGRAM}")
            torch.onnx.export(program, (), folder / f"{name}{ONNX}", dynamo=True, external_data=False, verbose=False)
    except Exception as error:  # complex numbers, for example, have no operators there
        (folder / f"{name}{ONNX}").unlink(missing_ok=True)
        return in_one_line(error)
    return ""

"""A packed model is the run's, bit by bit, wherever it is unpacked; its programs agree; damage is told."""

import shutil

import pytest
import torch

from upsnb.errors import RunError
from upsnb.report import pack
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import packed
from upsnb.training.setup import load_model

pytest.importorskip("safetensors", reason="safetensors is not here -> make test runs this in .extras")

MODELS = {
    "ups": {"training.ema_decay": 0.9},
    "fno": {"model.build": "upsnb.models.fno:FNO", "model.settings": {"width": 8, "modes": 4, "depth": 2}},
    "own file": {"model.build": "my_model.py:Net", "optimizer.name": "adamw"},
}
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(out_channels, in_channels, dtype=torch.complex64))

    def forward(self, x):
        return torch.einsum("oi,bi...->bo...", self.turned, x.to(torch.complex64)).real
"""


@pytest.mark.parametrize("model", MODELS)
def test_what_is_unpacked_predicts_what_the_run_does_and_so_do_its_programs(
    tiny_config, train_here, tmp_path, monkeypatch, model
):
    (tmp_path / "my_model.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    train_here(tiny_config(**MODELS[model]), tmp_path / "run")
    run = Run(tmp_path / "run")
    own, folder = run.load_model(), shutil.move(pack.pack(run), tmp_path / "given away")
    (tmp_path / "my_model.py").unlink()
    other = load_model(folder)
    for (name, value), (again, unpacked) in zip(own.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == again and torch.equal(value, unpacked), name
    for name, spec in own.specs.items():
        given = torch.randn(3, spec.input_frames, spec.input_channels, *spec.grid_shape)
        parameters = torch.full((3, spec.num_parameters), 0.4)
        with torch.no_grad():
            forecast = own(name, given, parameters, spec.dt)
            program = torch.export.load(folder / f"{name}{packed.PROGRAM}").module()
            torch.testing.assert_close(program(given, parameters), forecast, rtol=1e-5, atol=1e-6)
    card = (folder / pack.CARD).read_text()
    assert "| advection | advection1d | 2 x 1 | 2 x 1 | 32 |" in card and "There is no program" not in card
    assert "nRMSE" in card and 'torch.export.load("advection.pt2")' in card


def test_what_is_damaged_or_another_model_s_is_told_in_a_sentence(tiny_config, train_here, tmp_path):
    train_here(tiny_config(), tmp_path / "run")
    folder = pack.pack(Run(tmp_path / "run"), tmp_path / "given")
    weights = (folder / packed.WEIGHTS).read_bytes()
    (folder / packed.WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(RunError, match="is not what this version packs .* -> pack the run again"):
        load_model(folder)
    (folder / packed.WEIGHTS).write_bytes(weights)
    config = (folder / runfolder.CONFIG).read_text()
    (folder / runfolder.CONFIG).write_text(config.replace("  depth: 2", "  depth: 3").replace("depth: 2", "depth: 3"))
    with pytest.raises(RunError, match="is not what this version packs"):
        load_model(folder)
    (folder / packed.SPECS).unlink()
    with pytest.raises(RunError, match="is not what this version packs"):
        load_model(folder)
    pack.pack(Run(tmp_path / "run"), folder)
    assert load_model(folder).specs, "packed again"


def test_a_folder_with_something_else_is_left_alone(tiny_config, train_here, tmp_path):
    train_here(tiny_config(("darcy",)), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="holds something that was not made here"):
        pack.pack(Run(tmp_path / "run"), tmp_path / "mine")
    assert (tmp_path / "mine/thesis.tex").exists()

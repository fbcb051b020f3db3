"""A packed model is the run's, bit by bit, wherever it is unpacked; its programs agree; damage is told."""

import shutil
from unittest import mock

import pytest
import torch

from upsnb.errors import RunError
from upsnb.report import pack
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import packed
from upsnb.training.trained import load_model

pytest.importorskip("safetensors", reason="safetensors is not here -> make test runs this in .extras")

MODELS = {
    "ups": {"training.ema_decay": 0.9, "operator.fourier_modes": 4},
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


def test_onnx_programs_agree_for_any_number_of_samples_without_torch(tiny_config, train_here, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not here -> make test runs this in .extras")
    train_here(tiny_config(), tmp_path / "run")
    run = Run(tmp_path / "run")
    folder, own = pack.pack(run, onnx=True), run.load_model()
    card = (folder / pack.CARD).read_text()
    assert "There is no" not in card and 'InferenceSession("advection.onnx")' in card
    for name, spec in own.specs.items():
        session = onnxruntime.InferenceSession(folder / f"{name}{packed.ONNX}")
        for samples in (1, 5):
            given = torch.randn(samples, spec.input_frames, spec.input_channels, *spec.grid_shape)
            parameters = torch.full((samples, spec.num_parameters), 0.4)
            named = {"fields": given.numpy(), "parameters": parameters.numpy()}
            (y,) = session.run(None, {part.name: named[part.name] for part in session.get_inputs()})
            with torch.no_grad():
                forecast = own(name, given, parameters, spec.dt)
            torch.testing.assert_close(torch.from_numpy(y), forecast, rtol=1e-3, atol=1e-4)


def test_a_model_that_onnx_has_no_operators_for_is_packed_all_the_same(tiny_config, train_here, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not here -> make test runs this in .extras")
    train_here(tiny_config(**MODELS["fno"]), tmp_path / "run")
    folder = pack.pack(Run(tmp_path / "run"), onnx=True)
    found, card = {path.stem for path in folder.glob("*.onnx")}, (folder / pack.CARD).read_text()
    for name in Run(tmp_path / "run").load_model().specs:
        assert (folder / f"{name}.pt2").exists() and (name in found) != (f"no ONNX program for {name}: " in card)


def test_a_pushed_model_is_private_unless_asked_and_a_refusal_is_a_sentence(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not here -> make test runs this in .extras")
    api = mock.create_autospec(hub.HfApi, instance=True)  # refuses what the real one would not take
    api.upload_folder.return_value.repo_url = "https://hub/me/waves"
    monkeypatch.setattr(hub, "HfApi", lambda: api)
    assert pack.push(tmp_path, "me/waves") == "https://hub/me/waves"
    pack.push(tmp_path, "me/waves", public=True)
    assert [call.kwargs["private"] for call in api.create_repo.call_args_list] == [True, False]
    assert api.upload_folder.call_args.kwargs["folder_path"] == tmp_path
    api.create_repo.side_effect = OSError("401 Unauthorized")
    with pytest.raises(RunError, match="me/waves: not on the hub .401 Unauthorized.*hf auth login"):
        pack.push(tmp_path, "me/waves")

"""A model's name: found from where a run is started, kept with the run, and a sentence for every way to miss it."""

import linecache
import traceback

import pytest
import torch
from torch import nn

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import validate
from upsnb.errors import ConfigError
from upsnb.models import chosen
from upsnb.models.surrogate import Surrogate

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__()
        self.layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_dims - 1](in_channels, out_channels, 1)

    def forward(self, x):
        return self.layer(x)

class Broken(Net):
    def forward(self, x):
        raise RuntimeError("on purpose")

made, short, number = nn.Linear(2, 2), lambda config, specs: None, 3

def nothing(config, specs):
    return nn.Linear(2, 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(build: str, **model):
    return overlays.resolve({"model": {"build": build, **model}})


def test_a_file_is_found_from_here_and_from_the_project_and_its_text_stays(
    folder, tmp_path_factory, monkeypatch, make_spec
):
    kept = chosen.with_source(config("my_model.py:Net"))
    assert kept.model.source == FILE
    monkeypatch.setattr(chosen, "project_root", lambda: folder)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert chosen.with_source(config("my_model.py:Net")) == kept
    (folder / "my_model.py").unlink()
    saved = configs.parse(configs.dump(kept))
    assert saved == kept and "    class Net(nn.Module):" in configs.dump(kept)
    spec = make_spec()
    models = [chosen.build(saved, {spec.name: spec}) for _ in range(2)]
    assert type(models[0].networks[spec.name]) is type(models[1].networks[spec.name])
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_traceback_shows_the_lines_of_a_file_that_is_kept_as_text(folder):
    broken = chosen.find(config("my_model.py:Broken"))(1, 1, 1)
    (folder / "my_model.py").unlink()
    linecache.checkcache()
    with pytest.raises(RuntimeError) as caught:
        broken(torch.zeros(1, 1, 4))
    assert 'raise RuntimeError("on purpose")' in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("my_model.py:Nat", "there is no 'Nat' in my_model.py -> it has Net, Broken"),
        ("my_model.py:short", "is a lambda -> write a class"),
        ("my_model.py:made", "is one network, already built -> name its class, Linear"),
        ("my_model.py:number", "is a int -> name an nn.Module class or a function"),
        ("my_model.py:nothing", "returned a Linear -> return a Surrogate"),
        ("your_model.py:Net", "no file .*your_model.py -> write it into a file .%%writefile my_model.py"),
        ("my_model:Net", "is found from this folder alone -> set model.build: my_model.py:Net"),
        ("__main__:Net", "lives in this notebook, .* -> write it into a file .%%writefile my_model.py"),
        ("upsnb.models.ups:UPS", "is a Surrogate class -> name a function"),
        ("wrong.py:Net", "SyntaxError: .* line 1.* -> write package.module:name"),
        ("needy.py:Net", "ModuleNotFoundError: .*beside_it.* a file must not need others beside it"),
        ("long.py:Net", "more than 32 KiB, .* -> install it as a package"),
    ],
)
def test_what_is_no_model_that_a_worker_can_find_is_refused_with_the_remedy(
    folder, monkeypatch, make_spec, build, said
):
    (folder / "wrong.py").write_text("class Net(:")
    (folder / "needy.py").write_text("import beside_it")
    (folder / "long.py").write_text("#" * 40_000)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match=said):
        chosen.build(config(build), {"advection": make_spec()})


@pytest.mark.parametrize("given", [nn.Linear, nn.Linear(2, 2), lambda config, specs: None])
def test_a_class_a_network_or_a_lambda_itself_is_no_name(given):
    with pytest.raises(ConfigError, match="model.build: no worker finds .* -> write it into a file .%%writefile"):
        validate({"model": {"build": given}})


def test_a_function_has_full_control(make_spec, monkeypatch):
    class Own(Surrogate):
        def predict(self, name, x, parameters, relative_dt, points=None):
            return x

    monkeypatch.setattr(chosen, "find", lambda config: lambda config, specs: Own(specs))
    assert isinstance(chosen.build(config("any:thing"), {"advection": make_spec()}), Own)

"""A plain nn.Module trains as any model does: what it is given and gives back, and that wrapping changes no number."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

from upsnb import overlays, phases
from upsnb.config import ModelConfig
from upsnb.errors import ConfigError, DataError
from upsnb.memory import predict
from upsnb.models.inference import predict as forecast
from upsnb.models.surrogate import count_parameters
from upsnb.models.wrapped import Wrapped, blocks_of
from upsnb.profile import flops
from upsnb.profile.recorder import parameters_by_part
from upsnb.runs import runfolder
from upsnb.training import optimizers
from upsnb.training.muon import Muon
from upsnb.training.trained import load_model

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Mlp(nn.Module):
    """Of all grid points at once."""

    def __init__(self, in_channels, out_channels, grid_shape, width=16):
        super().__init__()
        points, self.shape = math.prod(grid_shape), (out_channels, *grid_shape)
        layers = nn.Linear(in_channels * points, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        self.layers = nn.Sequential(*layers, nn.Linear(width, out_channels * points))

    def forward(self, x):
        return self.layers(x.flatten(1)).unflatten(1, self.shape)


class ConvNet(nn.Module):
    """Any grid; told the PDE's parameters."""

    def __init__(self, in_channels, out_channels, num_dims, num_parameters, width=8):
        super().__init__()
        conv = CONVOLUTIONS[num_dims - 1]
        self.first, self.told = conv(in_channels, width, 3, padding=1), nn.Linear(num_parameters, width)
        self.middle = nn.ModuleList(conv(width, width, 3, padding=1) for _ in range(2))
        self.last = conv(width, out_channels, 1)

    def forward(self, x, parameters):
        z = self.first(x)
        z = z + self.told(parameters).reshape(*z.shape[:2], *(1,) * (z.dim() - 2))
        for layer in self.middle:
            z = z + torch.relu(layer(z))
        return self.last(z)


class Spectral(nn.Module):
    """Complex weights on the lowest waves."""

    def __init__(self, in_channels, out_channels, num_dims, modes=4):
        super().__init__()
        self.spectral = nn.Parameter(0.1 * torch.randn(in_channels, out_channels, modes, dtype=torch.complex64))
        self.skip = CONVOLUTIONS[num_dims - 1](in_channels, out_channels, 1)

    def forward(self, x):
        waves = torch.fft.rfft(x)[..., : self.spectral.shape[-1]]
        waves = torch.einsum("bi...k,iok->bo...k", waves, self.spectral)
        return torch.fft.irfft(waves, n=x.shape[-1]) + self.skip(x)


class Normed(ConvNet):
    """With batch norm in its blocks."""

    def __init__(self, in_channels, out_channels, num_dims, num_parameters):
        super().__init__(in_channels, out_channels, num_dims, num_parameters)
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[num_dims - 1]
        self.middle = nn.ModuleList(nn.Sequential(norm(8), layer) for layer in self.middle)


class Telling(nn.Module):
    """Says what it was given."""

    def __init__(self, **given):
        super().__init__()
        self.given, self.weight = given, nn.Parameter(torch.zeros(()))

    def forward(self, x, parameters, dt, grid):
        self.seen = x, parameters, dt, grid
        return self.weight * x[:, :2]


def settings(network, **model) -> dict:
    return {"model": {"build": f"{__name__}:{network.__name__}", **model}, "optimizer.name": "adamw"}


def wrap(spec, network, **model):
    return Wrapped({spec.name: spec}, network, ModelConfig(**model))


def step(setup, number=0):
    return setup.step(setup.loader.peek(), number)[0]


# -- what a network is given, and what it gives -----------------------------------------------------------------------


def test_a_constructor_gets_what_it_names_and_its_settings(make_spec):
    spec = make_spec(num_parameters=2, parameter_mean=(0.0, 0.0), parameter_std=(1.0, 1.0))
    network = wrap(spec, ConvNet, settings={"width": 4}, append_parameters=True).networks["advection"]
    assert (network.first.in_channels, network.first.out_channels, network.last.out_channels) == (2 + 2 + 1, 4, 2)
    assert network.told.in_features == 2 and isinstance(network.first, nn.Conv1d)
    assert wrap(spec, Telling, settings={"of_mine": [1, 2]}).networks["advection"].given == {"of_mine": [1, 2]}


@pytest.mark.parametrize(
    ("network", "given", "said"),
    [
        (Mlp, {"widht": 3}, "model.settings.widht: Mlp takes no such argument -> it takes width"),
        (Mlp, {"width": "many"}, "model.settings: Mlp cannot be built for advection .TypeError"),
        (nn.Conv1d, {"padding": 1}, "missing 1 required .*'kernel_size'.* -> .* it takes kernel_size"),
    ],
)
def test_settings_that_a_constructor_does_not_take_are_told_with_those_that_it_does(make_spec, network, given, said):
    with pytest.raises(ConfigError, match=said):
        wrap(make_spec(), network, settings=given)


@pytest.mark.parametrize("append", [False, True])
def test_forward_is_passed_what_it_names(make_spec, append):
    spec = make_spec(num_parameters=3, parameter_mean=(0.0,) * 3, parameter_std=(1.0,) * 3)
    model = wrap(spec, Telling, append_parameters=append)
    x, parameters, dt = torch.randn(4, 2, 1, 32), torch.randn(4, 3), torch.full((4,), 2.0)
    y = model.predict("advection", x, parameters, dt)
    assert torch.equal(y, x[:, -1:].expand(-1, 2, -1, -1)), "the change of the last frame"
    seen = model.networks["advection"].seen
    assert seen[0].shape == (4, 2 + append * 4, 32) and torch.equal(seen[0][:, :2], x[:, :, 0])
    if append:
        assert torch.equal(seen[0][:, 2:, 7], torch.cat((parameters, dt[:, None]), dim=1))
    assert seen[1] is parameters and seen[2] is dt
    assert torch.equal(seen[3], ((torch.arange(32) + 0.5) / 32).expand(4, 1, 32))


class Last(nn.Module):
    """Channels last, frames and channels apart, as PDEBench's models have them."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.linear, self.frames = nn.Linear(in_channels, out_channels), (2, out_channels // 2)

    def forward(self, x, grid):
        assert grid.shape == (*x.shape[:-1], x.dim() - 2)
        return self.linear(x).unflatten(-1, self.frames)


class First(nn.Module):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__()
        self.linear = CONVOLUTIONS[num_dims - 1](in_channels, out_channels, 1)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("grid", [(12,), (6, 8), (3, 4, 5)])
def test_channels_last_is_the_same_network_on_other_axes(make_spec, grid):
    spec = make_spec(grid_shape=grid, periodic=(True,) * len(grid), input_channels=2, output_channels=2,
                     **dict.fromkeys(("input_mean", "output_mean"), (0.0, 1.0)),
                     **dict.fromkeys(("input_std", "output_std"), (1.0, 2.0)))  # fmt: skip
    last, first = wrap(spec, Last, layout="channels_last"), wrap(spec, First)
    weights = first.networks["advection"].linear.state_dict()
    weights["weight"] = weights["weight"].flatten(1)
    last.networks["advection"].linear.load_state_dict(weights)
    x, parameters = torch.randn(2, 2, 2, *grid), torch.randn(2, 1)
    answers = [model("advection", x, parameters, spec.dt) for model in (last, first)]
    assert answers[0].shape == (2, 2, 2, *grid)
    torch.testing.assert_close(*answers)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda self, x: x[:, :1], r"gave \(2, 1, 32\) for advection -> return \(B, 2, 32\)"),
        (lambda self, x: (x, x), "gave a tuple -> return one tensor"),
        (lambda self, x: x[..., ::2], r"gave \(2, 2, 16\)"),
    ],
)
def test_another_shape_than_asked_for_is_said_with_the_right_one(make_spec, monkeypatch, forward, said):
    monkeypatch.setattr(First, "forward", forward)
    with pytest.raises(DataError, match=said):
        wrap(make_spec(), First).predict("advection", torch.randn(2, 2, 1, 32), torch.zeros(2, 1), torch.ones(2))


def test_another_resolution_is_predicted_on_or_refused_in_words(make_spec):
    spec = make_spec(parameter_low=(0.4,), parameter_high=(0.4,))
    fields = np.random.default_rng(0).standard_normal((2, 1, 48)).astype(np.float32)
    assert forecast(wrap(spec, ConvNet), fields).shape == (2, 1, 48)
    with pytest.raises(DataError, match="got a grid of 48 -> Mlp was built for 32 and takes no other"):
        forecast(wrap(spec, Mlp), fields)


# -- blocks -----------------------------------------------------------------------------------------------------------


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


class Holding(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def test_blocks_are_the_longest_list_of_what_can_be_called():
    two, three = nn.ModuleList(layers(2)), nn.ModuleList(layers(3))
    nested = nn.ModuleList(nn.ModuleList(layers(1)) for _ in range(5))
    assert blocks_of(Holding(a=two, b=three, c=nested, d=nn.Sequential(*layers(7)))) == list(three)
    only = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    assert blocks_of(Holding(a=only)) == [only[0], only[2]], "what stands in it, but for what has no weights"
    several = [nn.Sequential(*layers(1)), nn.Sequential(nn.Sequential(*layers(2)), *layers(1))]
    assert blocks_of(Holding(a=several[0], b=several[1])) == several
    assert blocks_of(nn.Linear(2, 2)) == []


def test_muon_gets_hidden_matrices_alone_and_complex_weights_are_adamw_s(make_spec):
    model = wrap(make_spec(), Mlp)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert model.matrices() == [linear[1].weight]
    made = optimizers.build(model, overlays.resolve({}).optimizer)
    assert [type(optimizer) for optimizer in made] == [Muon, torch.optim.AdamW]
    assert made[0].param_groups[0]["params"] == [linear[1].weight]
    (only,) = optimizers.build(wrap(make_spec(), Spectral), overlays.resolve({}).optimizer)
    assert isinstance(only, torch.optim.AdamW)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["darcy", "advection"])
def test_twenty_steps_have_the_losses_of_a_loop_written_by_hand(tiny_setup, name):
    setup = tiny_setup((name,), **settings(Mlp), **{"stages.operator.scheduler.name": "constant"})
    spec, network = setup.model.specs[name], copy.deepcopy(setup.model.networks[name])
    batches = list(setup.loader.epoch(0, 0))[:2] * 10
    setup.set_learning_rate(0.5)
    found = [float(setup.step([batch], number)[0]) for number, batch in enumerate(batches)]

    wide = [p for p in network.parameters() if p.ndim > 1]
    thin = [p for p in network.parameters() if p.ndim == 1]
    chosen = setup.config.optimizer
    groups = [{"params": wide, "weight_decay": chosen.weight_decay}, {"params": thin, "weight_decay": 0.0}]
    optimizer, expected = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas), []
    shape = (-1, 1, *(1,) * spec.num_dims)
    mean, std, out_mean, out_std = (
        torch.tensor(values).reshape(shape)
        for values in (spec.input_mean, spec.input_std, spec.output_mean, spec.output_std)
    )
    for batch in batches:
        x = (batch.inputs - mean) / std
        y = network(x.flatten(1, 2)).unflatten(1, (spec.output_frames, spec.output_channels))
        y = (y + x[:, -1:] if name == "advection" else y) * out_std + out_mean
        error = (y - batch.targets).flatten(3).norm(dim=-1) / batch.targets.flatten(3).norm(dim=-1)
        optimizer.zero_grad()
        error.mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        expected.append(error.mean().item())
    assert found == pytest.approx(expected, rel=1e-6) and len(set(found)) == 20


@pytest.mark.parametrize("network", [Mlp, ConvNet, Spectral])
def test_a_run_is_saved_resumed_to_the_bit_and_loaded(tiny_config, killed_and_continued, tmp_path, network):
    """Also where its file is gone and the folder that one stands in is another."""
    file = tmp_path / "mine.py"
    file.write_text("import math\nimport torch\nfrom torch import nn\n"
                    "CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)\n\n" + inspect.getsource(network))  # fmt: skip
    overlay = {"model.build": f"{file}:{network.__name__}", "optimizer.name": "adamw", "training.ema_decay": 0.9}
    config = tiny_config(("advection",), **overlay, **{"stages.operator.epochs": 2, "checkpoint.interval": 2})
    saved = runfolder.configs.load(runfolder.create(config, tmp_path / "whole") / runfolder.CONFIG)
    file.unlink()
    folders, losses = killed_and_continued(saved, tmp_path, 3), []
    for folder in folders:
        events = runfolder.read_events(folder, ("step",))
        losses.append({event["step"]: event["loss"] for event in events})
    assert losses[0] == losses[1] and len(losses[0]) > 3
    models = [load_model(folder) for folder in folders]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    verdicts = runfolder.read_manifest(folders[0])["verdicts"]
    assert verdicts.keys() == phases.BY_NAME.keys() and verdicts["flex_attention"][0] == "refused"


def test_looking_for_what_compiling_does_moves_no_running_average(tiny_setup):
    setup = tiny_setup(("advection",), **settings(Normed))
    before = copy.deepcopy(setup.model.state_dict())
    setup._probe()
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [Mlp, ConvNet, Spectral])
def test_memory_and_operations_of_a_step_are_known_without_one(tiny_config, network):
    config = tiny_config(**settings(network))
    predicted = predict.Predictor(config)
    footprint = predicted.at()
    assert footprint.account.by_kind()["activations"] > 0
    setup = predicted._rehearsal.setup
    assert predicted.parameters_by_optimizer() == (0, count_parameters(setup.model))
    assert parameters_by_part(setup.model)["operator"] == 0
    assert all(count > 0 for count in flops.per_microbatch(config, predicted._rehearsal.outlines).values())


def test_complex_products_and_transforms_are_counted():
    a, b = torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 5, dtype=torch.complex64)
    assert flops.count(lambda: (a @ b).real.sum()) == 8 * 3 * 4 * 5
    real, waves = torch.randn(2, 3, 16), torch.randn(2, 3, 16, dtype=torch.complex64)
    assert flops.count(lambda: torch.fft.rfft(real).real.sum()) == 2.5 * 2 * 3 * 16 * 4
    assert flops.count(lambda: torch.fft.fft(waves).real.sum()) == 5 * 2 * 3 * 16 * 4
    assert flops.count(lambda: torch.fft.irfftn(torch.fft.rfftn(real, dim=(1, 2)), s=(3, 16), dim=(1, 2)).sum()) > 0

"""Before anything starts: each way in which a model fails is a sentence, and so is what a phase is to it."""

import copy

import pytest
import torch
from torch import nn

from upsnb import hardware, phases
from upsnb.compare import ladder
from upsnb.errors import ConfigError
from upsnb.phases import DOES_NOT_APPLY, ON_PARTS, REFUSED, WORKS
from upsnb.runs import handle
from upsnb.training import preflight

SPECTRAL = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 4, "modes": 2, "depth": 2}}}
SPECTRAL |= {"optimizer.name": "adamw"}
ON_THE_CPU = "AdamW already steps in host memory, because this run is on the CPU"


class Net(nn.Module):
    """Trains well."""

    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_dims - 1]
        self.layers = nn.ModuleList([conv(in_channels, 4, 1), conv(4, out_channels, 1)])

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


class WrongShape(Net):
    def forward(self, x):
        return super().forward(x)[..., :-1]


class Raising(Net):
    def forward(self, x):
        return x @ torch.zeros(3, 3)


class Infinite(Net):
    def forward(self, x):
        return super().forward(x) / 0.0


class BadGradient(Net):
    def forward(self, x):
        return super().forward(x) + (super().forward(x) * 0).abs().sqrt()


class Idle(Net):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__(in_channels, out_channels, num_dims)
        self.unused = nn.Linear(2, 2)


class Random(Net):
    def forward(self, x):
        return super().forward(x) + torch.randn(())


class Lazy(Net):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__(in_channels, out_channels, num_dims)
        self.more = nn.LazyLinear(2)


class Saving(Net):
    def get_extra_state(self):
        return "a text"

    def set_extra_state(self, state):
        pass


class Forgetful(Net):
    """Keeps state that is in no buffer."""

    calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) + self.calls


class Normed(Net):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__(in_channels, out_channels, num_dims)
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[num_dims - 1](in_channels)

    def forward(self, x):
        return super().forward(self.norm(x))


class NormedBlocks(Normed):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__(in_channels, out_channels, num_dims)
        self.layers[0] = nn.Sequential(self.norm, self.layers[0])

    def forward(self, x):
        return Net.forward(self, x)


class Complex(Net):
    def __init__(self, in_channels, out_channels, num_dims):
        super().__init__(in_channels, out_channels, num_dims)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x):
        return (super().forward(x) * self.scale).real


def brought(network, **overlay) -> dict:
    return {"model.build": f"{__name__}:{network.__name__}", "optimizer.name": "adamw", **overlay}


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (WrongShape, "fails on darcy, 16 x 16 points .WrongShape: its forward gave .* -> return .B, 1, 16, 16"),
        (Raising, "fails on advection, 32 points .RuntimeError"),
        (Infinite, "gives NaN or infinite values for normal fields of darcy"),
        (BadGradient, "the gradient of networks.advection.layers.0.weight is not finite"),
        (Lazy, "has parameters without a size"),
        (Saving, "its state_dict holds networks.advection._extra_state, which is no tensor"),
        (Forgetful, "its state_dict loaded again gives another answer"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_run_has_a_folder(tiny_config, tmp_path, network, said):
    with pytest.raises(ConfigError, match=said):
        handle.start(tiny_config(**brought(network)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "overlay", "said"),
    [
        (Net, {}, ""),
        (Idle, {}, "no gradient reaches networks.advection.unused.weight and 3 more parameters -> use or remove"),
        (Random, {}, "the same field of advection gives two answers in evaluation mode"),
        (Normed, {"training.accum_steps": 2}, "batch norm takes its statistics of a microbatch of 8 -> nn.GroupNorm"),
        (Normed, {}, ""),
        (Complex, {}, "2 of its weights are complex -> AdamW trains them, in float32"),
    ],
)
def test_what_is_odd_is_said_and_nothing_is_left_behind(tiny_config, network, overlay, said):
    config = tiny_config(**brought(network, **overlay))
    objective = preflight.untrained(config)
    before, random = copy.deepcopy(objective.state_dict()), torch.get_rng_state()
    warnings = preflight.examine(objective, config).raise_errors(config)
    assert said in " ".join(warnings) and bool(warnings) == bool(said)
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_a_parameter_without_gradient_is_refused_where_ranks_wait_for_it(tiny_config):
    config = tiny_config(**brought(Idle, **{"training.num_gpus": 2}))
    with pytest.raises(ConfigError, match="no gradient reaches .* and ranks wait"):
        preflight.check(config)


def test_grids_are_thinned_as_far_as_a_model_takes_it(tiny_config):
    config = tiny_config(**brought(Net))
    model = preflight.untrained(config).model
    assert preflight.thinned(model, "advection") == (16,) and preflight.thinned(model, "darcy") == (16, 16)


@pytest.mark.parametrize(("message", "said"), [("expected scalar type", "expected scalar type"), ("", "RuntimeError")])
def test_half_precision_that_fails_is_refused_with_the_setting(tiny_config, monkeypatch, message, said):
    def fails(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError(message)
        return Net.forward(self, x)

    monkeypatch.setattr(Random, "forward", fails)
    half = {"training.amp": True, "training.amp_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=f"training.amp_dtype: under autocast on advection: {said} -> "):
        preflight.check(tiny_config(**brought(Random, **half)))


# -- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        (SPECTRAL, {"compile": (ON_PARTS, "4 x FourierBlock"), "bf16": (WORKS, ""), "fused": (WORKS, ""),
                    "activation_checkpointing": (ON_PARTS, "4 x FourierBlock"),
                    "loss_frequency": (DOES_NOT_APPLY, "FNO predicts on its grid only"),
                    "optimizer_offload": (REFUSED, ON_THE_CPU),
                    "no_sync": (DOES_NOT_APPLY, "it is for several ranks and several microbatches a step")}),
        (brought(Complex), {"bf16": (DOES_NOT_APPLY, "Complex has complex weights, which have no half precision"),
                            "fsdp2": (REFUSED, "Complex has complex weights, and it takes real ones"),
                            "fused": (REFUSED, "Complex has complex weights, and it takes real ones")}),
        (brought(NormedBlocks), {"activation_checkpointing": (
            REFUSED, "blocks of NormedBlocks hold running averages, which recomputing moves twice a step")}),
        ({}, {"loss_frequency": (WORKS, ""), "activation_checkpointing": (ON_PARTS, "2 x Block")}),
    ],
    ids=["FNO", "complex", "batch norm", "UPS"],
)  # fmt: skip
def test_each_phase_has_a_verdict_for_a_model(tiny_config, overlay, expected):
    found = preflight.foreseen(tiny_config(**overlay), hardware.detect())
    assert found.keys() == phases.BY_NAME.keys()
    assert {name: tuple(found[name]) for name in expected} == expected


def test_fused_steps_are_of_adamw_s_share_beside_muon(tiny_config):
    verdict = preflight.foreseen(tiny_config(), hardware.detect())["fused"]
    assert verdict.kind == ON_PARTS and verdict.why.endswith("% of the parameters that AdamW steps, not Muon's")


def test_what_does_not_apply_is_not_measured(tiny_config):
    config = tiny_config(**SPECTRAL)
    entries, _, skipped = ladder.plan(config, hardware.detect(), ["loss_frequency", "fused"])
    assert {entry.phase for entry in entries} == {"fused"}
    assert skipped == {"loss_frequency": "does not apply: FNO predicts on its grid only"}

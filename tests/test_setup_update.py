"""One way from any config to any other: what a flip changes, what it must not, and that undoing undoes."""

from pathlib import Path

import pytest
import torch

from upsnb import overlays
from upsnb.errors import ConfigError, DataError
from upsnb.phases import PHASES, is_on
from upsnb.setup import Setup

INVERSE = {"training.lambda_inv_enc": 0.5}  # so that the frequency of inverse losses has something to act on
CPU_PHASES = [phase for phase in PHASES if phase.hot and phase.name not in ("optimizer_offload", "fused", "compile")]
slow_compile = pytest.param(next(p for p in PHASES if p.name == "compile"), marks=pytest.mark.slow, id="compile")
phases = pytest.mark.parametrize("phase", [*(pytest.param(p, id=p.name) for p in CPU_PHASES), slow_compile])
TOLERANCE = {"identical": 0.0, "rounding": 0.05}


def change(setup: Setup, overlay: dict) -> None:
    setup.update(overlays.apply(setup.config, overlay))


def batches(setup: Setup, count: int = 2) -> list:
    epoch = setup.loader.epoch(0)
    return [next(epoch) for _ in range(count)]


def gradients(setup: Setup, chosen: list) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of fixed batches, the setup's own precision and losses; the setup stays as it was."""
    from upsnb.losses import active_terms
    from upsnb.precision import amp_dtype

    generator = setup.generator.get_state()
    setup.model.zero_grad()
    loss = 0.0
    for batch in chosen:
        total, _ = setup.loss(batch, active_terms(setup.config.training, 0, 0), amp_dtype(setup.config))
        total.backward()
        loss += total.item()
    found = {name: p.grad.clone() for name, p in setup.model.named_parameters() if p.grad is not None}
    setup.model.zero_grad()
    setup.generator.set_state(generator)
    return loss, found


@phases
def test_a_phase_changes_numbers_as_it_says_and_undoing_it_undoes_all(tiny_setup, phase):
    setup = tiny_setup(**INVERSE, **{"training.amp": phase.name == "bf16", "training.num_workers": 0})
    change(setup, phase.off)
    chosen, names = batches(setup), list(setup.model.state_dict())
    before, randomness, threads = gradients(setup, chosen), torch.get_rng_state(), torch.get_num_threads()

    change(setup, phase.on)
    assert is_on(phase, setup.config)
    during = gradients(setup, chosen)
    assert list(setup.model.state_dict()) == names
    if phase.numerics in TOLERANCE:
        assert during[0] == pytest.approx(before[0], rel=TOLERANCE[phase.numerics])
        old, new = (torch.cat([found[1][name].flatten() for name in before[1]]) for found in (before, during))
        assert (new - old).norm() <= TOLERANCE[phase.numerics] * old.norm()

    change(setup, phase.off)
    after = gradients(setup, chosen)
    assert after[0] == before[0]
    assert all(torch.equal(after[1][name], gradient) for name, gradient in before[1].items())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.get_num_threads() == threads


def test_a_config_reached_by_flips_trains_like_a_fresh_build_of_it(tiny_setup):
    path = [
        {"operator.pdet.use_activation_checkpoint": True},
        {"training.batch_size": 4, "training.noise": 0.01},
        {"operator.pdet.attention": "math", "optimizer.lr": 5e-4},
        {"training.batch_size": 6, "training.lambda_spectral": 0.1, "operator.pdet.use_activation_checkpoint": False},
        {"training.noise": None},
    ]
    flipped = tiny_setup()
    for overlay in path:
        change(flipped, overlay)
    fresh = Setup.build(flipped.config, Path(), flipped.ranks, lambda message: None)
    for step in range(3):
        losses = []
        for setup in (flipped, fresh):
            torch.manual_seed(step)
            losses.append(setup.step(batches(setup), step, 2 * step)[0].item())
        assert losses[0] == losses[1]
    for (name, ours), (_, theirs) in zip(flipped.model.named_parameters(), fresh.model.named_parameters()):
        assert torch.equal(ours, theirs), name


def test_moments_survive_another_learning_rate(tiny_setup):
    setup = tiny_setup()
    setup.step(batches(setup), 0, 0)
    before = [optimizer.state_dict()["state"] for optimizer in setup.optimizers]
    change(setup, {"optimizer.lr": 1e-5})
    for optimizer, state in zip(setup.optimizers, before):
        for key, entry in optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[key][name]))
    assert {group["peak_lr"] for optimizer in setup.optimizers for group in optimizer.param_groups} == {1e-5}


def test_resident_data_is_read_once(tiny_setup):
    setup = tiny_setup()
    reader = setup.loader.reader
    change(setup, {"training.batch_size": 4})
    assert setup.loader.reader is reader
    assert len(batches(setup)[0].inputs) == 4


@pytest.mark.parametrize(
    ("overlay", "error", "said"),
    [
        ({"latent.dim": 64}, ConfigError, "latent.dim: cannot change while training runs"),
        ({"training.num_gpus": 2}, ConfigError, "training.num_gpus: cannot change"),
        ({"training.lambda_inv_enc": 0.5}, ConfigError, "training.lambda_inv_enc"),
        ({"training.batch_size": 10**6}, DataError, "lower batch_size"),
    ],
)
def test_what_cannot_change_is_refused_and_changes_nothing(tiny_setup, overlay, error, said):
    setup = tiny_setup()
    config, loader = setup.config, setup.loader
    with pytest.raises(error, match=said):
        change(setup, overlay)
    assert setup.config == config
    assert setup.loader.schedule.global_size == loader.schedule.global_size
    setup.step(batches(setup), 0, 0)

"""What is added to the last frame: a linear part that is exact where an equation is, and means that are kept."""

import math

import pytest
import torch

from upsnb import overlays
from upsnb.errors import ConfigError
from upsnb.models.fourier import Propagator, convolve, matrices, product
from upsnb.models.geometry import grid_points

DIFFUSION = 0.02


@pytest.mark.parametrize("kept", [(5,), (4, 3), (4, 2, 3)])
def test_the_product_in_real_numbers_is_the_one_of_complex_matrices_gradients_included(kept):
    draws = torch.Generator().manual_seed(0)
    waves = torch.randn(3, 5, *kept, dtype=torch.complex128, generator=draws, requires_grad=True)
    spectral = torch.randn(5, 6, *kept, 2, dtype=torch.float64, generator=draws, requires_grad=True)
    right = torch.einsum("bi...,io...->bo...", waves, torch.view_as_complex(spectral))
    torch.testing.assert_close(product(waves, spectral), right)
    weight = torch.randn(right.shape, dtype=right.dtype, generator=draws)
    gradients, expected = (
        torch.autograd.grad((y * weight).real.sum(), (waves, spectral)) for y in (product(waves, spectral), right)
    )
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(("shape", "modes"), [((16,), 5), ((9,), 4), ((8,), 5), ((12, 16), 4), ((8, 8, 6), 4)], ids=str)
def test_what_no_real_field_has_is_taken_out_before_the_way_back_which_a_cpu_does_anyway(shape, modes, monkeypatch):
    """On CUDA it changes the result; (8,) and (8, 8, 6) keep the shortest wave of their last axis, too."""
    draws, kept, given = torch.Generator().manual_seed(0), (*(4,) * (len(shape) - 1), modes), []
    spectral = matrices(3, 2, kept, lambda *sizes: torch.randn(*sizes, generator=draws))
    x, axes = torch.randn(2, 3, *shape, generator=draws), tuple(range(2, 2 + len(shape)))
    back = torch.fft.irfft
    monkeypatch.setattr(torch.fft, "irfft", lambda waves, **how: given.append(waves.detach()) or back(waves, **how))
    found = convolve(x, spectral, kept)
    # by one call, as a CPU does it
    waves = torch.fft.rfftn(x, dim=axes, norm="forward")
    leading = (torch.cat((torch.arange(m), torch.arange(-m, 0))) for m in kept[:-1])
    low = (..., *torch.meshgrid(*leading, torch.arange(modes), indexing="ij"))
    made = torch.zeros(2, 2, *waves.shape[2:], dtype=waves.dtype)
    made[low] = product(waves[low], spectral)
    torch.testing.assert_close(found, torch.fft.irfftn(made, s=shape, dim=axes, norm="forward"))
    imaginary = given[0].imag.flatten(0, -2).abs().amax(0)
    assert [bool(size == 0) for size in imaginary] == [2 * turns in (0, shape[-1]) for turns in range(modes)]


def cells(*sizes):
    """Cell centres of each axis."""
    return torch.meshgrid(*((torch.arange(size) + 0.5) / size for size in sizes), indexing="ij")


def waves_in(made: Propagator, change) -> Propagator:
    """With the matrices that `change` gives for wave numbers of a domain of length one, out of the last given frame."""
    with torch.no_grad():
        turns = torch.arange(made.modes[-1], dtype=torch.float64) / (1 if made.spec.periodic[-1] else 2)
        made.spectral.zero_()
        for frame in range(made.spec.output_frames):
            made.spectral[-1, frame] = torch.view_as_real(change(2 * torch.pi * turns, frame + 1)).float()
    return made


@pytest.mark.parametrize("size", [32, 64, 48, 16])
def test_a_wave_that_moves_is_forecast_exactly_on_any_grid(make_spec, size):
    speed, spec = 0.13, make_spec()
    made = waves_in(Propagator(spec, 6), lambda k, steps: torch.exp(-1j * k * speed * steps) - 1)
    (x,) = cells(size)

    def field(t):
        return torch.stack([torch.sin(2 * torch.pi * 3 * (x - speed * t)) + torch.cos(2 * torch.pi * (x - speed * t))])

    given = torch.stack([field(t) for t in range(1 - spec.input_frames, 1)])[None]
    truth = torch.stack([field(t) for t in range(1, 1 + spec.output_frames)])[None]
    torch.testing.assert_close(given[:, -1:] + made(given), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [128, 96])
def test_heat_between_walls_that_let_none_through_is_forecast_exactly(make_spec, size):
    spec = make_spec(periodic=(False,), input_frames=1, grid_shape=(128,))
    made = waves_in(Propagator(spec, 8), lambda k, steps: torch.exp(-DIFFUSION * k**2 * steps + 0j) - 1)
    (x,) = cells(size)

    def field(t):
        return sum(math.exp(-DIFFUSION * (math.pi * n) ** 2 * t) * torch.cos(math.pi * n * x) / n for n in (1, 2, 5))

    given, truth = field(0)[None, None, None], torch.stack([field(1), field(2)])[None, :, None]
    torch.testing.assert_close(given + made(given), truth, atol=1e-5, rtol=0)


def test_a_grid_too_coarse_for_its_waves_is_refined_first(make_spec):
    spec = make_spec()
    made = waves_in(Propagator(spec, 16), lambda k, steps: torch.exp(-1j * k * 0.1 * steps) - 1)
    (x,) = cells(24)
    given = torch.sin(2 * torch.pi * x).expand(1, spec.input_frames, 1, -1)
    moved = torch.sin(2 * torch.pi * (x - 0.1)) - torch.sin(2 * torch.pi * x)
    torch.testing.assert_close(made(given)[0, 0, 0], moved, atol=0.03, rtol=0)


@pytest.mark.parametrize("periodic", [(True,), (False,), (True, True), (False, False), (True, False, True)])
def test_it_adds_nothing_before_it_is_trained_and_all_of_it_learns(make_spec, periodic):
    spec = make_spec(periodic=periodic, grid_shape=(12, 10, 8)[: len(periodic)], input_channels=3, output_channels=2)
    made, x = Propagator(spec, 5), torch.randn(2, spec.input_frames, spec.input_channels, *spec.grid_shape)
    y = made(x)
    assert y.shape == (2, spec.output_frames, spec.output_channels, *spec.grid_shape) and not y.any()
    (y * torch.randn(y.shape)).sum().backward()
    # of a field's mean, and of twins in the last axis' plane of zero, what is not real is not seen
    assert (made.spectral.grad != 0).float().mean() > 0.8


def test_it_commutes_with_shifts_along_a_periodic_axis(make_spec, perturb):
    spec = make_spec()
    made, x = perturb(Propagator(spec, 16)), torch.randn(2, spec.input_frames, 1, 32)
    torch.testing.assert_close(made(x.roll(5, -1)), made(x).roll(5, -1), atol=1e-6, rtol=0)


def test_what_a_model_forecasts_is_its_own_and_what_the_last_frame_becomes(make_spec, make_model):
    spec = make_spec()
    model, x = make_model([spec], fourier_modes=8), torch.randn(2, spec.input_frames, 1, 32)
    given = (spec.name, x, torch.zeros(2, 1), torch.ones(2))
    with torch.no_grad():
        with_it = model.predict(*given)
        added = model.propagators[spec.name](x)
        model.propagators[spec.name].spectral.zero_()
        torch.testing.assert_close(with_it, model.predict(*given) + added)
    assert added.abs().mean() > 0.01
    assert not make_model([make_spec("darcy2d")], fourier_modes=8).propagators, "where nothing moves"


@pytest.mark.parametrize("decoder", ["local_basis", "unpatchify"])
@pytest.mark.parametrize("size", [32, 64])
def test_a_mean_that_the_equation_keeps_is_kept_on_any_grid_and_at_points(make_spec, make_model, decoder, size):
    spec = make_spec(priors=("conservation",))
    free, kept = (make_model([spec], fourier_modes=8, decoder=decoder, means=means) for means in ("free", "kept"))
    x = torch.randn(2, spec.input_frames, 1, size)
    given = (spec.name, x, torch.zeros(2, 1), torch.ones(2))
    with torch.no_grad():
        before = x[:, -1:].mean(-1).expand(-1, spec.output_frames, -1)
        torch.testing.assert_close(kept.predict(*given).mean(-1), before, atol=1e-5, rtol=0)
        assert (free.predict(*given).mean(-1) - before).abs().max() > 1e-2
        points = kept.predict(*given, grid_points((size,)))
        torch.testing.assert_close(points, kept.predict(*given), atol=1e-5, rtol=0)


def test_where_nothing_keeps_a_mean_it_is_refused():
    overlays.resolve({"operator.means": "kept"})
    with pytest.raises(ConfigError, match="operator.means.*set it to free"):
        overlays.resolve({"operator.means": "kept", "data.datasets": {"darcy": {"family": "darcy2d"}}})


@pytest.mark.parametrize("setting", [{"operator.fourier_modes": 4}, {"operator.means": "kept"}], ids=str)
def test_a_latent_rollout_adds_nothing_to_the_last_frame(setting):
    settings = {"operator.rollout": "latent", "training.lambda_forward": 1.0, "training.lambda_inv_enc": 1.0}
    overlays.resolve(settings)
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}.*set it to"):
        overlays.resolve(settings | setting)

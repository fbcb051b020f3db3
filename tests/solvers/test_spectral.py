"""Spectral solvers meet exact solutions, converge at their order, and keep what their equations keep."""

import h5py
import numpy as np
import pytest
import scipy.fft
import scipy.integrate
import scipy.linalg
import torch

from upsnb.data import symmetries
from upsnb.data.families import FAMILIES
from upsnb.solvers import spectral
from upsnb.solvers.spectral import (
    fitzhugh_nagumo,
    kolmogorov_flow,
    kuramoto_sivashinsky,
    reaction_diffusion,
    reaction_diffusion_states,
    resample,
    resample_square,
)

X = (np.arange(64) + 0.5) / 64
LENGTH = 64.0  # of Kuramoto-Sivashinsky's period
FHN = {"diffusivities": (1e-3, 5e-3), "k": 5e-3}
SOLVERS = {
    spectral.solve_reaction_diffusion: {"Nu": 0.5, "rho": 1.0},
    spectral.solve_kuramoto_sivashinsky: {"nu": 1.0},
    spectral.solve_fitzhugh_nagumo: {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3},
    spectral.solve_kolmogorov_flow: {"nu": 0.02, "drag": 0.1},
}


def _nrmse(found, expected, num_dims=1):
    """Per sample and frame, over space."""
    axes = tuple(range(-num_dims, 0))
    return np.sqrt(((found - expected) ** 2).mean(axes) / (expected**2).mean(axes))


def _order(solve, step):
    """How often halving the step halves the error of the last frame."""
    exact = solve(step / 16)[:, -1]
    return np.log2(np.abs(solve(step)[:, -1] - exact).max() / np.abs(solve(step / 2)[:, -1] - exact).max())


def _cosine(num_points, *wavenumbers):
    """Product of waves between walls."""
    x = (np.arange(num_points) + 0.5) / num_points
    one, two = (np.cos(np.pi * k * x) for k in wavenumbers)
    return one[:, None] * two


@pytest.fixture(scope="module")
def chaos():
    """Two states on the attractor of Kuramoto-Sivashinsky."""
    fields = spectral.solve_kuramoto_sivashinsky(0, range(2), {"nu": 1.0}, 128, np.array([0, 0.1]))
    return np.stack([sample["u"][0] for sample in fields])


@pytest.fixture(scope="module")
def turbulence():
    """One settled Kolmogorov flow."""
    settings = SOLVERS[spectral.solve_kolmogorov_flow]
    return next(spectral.solve_kolmogorov_flow(0, range(1), settings, 32, np.array([0, 0.02])))["vorticity"][:1]


# --- 1D reaction-diffusion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [1.0, 10.0])
def test_constants_follow_the_logistic_curve(rho):
    start, times = np.array([[0.0], [0.03], [0.5], [1.0]]), np.linspace(0, 1, 6)
    found = reaction_diffusion(np.tile(start, 16), 0.5, rho, times)
    growth = np.exp(rho * times)
    expected = start * growth / (1 - start + start * growth)
    np.testing.assert_allclose(found, np.repeat(expected[..., None], 16, axis=-1), atol=1e-12)


def test_small_waves_decay_and_grow_as_the_linear_equation():
    times, small = np.linspace(0, 0.2, 5), 1e-9
    found = reaction_diffusion(small * (1 + np.cos(4 * np.pi * X))[None], 0.01, 3.0, times)[0]
    shape = 1 + np.exp(-0.01 * (4 * np.pi) ** 2 * times)[:, None] * np.cos(4 * np.pi * X)
    np.testing.assert_allclose(found, small * np.exp(3 * times)[:, None] * shape, atol=1e-16)


def test_splitting_is_of_second_order():
    states, times = (0.5 + 0.4 * np.cos(2 * np.pi * X))[None], np.array([0, 0.4])
    assert _order(lambda step: reaction_diffusion(states, 0.02, 2.0, times, step), 0.1) == pytest.approx(2, abs=0.1)


def test_fractions_stay_fractions():
    found = reaction_diffusion(reaction_diffusion_states(0, range(20), 64), 0.5, 10.0, np.linspace(0, 1, 11))
    assert found.min() >= 0
    assert found.max() <= 1


def test_a_grid_four_times_finer_changes_reaction_diffusion_by_less_than_a_thousandth():
    times, ours, fine = np.linspace(0, 0.2, 5), *(reaction_diffusion_states(1, range(20), n) for n in (128, 512))
    fine = resample(reaction_diffusion(fine, 0.5, 1.0, times), 128)
    assert _nrmse(reaction_diffusion(ours, 0.5, 1.0, times), fine)[:, 1:].max() < 1e-3  # the first has kinks


def test_the_published_reaction_is_ours_at_few_points(shared_data):
    """Its steps are too short for float32 at 1024 points; at the small file's 128 they are 64 times longer."""
    with h5py.File(shared_data / "ReacDiff_Nu0.5_Rho1.0.hdf5") as handle:
        real, times = handle["tensor"][:].astype(np.float64), handle["t-coordinate"][:-1].astype(np.float64)
    assert _nrmse(reaction_diffusion(real[:, 0], 0.5, 1.0, times), real)[:, 1:].max() < 1e-3


# --- Kuramoto-Sivashinsky ---------------------------------------------------------------------------------------------


def test_small_waves_grow_at_the_linear_rate():
    k = 2 * np.pi / LENGTH * 5
    found = kuramoto_sivashinsky(1e-9 * np.sin(10 * np.pi * X)[None], LENGTH, 2.0, np.array([0, 4.0]))[0, -1]
    expected = 1e-9 * np.exp(4 * (k**2 - 2 * k**4)) * np.sin(10 * np.pi * X)
    np.testing.assert_allclose(found, expected, atol=1e-15)


def test_chaotic_steps_are_of_fourth_order_and_exact_to_a_hundred_thousandth(chaos):
    times = np.array([0, 0.8])

    def solve(step):
        return kuramoto_sivashinsky(chaos, LENGTH, 1.0, times, step)

    assert _order(solve, 0.01) > 3.7  # 3 at steps of 0.1, where the shortest waves decay at once
    assert _nrmse(solve(0.1), solve(0.0125)).max() < 1e-5


def test_a_grid_four_times_finer_changes_chaos_by_less_than_a_thousandth(chaos):
    times = np.array([0, 0.8])
    fine = resample(kuramoto_sivashinsky(resample(chaos, 512), LENGTH, 1.0, times), 128)
    assert _nrmse(kuramoto_sivashinsky(chaos, LENGTH, 1.0, times), fine).max() < 1e-4


def test_the_mean_is_conserved(chaos):
    found = kuramoto_sivashinsky(chaos + 0.25, LENGTH, 1.0, np.array([0, 2.0, 4.0]))
    np.testing.assert_allclose(found.mean(axis=-1), 0.25, atol=1e-13)


def test_states_lie_on_the_attractor(chaos):
    """Its mean square is 1.7 at length 64, whatever a state began with."""
    assert 1.0 < (kuramoto_sivashinsky(chaos, LENGTH, 1.0, np.arange(0, 60, 5.0)) ** 2).mean() < 2.4


# --- 2D reaction-diffusion --------------------------------------------------------------------------------------------


def test_uniform_states_follow_the_two_rates():
    times, start = np.array([0, 1.0]), np.array([0.7, -0.4])
    found = fitzhugh_nagumo(np.ones((1, 2, 4, 4)) * start[:, None, None], **FHN, times=times)[0, -1]

    def rates(_, w):
        return [w[0] - w[0] ** 3 - FHN["k"] - w[1], w[0] - w[1]]

    expected = scipy.integrate.solve_ivp(rates, (0, 1), start, rtol=1e-10, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(found, np.broadcast_to(expected[:, None, None], (2, 4, 4)), atol=1e-7)


def test_small_waves_between_walls_follow_the_linear_equation():
    shape, small = _cosine(16, 3, 2), 1e-7
    states = small * np.array([1.0, 0.5])[:, None, None] * shape
    found = fitzhugh_nagumo(states[None], (1e-2, 5e-2), 0.0, np.array([0, 1.0]))[0, -1]
    bend = (np.pi / 2) ** 2 * (3**2 + 2**2)
    rates = np.array([[1 - 1e-2 * bend, -1], [1, -1 - 5e-2 * bend]])
    expected = scipy.linalg.expm(rates) @ [1.0, 0.5]
    np.testing.assert_allclose(found, small * expected[:, None, None] * shape, atol=1e-13)


def test_nothing_flows_through_the_walls():
    """A box mirrored at a wall is a box twice as long: where that has its middle, nothing flows."""
    half = np.random.default_rng(0).normal(size=(1, 2, 8, 8))
    quarters = np.concatenate([half, half[..., ::-1]], axis=-1)
    whole = np.concatenate([quarters, quarters[..., ::-1, :]], axis=-2)
    times, small = np.array([0, 0.5]), np.array(FHN["diffusivities"])
    found = fitzhugh_nagumo(whole, small / 4, FHN["k"], times)[..., :8, :8]
    np.testing.assert_allclose(found, fitzhugh_nagumo(half, small, FHN["k"], times), atol=1e-12)


def test_noise_is_followed_to_fourth_order():
    states = np.random.default_rng(0).normal(size=(1, 2, 16, 16))
    assert _order(lambda step: fitzhugh_nagumo(states, **FHN, times=np.array([0, 0.4]), longest_step=step), 0.04) > 3.7


def test_a_grid_four_times_finer_changes_smooth_fronts_by_less_than_a_thousandth():
    def solve(num_points):
        states = np.stack([_cosine(num_points, 2, 1) + _cosine(num_points, 1, 2), _cosine(num_points, 0, 2)])
        return fitzhugh_nagumo(states[None], **FHN, times=np.array([0, 0.5]))[:, -1]

    waves = scipy.fft.dctn(solve(96), axes=(-2, -1))[..., :24, :24] / 4**2
    assert _nrmse(solve(24), scipy.fft.idctn(waves, axes=(-2, -1)), 2).max() < 1e-3


def test_the_published_fronts_are_those_of_second_differences(shared_data, monkeypatch):
    """What is left is the published solver's tolerance. At 32 points their fronts are not those of the equation."""
    with h5py.File(shared_data / "2D_diff-react_NA_NA.h5") as handle:
        real, times = (np.stack([handle[name][key][:11] for name in ("0000", "0001")]) for key in ("data", "grid/t"))
    real = np.moveaxis(real.astype(np.float64), -1, 2)
    assert 0.1 < _nrmse(fitzhugh_nagumo(real[:, 0], **FHN, times=times[0]), real, 2)[:, -1].mean() < 0.3

    def second_differences(num_points):
        return (2 * np.cos(np.pi * np.arange(num_points) / num_points) - 2) * (num_points / 2) ** 2

    monkeypatch.setattr(spectral, "wall_eigenvalues", second_differences)
    assert _nrmse(fitzhugh_nagumo(real[:, 0], **FHN, times=times[0]), real, 2)[:, 1:].mean() < 2e-3


# --- Kolmogorov flow --------------------------------------------------------------------------------------------------


def test_the_laminar_flow_is_steady():
    y, nu, drag = 2 * np.pi * (np.arange(16) + 0.5) / 16, 0.2, 0.1
    laminar = np.broadcast_to(-3 * np.cos(3 * y) / (nu * 3**2 + drag), (1, 16, 16))
    found = kolmogorov_flow(laminar, nu, drag, 3, np.array([0, 1.0, 2.0]))
    np.testing.assert_allclose(found, np.repeat(laminar[:, None], 3, axis=1), atol=1e-12)


def test_taylor_and_greens_vortices_decay_in_place():
    x = 2 * np.pi * (np.arange(16) + 0.5) / 16
    vortices = 5 * np.sin(2 * x)[:, None] * np.sin(2 * x)
    found = kolmogorov_flow(vortices[None], 0.05, 0.0, 0, np.array([0, 1.0]))[0, -1]
    np.testing.assert_allclose(found, np.exp(-0.05 * 8) * vortices, atol=1e-12)


def test_a_flow_without_friction_keeps_energy_and_enstrophy(turbulence):
    found = kolmogorov_flow(turbulence, 0.0, 0.0, 0, np.array([0, 0.2]), 0.01)[0]
    waves = np.fft.fft2(found)
    squares = np.fft.fftfreq(32, 1 / 32)[:, None] ** 2 + np.fft.fftfreq(32, 1 / 32) ** 2
    for weights in (np.ones_like(squares), 1 / np.maximum(squares, 1)):
        before, after = (weights * np.abs(waves) ** 2).sum(axis=(-2, -1))
        assert after == pytest.approx(before, rel=1e-5)


def test_flow_is_followed_to_fourth_order(turbulence):
    times = np.array([0, 0.2])

    def solve(step):
        return kolmogorov_flow(turbulence, 0.02, 0.1, 4, times, step)

    assert _order(solve, 0.05) > 3.7
    assert _nrmse(solve(0.05), solve(0.0125), 2).max() < 1e-4


def test_a_grid_four_times_finer_changes_flow_by_less_than_a_thousandth(monkeypatch):
    monkeypatch.setattr(spectral, "FLOW_BURN_IN", {32: 2.0, 64: 1.0})
    settings, times = SOLVERS[spectral.solve_kolmogorov_flow], np.array([0, 0.1])
    ours, fine = (next(spectral.solve_kolmogorov_flow(0, range(1), settings, n, times))["vorticity"] for n in (64, 256))
    assert _nrmse(ours, resample_square(fine, 64), 2).max() < 1e-3


def test_a_flow_too_fast_for_the_step_takes_finer_ones_and_the_flow_beside_it_its_own(turbulence):
    both, times = np.concatenate((turbulence, 8 * turbulence)), np.array([0, 0.1, 0.2])
    found = kolmogorov_flow(both, 0.02, 0.1, 4, times)
    assert _nrmse(found[1:], kolmogorov_flow(both[1:], 0.02, 0.1, 4, times, 0.001), 2).max() < 1e-2
    np.testing.assert_array_equal(found[:1], kolmogorov_flow(turbulence, 0.02, 0.1, 4, times))
    np.testing.assert_array_equal(found[1:], kolmogorov_flow(both[1:], 0.02, 0.1, 4, times))


def test_a_gusty_flow_is_followed_to_the_end():
    """Sample 42 of `params/pipeline_kolmogorov.yaml` begins at nearly twice the usual speed."""
    settings, times = SOLVERS[spectral.solve_kolmogorov_flow], np.linspace(0, 2.0, 11)
    (made,) = spectral.solve_kolmogorov_flow(0, range(42, 43), settings, 64, times)
    assert np.isfinite(made["vorticity"]).all() and np.abs(made["vorticity"]).max() < 100


# --- symmetries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "solve"),
    [
        ("reacdiff1d", lambda states: reaction_diffusion(states[:, 0], 0.1, 1.0, np.array([0, 0.1]))[:, :, None]),
        ("kuramoto1d", lambda states: kuramoto_sivashinsky(states[:, 0], LENGTH, 1.0, np.array([0, 0.4]))[:, :, None]),
        ("diffreact2d", lambda states: fitzhugh_nagumo(states, **FHN, times=np.array([0, 0.1]))),
    ],
)
def test_an_image_of_a_state_becomes_the_image_of_its_solution(name, solve):
    family = FAMILIES[name]
    state = torch.from_numpy(np.random.default_rng(0).uniform(size=(1, len(family.channels), *family.num_dims * (16,))))
    count = symmetries.num_turns(tuple(state.shape[2:]))
    states, element = torch.cat([state] * count)[:, None], np.arange(count)

    def turned(frames):
        return symmetries.turn(family, frames, family.output_channels, element).numpy()

    straight = torch.from_numpy(solve(states[:, 0].numpy()))
    np.testing.assert_allclose(solve(turned(states)[:, 0]), turned(straight), atol=1e-12)


def test_kolmogorov_flow_is_the_same_all_along_x(turbulence):
    times = np.array([0, 0.2])
    moved = kolmogorov_flow(np.roll(turbulence, 5, axis=1), 0.02, 0.1, 4, times)
    np.testing.assert_allclose(moved, np.roll(kolmogorov_flow(turbulence, 0.02, 0.1, 4, times), 5, axis=2), atol=1e-11)


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_frame_is_the_same_whatever_frames_are_asked_for(chaos):
    few, many = (kuramoto_sivashinsky(chaos, LENGTH, 1.0, np.array(times)) for times in ([0, 0.8], [0, 0.1, 0.2, 0.8]))
    np.testing.assert_allclose(many[:, -1], few[:, -1], atol=1e-12)


@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_more_samples_begin_with_the_same_samples(solve, monkeypatch):
    monkeypatch.setattr(spectral, "FLOW_BURN_IN", {32: 1.0})
    times = np.linspace(0, 0.2, 3)
    one, *_ = solve(3, range(1, 2), SOLVERS[solve], 16, times)
    monkeypatch.setattr(spectral, "BLOCK_VALUES", 2 * 3 * 128)
    _, again, other = solve(3, range(3), SOLVERS[solve], 16, times)
    for channel, values in one.items():
        assert values.shape == (3,) + values.shape[1:]
        np.testing.assert_allclose(again[channel], values, atol=1e-9)
        assert np.abs(other[channel] - values).max() > 0.01


@pytest.mark.parametrize("solve", [spectral.solve_kuramoto_sivashinsky, spectral.solve_kolmogorov_flow])
def test_a_finer_grid_shows_the_same_chaos(solve, monkeypatch):
    monkeypatch.setattr(spectral, "FLOW_BURN_IN", {32: 1.0})
    times, channel = np.linspace(0, 0.2, 2), "u" if "siv" in solve.__name__ else "vorticity"
    coarse, fine = (next(solve(0, range(1), SOLVERS[solve], n, times))[channel][0] for n in (40, 120))
    moved = resample(fine, 40) if fine.ndim == 1 else resample_square(fine, 40)
    np.testing.assert_allclose(coarse, moved, atol=1e-9)

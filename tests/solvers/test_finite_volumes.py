"""Solvers by finite volumes against exact solutions, conservation, symmetry, finer grids and published files."""

from functools import partial

import h5py
import numpy as np
import pytest
import scipy.optimize
import torch

from upsnb.data import symmetries
from upsnb.data.families import FAMILIES
from upsnb.errors import DataError
from upsnb.solvers import finite_volumes
from upsnb.solvers.finite_volumes import GAMMA, burgers, compressible, draw_dam, draw_gas, shallow_water, solve_gas


def _centres(points: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    return low + (high - low) * (np.arange(points) + 0.5) / points


def _nrmse(found, expected, dims: int = 1):
    axes = tuple(range(-dims, 0))
    return np.sqrt(((found - expected) ** 2).mean(axes) / (expected**2).mean(axes))


# --- Burgers --------------------------------------------------------------------------------------------------------


def _cole_hopf(x: np.ndarray, time: float, nu: float) -> np.ndarray:
    """u at `time` from sin(2 pi x): the mean of (x - y) / t weighted by a heat kernel, summed over y."""
    diffusion, reach = nu / np.pi, 12 * np.sqrt(nu * time / np.pi) + 1.5 * time
    away = np.linspace(-reach, reach, 8001)
    origin = x[:, None] - away
    exponent = -(1 - np.cos(2 * np.pi * origin)) / (4 * np.pi * diffusion) - away**2 / (4 * diffusion * time)
    weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return (weight * away).sum(axis=1) / weight.sum(axis=1) / time


def _sine(points: int) -> np.ndarray:
    """Cell averages of sin(2 pi x): (1, points)."""
    return -np.diff(np.cos(2 * np.pi * np.arange(points + 1) / points))[None] * points / (2 * np.pi)


@pytest.mark.parametrize(
    ("nu", "time", "most"), [(0.003, 0.3, 1e-3), (0.01, 0.3, 4e-4), (0.1, 0.3, 6e-5), (4.0, 0.02, 1e-4)]
)
def test_burgers_flow_is_cole_and_hopfs(nu, time, most):
    found = burgers(_sine(512), nu, np.array([0, time]))[0, -1]
    exact = _cole_hopf(_centres(512), time, nu)
    assert np.abs(found - exact).mean() < most * np.abs(exact).mean()


def test_burgers_error_falls_with_the_square_of_the_cells():
    errors = [
        np.abs(burgers(_sine(n), 0.1, np.array([0, 0.3]))[0, -1] - _cole_hopf(_centres(n), 0.3, 0.1)).mean()
        for n in (64, 128)
    ]
    assert 3.4 < errors[0] / errors[1] < 4.6


def test_generated_burgers_flow_is_that_of_four_times_finer_cells():
    times = np.array([0, 0.2, 0.4])
    coarse, fine = (
        np.stack([sample["u"] for sample in finite_volumes.solve_burgers(0, range(1), {"Nu": 0.01}, points, times)])
        for points in (128, 512)
    )
    fine = fine.reshape(1, 3, 128, 4).mean(axis=3)
    assert (np.abs(coarse - fine).mean(axis=2) < 1e-3 * np.abs(fine).mean(axis=2)).all()


def test_a_shock_moves_at_the_mean_of_its_sides():
    u = burgers(np.where(_centres(200) < 0.3, 1.0, 0.0)[None], 0.0, np.array([0, 0.5]))[0, -1]
    exact = np.where(
        _centres(200) < 0.5, np.minimum(_centres(200) / 0.5, 1.0), np.where(_centres(200) < 0.55, 1.0, 0.0)
    )
    assert np.abs(u - exact).mean() < 4e-3


@pytest.mark.parametrize("nu", [0.0, 0.01])
def test_burgers_flow_keeps_its_mean_and_makes_no_new_extrema(nu):
    initial = np.random.default_rng(0).normal(size=(3, 64))
    flow = burgers(initial, nu, np.linspace(0, 1, 5))
    np.testing.assert_allclose(flow.mean(axis=2), np.broadcast_to(initial.mean(axis=1)[:, None], (3, 5)), atol=1e-13)
    assert (np.diff(flow.max(axis=2)) <= 1e-12).all()
    assert (np.diff(flow.min(axis=2)) >= -1e-12).all()


# --- gases ----------------------------------------------------------------------------------------------------------

GASES = {
    dims: draw_gas(0, 0, dims, points, None if dims == 1 else 0.5)[None] for dims, points in ((1, 32), (2, 16), (3, 8))
}


def _shock_tube(x: np.ndarray, time: float) -> np.ndarray:
    """Exact density, velocity and pressure of (1, 0, 1) beside (0.125, 0, 0.1) at x = 0."""
    sides, less = ((1.0, 1.0), (0.125, 0.1)), (GAMMA - 1) / (2 * GAMMA)
    sounds = [np.sqrt(GAMMA * p / d) for d, p in sides]

    def rarefied(pressure):  # velocity behind the wave that runs to the left
        return 2 * sounds[0] / (GAMMA - 1) * (1 - pressure**less)

    def shocked(pressure):  # and behind the shock
        d, p = sides[1]
        return (pressure - p) * np.sqrt(2 / (d * ((GAMMA + 1) * pressure + (GAMMA - 1) * p)))

    pressure = scipy.optimize.brentq(lambda p: rarefied(p) - shocked(p), 0.1, 1.0)
    u, ratio, squeeze = rarefied(pressure), pressure / 0.1, (GAMMA - 1) / (GAMMA + 1)
    speed = sounds[1] * np.sqrt((GAMMA + 1) / (2 * GAMMA) * ratio + less)
    fan = x / time
    inside_u = 2 / (GAMMA + 1) * (sounds[0] + fan)
    inside_c = sounds[0] - (GAMMA - 1) / 2 * inside_u
    inside = (inside_c / sounds[0]) ** (2 / (GAMMA - 1))
    parts = [
        fan < -sounds[0],
        fan < u - sounds[0] * pressure**less,
        fan < u,
        fan < speed,
    ]
    densities = [1.0, inside, pressure ** (1 / GAMMA), 0.125 * (ratio + squeeze) / (squeeze * ratio + 1)]
    pressures = [1.0, inside**GAMMA, pressure, pressure]
    return np.stack(
        [np.select(parts, *value) for value in ((densities, 0.125), ([0.0, inside_u, u, u], 0.0), (pressures, 0.1))]
    )


def test_a_shock_tube_is_the_exact_one():
    errors = []
    for points in (100, 200):  # of a length of 1; the tube and its mirror image fill a periodic box
        x = _centres(2 * points, -1, 1)
        initial = np.where(np.abs(x) < 0.5, [[1.0], [0.0], [1.0]], [[0.125], [0.0], [0.1]])
        found = compressible(initial[None], 0, 0, 1 / points, np.array([0, 0.2]))[0, -1][:, points:]
        errors.append(np.abs(found - _shock_tube(x[points:] - 0.5, 0.2)).mean(axis=1))
    assert (errors[1] < [0.004, 0.006, 0.004]).all()
    assert (errors[0] / errors[1] > 1.6).all()


def test_an_entropy_wave_travels_and_its_error_falls_with_the_cube_of_the_cells():
    errors = []
    for points in (32, 64):
        density = 1 + 0.3 * np.sin(2 * np.pi * _centres(points))
        initial = np.stack([density, 0 * density + 1, 0 * density + 1])
        found = compressible(initial[None], 0, 0, 1 / points, np.array([0, 1.0]))[0, -1]
        np.testing.assert_allclose(found[1:], 1, atol=1e-13)  # a contact moves neither velocity nor pressure
        errors.append(np.abs(found[0] - density).mean())
    assert errors[0] / errors[1] > 7


def test_a_sound_wave_of_sixteen_cells_keeps_its_height():
    sound, swing = np.sqrt(GAMMA), 1e-3 * np.sin(2 * np.pi * _centres(16))
    gas = np.tile(np.stack([1 + swing / sound, swing, 1 + sound * swing]), 4)
    found = compressible(gas[None], 0, 0, 1 / 64, np.array([0, 1 / sound]))[0, -1]  # four of its lengths later
    np.testing.assert_allclose(found[1], gas[1], atol=1e-4)


def test_a_generated_gas_is_that_of_four_times_finer_cells():
    viscosity, times = {"eta": 0.01, "zeta": 0.01}, np.array([0, 0.5])
    coarse, fine = (
        np.stack([list(gas.values()) for gas in solve_gas(1, 0, range(1), viscosity, points, times)])
        for points in (64, 256)
    )
    coarse, fine = coarse[:, :, 1], fine.reshape(1, 3, 2, 64, 4).mean(axis=4)[:, :, 1]  # the first has kinks
    assert (np.abs(coarse - fine).mean(axis=2) < 1e-3 * np.abs(fine).mean(axis=2)).all()


@pytest.mark.parametrize("dims", GASES)
def test_mass_momentum_and_energy_are_conserved(dims):
    flow = compressible(GASES[dims], 0.02, 0.01, 1 / GASES[dims].shape[-1], np.array([0, 0.1]))[0]
    density, velocity, pressure = flow[:, 0], flow[:, 1:-1], flow[:, -1]
    energy = pressure / (GAMMA - 1) + 0.5 * density * (velocity**2).sum(axis=1)
    for conserved in (density, energy, *(density[:, None] * velocity).swapaxes(0, 1)):
        before, after = conserved.reshape(2, -1).mean(axis=1)
        assert after == pytest.approx(before, abs=1e-13 * np.abs(energy).max())
    assert _nrmse(velocity[1], velocity[0], dims).min() > 0.01  # something happened


def _decay(initial: np.ndarray, eta: float, zeta: float, channel: int, time: float) -> float:
    """Rate at which a channel's variation falls, of a gas in the unit box."""
    flow = compressible(initial[None], eta, zeta, 1 / initial.shape[-1], np.array([0, time]))[0, :, channel]
    return -np.log(flow[1].std() / flow[0].std()) / time


def test_a_shear_wave_decays_by_its_shear_viscosity_along_any_direction():
    x, still = _centres(32), np.ones((32, 32))
    straight = 0.01 * np.sin(2 * np.pi * x)[:, None] * still
    assert _decay(np.stack([2 * still, 0 * still, straight, still]), 0.02, 0.05, 2, 0.2) == pytest.approx(
        0.02 * (2 * np.pi) ** 2, rel=0.02
    )
    # Along the diagonal stress has mixed derivatives, without which it would decay by other than eta |k|^2.
    diagonal = 0.01 * np.sin(2 * np.pi * (x[:, None] + x))
    assert _decay(np.stack([2 * still, diagonal, -diagonal, still]), 0.02, 0.05, 1, 0.2) == pytest.approx(
        0.02 * 2 * (2 * np.pi) ** 2, rel=0.03
    )


def test_a_sound_wave_decays_by_both_viscosities():
    x, sound = _centres(64), np.sqrt(GAMMA)
    swing = 1e-3 * np.sin(2 * np.pi * x)
    gas = np.stack([1 + swing / sound, swing, 1 + sound * swing])
    rate = 0.5 * (4 / 3 * 0.03 + 0.02) * (2 * np.pi) ** 2
    assert _decay(gas, 0.03, 0.02, 1, 1 / sound) == pytest.approx(rate, rel=0.03)


def test_an_impossible_gas_is_refused():
    for signs in ([1, 1, -1], [-1, 1, 1], [-1, 1, -1]):
        with pytest.raises(DataError, match="negative -> take a finer grid"):
            compressible(np.tile(np.array(signs, float)[:, None], (1, 1, 16)), 0, 0, 1 / 16, np.array([0, 0.1]))


# --- shallow water --------------------------------------------------------------------------------------------------


def _broken_dam(x: np.ndarray, time: float, left: float, right: float) -> np.ndarray:
    """Stoker's exact height of two levels of water at rest that met at x = 0, with g = 1."""

    def shocked(h):
        return (h - right) * np.sqrt((h + right) / (2 * h * right))

    h = scipy.optimize.brentq(lambda h: 2 * (np.sqrt(left) - np.sqrt(h)) - shocked(h), right, left)
    u, fan = shocked(h), x / time
    inside = (2 * np.sqrt(left) - fan) ** 2 / 9
    parts = [fan < -np.sqrt(left), fan < u - np.sqrt(h), fan < h * u / (h - right)]
    return np.select(parts, [left, inside, h], right)


def test_a_broken_dam_is_stokers():
    errors = []
    for points in (100, 200):
        x = _centres(points, -2.5, 2.5)
        found = shallow_water(np.where(x < 0, 2.0, 1.0)[None], 5 / points, np.array([0, 1.0]))[0, -1]
        errors.append(np.abs(found - _broken_dam(x, 1.0, 2.0, 1.0)).mean())
    assert errors[1] < 5e-3
    assert errors[0] / errors[1] > 1.6


@pytest.fixture(scope="module")
def round_dam():
    """A centred dam on 40 x 40 cells, at 5 times."""
    dam = {"dam_radius": 0.6, "inner_height": 2.5, "x": 0.0, "y": 0.0}
    return shallow_water(finite_volumes.dam_height(dam, 40)[None], 5 / 40, np.linspace(0, 0.8, 5))[0]


def test_water_is_conserved_until_waves_reach_the_boundary(round_dam):
    np.testing.assert_allclose(round_dam.mean(axis=(1, 2)), round_dam[0].mean(), rtol=1e-6)
    assert round_dam.min() > 0.3


def test_a_round_dam_breaks_in_a_round_wave(round_dam):
    for image in (round_dam.swapaxes(1, 2), round_dam[:, ::-1], round_dam[:, :, ::-1]):
        np.testing.assert_allclose(image, round_dam, atol=1e-13)
    x = _centres(40, -2.5, 2.5)
    radius = np.hypot(x[:, None], x)
    along = np.interp(radius, x[20:], round_dam[-1, 20, 20:])  # the row beside the axis, turned
    assert np.abs(along - round_dam[-1])[radius < 2.4].mean() < 0.015


def test_still_water_stays_still():
    np.testing.assert_array_equal(shallow_water(np.full((1, 12, 12), 1.7), 0.4, np.array([0, 1.0])), 1.7)


def test_waves_leave_through_the_boundary():
    height = shallow_water(np.where(_centres(60, -1, 1) < 0, 1.2, 1.0)[None], 1 / 30, np.array([0, 4.0]))[0, -1]
    assert np.ptp(height) < 0.005


def test_deep_and_flat_water_stays_positive():
    height = shallow_water(np.where(_centres(100) < 0.5, 10.0, 0.01)[None], 0.01, np.linspace(0, 0.1, 3))
    assert height.min() > 0.0099


# --- symmetries -----------------------------------------------------------------------------------------------------


def _follow(family, first: torch.Tensor) -> torch.Tensor:
    """(B, 2, C, *grid): a first frame (B, 1, C, *grid), and what it becomes."""
    states, times, cell = first[:, 0].numpy(), np.array([0, 0.1]), 1 / first.shape[-1]
    if family.name == "burgers1d":
        flow = burgers(states[:, 0], 0.01, times)[:, :, None]
    elif family.name == "shallowwater2d":
        flow = shallow_water(states[:, 0], cell, times)[:, :, None]
    else:
        order = [0, *range(2, states.shape[1]), 1]
        flow = compressible(states[:, order], 0.02, 0.01, cell, times)[:, :, np.argsort(order)]
    return torch.from_numpy(np.ascontiguousarray(flow))


@pytest.mark.parametrize("name", ["burgers1d", "cfd1d", "cfd2d", "cfd3d", "shallowwater2d"])
def test_an_image_of_a_state_becomes_the_image_of_what_the_state_becomes(name):
    """For the symmetries that the row names, and with its vectors."""
    family = FAMILIES[name]
    shape = (1, len(family.channels), *family.num_dims * ({1: 32, 2: 12, 3: 6}[family.num_dims],))
    state = 1.5 + 0.4 * np.random.default_rng(0).random(shape)
    first = torch.from_numpy(np.tile(state[:, None], (6, 1, 1, *family.num_dims * (1,))))
    flow = _follow(family, first)
    image, image_of_flow = symmetries.images(family, first, flow, np.random.default_rng(1).random((6, 2)))
    assert not torch.equal(image, first)
    np.testing.assert_allclose(_follow(family, image), image_of_flow, rtol=1e-11, atol=1e-11)
    assert (flow[:, 1] - flow[:, 0]).abs().max() > 0.01


# --- samples --------------------------------------------------------------------------------------------------------


def test_what_a_sample_becomes_does_not_depend_on_the_others():
    """Slow and fast flows together: each has its own steps."""
    gases = np.concatenate([draw_gas(0, sample, 1, 32)[None] for sample in range(4)])
    waves, times = np.random.default_rng(0).normal(size=(4, 32)) * [[0.1], [3], [1], [0.5]], np.linspace(0, 0.2, 3)
    for solve, first in (
        (lambda states: compressible(states, 0.01, 0.01, 1 / 16, times), gases),
        (lambda states: burgers(states, 0.01, times), waves),
        (lambda states: shallow_water(1.5 + 0.1 * states, 1 / 16, times), waves),
    ):
        np.testing.assert_array_equal(solve(first), np.concatenate([solve(one[None]) for one in first]))


@pytest.mark.parametrize("name", ["Nu", "eta", "zeta", "M"])
def test_negative_parameters_are_refused(name):
    parameters = {**dict.fromkeys(("Nu", "eta", "zeta", "M"), 0.1), name: -1.0}
    solve = finite_volumes.solve_burgers if name == "Nu" else partial(finite_volumes.solve_gas, 2)
    with pytest.raises(DataError, match=f"{name} is -1 -> expected"):
        next(solve(0, range(1), parameters, 8, np.array([0, 1.0])))


@pytest.mark.parametrize(("dims", "mach"), [(2, 0.1), (2, 1.0), (3, 1.0)])
def test_a_gas_has_the_mach_number_it_is_drawn_with(dims, mach):
    found = []
    for sample in range(6):
        density, *velocity, pressure = draw_gas(7, sample, dims, 12, mach)
        sound = np.sqrt(GAMMA * np.exp(np.log(pressure).mean() - np.log(density).mean()))
        found.append(np.sqrt((np.square(velocity).sum(axis=0)).mean()) / sound)
    assert np.isclose(found, mach, rtol=1e-6).sum() >= 2  # the others have a window over them
    assert max(found) < 1.01 * mach


def test_one_seed_is_one_gas_at_every_resolution():
    for dims in (1, 2):
        coarse, fine = (draw_gas(1, 3, dims, points, None if dims == 1 else 1.0) for points in (9, 27))
        np.testing.assert_allclose(fine[(slice(None), *dims * [slice(1, None, 3)])], coarse, rtol=1e-9, atol=1e-9)


def test_no_two_dams_are_alike():
    dams = np.array([list(draw_dam(0, sample).values()) for sample in range(50)])
    assert all(len(np.unique(column)) == 50 for column in dams.T)


# --- published files ------------------------------------------------------------------------------------------------


def _published(path, *keys: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples, T, C, *grid) float64 and their times."""
    with h5py.File(path) as handle:
        fields = np.stack([handle[key][:samples] for key in keys], axis=2).astype(np.float64)
        return fields, handle["t-coordinate"][: fields.shape[1]].astype(np.float64)


def test_a_published_burgers_flow_follows_from_its_first_frame(shared_data):
    flow, times = _published(shared_data / "1D_Burgers_Sols_Nu0.01.hdf5", "tensor", samples=2)
    found = burgers(flow[:, 0, 0], 0.01, times[:21])
    assert _nrmse(found[:, 10::10], flow[:, 10:21:10, 0]).max() < 3e-3


@pytest.mark.parametrize(
    ("file", "viscosity", "frames", "most"),
    [
        ("1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5", 0.01, 20, [1e-3, 5e-3, 1e-3]),
        # Stress has no mixed derivatives there.
        ("2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_48_Train.hdf5", 0.01, 1, [5e-3, 0.15, 0.15, 5e-3]),
        ("3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5", 1e-8, 4, [0.015, 0.05, 0.05, 0.05, 0.01]),
    ],
)
def test_a_published_gas_follows_from_its_first_frame(shared_data, monkeypatch, file, viscosity, frames, most):
    """By slopes that are limited everywhere, as those of the published solver are: else with less diffusion."""
    monkeypatch.setattr(finite_volumes, "JUMP", -1.0)
    keys = ("density", "Vx", "Vy", "Vz")[: len(most) - 1]
    flow, times = _published(shared_data / file, *keys, "pressure", samples=1)
    dims, points = len(most) - 2, flow.shape[-1]
    cell = (2 if dims == 1 else 1) / points
    found = compressible(flow[:, 0], viscosity, viscosity, cell, times[[0, frames]])[0, 1]
    assert (_nrmse(found, flow[0, frames], dims) < most).all()

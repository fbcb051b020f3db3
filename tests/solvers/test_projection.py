"""Flow in a box: free of divergence, second order towards a manufactured flow, and no dye is lost or made."""

import h5py
import numpy as np
import pytest

from upsnb.solvers.projection import _pairs, carried_dye, centred, divergence, projection, random_field
from upsnb.solvers.projection import solve_incompressible_flow as solve

TIMES = np.array([0, 0.25, 0.5])


def _vortex(x, y):
    """Velocity of the stream function (sin pi x sin pi y)^2, at rest on the walls."""
    return (
        np.pi * np.sin(np.pi * x) ** 2 * np.sin(2 * np.pi * y),
        -np.pi * np.sin(2 * np.pi * x) * np.sin(np.pi * y) ** 2,
    )


def _steady_force(x, y, nu):
    """What keeps the vortex as it is: velocity . grad velocity - nu lap velocity."""
    (u, v), one, two = _vortex(x, y), np.pi, 2 * np.pi
    mixed = np.sin(two * x) * np.sin(two * y)
    u_slopes = one**2 * mixed, 2 * one**2 * np.sin(one * x) ** 2 * np.cos(two * y)
    v_slopes = -2 * one**2 * np.cos(two * x) * np.sin(one * y) ** 2, -(one**2) * mixed
    u_bend = 2 * one**3 * np.cos(two * x) * np.sin(two * y) - 4 * one**3 * np.sin(one * x) ** 2 * np.sin(two * y)
    v_bend = 4 * one**3 * np.sin(two * x) * np.sin(one * y) ** 2 - 2 * one**3 * np.sin(two * x) * np.cos(two * y)
    return np.stack([
        u * u_slopes[0] + v * u_slopes[1] - nu * u_bend,
        u * v_slopes[0] + v * v_slopes[1] - nu * v_bend,
    ])  # fmt: skip


def _grids(num_cells):
    """Positions of u, v and of centres."""
    edges, centres = np.arange(1, num_cells) / num_cells, (np.arange(num_cells) + 0.5) / num_cells
    return ((edges[:, None], centres), (centres[:, None], edges), (centres[:, None], centres))


def _steady_errors(num_cells, nu=0.05):
    """How far the vortex, and a dye along its streamlines, are from where they began, which is where they belong."""
    at_u, at_v, at_centres = _grids(num_cells)
    u, v = _vortex(*at_u)[0], _vortex(*at_v)[1]
    x, y = at_centres
    dye = 1 + 0.5 * (np.sin(np.pi * x) * np.sin(np.pi * y)) ** 2
    *_, last = carried_dye(u, v, dye, _steady_force(x, y, nu) / dye, nu, TIMES)
    return [np.sqrt(np.mean((found - exact) ** 2)) for found, exact in zip(last, (u, v, dye), strict=True)]


def _random(num_cells, seed=0):
    random = np.random.default_rng(seed)
    vx, vy, dye, *force = (random_field(random, num_cells) for _ in range(5))
    return _pairs(vx, 0) / 2, _pairs(vy, 1) / 2, dye, np.stack(force)


@pytest.fixture(scope="module")
def frames():
    return list(carried_dye(*_random(24), 0.01, TIMES))


def test_a_projected_velocity_has_no_divergence_and_stays_as_it_is():
    random = np.random.default_rng(0)
    once = projection(20)(random.normal(size=(19, 20)), random.normal(size=(20, 19)))
    np.testing.assert_allclose(divergence(*once), 0, atol=1e-13)
    for again, before in zip(projection(20)(*once), once, strict=True):
        np.testing.assert_allclose(again, before, atol=1e-13)


def test_velocity_has_no_divergence_in_any_frame(frames):
    for u, v, _ in frames:
        assert np.abs(divergence(u, v)).max() < 1e-13
        assert np.abs(u).max() > 0.1


def test_dye_is_neither_made_nor_lost_and_keeps_its_bounds(frames):
    first = frames[0][2]
    for *_, dye in frames:
        assert dye.sum() == pytest.approx(first.sum(), abs=1e-10)
        assert first.min() <= dye.min() < dye.max() <= first.max()


def test_a_manufactured_flow_is_met_to_second_order():
    coarse, fine = _steady_errors(12), _steady_errors(24)
    for before, after in zip(coarse, fine, strict=True):
        assert before / after > 3.2  # the limited slopes cost the dye a little at its top
        assert after < 0.03


def test_steps_are_of_second_order():
    def solve(courant):
        *_, (u, *_) = carried_dye(*_random(12), 0.01, np.array([0, 0.1]), courant=courant)
        return u

    exact = solve(0.01)
    assert np.abs(solve(0.2) - exact).max() / np.abs(solve(0.1) - exact).max() == pytest.approx(4, abs=0.8)


def test_a_flow_at_rest_stays_at_rest_under_a_force_that_is_a_gradient():
    """An even dye: pressure alone holds it."""
    x, y = _grids(16)[2]
    force = np.stack([np.pi * np.cos(np.pi * x) * np.sin(np.pi * y), np.pi * np.sin(np.pi * x) * np.cos(np.pi * y)])
    even = np.ones((16, 16))
    *_, (u, v, dye) = carried_dye(np.zeros((15, 16)), np.zeros((16, 15)), even, force, 0.01, TIMES)
    assert max(np.abs(u).max(), np.abs(v).max()) < 2e-3  # second differences of the sine
    np.testing.assert_allclose(dye, 1, atol=1e-12)


@pytest.mark.parametrize(
    "image",
    [
        lambda u, v, *centred: (v.T, u.T, *(field.T for field in centred[::-1])),
        lambda u, v, fx, dye, fy: (-u[::-1], v[::-1], -fx[::-1], dye[::-1], fy[::-1]),
    ],
    ids=["exchanged", "mirrored"],
)
def test_an_image_of_a_flow_flows_as_its_image(image):
    u, v, dye, (fx, fy) = _random(12)
    *_, straight = carried_dye(u, v, dye, np.stack([fx, fy]), 0.01, TIMES[:2])
    u, v, fx, dye, fy = image(u, v, fx, dye, fy)
    *_, found = carried_dye(u, v, dye, np.stack([fx, fy]), 0.01, TIMES[:2])
    u, v, _, dye, _ = image(*straight[:2], straight[2], straight[2], straight[2])
    for one, other in zip(found, (u, v, dye), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11)


def test_the_published_flow_moves_as_ours_until_its_smoothing_tells(shared_data):
    """Force on the dye, walls at rest, and cells one wide: at t = 1 its first frame is gone, and found by ours."""
    with h5py.File(shared_data / "ns_incom_inhom_2d_48-3.h5") as handle:
        velocity, dye, force = (
            np.moveaxis(handle[key][0].astype(np.float64), -1, axis)
            for key, axis in (("velocity", 1), ("particles", 1), ("force", 0))
        )
    (vx, vy), density = velocity[0], dye[0, 0]
    *_, (u, v, carried) = carried_dye(
        _pairs(vx, 0) / 2, _pairs(vy, 1) / 2, density, force, 0.01, np.array([0, 1.0]), length=48.0
    )

    def nrmse(found, expected):
        return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())

    assert nrmse(centred(u, v), velocity[1]) < 0.1 < 1 < nrmse(velocity[0], velocity[1])
    assert nrmse(carried, dye[1, 0]) < 0.05 < 0.2 < nrmse(density, dye[1, 0])


def test_a_sample_is_the_same_however_many_and_however_fine():
    times = np.array([0, 0.05])
    settings = {"NU": 0.01}
    alone, (_, with_others) = next(solve(0, range(1, 2), settings, 16, times)), solve(0, range(2), settings, 16, times)
    for channel, values in alone.items():
        assert values.shape == (16, 16) if channel in ("Fx", "Fy") else (2, 16, 16)
        np.testing.assert_array_equal(values, with_others[channel])
    fine = random_field(np.random.default_rng(5), 48)
    np.testing.assert_allclose(random_field(np.random.default_rng(5), 16), fine[1::3, 1::3], atol=1e-12)
    assert fine.std() == pytest.approx(1)
    assert fine.mean() == pytest.approx(0)

"""Diffusion with sorption meets the exact linear solution, loses nothing, and is what the published solver tends to."""

import h5py
import numpy as np
import scipy.special
import yaml

from upsnb.solvers.sorption import DRAWN, diffusion_sorption, retardation, solve_diffusion_sorption

SOIL = {"D": 5e-4, "por": 0.29, "rho_s": 2880.0, "k_f": 3.5e-4, "n_f": 0.874}
TIMES = np.linspace(0, 500, 11)


def _without_d(medium):
    return {name: value for name, value in medium.items() if name != "D"}


def test_linear_sorption_only_slows_diffusion():
    """From an empty half space the exact solution is known; the inlet lies half a cell outside."""
    linear, num_points = SOIL | {"n_f": 1.0}, 128
    found = diffusion_sorption(np.zeros(num_points), TIMES[:4], **linear)
    slower = retardation(np.ones(1), **_without_d(linear))
    depth = np.arange(1, num_points + 1) / num_points
    expected = scipy.special.erfc(depth / (2 * np.sqrt(SOIL["D"] * TIMES[1:4, None] / slower)))
    np.testing.assert_allclose(found[1:], expected, atol=2e-4)


def test_what_flows_in_is_held_or_has_left():
    num_points, times = 64, np.linspace(0, 500, 2001)
    found = diffusion_sorption(np.full(num_points, 0.15), times, **SOIL)
    bound = (1 - SOIL["por"]) / SOIL["por"] * SOIL["rho_s"] * SOIL["k_f"]
    held = (found + bound * found ** SOIL["n_f"]).mean(axis=1)
    outside = SOIL["D"] * (found[:, -2] - found[:, -1]) * num_points
    inflow = SOIL["D"] * num_points * (1 - found[:, 0] - found[:, -1] + outside)
    late = slice(100, None)  # the first flow is too sudden for the sum over frames
    brought = np.concatenate([[0], np.cumsum((inflow[late][1:] + inflow[late][:-1]) / 2 * times[1])])
    np.testing.assert_allclose(held[late] - held[100], brought, atol=2e-5)


def test_cells_four_times_smaller_change_it_by_less_than_a_thousandth():
    """Between the same walls: they lie half a cell outside, so that the published domain grows with the cells."""
    num_points, times = 63, np.array([0, 250.0, 500.0])
    fine_points = 4 * (num_points + 1) - 1
    larger = (4 * num_points / fine_points) ** 2  # for cells of a quarter's width
    fine = diffusion_sorption(np.full(fine_points, 0.1), times, **SOIL | {"D": SOIL["D"] * larger})[:, 3::4]
    found = diffusion_sorption(np.full(num_points, 0.1), times, **SOIL)
    assert np.sqrt(((found - fine) ** 2).mean() / (fine**2).mean()) < 1e-3


def test_concentrations_stay_between_nothing_and_the_inlets():
    for start in (0.0, 0.2):
        found = diffusion_sorption(np.full(32, start), TIMES, **SOIL)
        assert found.min() >= -1e-6
        assert found.max() <= 1


def test_the_published_file_is_ours_but_for_its_tolerance(shared_data):
    """Its solver ran at a relative tolerance of 1e-3, and is 2e-3 off at the end: as much as a published model."""
    with h5py.File(shared_data / "1D_diff-sorp_NA_NA.h5") as handle:
        soil = yaml.safe_load(handle["0000"].attrs["config"])["sim"]
        real, times = handle["0000/data"][..., 0].astype(np.float64), handle["0000/grid/t"][:]
    assert {name: soil[name] for name in SOIL} == SOIL
    found = diffusion_sorption(real[0], times.astype(np.float64), **SOIL)
    errors = np.sqrt(((found - real) ** 2).mean(axis=1) / (real**2).mean(axis=1))
    assert 1e-3 < errors[-1] < 3e-3
    assert errors.max() < 5e-3


def test_samples_differ_in_their_start_alone_unless_more_is_drawn():
    published = list(solve_diffusion_sorption(0, range(3), SOIL, 16, TIMES))
    varied = list(solve_diffusion_sorption(0, range(1, 3), SOIL | {"D": 0.0, "n_f": 0.0}, 16, TIMES))
    assert [set(sample) for sample in published] == [{"u"}] * 3
    starts = [sample["u"][0, 0] for sample in published]
    assert len(set(starts)) == 3
    np.testing.assert_allclose([sample["u"][0, 0] for sample in varied], starts[1:])
    for sample in varied:
        assert set(sample) == {"u", *DRAWN}
        own = diffusion_sorption(sample["u"][0], TIMES, **SOIL | {name: sample[name] for name in DRAWN})
        np.testing.assert_allclose(sample["u"], own)

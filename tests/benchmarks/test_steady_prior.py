"""Guesses are as far off as they say, and a solver that is given the answer has nothing to do."""

import numpy as np
import pytest
import steady_prior

from upsnb.solvers.darcy import darcy_matrix, draw_permeability, solve_darcy


def test_guesses_are_as_far_off_as_their_names_say_and_as_smooth():
    nu = draw_permeability(0, 0, 32)
    exact = solve_darcy(nu, 1.0)
    found = steady_prior.guesses(nu, exact, None, np.random.default_rng(0))
    rough = {}
    for name, guess in found.items():
        if name != steady_prior.ZERO:
            off, error = float(name.split(" ")[0]), guess - exact
            assert np.linalg.norm(error) / np.linalg.norm(exact) == pytest.approx(off)
            length = float(name.split(" ")[-1])
            rough[off, length] = np.square(np.diff(error, axis=0)).mean() / np.square(error).mean()
    for off in steady_prior.SIZES:
        steps = [rough[off, length] for length in steady_prior.LENGTHS]
        assert steps == sorted(steps), "the shorter the length, the rougher"


def test_from_the_exact_solution_no_iteration_is_left_and_from_zero_the_answer_is_found():
    nu = draw_permeability(0, 0, 16)
    matrix, exact, right = darcy_matrix(nu), solve_darcy(nu, 1.0), np.full(256, 1 / 256)
    assert steady_prior.solved(matrix, right, exact.ravel(), False)[0] == 0
    plain, helped = (steady_prior.solved(matrix, right, np.zeros(256), way)[0] for way in (False, True))
    assert 10 < helped < plain
    np.testing.assert_allclose(matrix @ exact.ravel(), right, rtol=1e-9)

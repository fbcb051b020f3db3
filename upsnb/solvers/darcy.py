"""Steady Darcy flow through random permeabilities."""

from collections.abc import Iterator

import numpy as np

from upsnb.solvers.waves import Sample

# Darcy permeability: a smooth random field cut at zero. Compared with 298 samples of PDEBench's generator: boundaries
# crossed along a line 1.08 (1.13 there), autocorrelation 0.64 (0.65) at 1/8 and 0.31 (0.36) at 1/4 of the domain, share
# of nu = 1 in 0.12..0.88 (0.14..0.79) for 5..95 % of the samples. Its blobs are less compact: 53 % one piece (89 %).
PERMEABILITY = (0.1, 1.0)
CORRELATION_LENGTH = 0.3
NUM_FEATURES = 128


def draw_permeability(seed: int, sample: int, resolution: int) -> np.ndarray:
    """nu of one sample on cell centres: (resolution, resolution) float64, 0.1 or 1, never uniform.

    The same seed and sample give the same field at every resolution, only finer: data for resolution transfer. (But
    for fields so nearly uniform that one of two resolutions misses their only spot.)
    """
    centres = (np.arange(resolution) + 0.5) / resolution
    random = np.random.default_rng([seed, sample])
    while True:  # a uniform field, about 1 in 200, is drawn again: it would occur many times, in training and in test
        # Random Fourier features of a Gaussian kernel: the field is a formula, so any grid can sample it.
        frequencies = random.normal(scale=1 / CORRELATION_LENGTH, size=(2, NUM_FEATURES))
        phases = random.uniform(0, 2 * np.pi, size=NUM_FEATURES)
        along_x = np.exp(1j * (centres[:, None] * frequencies[0] + phases))
        along_y = np.exp(1j * centres[:, None] * frequencies[1])
        above = (along_x @ along_y.T).real > 0
        if above.any() and not above.all():
            return np.where(above, PERMEABILITY[1], PERMEABILITY[0])


def solve_darcy(nu: np.ndarray, beta: float) -> np.ndarray:
    """Steady pressure of -div(nu grad u) = beta on the unit square.

    Finite volumes with arithmetic face means and u = 0 in ghost cells, half a cell outside the domain: this is what
    PDEBench's relaxation tends to. On 298 of its samples the solution scores a median nRMSE of 0.001; harmonic means
    give 0.016, u = 0 on the domain's edge itself 0.07.

    Args:
        nu: (N, N) positive, on cell centres.
    Returns:
        (N, N) float64 pressure on the same points.
    """
    import scipy.sparse.linalg  # here, because it takes a while and whoever reads a config would wait for it

    # Symmetric and positive definite: no pivoting, and an ordering of A + A^T, four times faster than the default.
    options = {"SymmetricMode": True}
    factor = scipy.sparse.linalg.splu(
        darcy_matrix(nu), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options
    )
    return factor.solve(np.full(nu.size, beta / nu.size)).reshape(nu.shape)


def darcy_matrix(nu: np.ndarray):
    """What is multiplied with the pressure, row by row, to give beta / N^2: (N^2, N^2) sparse, by columns."""
    import scipy.sparse

    nu = np.pad(np.asarray(nu, dtype=np.float64), 1, mode="edge")  # the ghost cells' nu is their neighbour's
    faces_x = 0.5 * (nu[1:, 1:-1] + nu[:-1, 1:-1])  # (N + 1, N)
    faces_y = 0.5 * (nu[1:-1, 1:] + nu[1:-1, :-1])  # (N, N + 1)
    n = len(nu) - 2
    centre = faces_x[1:] + faces_x[:-1] + faces_y[:, 1:] + faces_y[:, :-1]
    to_next_y = np.where(np.arange(n) < n - 1, -faces_y[:, 1:], 0.0).ravel()[:-1]  # a row's last cell has no next
    to_next_x = -faces_x[1:-1].ravel()
    return scipy.sparse.diags_array(
        [centre.ravel(), to_next_y, to_next_y, to_next_x, to_next_x], offsets=[0, 1, -1, n, -n], format="csc"
    )


def steady_darcy(seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """Steady 2D Darcy flows, nu in {0.1, 1}, and beta the constant forcing; unlike PDEBench's, relaxed."""
    for sample in samples:
        nu = draw_permeability(seed, sample, resolution)
        yield {"nu": nu, "pressure": solve_darcy(nu, parameters["beta"])[None]}

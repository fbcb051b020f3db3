"""Generated files are laid out as the real ones, hold exact solutions, and appear whole or not at all."""

import fcntl
from dataclasses import replace

import h5py
import numpy as np
import pytest
import scipy.ndimage

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.data.source import open_source
from upsnb.errors import DataError
from upsnb.solvers.darcy import draw_permeability, solve_darcy
from upsnb.solvers.waves import advection_solution, draw_waves, initial_state

SMALL = {"advection1d": (32, 6), "darcy2d": (16, 2)}  # points, frames
both = pytest.mark.parametrize("name", SMALL)


def make(path, name, num_samples=3, **settings):
    """A small file of a family."""
    resolution, num_times = SMALL[name]
    settings = {"resolution": resolution, "num_times": num_times} | settings
    return generate(FAMILIES[name], path, num_samples, **settings)


def advection(path, num_samples, beta, resolution, num_times, seed=0):
    return generate(FAMILIES["advection1d"], path, num_samples, {"beta": beta}, resolution, num_times, seed)


def _nrmse(found, expected):
    """Per sample, over all other axes."""
    axes = tuple(range(1, found.ndim))
    return np.sqrt(((found - expected) ** 2).mean(axes) / (expected**2).mean(axes))


# --- layout ---------------------------------------------------------------------------------------------------------


def _datasets(handle):
    """Every dataset; of grouped files those of the first sample."""
    found = {}
    handle.visititems(lambda key, item: found.update({key: item}) if isinstance(item, h5py.Dataset) else None)
    return {key: item for key, item in found.items() if not key[:4].isdecimal() or key.startswith("0000")}


def test_layout_equals_the_real_layout_key_by_key(real_file, tmp_path):
    name, path = real_file
    real_source = open_source(name, path)
    (resolution, *_), num_times, family = real_source.grid_shape, real_source.num_times, FAMILIES[name]

    def still(seed, samples, parameters, resolution, times):
        grid = (resolution,) * family.num_dims
        frames, one = dict.fromkeys(family.channels, np.zeros((num_times, *grid))), np.ones(grid)
        return (frames | dict.fromkeys(family.given, one) for _ in samples)

    parameters = dict(zip(family.parameters, real_source.parameters[0].tolist(), strict=True))
    made = generate(replace(family, solve=still), tmp_path / path.name, 2, parameters, resolution, num_times)
    with h5py.File(path) as real, h5py.File(made) as ours:
        expected, found = _datasets(real), _datasets(ours)
        assert sorted(found) == sorted(expected)
        for key, item in expected.items():
            assert found[key].dtype == item.dtype
            if family.layout == "single_array":
                assert found[key].chunks is found[key].compression is item.chunks is item.compression is None
            same = 0 if key.endswith("coordinate") or "/" in key else 1  # all but the number of samples
            assert found[key].shape[same:] == item.shape[same:]
            if key.endswith("coordinate") or "grid" in key:
                # Small files that are strided from 1024 cells have points up to half a cell before our centres.
                strided = name in ("advection1d", "burgers1d")
                np.testing.assert_allclose(found[key], item, atol=0.5 / 256 if strided else 1e-5)
        assert set(ours.attrs) == set(real.attrs) | {"generator", "seed"}
        for key in set(real.attrs) & set(parameters):
            assert ours.attrs[key] == pytest.approx(real.attrs[key])
            assert type(ours.attrs[key]) is type(real.attrs[key])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_fixes_every_sample_of_a_family_that_is_read_back(tmp_path, name):
    resolution = {1: 16, 2: 12, 3: 4}[FAMILIES[name].num_dims]
    few, more = (
        open_source(name, generate(FAMILIES[name], tmp_path / f"{n}.h5", n, None, resolution, 3)).read_all()[0]
        for n in (1, 2)
    )
    assert few.shape[2:] == (len(FAMILIES[name].input_channels), *FAMILIES[name].num_dims * (resolution,))
    assert np.ptp(few[:, :, 0]) > 0.1
    np.testing.assert_allclose(more[:1], few, atol=1e-6)
    assert np.abs(more[1] - more[0]).max() > 1e-3


@both
def test_the_reader_serves_generated_files(tmp_path, name):
    source = open_source(name, make(tmp_path / "new" / "folder" / "file.hdf5", name, parameters={"beta": 0.4}))
    source.read_all()
    assert source.num_samples == 3
    assert source.parameters[0, 0] == pytest.approx(0.4)


@pytest.mark.parametrize("beta", [0.1, 0.4, 1.0, 7.0, -2.0, 0.0])
@pytest.mark.parametrize("resolution", [32, 256])
def test_the_readers_speed_check_accepts_every_generated_file(tmp_path, beta, resolution):
    for seed in range(10):
        open_source("advection1d", advection(tmp_path / "a.h5", 1, beta, resolution, 41, seed))


# --- advection ------------------------------------------------------------------------------------------------------


def test_frames_are_the_first_frame_moved_by_beta_t(tmp_path):
    resolution, beta = 64, 0.25
    source = open_source("advection1d", advection(tmp_path / "a.h5", 40, beta, resolution, 9, seed=5))
    tensor = source.read_all()[0][:, :, 0]
    for frame, time in enumerate(source.times):  # beta t N is a whole number of cells here: no interpolation
        cells = beta * time * resolution
        assert cells == np.rint(cells)
        np.testing.assert_allclose(tensor[:, frame], np.roll(tensor[:, 0], int(cells), axis=1), atol=2e-6)


def test_the_file_holds_the_exact_solution(tmp_path):
    source = open_source("advection1d", advection(tmp_path / "a.h5", 20, 0.7, 50, 11, seed=3))
    x, times = (np.arange(50) + 0.5) / 50, np.linspace(0, 2, 11)
    expected = advection_solution(draw_waves(3, np.arange(20)), 0.7, x, times)
    np.testing.assert_allclose(source.read_all()[0][:, :, 0], expected, atol=1e-6)


def test_the_solution_satisfies_the_equation():
    waves, beta, step, points = draw_waves(0, np.arange(30)), 0.7, 1e-5, np.linspace(0.01, 0.98, 50)
    times = np.array([0.5 - step, 0.5, 0.5 + step])
    left, middle, right = (advection_solution(waves, beta, points + offset, times) for offset in (-step, 0, step))
    residual = (middle[:, 2] - middle[:, 0] + beta * (right[:, 1] - left[:, 1])) / (2 * step)
    assert np.median(np.abs(residual)) < 1e-6  # all but kinks of |u|
    assert np.mean(np.abs(residual) > 1e-3) < 0.01


def test_states_are_periodic():
    waves = draw_waves(0, np.arange(200))
    np.testing.assert_allclose(
        initial_state(waves, np.array([1e-12])), initial_state(waves, np.array([-1e-12])), atol=1e-6
    )


def test_a_tenth_of_the_states_is_folded_and_a_tenth_windowed():
    waves = draw_waves(0, np.arange(3000))
    assert np.mean(waves.folds != 0) == pytest.approx(0.1, abs=0.02)
    assert np.mean(~np.isnan(waves.windows)) == pytest.approx(0.1, abs=0.02)
    assert set(np.unique(waves.folds)) == {-1.0, 0.0, 1.0}
    states = initial_state(waves, np.linspace(0, 1, 64))
    assert (states[waves.folds == 1] >= 0).all()
    assert (states[waves.folds == -1] <= 0).all()
    assert np.abs(states[~np.isnan(waves.windows)][:, 48:]).max() < 1e-3


def test_states_resemble_the_real_ones(shared_data):
    real = open_source("advection1d", shared_data / "1D_Advection_Sols_beta0.4.hdf5")
    real_states = real.read_all()[0][:, 0, 0].astype(np.float64)
    states = initial_state(draw_waves(0, np.arange(2000)), real.coordinates[0])
    assert states.std() == pytest.approx(real_states.std(), rel=0.1)
    assert states.mean(axis=1).std() == pytest.approx(real_states.mean(axis=1).std(), rel=0.15)
    spectra = [np.abs(np.fft.rfft(u, axis=1)).mean(axis=0)[1:9] for u in (states, real_states)]
    assert np.corrcoef(*spectra)[0, 1] > 0.97


def test_the_real_file_is_the_exact_solution_of_its_first_frame(shared_data):
    """The claim behind our generator: within PDEBench's own numerical error, 0.45 % at t = 2."""
    source = open_source("advection1d", shared_data / "1D_Advection_Sols_beta0.4.hdf5")
    tensor, points = source.read_all()[0][:, :, 0].astype(np.float64), 256
    wavenumbers = np.arange(points // 2 + 1)
    moved = np.fft.rfft(tensor[:, 0]) * np.exp(-2j * np.pi * wavenumbers * 0.4 * source.times[-1])
    assert _nrmse(tensor[:, -1], np.fft.irfft(moved, n=points)).mean() < 0.006


# --- Darcy ----------------------------------------------------------------------------------------------------------


def test_the_solver_agrees_with_the_real_file_as_far_as_that_is_steady(shared_data):
    source = open_source("darcy2d", shared_data / "2D_DarcyFlow_beta1.0_Train.hdf5")
    nu, pressure = (values[:, 0, 0].astype(np.float64) for values in source.read_all())
    scores = _nrmse(np.stack([solve_darcy(one, 1.0) for one in nu]), pressure)
    assert 0.024 < scores.mean() < 0.0275
    assert 0.001 < np.median(scores) < 0.002
    assert 0.08 < np.percentile(scores, 90) < 0.10


def test_the_solver_agrees_with_the_real_file_at_official_resolution(shared_data):
    source = open_source("darcy2d", shared_data / "2D_DarcyFlow_beta1.0_res128.hdf5", num_samples=6)
    nu, pressure = (values[:, 0, 0].astype(np.float64) for values in source.read_all())
    assert np.median(_nrmse(np.stack([solve_darcy(one, 1.0) for one in nu]), pressure)) < 0.003


@pytest.mark.parametrize("axis", [0, 1])
def test_the_discrete_equation_holds_in_every_cell(axis):
    """Fluxes through four faces add up to the forcing, also at walls and where nu jumps."""
    nu = draw_permeability(1, 0, 24)
    nu = nu if axis == 0 else nu.T
    pressure = np.pad(solve_darcy(nu, 3.0), 1)
    nu = np.pad(nu, 1, mode="edge")
    outflow = np.zeros((24, 24))
    for along, shift in ((0, 1), (0, -1), (1, 1), (1, -1)):
        face = 0.5 * (nu + np.roll(nu, shift, along))
        outflow += (face * (pressure - np.roll(pressure, shift, along)))[1:-1, 1:-1]
    np.testing.assert_allclose(outflow * 24**2, 3.0, rtol=1e-9)


def test_a_constant_permeability_gives_the_textbook_maximum():
    n = 63  # the ghost cells sit half a cell outside: the zero lines are (n + 1) / n apart
    maximum = solve_darcy(np.ones((n, n)), 1.0).max() / ((n + 1) / n) ** 2
    assert maximum == pytest.approx(0.0736713, rel=1e-3)


def test_pressure_is_proportional_to_beta_and_inverse_to_permeability():
    nu = draw_permeability(0, 0, 16)
    np.testing.assert_allclose(solve_darcy(nu, 5.0), 5 * solve_darcy(nu, 1.0), rtol=1e-10)
    np.testing.assert_allclose(solve_darcy(2 * nu, 1.0), solve_darcy(nu, 1.0) / 2, rtol=1e-10)


def test_the_file_holds_the_solutions_of_its_coefficients(tmp_path):
    source = open_source("darcy2d", generate(FAMILIES["darcy2d"], tmp_path / "d.h5", 4, {"beta": 0.1}, 20, seed=9))
    inputs, targets = source.read_all()
    for nu, pressure in zip(inputs[:, 0, 0], targets[:, 0, 0], strict=True):
        np.testing.assert_allclose(pressure, solve_darcy(nu, 0.1), rtol=1e-5)


def test_permeability_is_binary_and_never_uniform():
    fields = np.stack([draw_permeability(0, sample, 16) for sample in range(300)])
    np.testing.assert_array_equal(np.unique(fields), [0.1, 1.0])
    assert (fields.reshape(300, -1).std(axis=1) > 0).all()


def test_one_seed_is_one_field_at_every_resolution():
    for sample in range(20):
        coarse, fine = draw_permeability(0, sample, 21), draw_permeability(0, sample, 63)
        np.testing.assert_array_equal(coarse, fine[1::3, 1::3])  # every third fine centre is a coarse centre


def test_permeability_resembles_the_real_one(shared_data):
    real = open_source("darcy2d", shared_data / "2D_DarcyFlow_beta1.0_Train.hdf5").read_all()[0][:, 0, 0] > 0.5
    ours = np.stack([draw_permeability(0, sample, 64) for sample in range(300)]) > 0.5

    def crossings(fields):
        return (fields[:, 1:] != fields[:, :-1]).sum(axis=1).mean()

    assert crossings(ours) == pytest.approx(crossings(real), rel=0.15)
    assert ours.mean() == pytest.approx(real.mean(), abs=0.06)
    assert np.mean([scipy.ndimage.label(field)[1] for field in ours]) < 2


# --- both -----------------------------------------------------------------------------------------------------------


@both
def test_a_seed_fixes_every_value_and_another_seed_changes_them(tmp_path, name):
    values = []
    for seed in (1, 1, 2):
        with h5py.File(make(tmp_path / "a.h5", name, seed=seed)) as handle:
            values.append(handle["tensor"][:])
    np.testing.assert_array_equal(values[0], values[1])
    assert (_nrmse(values[2], values[0]) > 0.01).all()


@both
def test_more_samples_begin_with_the_same_samples(tmp_path, name):
    few, more = (open_source(name, make(tmp_path / f"{n}.h5", name, n)).read_all()[1] for n in (3, 5))
    np.testing.assert_array_equal(more[:3], few)


@both
def test_what_was_interrupted_goes_on_where_it_was_and_the_old_file_stays_until_then(tmp_path, name):
    path, seen = make(tmp_path / "a.h5", name), []
    before = path.read_bytes()

    def stop(done, of):
        assert path.read_bytes() == before  # a reader during the work sees the old file, whole
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(path, name, 4, seed=1, progress=stop)
    assert path.read_bytes() == before
    make(path, name, 4, seed=1, progress=lambda done, of: seen.append(done))
    assert seen == [3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["a.h5"]
    at_once = make(tmp_path / "b.h5", name, 4, seed=1)
    np.testing.assert_array_equal(open_source(name, path).read_all()[1], open_source(name, at_once).read_all()[1])


@pytest.mark.parametrize("left", [b"", b"half", "another seed", "in use"])
def test_what_cannot_be_gone_on_with_is_made_anew(tmp_path, left):
    part, whole = tmp_path / ".a.h5.part", make(tmp_path / "b.h5", "darcy2d")

    def stop(done, of):
        raise KeyboardInterrupt

    if isinstance(left, bytes):
        part.write_bytes(left)
    else:
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "a.h5", "darcy2d", seed=int(left == "another seed"), progress=stop)
    with open(part) as held:
        if left == "in use":
            fcntl.flock(held, fcntl.LOCK_EX)  # as HDF5 does it, in another process
        make(tmp_path / "a.h5", "darcy2d")
    values = [open_source("darcy2d", path).read_all()[1] for path in (tmp_path / "a.h5", whole)]
    np.testing.assert_array_equal(*values)


def test_what_fails_leaves_nothing(tmp_path):
    def solve(seed, samples, parameters, resolution, times):
        yield {"u": np.full((len(times), resolution), np.nan)}

    with pytest.raises(DataError, match=r"sample 0 is not finite -> "):
        generate(replace(FAMILIES["advection1d"], solve=solve), tmp_path / "a.h5", 2)
    assert not list(tmp_path.iterdir())


@both
def test_an_open_source_outlives_the_replacement_of_its_file(tmp_path, name):
    path = make(tmp_path / "a.h5", name)
    source = open_source(name, path)
    before = source.read([0])[1]
    make(path, name, seed=1)
    np.testing.assert_array_equal(source.read([0])[1], before)


@both
def test_progress_ends_at_the_number_of_samples(tmp_path, name):
    seen = []
    make(tmp_path / "a.h5", name, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (3, 3)


@both
@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"num_samples": 0}, "num_samples is 0 -> expected"),
        ({"num_samples": 2.0}, r"num_samples is 2\.0 -> expected"),
        ({"resolution": 1}, "resolution is 1 -> expected"),
        ({"parameters": {"beta": np.nan}}, "beta is nan -> expected"),
        ({"parameters": {"Nu": 1.0}}, "has no 'Nu' -> its parameters are beta"),
    ],
)
def test_impossible_settings_are_refused_before_a_file_appears(tmp_path, name, setting, found):
    with pytest.raises(DataError, match=found):
        make(tmp_path / "a.h5", name, **setting)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "parameters", "found"),
    [
        ("burgers1d", {"Nu": -1.0}, "Nu is -1 -> expected"),
        ("incompressible2d", {"NU": -0.01}, r"NU is -0\.01 -> expected"),
        ("diffreact2d", {"Dv": -0.01}, r"Dv is -0\.01 -> expected"),
        ("diffsorp1d", {"por": 0.0}, "por is 0 -> expected a porosity"),
    ],
)
def test_parameters_that_no_equation_has_are_refused_and_leave_nothing(tmp_path, family, parameters, found):
    assert family in FAMILIES
    with pytest.raises(DataError, match=found):
        generate(FAMILIES[family], tmp_path / "a.h5", 2, parameters, 16, 4)
    assert not list(tmp_path.glob("*.h5"))


def test_a_flow_without_viscosity_is_solved(tmp_path):
    path = generate(FAMILIES["incompressible2d"], tmp_path / "a.h5", 1, {"NU": 0.0}, 16, 3)
    with h5py.File(path) as handle:
        assert np.isfinite(handle["velocity"]).all()


# --- longer than the published ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kuramoto1d", "diffreact2d"])  # of one array, and of groups
def test_a_longer_trajectory_begins_as_a_shorter_one_does_and_is_read_to_its_end(name, tmp_path):
    family, points = FAMILIES[name], 16
    end = family.time_range[1]
    short = open_source(name, generate(family, tmp_path / "short.h5", 2, resolution=points, num_times=3))
    long = open_source(name, generate(family, tmp_path / "long.h5", 2, resolution=points, num_times=5, until=2 * end))
    np.testing.assert_allclose(long.times, np.linspace(family.time_range[0], 2 * end, 5), rtol=1e-6)
    (earlier, _), (whole, _) = (source.read([0, 1], range(3)) for source in (short, long))
    np.testing.assert_allclose(whole, earlier, rtol=1e-5, atol=1e-5)
    assert np.abs(long.read([0], [4])[0] - whole[:1, -1:]).max() > 1e-3, "and it goes on"


def test_a_file_that_ends_elsewhere_and_was_not_made_to_is_refused(tmp_path):
    path = generate(
        FAMILIES["advection1d"], tmp_path / "1D_Advection_Sols_beta0.4.hdf5", 2, {"beta": 0.4}, 32, 5, until=4.0
    )
    with h5py.File(path, "a") as handle:
        del handle.attrs["until"]
    with pytest.raises(DataError, match="runs from 0 to 4 over 5 frames"):
        open_source("advection1d", path)


def test_an_end_before_the_beginning_is_refused(tmp_path):
    with pytest.raises(DataError, match="the last time is -1 -> it must come after 0"):
        make(tmp_path / "a.h5", "advection1d", until=-1.0)

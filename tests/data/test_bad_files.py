"""Files that are wrong in one way each: refused on opening, with file, key and what to do."""

import h5py
import numpy as np
import pytest
from tiny_files import advection_arrays, darcy_arrays, write

from upsnb.data.families import open_source
from upsnb.errors import DataError

MAKE = {"advection1d": advection_arrays, "darcy2d": darcy_arrays}
KEYS = [(name, key) for name, make in MAKE.items() for key in make() if (name, key) != ("darcy2d", "t-coordinate")]


def _refused(name, path, match, **settings):
    with pytest.raises(DataError, match=match) as caught:
        open_source(name, path, **settings)
    assert path.name in str(caught.value)
    assert "->" in str(caught.value)  # says what to do
    return str(caught.value)


@pytest.mark.parametrize("name", MAKE)
def test_the_unbroken_files_open(tmp_path, name):
    assert open_source(name, write(tmp_path / "good.h5", MAKE[name](), beta=0.5)).num_samples == 20


def test_a_missing_file(tmp_path):
    _refused("advection1d", tmp_path / "nowhere.hdf5", "no such file")


def test_a_folder_is_no_file(tmp_path):
    _refused("advection1d", tmp_path, "no such file")


def test_an_empty_file(tmp_path):
    path = tmp_path / "empty.hdf5"
    path.touch()
    _refused("advection1d", path, "0 bytes")


def test_a_web_page_saved_as_hdf5(tmp_path):
    path = tmp_path / "page.hdf5"
    path.write_text("<html>404</html>" * 1000)
    _refused("advection1d", path, "not an HDF5 file")


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.05])
def test_a_truncated_file(tmp_path, kept):
    path = write(tmp_path / "cut.hdf5", advection_arrays(200, 64), beta=0.5)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    _refused("advection1d", path, "truncated or damaged")


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_missing_key_lists_the_keys_found(tmp_path, name, key):
    arrays = MAKE[name]()
    del arrays[key]
    message = _refused(name, write(tmp_path / "a.h5", arrays, beta=0.5), f"key '{key}' is missing")
    assert all(other in message for other in arrays)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_group_in_place_of_a_dataset(tmp_path, name, key):
    path = write(tmp_path / "a.h5", {k: v for k, v in MAKE[name]().items() if k != key}, beta=0.5)
    with h5py.File(path, "a") as handle:
        handle.create_group(key)
    _refused(name, path, key)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_an_axis_too_few_and_an_axis_too_many(tmp_path, name, key):
    for change in (lambda values: values[0], lambda values: values[None]):
        arrays = MAKE[name]()
        arrays[key] = change(arrays[key])
        _refused(name, write(tmp_path / "a.h5", arrays, beta=0.5), rf"{key}: shape")


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.float16, bool])
@pytest.mark.parametrize(("name", "key"), [("advection1d", "tensor"), ("darcy2d", "nu")])
def test_a_dtype_that_is_not_float32_or_float64(tmp_path, name, key, dtype):
    arrays = MAKE[name]()
    arrays[key] = arrays[key].astype(dtype)
    _refused(name, write(tmp_path / "a.h5", arrays, beta=0.5), f"{key}: dtype")


def test_float64_is_read_as_float32(tmp_path):
    arrays = {key: values.astype(np.float64) for key, values in advection_arrays().items()}
    values = open_source("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5)).read([0])[0]
    assert values.dtype == np.float32


def test_a_file_without_samples(tmp_path):
    _refused("advection1d", write(tmp_path / "a.h5", advection_arrays(num_samples=0), beta=0.5), "holds no values")


def test_coordinates_shorter_than_the_field(tmp_path):
    for key, needed in (("x-coordinate", 16), ("t-coordinate", 5)):
        arrays = advection_arrays()
        arrays[key] = arrays[key][: needed - 1]
        _refused("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5), rf"{key}: shape \({needed - 1},\)")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("x-coordinate", lambda x: 2 * x - 1),  # the range of old releases
        ("x-coordinate", lambda x: 0.5 * x),
        ("x-coordinate", lambda x: x + 0.5),
        ("x-coordinate", lambda x: 100 * x),
        ("t-coordinate", lambda t: 2 * t),
        ("t-coordinate", lambda t: 0.5 * t),
        ("t-coordinate", lambda t: t + 1),
    ],
)
def test_coordinates_of_the_wrong_range(tmp_path, key, change):
    arrays = advection_arrays()
    arrays[key] = change(arrays[key])
    _refused("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5), f"{key} runs from")


@pytest.mark.parametrize("key", ["x-coordinate", "t-coordinate"])
def test_coordinates_that_are_uneven_backwards_or_not_finite(tmp_path, key):
    for change in (lambda v: v[::-1], lambda v: v**2, lambda v: np.zeros_like(v), lambda v: v * np.nan):
        arrays = advection_arrays()
        arrays[key] = change(arrays[key])
        _refused("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5), key)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("beta", [0.1, 0.5, 4.0, -0.5])
def test_waves_at_twice_or_half_their_beta(tmp_path, beta, factor):
    path = write(tmp_path / "old.hdf5", advection_arrays(frames=101, beta=factor * beta), beta=beta)
    _refused("advection1d", path, rf"waves move at {factor * beta:g}, {factor:g} times beta {beta:g}.*Aug 2023")


def test_fields_of_another_grid_than_the_coefficients(tmp_path):
    arrays = darcy_arrays() | {"tensor": darcy_arrays(points=4)["tensor"]}
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "differ between keys")


def test_fewer_coefficients_than_pressures(tmp_path):
    arrays = darcy_arrays() | {"nu": darcy_arrays(19)["nu"]}
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "differ between keys")


def test_darcy_with_more_than_one_frame(tmp_path):
    arrays = darcy_arrays()
    arrays["tensor"] = np.repeat(arrays["tensor"], 2, axis=1)
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "2 frames, expected 1")


def test_a_reduction_larger_than_the_grid(tmp_path):
    path = write(tmp_path / "a.h5", advection_arrays(), beta=0.5)
    _refused("advection1d", path, "reduced_resolution 16 is too large for 16 points in x", reduced_resolution=16)
    _refused("advection1d", path, "reduced_resolution_t 5 is too large for 5 frames", reduced_resolution_t=5)


def test_two_files_of_different_grids_or_times_are_both_named(tmp_path):
    one = write(tmp_path / "one.h5", advection_arrays(), beta=0.5)
    for other in (advection_arrays(points=32), advection_arrays(frames=9)):
        two = write(tmp_path / "two.h5", other, beta=0.5)
        with pytest.raises(DataError, match=r"one\.h5 and .*two\.h5"):
            open_source("advection1d", [one, two])


def test_a_file_given_twice_would_leak_training_samples_into_the_test(tmp_path):
    path = write(tmp_path / "one.h5", advection_arrays(), beta=0.5)
    with pytest.raises(DataError, match="given twice"):
        open_source("advection1d", [path, tmp_path / "." / "one.h5"])


def test_no_files_at_all():
    with pytest.raises(DataError, match="no files"):
        open_source("advection1d", [])


def test_every_problem_of_every_file_is_reported_at_once(tmp_path):
    bad = write(tmp_path / "bad.h5", {}, beta=0.5)
    with pytest.raises(DataError) as caught:
        open_source("advection1d", [tmp_path / "gone.h5", bad])
    assert "2 problems" in str(caught.value)
    assert "gone.h5" in str(caught.value) and "bad.h5" in str(caught.value)

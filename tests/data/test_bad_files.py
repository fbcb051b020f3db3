"""Files that are wrong in one way each: refused on opening, with file, key and what to do."""

import os

import h5py
import numpy as np
import pytest
from tiny_files import advection_arrays, darcy_arrays, write

from upsnb.config import DatasetConfig
from upsnb.data.datasets import find_files
from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.data.source import open_source
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
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "x has 4 in tensor and 8 in nu")


def test_fewer_coefficients_than_pressures(tmp_path):
    arrays = darcy_arrays() | {"nu": darcy_arrays(19)["nu"]}
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "sample has 20 in tensor and 19 in nu")


def test_darcy_with_more_than_one_frame(tmp_path):
    arrays = darcy_arrays()
    arrays["tensor"] = np.repeat(arrays["tensor"], 2, axis=1)
    _refused("darcy2d", write(tmp_path / "a.h5", arrays, beta=1.0), "2 frames, expected 1")


def test_a_reduction_larger_than_the_grid(tmp_path):
    path = write(tmp_path / "a.h5", advection_arrays(), beta=0.5)
    _refused("advection1d", path, "reduced_resolution 16 is too large for 16 points in x", reduced_resolution=16)
    _refused("advection1d", path, "reduced_resolution_t 5 is too large for 5 frames", reduced_resolution_t=5)


def test_a_stride_that_leaves_a_gap_where_a_period_ends(tmp_path):
    path = write(tmp_path / "a.h5", advection_arrays(), beta=0.5)
    _refused("advection1d", path, "reduced_resolution 3 does not divide 16 points in x", reduced_resolution=3)


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


@pytest.mark.parametrize("name", ["", "**x", "gone.h5", "../*/gone*", "/gone.h5", "[", "."])
def test_a_name_that_matches_nothing_is_told_with_what_is_there(tmp_path, name):
    write(tmp_path / "there.h5", {})
    with pytest.raises(DataError, match=r"not found in .*there\.h5.* -> correct data.root"):
        find_files("d", DatasetConfig(family="darcy2d", files=(name,)), tmp_path)


def test_no_files_at_all():
    with pytest.raises(DataError, match="no files"):
        open_source("advection1d", [])


def test_every_problem_of_every_file_is_reported_at_once(tmp_path):
    bad = write(tmp_path / "bad.h5", {}, beta=0.5)
    with pytest.raises(DataError) as caught:
        open_source("advection1d", [tmp_path / "gone.h5", bad])
    assert "2 problems" in str(caught.value)
    assert "gone.h5" in str(caught.value) and "bad.h5" in str(caught.value)


# -- another equation's values -----------------------------------------------------------------------------------------


def burgers_arrays(num_samples: int = 20, points: int = 64, frames: int = 21) -> dict:
    """Viscous Burgers flow of random sines on advection's own grid and times (Cole and Hopf's formula)."""
    nu, fine = 0.01, 512
    x, arrays = (np.arange(fine) + 0.5) / fine, advection_arrays(num_samples, points, frames)
    random = np.random.default_rng(0)
    kernel = np.fft.fftfreq(fine, 1 / fine)
    for sample in arrays["tensor"]:
        start = sum(random.uniform() * np.sin(2 * np.pi * k * x + random.uniform(0, 7)) for k in (1, 2))
        potential = np.exp(-np.cumsum(start - start.mean()) / fine / (2 * nu))
        for frame, time in zip(sample, arrays["t-coordinate"]):
            decay = np.exp(-nu * (2 * np.pi * kernel) ** 2 * time)
            phi = np.fft.fft(potential) * decay
            slope = np.fft.ifft(2j * np.pi * kernel * phi).real / np.fft.ifft(phi).real
            frame[:] = (-2 * nu * slope)[:: fine // points]
    return arrays


@pytest.mark.parametrize("beta", [0.0, 0.001, 0.1, 0.4, 1.0, 4.0, -2.0])
def test_another_equation_with_a_speed_to_its_name_is_no_advection(tmp_path, beta):
    path = write(tmp_path / "a.h5", burgers_arrays(), beta=beta)
    _refused("advection1d", path, "no other speed explains it -> another equation's values, or noise")


def test_noise_and_a_still_field_are_no_advection(tmp_path):
    arrays = advection_arrays(frames=21)
    noise = np.random.default_rng(0).normal(size=arrays["tensor"].shape).astype(np.float32)
    _refused("advection1d", write(tmp_path / "a.h5", arrays | {"tensor": noise}, beta=0.5), "no other speed")
    arrays["tensor"][:] = arrays["tensor"][:, :1]
    _refused("advection1d", write(tmp_path / "b.h5", arrays, beta=0.5), "waves move at 0 and beta is 0.5")


def test_waves_at_another_speed_than_the_attribute_say_theirs(tmp_path):
    arrays = advection_arrays(frames=101, beta=0.3)
    _refused("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5), r"waves move at 0\.(29|30)\d* and beta is 0\.5")


@pytest.mark.parametrize("beta", [0.001, 0.4, 1.0, 7.0])
def test_a_real_file_of_burgers_flow_is_no_advection_whatever_it_is_called(shared_data, tmp_path, beta):
    (tmp_path / f"1D_Advection_beta{beta}.hdf5").symlink_to(shared_data / "1D_Burgers_Sols_Nu0.01.hdf5")
    _refused("advection1d", tmp_path / f"1D_Advection_beta{beta}.hdf5", "no other speed explains it")


@pytest.mark.parametrize("resolution", [16, 18, 32, 64])
@pytest.mark.parametrize("num_times", [2, 13, 41])
@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0, 7.0, -0.3])
def test_generated_advection_moves_as_it_says(tmp_path, resolution, num_times, beta):
    for num_samples in (1, 20):
        path = generate(FAMILIES["advection1d"], tmp_path / "a.h5", num_samples, {"beta": beta}, resolution, num_times)
        assert open_source("advection1d", path).num_samples == num_samples


@pytest.mark.parametrize(
    ("name", "attributes", "found"),
    [
        ("1D_Burgers_Sols_Nu0.01.hdf5", {}, "it gives Nu, so another equation's"),
        ("ReacDiff.hdf5", {"Nu": 0.5, "rho": 1.0}, "it gives Nu, rho, so another equation's"),
        ("mine.hdf5", {}, "set this attribute to the beta"),
    ],
)
def test_a_file_without_its_parameter_is_never_to_be_renamed(tmp_path, name, attributes, found):
    said = _refused("advection1d", write(tmp_path / name, advection_arrays(), **attributes), found)
    assert "rename" not in said


# -- files that are no plain arrays --------------------------------------------------------------------------------


def reach(handle, key: str, how: str) -> None:
    """Put something else in the place of a dataset: a link, an empty space, an array that is made of others."""
    values = handle[key][()]
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    del handle[key]
    if how == "external link":
        handle[key] = h5py.ExternalLink("gone.h5", key)
    elif how == "external link to a pipe":
        handle[key] = h5py.ExternalLink("pipe", key)
    elif how == "dangling link":
        handle[key] = h5py.SoftLink("/gone")
    elif how == "link to itself":
        handle[key] = h5py.SoftLink(f"/{key}")
    elif how == "null space":
        handle.create_dataset(key, data=h5py.Empty("f4"))
    elif how == "virtual, of itself":
        layout[:] = h5py.VirtualSource(".", key, values.shape)
        handle.create_virtual_dataset(key, layout)
    elif how == "external storage":
        handle.create_dataset(key, values.shape, "f4", external=[("raw.bin", 0, values.nbytes)])
    elif how == "never written":
        handle.create_dataset(key, (10**12, *values.shape[1:]), "f4", chunks=(1, *values.shape[1:]))
    elif how == "never written, compressed":
        handle.create_dataset(key, (10**12, *values.shape[1:]), "f4", chunks=(1, *values.shape[1:]), compression="gzip")
    elif how == "compound":
        handle.create_dataset(key, values.shape, np.dtype([("re", "f4"), ("im", "f4")]))
        handle[key][...] = np.zeros(values.shape, handle[key].dtype)
    elif how == "texts":
        handle.create_dataset(key, data=np.full(values.shape, "a", dtype=object), dtype=h5py.string_dtype())


HOW = (
    *(
        "external link",
        "external link to a pipe",
        "dangling link",
        "link to itself",
        "null space",
        "virtual, of itself",
    ),
    *("external storage", "never written", "never written, compressed", "compound", "texts"),
)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "key"), KEYS)
def test_what_is_no_plain_array_is_refused_before_hdf5_follows_it(tmp_path, name, key, how):
    os.mkfifo(tmp_path / "pipe")
    path = write(tmp_path / "a.h5", MAKE[name](), beta=0.5)
    with h5py.File(path, "a") as handle:
        reach(handle, key, how)
    _refused(name, path, key)


@pytest.mark.parametrize("value", [h5py.Empty("f8"), "x" * 10000, np.zeros(3), np.nan, b"\xff", np.array([], "f8")])
def test_an_attribute_that_is_no_number(tmp_path, value):
    said = _refused(
        "advection1d", write(tmp_path / "a.h5", advection_arrays(), beta=value), "expected one finite number"
    )
    assert len(said) < 400


def test_a_file_of_many_keys_names_a_few(tmp_path):
    path = write(tmp_path / "a.h5", {f"{n:04}": np.zeros(1) for n in range(1000)} | {"a\nb": np.zeros(1)})
    assert len(_refused("advection1d", path, "keys found: 0000, 0001")) < 400


def test_a_folder_of_bad_files_is_cut_and_counted(tmp_path):
    with pytest.raises(DataError, match=r"30 problems(.|\n)*and 10 more$"):
        open_source("advection1d", [tmp_path / f"{n}.h5" for n in range(30)])

"""Readers give what the file holds, or an error that names file, key and sample; splits never overlap."""

import multiprocessing
import pickle

import h5py
import numpy as np
import pytest
from tiny_files import advection_arrays, darcy_arrays, write

from upsnb.data import source as reading
from upsnb.data.families import FAMILIES
from upsnb.data.source import LAYOUTS, open_source, split_samples
from upsnb.errors import DataError

MAKE = {"advection1d": advection_arrays, "darcy2d": darcy_arrays}


@pytest.fixture
def advection(tmp_path):
    return write(tmp_path / "1D_Advection_Sols_beta0.5.hdf5", advection_arrays(), beta=0.5)


@pytest.fixture
def darcy(tmp_path):
    return write(tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5", darcy_arrays(), beta=1.0)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_table_row_agrees_with_itself(family):
    assert len(family.periodic) == len(family.domain) == family.num_dims
    assert len(family.input_channels) == len(set(family.input_channels))
    assert family.layout in LAYOUTS


# --- real files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "stride", "stride_t"),
    [
        ("advection1d", "1D_Advection_Sols_beta0.4.hdf5", 1, 1),
        ("advection1d", "1D_Advection_Sols_beta1.0.hdf5", 4, 5),
        ("darcy2d", "2D_DarcyFlow_beta1.0_Train.hdf5", 1, 1),
        ("darcy2d", "2D_DarcyFlow_beta1.0_res128.hdf5", 2, 1),
    ],
)
def test_real_files_read_as_plain_strided_arrays(shared_data, name, file, stride, stride_t):
    source = open_source(name, shared_data / file, stride, stride_t)
    inputs, targets = source.read_all()
    with h5py.File(shared_data / file) as handle:
        strides = (slice(None), slice(None, None, stride_t)) + (slice(None, None, stride),) * source.family.num_dims
        expected = handle["tensor"][:][strides]
        np.testing.assert_array_equal(targets[:, :, 0], expected)
        if name == "darcy2d":
            np.testing.assert_array_equal(inputs[:, 0, 0], handle["nu"][:, ::stride, ::stride])
        else:
            assert np.shares_memory(inputs, targets)
            np.testing.assert_allclose(source.times, handle["t-coordinate"][: handle["tensor"].shape[1]][::stride_t])
        np.testing.assert_array_equal(source.coordinates[0], handle["x-coordinate"][::stride])
    assert inputs.dtype == targets.dtype == np.float32
    assert targets.shape == (source.num_samples, source.num_times, 1, *source.grid_shape)


def _plain(handle: h5py.File, channel: str, key: str, place: int, given: bool) -> np.ndarray:
    """(n, T, *grid) of one channel, with no more than its layout known."""
    if key in handle:
        values = handle[key][()]
        many = "velocity" in handle
        return (values[:, None] if given else values)[..., place] if many else values[:, None] if given else values
    return np.stack([handle[name][key][..., place] for name in sorted(handle)])


def test_every_real_file_reads_as_plain_strided_arrays_of_its_channels(real_file):
    name, path = real_file
    stride, stride_t = 2, 1 if name == "darcy2d" else 5
    source = open_source(name, path, stride, stride_t)
    inputs, targets = source.read(np.arange(source.num_samples))
    family, seen = source.family, {}
    assert inputs.shape[2] == len(family.input_channels) and targets.shape[2] == len(family.channels)
    with h5py.File(path) as handle:
        for side, channels, given in ((targets, family.channels, False), (inputs, family.given, True)):
            first = side.shape[2] - len(channels)
            for number, (channel, key) in enumerate(channels.items()):
                seen[key] = seen.get(key, -1) + 1
                values = _plain(handle, channel, key, seen[key], given)[:, ::stride_t]
                values = values[(..., *(slice(None, None, stride),) * family.num_dims)]
                found = side[:, :, first + number]
                np.testing.assert_array_equal(found, np.broadcast_to(values, found.shape))
    assert np.isfinite(source.parameters).all() and source.parameters.shape[1] == len(family.parameters)


def test_a_real_file_opens_as_no_other_family(real_file):
    name, path = real_file
    for other in FAMILIES:
        if other != name:
            with pytest.raises(DataError, match="->"):
                open_source(other, path)


def test_official_resolution_reduces_to_the_small_files_grid_and_times(shared_data):
    reduced = open_source("advection1d", shared_data / "1D_Advection_Sols_beta1.0.hdf5", 4, 5)
    small = open_source("advection1d", shared_data / "1D_Advection_Sols_beta0.4.hdf5")
    np.testing.assert_allclose(reduced.coordinates[0], small.coordinates[0], atol=1e-6)
    np.testing.assert_allclose(reduced.times, small.times, atol=1e-6)
    assert reduced.dt == pytest.approx(small.dt) == pytest.approx(0.05)


def test_real_files_of_two_betas_mix_once_their_grids_agree(shared_data, tmp_path):
    source = open_source("advection1d", shared_data / "1D_Advection_Sols_beta1.0.hdf5", 4, 5)
    arrays = {"tensor": source.read_all()[0][:, :, 0], "x-coordinate": source.coordinates[0]}
    arrays["t-coordinate"] = np.append(source.times, np.float32(2.05))
    coarse = write(tmp_path / "coarse.hdf5", arrays, beta=1.0)
    mixed = open_source("advection1d", [coarse, shared_data / "1D_Advection_Sols_beta0.4.hdf5"])
    assert mixed.num_samples == 202
    np.testing.assert_allclose(mixed.parameters[[0, 1, 2, 201], 0], [1.0, 1.0, 0.4, 0.4])


@pytest.mark.parametrize("file", ["1D_Burgers_Sols_Nu0.01.hdf5", "2D_DarcyFlow_beta1.0_Train.hdf5", "2D_rdb_NA_NA.h5"])
def test_a_real_file_of_another_family_is_refused(shared_data, file):
    with pytest.raises(DataError, match=file):
        open_source("advection1d", shared_data / file)


# --- reading --------------------------------------------------------------------------------------------------------


def test_samples_come_in_the_order_asked_for_across_files(tmp_path):
    betas = (0.5, 0.25)
    files = [write(tmp_path / f"{beta}.h5", advection_arrays(6, beta=beta), beta=beta) for beta in betas]
    everything = np.concatenate([advection_arrays(6, beta=beta)["tensor"] for beta in betas])
    source = open_source("advection1d", files)
    order = [11, 0, 1, 2, 7, 6, 5, 5]
    np.testing.assert_array_equal(source.read(order)[0][:, :, 0], everything[order])
    np.testing.assert_array_equal(source.file_of_sample, [0] * 6 + [1] * 6)
    np.testing.assert_allclose(source.parameters[:, 0], [0.5] * 6 + [0.25] * 6)


@pytest.mark.parametrize("times", [slice(1, 3), slice(None, None, -1), [2, 0, 2], [1], slice(0, None, 2), [0, 2, 1]])
def test_frames_are_chosen_after_reduction(tmp_path, times):
    arrays = advection_arrays(frames=9)
    source = open_source("advection1d", write(tmp_path / "a.h5", arrays, beta=0.5), 2, 3)
    assert source.num_times == 3
    expected = arrays["tensor"][:, ::3, ::2][4:7][:, times]
    np.testing.assert_array_equal(source.read([4, 5, 6], times)[0][:, :, 0], expected)


def test_small_blocks_and_one_large_block_read_the_same(advection, monkeypatch):
    whole = open_source("advection1d", advection).read_all()[0]
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1)
    np.testing.assert_array_equal(open_source("advection1d", advection).read(np.arange(20))[0], whole)


def test_a_cap_applies_to_each_file(advection, tmp_path):
    second = write(tmp_path / "second.h5", advection_arrays(3), beta=0.5)
    assert open_source("advection1d", [advection, second], num_samples=5).file_of_sample.tolist() == [0] * 5 + [1] * 3


def test_a_source_survives_pickling_after_it_was_read(advection):
    source = open_source("advection1d", advection)
    before = source.read([3])[0]
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(copy.read([3])[0], before)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_process_reads_a_source_that_is_open_here(advection, method):
    source = open_source("advection1d", advection)
    expected = source.read([7, 2])[0]
    with multiprocessing.get_context(method).Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply_async(source.read, ([7, 2],)).get()[0], expected)
    np.testing.assert_array_equal(source.read([7, 2])[0], expected)


@pytest.mark.parametrize("samples", [[20], [-1], [0.5], [[0, 1]], [True, False]])
def test_impossible_samples_are_refused(advection, samples):
    with pytest.raises(DataError, match="sample"):
        open_source("advection1d", advection).read(samples)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "key"), [("advection1d", "tensor"), ("darcy2d", "tensor"), ("darcy2d", "nu")])
def test_a_value_that_is_not_finite_names_file_key_and_sample(tmp_path, name, key, bad):
    arrays = MAKE[name]()
    arrays[key][13, ..., 2] = bad
    source = open_source(name, write(tmp_path / "holes.hdf5", arrays, beta=0.5))
    with pytest.raises(DataError, match=rf"holes\.hdf5: {key}: NaN or infinity in sample 13"):
        source.read_all()
    source.read(np.delete(np.arange(20), 13))  # the others are fine


# --- parameters -----------------------------------------------------------------------------------------------------


def test_a_missing_attribute_is_taken_from_the_file_name(tmp_path):
    path = write(tmp_path / "1D_Advection_Sols_beta0.5.hdf5", advection_arrays())
    assert open_source("advection1d", path).parameters[0, 0] == 0.5


@pytest.mark.parametrize("name", ["solution.hdf5", "1D_Advection_beta.hdf5", "alphabeta3.hdf5"])
def test_a_missing_attribute_and_no_value_in_the_file_name_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match=f"{name}.*'beta' is missing"):
        open_source("advection1d", write(tmp_path / name, advection_arrays()))


@pytest.mark.parametrize("value", [np.nan, np.inf, "fast", [0.1, 0.2]])
def test_an_attribute_that_is_not_one_finite_number_is_an_error(tmp_path, value):
    with pytest.raises(DataError, match="expected one finite number"):
        open_source("advection1d", write(tmp_path / "a_beta0.5.h5", advection_arrays(), beta=value))


# --- splits ---------------------------------------------------------------------------------------------------------


def _two_files(tmp_path, sizes=(20, 37)):
    return [write(tmp_path / f"{size}.h5", advection_arrays(size), beta=0.5) for size in sizes]


@pytest.mark.parametrize("convention", ["pdebench", "first", "last", "distinct"])
@pytest.mark.parametrize("fractions", [(0.1, 0.1), (0.0, 0.3), (0.25, 0.05)])
def test_splits_are_disjoint_sorted_and_cover_everything(tmp_path, convention, fractions):
    source = open_source("advection1d", _two_files(tmp_path))
    splits = split_samples(source, convention, *fractions)
    assert list(splits) == ["train", "validation", "test"]
    assert all(np.all(np.diff(part) > 0) for part in splits.values())
    np.testing.assert_array_equal(np.sort(np.concatenate(list(splits.values()))), np.arange(57))
    assert (len(splits["validation"]) == 0) == (fractions[0] == 0)


@pytest.mark.parametrize(
    ("convention", "order"), [("first", "test validation train"), ("last", "train validation test")]
)
def test_validation_lies_between_training_and_test_in_every_file(tmp_path, convention, order):
    source = open_source("advection1d", _two_files(tmp_path))
    splits = split_samples(source, convention)
    for file in (0, 1):
        parts = [part[source.file_of_sample[part] == file] for part in (splits[name] for name in order.split())]
        np.testing.assert_array_equal(np.concatenate(parts), np.flatnonzero(source.file_of_sample == file))
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [47, 5, 5]


def test_pdebench_tests_single_array_families_on_the_first_tenth(advection, darcy):
    for name, path in (("advection1d", advection), ("darcy2d", darcy)):
        assert split_samples(open_source(name, path), "pdebench")["test"].tolist() == [0, 1]


def test_a_split_without_samples_says_how_many_there_are(shared_data):
    source = open_source("advection1d", shared_data / "1D_Advection_Sols_beta1.0.hdf5")
    with pytest.raises(DataError, match=r"test split would be empty: 2 samples.*->"):
        split_samples(source, "pdebench", validation_fraction=0)


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.1, 0.0), (0.01, 0.1), (-0.1, 0.1), (0.1, 1.5)])
def test_fractions_that_leave_a_split_empty_are_refused(advection, fractions):
    with pytest.raises(DataError, match="split would be empty"):
        split_samples(open_source("advection1d", advection), "first", *fractions)


def test_an_unknown_family_is_refused(advection):
    with pytest.raises(DataError, match="one of advection1d, .*darcy2d"):
        open_source("advection", advection)

"""Files of groups and of many arrays that are wrong in one way each: refused, with file, key and what to do."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.data.source import open_source
from upsnb.errors import DataError


def _random(family):
    """A solver that solves nothing."""

    def solve(seed, samples, parameters, resolution, times):
        grid = (resolution,) * family.num_dims
        for sample in samples:
            draw = np.random.default_rng(sample)
            yield {channel: draw.normal(size=(len(times), *grid)) for channel in family.channels} | {
                channel: draw.normal(size=grid) for channel in family.given
            }

    return replace(family, solve=solve)


@pytest.fixture
def broken(tmp_path):
    """`broken(family, change)`: a file of three samples that `change` has opened and spoilt."""

    def make(name, change):
        path = generate(_random(FAMILIES[name]), tmp_path / "broken.h5", 3, resolution=8, num_times=4)
        open_source(name, path).read_all()
        with h5py.File(path, "r+") as handle:
            change(handle)
        return path

    return make


def put(handle, key, values):
    del handle[key]
    handle[key] = values


def link(handle, key, target):
    del handle[key]
    handle[key] = target


def declare(handle, key, shape):
    del handle[key]
    handle.create_dataset(key, shape, "f4", chunks=(1, *(min(8, size) for size in shape[1:])), compression="gzip")


def config(handle, found, text):
    group = handle["0001"] if "0001" in handle else handle
    group.attrs["config"] = group.attrs["config"].replace(found, text)


GROUPED = {
    "no data": (lambda h: h["0001"].pop("data"), "key '0001/data' is missing or a group"),
    "no times": (lambda h: h["0001/grid"].pop("t"), "key '0001/grid/t' is missing"),
    "no groups": (lambda h: h.clear(), "no groups, expected one a sample"),
    "an array among groups": (lambda h: h.create_dataset("tensor", data=np.zeros(3)), "key 'tensor/data' is missing"),
    "a group elsewhere": (lambda h: link(h, "0001", h5py.ExternalLink("gone.h5", "/")), "0001: a link to another file"),
    "data elsewhere": (lambda h: link(h, "0001/data", h5py.ExternalLink("gone.h5", "/")), "0001/data: a link to"),
    "a grid that is nowhere": (lambda h: link(h, "0001/grid", h5py.SoftLink("/gone")), "'0001/grid/x' is missing"),
    "three channels": (lambda h: [put(h, f"{n}/data", np.zeros((4, 8, 8, 3), "f4")) for n in h], "3 channels, expect"),
    "a channel more": (lambda h: put(h, "0001/data", np.zeros((4, 8, 8, 3), "f4")), r"0001/data \(4, 8, 8, 3\) -> all"),
    "one axis less": (lambda h: put(h, "0001/data", np.zeros((4, 8, 8), "f4")), r"expected axes \[time, x, y, channel"),
    "other frames": (lambda h: put(h, "0001/data", np.zeros((3, 8, 8, 2), "f4")), r"0001/data \(3, 8, 8, 2\) -> all"),
    "another grid": (lambda h: put(h, "0001/grid/x", np.zeros(8, "f4")), "grid or times of 0001 differ"),
    "no frames": (lambda h: put(h, "0000/data", np.zeros((0, 8, 8, 2), "f4")), "holds no values"),
    "integers": (lambda h: put(h, "0001/data", np.zeros((4, 8, 8, 2), "i4")), "dtype int32, expected float32"),
    "unsorted times": (lambda h: put(h, "0000/grid/t", np.array([0, 3, 1, 5], "f4")), "not increasing in even steps"),
    "another end": (lambda h: put(h, "0000/grid/t", np.linspace(0, 9, 4, dtype="f4")), "t runs from 0 to 9"),
    "another domain": (lambda h: put(h, "0000/grid/x", np.linspace(0, 9, 8, dtype="f4")), "x runs from 0 to 9"),
    "never written": (lambda h: declare(h, "0001/data", (10**6, 10**3, 10**3, 2)), "never written to its end"),
    "no parameters": (lambda h: h["0001"].attrs.pop("config"), "attribute 'Du' is missing"),
    "no number": (lambda h: config(h, "Dv: 0.005", "Dv: fast"), "'Dv' is 'fast' -> expected one finite"),
}  # fmt: skip
MANY = {
    "no force": (lambda h: h.pop("force"), "key 'force' is missing"),
    "elsewhere": (lambda h: link(h, "velocity", h5py.ExternalLink("gone.h5", "/")), "velocity: a link to another file"),
    "one component": (lambda h: put(h, "velocity", h["velocity"][..., :1]), "velocity: 1 channels, expected Vx, Vy"),
    "fewer samples": (lambda h: put(h, "force", h["force"][:2]), "sample has 3 in velocity and 2 in force"),
    "fewer points": (lambda h: put(h, "particles", h["particles"][:, :, :4]), "x has 8 in velocity and 4 in particles"),
    "fewer frames": (lambda h: put(h, "particles", h["particles"][:, :3]), "time has 4 in velocity and 3 in particles"),
    "no times": (lambda h: h.pop("t"), "key 't' is missing"),
    "fewer times": (lambda h: put(h, "t", h["t"][:, :3]), r"t: shape \(3, 3\), expected \(3, 4\)"),
    "frames that were not reached": (lambda h: h["t"].write_direct(np.zeros((3, 4), "f4")), "not increasing"),
    "times of their own": (lambda h: put(h, "t", h["t"][()] * np.array([[1], [2], [1]], "f4")), "at different times"),
    "never written": (lambda h: declare(h, "velocity", (10**6, 10**3, 10**3, 10**3, 2)), "never written to its end"),
    "no parameters": (lambda h: h.attrs.pop("config"), "attribute 'NU' is missing"),
}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        pytest.param(name, *case, id=f"{name}, {what}")
        for name, cases in (("diffreact2d", GROUPED), ("incompressible2d", MANY))
        for what, case in cases.items()
    ],
)
def test_what_is_wrong_is_said_on_opening(broken, name, change, said):
    with pytest.raises(DataError, match=rf"broken\.h5: .*{said}") as caught:
        open_source(name, broken(name, change))
    assert " -> " in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [("diffreact2d", "0001/data"), ("incompressible2d", "force")])
def test_a_value_that_is_not_finite_names_its_sample(broken, name, key):
    def spoil(handle):
        values = handle[key][()]
        values[(1,) if name == "incompressible2d" else ...].flat[5] = np.nan
        handle[key][...] = values

    source = open_source(name, broken(name, spoil))
    with pytest.raises(DataError, match="NaN or infinity in sample 1"):
        source.read_all()
    source.read([0, 2])


def test_float64_files_read_as_float32_ones(broken):
    def widen(handle):
        for name in list(handle):
            put(handle, f"{name}/data", handle[f"{name}/data"][()].astype("f8"))

    wide, narrow = (open_source("diffreact2d", broken("diffreact2d", change)) for change in (widen, lambda h: None))
    np.testing.assert_array_equal(wide.read([0])[0], narrow.read([0])[0])
    assert wide.read([0])[0].dtype == np.float32


def test_each_group_has_its_own_parameters(broken):
    source = open_source("diffreact2d", broken("diffreact2d", lambda h: config(h, "Du: 0.001", "DU: 0.25")))
    np.testing.assert_allclose(source.parameters[:, 0], [0.001, 0.25, 0.001])


@pytest.mark.parametrize(
    ("ends", "said"), [("periodic", None), ("trans", "open ends, and this family is periodic -> take")]
)
def test_a_gas_that_may_leave_its_box_is_refused_and_viscosities_come_from_the_name(tmp_path, ends, said):
    path = tmp_path / f"1D_CFD_Rand_Eta1.e-8_Zeta0.1_{ends}_Train.hdf5"
    generate(_random(FAMILIES["cfd1d"]), path, 2, resolution=8, num_times=4)
    with h5py.File(path, "r+") as handle:
        handle.attrs.pop("eta"), handle.attrs.pop("zeta")
    if said:
        with pytest.raises(DataError, match=said):
            open_source("cfd1d", path)
    else:
        np.testing.assert_allclose(open_source("cfd1d", path).parameters[0], [1e-8, 0.1])

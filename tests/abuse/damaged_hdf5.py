"""PDEBench files that are wrong as disks, scripts and other equations make them, each a function of its seed."""

import random
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate

KEYS = {
    "advection1d": ("tensor", "x-coordinate", "t-coordinate"),
    "darcy2d": ("tensor", "nu", "x-coordinate"),
    "diffreact2d": ("0001/data", "0000/grid/x", "0000/grid/t"),
    "incompressible2d": ("velocity", "force", "t"),
}


def damage(seed: int, path: Path) -> str:
    """Write one file; the family that it is to be read as. A few are still right."""
    draw = random.Random(seed)
    family = draw.choice(list(KEYS))
    resolution = draw.choice([8, 32]) if family == "advection1d" else 8
    numbers = {"num_samples": draw.choice([2, 10, 20]), "seed": draw.randrange(9)}
    parameters = {"beta": 0.4} if family == "advection1d" else {}
    generate(_quick(FAMILIES[family]), path, parameters=parameters, resolution=resolution, num_times=13, **numbers)
    if FAMILIES[family].layout == "single_array":
        _stored_otherwise(path, draw)
    with h5py.File(path, "r+") as handle:
        changes = draw.sample([_link, _other, _values, _values, _coordinate, _attribute], draw.choice([1, 1, 2]))
        for change in sorted(changes, key=lambda change: change is _link):  # reading that crashes as well
            try:
                change(handle, family, draw)
            except (IndexError, KeyError, TypeError, ValueError):
                pass  # the change before left nothing to change
    draw.choice([_same, _same, _cut, _flip, _flip, _foreign])(path, draw)
    return family


def _quick(family):
    """The same with noise for the two families whose solvers take a second."""

    def noise(seed, samples, parameters, resolution, times):
        grid = (resolution,) * family.num_dims
        for sample in samples:
            random = np.random.default_rng([seed, sample])
            moving = {channel: random.normal(size=(len(times), *grid)) for channel in family.channels}
            yield moving | {channel: random.normal(size=grid) for channel in family.given}

    return family if family.layout == "single_array" else replace(family, solve=noise)


def _stored_otherwise(path: Path, draw: random.Random) -> None:
    """The same arrays in chunks, compressed, by another version of the library, behind a block of another program."""
    with h5py.File(path) as handle:
        arrays, beta = {key: values[()] for key, values in handle.items()}, handle.attrs["beta"]
    storage = {}
    if draw.random() < 0.4:
        storage = {"chunks": True, "compression": draw.choice([None, "gzip", "lzf"]), "shuffle": True}
    with h5py.File(path, "w", libver=draw.choice([None, "latest"]), userblock_size=draw.choice([0, 0, 512])) as handle:
        for key, values in arrays.items():
            handle.create_dataset(key, data=values, **storage)
        handle.attrs["beta"] = beta


# -- inside ------------------------------------------------------------------------------------------------------------


def _link(handle, family, draw):
    """Something else than a plain array under a key."""
    key = draw.choice(KEYS[family])
    values = handle[key][()]
    del handle[key]
    how = draw.randrange(12)
    if how == 0:
        handle[key] = h5py.ExternalLink(draw.choice(["gone.h5", "/dev/zero", "/"]), key)
    elif how == 1:
        handle[key] = h5py.SoftLink(draw.choice(["/gone", f"/{key}", "/"]))
    elif how == 2:
        handle.create_group(key)
    elif how == 3:
        handle.create_dataset(key, data=h5py.Empty("f4"))
    elif how in (4, 5):
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:] = h5py.VirtualSource("." if how == 4 else handle.filename, key, values.shape)
        handle.create_virtual_dataset(key, layout)
    elif how == 6:
        handle.create_dataset(key, values.shape, "f4", external=[("gone.bin", 0, values.nbytes)])
    elif how == 7:
        handle.create_dataset(key, (10**12, *values.shape[1:]), "f4", chunks=(1, *values.shape[1:]), compression="gzip")
    elif how == 8:
        handle.create_dataset(key, values.shape, np.dtype([("re", "f4"), ("im", "f4")]))[...] = 0
    elif how == 9:
        handle.create_dataset(key, data=np.full(values.shape, "a", dtype=object), dtype=h5py.string_dtype())
    elif how == 10:
        handle[f"{key} (copy)"] = values
    else:
        handle[key] = np.dtype("f4")  # a type with a name


def _other(handle, family, draw):
    """Other axes, another type, another number of samples."""
    key = draw.choice(KEYS[family])
    values = handle[key][()]
    del handle[key]
    kind = draw.choice(["i4", "f2", "f8", "c8", "bool", "u1", ">f4"])
    handle[key] = draw.choice(
        [values[:0], values[..., :1], values[:1], values.T, values[None], values.ravel(), values[..., ::-1], values[1:],
         values.astype(kind), values.astype(kind), np.float32(3)]
    )  # fmt: skip


def _values(handle, family, draw):
    """Numbers that no solver gave."""
    key = draw.choice(KEYS[family][:2])
    values = np.array(handle[key][()])
    draw.choice(
        [
            lambda: values.flat.__setitem__(draw.randrange(values.size), draw.choice([np.nan, np.inf, 3e38])),
            lambda: values.fill(draw.choice([0.0, 1.0, np.nan, 3e38])),
            lambda: np.copyto(values, np.random.default_rng(0).normal(size=values.shape)),
            lambda: np.copyto(values, values**3),
            lambda: np.copyto(values, values[..., ::-1].copy()),
        ]
    )()
    handle[key][...] = values


def _coordinate(handle, family, draw):
    key = draw.choice([name for name in KEYS[family] if "coordinate" in name or "grid" in name])
    x = handle[key][()]
    change = [x[::-1], np.sort(-x), x**2, 2 * x, x - 1, x * np.nan, np.zeros_like(x), x[: len(x) // 2], np.roll(x, 1)]
    del handle[key]
    handle[key] = draw.choice(change)


def _attribute(handle, family, draw):
    owner = handle if handle.attrs.get("config") or "beta" in handle.attrs else handle["0001"]
    name = "beta" if "beta" in owner.attrs else "config"
    del owner.attrs[name]
    value = draw.choice(
        [None, h5py.Empty("f8"), "0.4", "x" * 9000, b"\xff", np.zeros(3), np.nan, np.inf, -0.4, 4.0, 1e300, 0.2, 0.8]
    )
    if value is not None:
        owner.attrs[name] = value
    handle.attrs[draw.choice(["Nu", "eta", "a\nb"])] = 0.01


# -- outside -----------------------------------------------------------------------------------------------------------


def _same(path, draw):
    pass


def _cut(path, draw):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * draw.random())] + draw.choice([b"", b"", bytes(5000)]))


def _flip(path, draw):
    """Bits, most of them where HDF5 keeps its own books."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 3, 20])):
        at = draw.randrange(min(len(content), draw.choice([300, 2000, 5000, 10**9])))
        content[at] = draw.choice([0, 255, content[at] ^ (1 << draw.randrange(8)), draw.randrange(256)])
    path.write_bytes(content)


def _foreign(path, draw):
    path.write_bytes(
        draw.choice([b"", b"<html>404</html>", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04" + bytes(99), bytes(4096)])
    )

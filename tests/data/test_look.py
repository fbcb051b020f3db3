"""A look into files: what they hold, and a row for them that opens."""

import h5py
import numpy as np
import pytest
import yaml
from tiny_files import advection_arrays, own_fields, well_file, write

from upsnb import __main__ as command
from upsnb import overlays
from upsnb.data import look
from upsnb.data.families import family_of
from upsnb.data.source import open_source

WAVES = own_fields(12, 9, (16,), 1)[:, :, 0]  # 12 samples, 9 times, 16 points
FLOW = own_fields(12, 9, (16, 24))  # and two channels


def of_npz(folder):
    np.savez(folder / "a.npz", u=WAVES, t=np.arange(9) / 8, x=np.arange(16) / 8, nu=np.arange(12.0))
    return folder / "a.npz"


def of_npy(folder):
    np.save(folder / "flow.npy", np.moveaxis(FLOW, 2, -1))
    return folder / "flow.npy"


def time_last(folder):
    np.save(folder / "a.npy", np.moveaxis(own_fields(12, 9, (16, 16), 1)[:, :, 0], 1, -1))
    return folder / "a.npy"


def groups(folder):
    arrays = {f"run_{n}/state/u": WAVES[n] for n in range(12)} | {f"run_{n}/t": np.arange(9.0) for n in range(12)}
    return write(folder / "a.h5", arrays)


def static_pair(folder):
    return write(folder / "a.h5", {"input": FLOW[:, 0, 0, :, :16], "output": FLOW[:, 0, 1, :, :16]})


PROPOSED = {  # axes of each array, what is given, other settings
    of_npz: (
        {"u": "sample time x"},
        (),
        {"times": "t", "domain": [[0.0, 2.0]], "parameters": {"nu": "nu"}, "periodic": [True]},
    ),
    of_npy: ({"array": "sample time x y channel"}, (), {"time_step": 1.0, "periodic": [True, True]}),
    time_last: ({"array": "sample x y time"}, (), {"periodic": [True, True]}),
    groups: ({"run_*/state/u": "time x"}, (), {"times": "run_*/t"}),
    static_pair: ({"input": "sample x y", "output": "sample x y"}, ("input",), {"periodic": [True, False]}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), PROPOSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_the_proposed_row_can_be_pasted_and_opens(tmp_path, make, expected):
    path, (axes, given, others) = make(tmp_path), expected
    lines = look.propose(path)
    assert lines[-1].startswith("# opens: 12 samples")
    config = overlays.resolve(yaml.safe_load("\n".join(lines)))
    (dataset,) = config.data.datasets.values()
    row = dataset.custom
    assert {key: " ".join(array.axes) for key, array in row.arrays.items()} == axes
    assert tuple(key for key, array in row.arrays.items() if array.given) == given
    assert {name: row.model_dump(mode="json")[name] for name in others} == others
    assert all("# guess: " in line for line in lines if "axes: " in line)
    open_source(family_of(dataset), path).read_all()


def test_the_wells_layout_says_itself_what_its_axes_are(tmp_path):
    (dataset,) = overlays.resolve(
        yaml.safe_load("\n".join(look.propose(well_file(tmp_path / "w.hdf5"))))
    ).data.datasets.values()
    row, source = dataset.custom, open_source(family_of(dataset), tmp_path / "w.hdf5")
    assert row.periodic == (True, False) and row.domain == ((0.0, 1.0), (0.0, 1.0))
    assert row.vectors == (("velocity_x", "velocity_y"),)
    assert row.parameters == {"viscosity": "@viscosity", "forcing": "scalars/forcing"}
    np.testing.assert_allclose(source.parameters[[0, 9]], [[0.1, 1], [0.1, 2]])
    strain = tuple(f"strain_{ends}" for ends in ("xx", "xy", "yx", "yy"))
    assert source.family.output_channels == ("density", "velocity_x", "velocity_y", *strain)
    assert source.family.given == {"depth": "t0_fields/depth"}
    with h5py.File(tmp_path / "w.hdf5") as handle:
        inputs = source.read([4], [2])[0][0, 0]
        np.testing.assert_array_equal(inputs[2], handle["t1_fields/velocity"][4, 2, ..., 1])
        np.testing.assert_array_equal(inputs[5], handle["t2_fields/strain"][4, 2, ..., 1, 0])
        np.testing.assert_array_equal(inputs[7], handle["t0_fields/depth"])


def test_contents_are_paths_shapes_ranges_and_attributes_in_bounded_lines(tmp_path):
    (line, times), seen = look.contents(groups(tmp_path)), WAVES[0, [0, 4, 8]]
    assert line == f"run_*/state/u: float64 (9, 16), 12 of them, from {seen.min():.4g} to {seen.max():.4g}"
    assert times == "run_*/t: float64 (9,), 12 of them, from 0 to 8"
    path = write(
        tmp_path / "b.h5", {f"array {chr(97 + n)}": np.zeros(3) for n in range(26)}, solver="mine", note="x" * 999
    )
    lines = look.contents(path)
    assert "..." in lines and "@solver = 'mine'" in lines and len(lines) < 30 and max(map(len, lines)) < 200


def test_what_cannot_be_looked_at_is_said_in_its_line(tmp_path):
    path = write(tmp_path / "a.h5", {"text": np.array([b"a", b"b"]), "gap": np.array([1, np.nan, 3])})
    with h5py.File(path, "a") as handle:
        handle.create_dataset("huge", (10**6, 10**6), "f4", chunks=(1000, 1000), compression="gzip")
        handle.create_dataset("lump", (4200, 4200), "f4", chunks=(4200, 4200), compression="lzf")[0, 0] = 1
        handle["far"] = h5py.ExternalLink("gone.h5", "/u")
    said = dict(line.split(": ", 1) for line in look.contents(path))
    assert said["gap"] == "float64 (3,), from 1 to 3, some not finite"
    assert "never written to its end" in said["huge"] or "takes" in said["huge"]
    assert "not looked at (chunks of 67 MiB)" in said["lump"]
    assert said["text"].endswith("no numbers") and "far" not in said


def test_the_command_prints_a_row_where_no_family_fits(tmp_path, capsys):
    assert command.main(["data", "look", str(of_npz(tmp_path))]) == command.OK
    told = capsys.readouterr().out
    assert "u: float64 (12, 9, 16), from" in told and "none of the known families" in told and "family: custom" in told
    known = write(tmp_path / "1D_Advection_Sols_beta0.5.hdf5", advection_arrays())
    assert command.main(["data", "look", str(known)]) == command.OK
    told = capsys.readouterr().out
    assert "is read as: advection1d" in told and "family: custom" not in told


@pytest.mark.parametrize(("content", "said"), [
    (b"<html>", "not an HDF5 file"), (b"", "0 bytes"), (None, "no such file"),
    (b"\x89HDF\r\n\x1a\n" + bytes(90), "damaged"),
])  # fmt: skip
def test_a_damaged_file_is_one_sentence(tmp_path, capsys, content, said):
    path = tmp_path / "bad.h5"
    if content is not None:
        path.write_bytes(content)
    assert command.main(["data", "look", str(path)]) == command.REFUSED
    told = capsys.readouterr().err
    assert said in told and " -> " in told and told.count("\n") == 1


def test_a_file_without_fields_says_so_and_keeps_what_it_holds(tmp_path, capsys):
    path = write(tmp_path / "a.h5", {"mean": np.zeros(3)})
    assert command.main(["data", "look", str(path)]) == command.OK
    told = capsys.readouterr().out
    assert "mean: float64 (3,)" in told and "looks like fields of several samples -> write the row by hand" in told

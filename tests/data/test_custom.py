"""Arrays of a user's own: whatever they are stored in and in whichever order, they are data like any other."""

import json
import pickle
import re
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from matplotlib.text import Text
from tiny_files import own_fields, well_file, write

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import DatasetConfig
from upsnb.data import audit, datasets, look, numpy_files
from upsnb.data.families import family_of
from upsnb.data.source import open_source, split_samples
from upsnb.errors import ConfigError, DataError
from upsnb.memory import predict
from upsnb.report import data_report, figures, results
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training.trained import load_model

FIELDS = own_fields()  # (10, 6, 2, 8, 12)
ORDERS = {"sample": 0, "time": 1, "channel": 2, "x": 3, "y": 4}


def ordered(axes: list[str], fields=FIELDS) -> np.ndarray:
    return np.transpose(fields, [ORDERS[axis] for axis in axes])


def row_of(axes: list[str], key: str = "u", **others) -> dict:
    arrays = {key: {"axes": axes, "channels": ["u", "v"]}}
    return {"arrays": arrays, "periodic": [True, True], "time_step": 0.1} | others


def read(path, row: dict, *reduced):
    dataset = DatasetConfig.model_validate_json(json.dumps({"family": "custom", "files": [str(path)], "custom": row}))
    return open_source(family_of(dataset), path, *reduced)


def in_npy(folder, axes):
    np.save(folder / "u.npy", ordered(axes))
    return folder / "u.npy", row_of(axes, "array")


def in_npz(folder, axes):
    np.savez(folder / "u.npz", u=ordered(axes).astype(">f4"), t=np.arange(6))
    return folder / "u.npz", row_of(axes, times="t", time_step=None)


def in_packed_npz(folder, axes):
    np.savez_compressed(folder / "u.npz", u=np.asfortranarray(ordered(axes).astype(np.float32)))
    return folder / "u.npz", row_of(axes)


def beside(folder, axes):
    np.save(folder / "u.npy", np.zeros(3))
    np.save(folder / "v.npy", ordered(axes))
    return folder / "u.npy", row_of(axes, "v.npy")


def in_a_group(folder, axes):
    path = write(folder / "u.h5", {"runs/all/u": ordered(axes), "runs/t": np.arange(6.0)})
    return path, row_of(axes, "runs/all/u", times="runs/t", time_step=None)


def in_groups(folder, axes):
    rest = [axis for axis in axes if axis != "sample"]
    fields = np.moveaxis(ordered(axes), axes.index("sample"), 0)
    arrays = {f"sim_{n}/u": fields[n] for n in range(10)} | {f"sim_{n}/t": np.arange(6.0) for n in range(10)}
    path = write(folder / "u.h5", arrays | {"sim_notes/text": np.zeros(1)})
    return path, row_of(rest, "sim_*/u", times="sim_*/t", time_step=None)


def in_arrays(folder, axes):
    rest = [axis for axis in axes if axis != "sample"]
    fields = np.moveaxis(ordered(axes), axes.index("sample"), 0)
    np.savez(folder / "u.npz", **{f"u{n}": fields[n] for n in range(10)})
    return folder / "u.npz", row_of(rest, "u*")


STORED = [in_npy, in_npz, in_packed_npz, beside, in_a_group, in_groups, in_arrays]
AXES = [
    ["sample", "time", "channel", "x", "y"],
    ["sample", "x", "y", "time", "channel"],
    ["channel", "y", "sample", "x", "time"],
]


@pytest.mark.parametrize("axes", AXES, ids="-".join)
@pytest.mark.parametrize("store", STORED, ids=lambda store: store.__name__)
def test_fields_are_the_same_however_they_are_stored(tmp_path, store, axes):
    path, row = store(tmp_path, axes)
    expected = FIELDS.astype(np.float32)
    source = read(path, row)
    assert (source.num_samples, source.num_times, source.grid_shape) == (10, 6, (8, 12))
    inputs, targets = source.read([7, 2, 3, 9], [4, 1, 5])
    np.testing.assert_array_equal(inputs, expected[[7, 2, 3, 9]][:, [4, 1, 5]])
    assert inputs.dtype == np.float32 and np.shares_memory(inputs, targets)
    reduced = read(path, row, 2, 2)
    np.testing.assert_array_equal(reduced.read_all()[1], expected[:, ::2, :, ::2, ::2])
    assert reduced.dt == pytest.approx(2 * source.dt)
    again = pickle.loads(pickle.dumps(source))  # as a worker process gets it
    np.testing.assert_array_equal(again.read(5)[0], expected[[5]])


def test_what_is_given_is_repeated_along_axes_that_it_lacks(tmp_path):
    depth, lid = FIELDS[0, 0, 0], FIELDS[:, 0, 1, 0]
    path = write(tmp_path / "a.h5", {"u": FIELDS[:, :, 0], "depth": depth, "lid": lid})
    row = row_of(["sample", "time", "x", "y"]) | {"arrays": {
        "u": {"axes": ["sample", "time", "x", "y"], "channels": ["u"]},
        "depth": {"axes": ["x", "y"], "channels": ["depth"], "given": True},
        "lid": {"axes": ["sample", "y"], "channels": ["lid"], "given": True},
    }}  # fmt: skip
    inputs, targets = read(path, row).read([3, 8], [1, 2])
    assert inputs.shape == (2, 2, 3, 8, 12) and targets.shape == (2, 2, 1, 8, 12)
    np.testing.assert_array_equal(inputs[:, :, 1], np.broadcast_to(depth.astype("f4"), (2, 2, 8, 12)))
    np.testing.assert_array_equal(inputs[:, :, 2], np.broadcast_to(lid[[3, 8], None, None].astype("f4"), (2, 2, 8, 12)))


def test_parameters_are_columns_attributes_or_one_number(tmp_path):
    columns, fields = np.arange(20.0).reshape(10, 2), FIELDS[:, :, 0, 0]
    arrays = {f"s{n}/u": fields[n] for n in range(10)} | {"columns": columns, "nu": np.arange(10), "one": np.array([7])}
    path = write(tmp_path / "a.h5", arrays, beta=0.5)
    with h5py.File(path, "a") as handle:
        for n in range(10):
            handle[f"s{n}"].attrs["own"] = -n
    parameters = {"a": "columns", "nu": "nu", "b": "columns", "one": "one", "beta": "@beta", "own": "s*@own"}
    arrays = {"s*/u": {"axes": ["time", "x"], "channels": ["u"]}}
    found = read(path, {"arrays": arrays, "periodic": [True], "time_step": 1.0, "parameters": parameters}).parameters
    count = np.arange(10)
    expected = np.stack([2 * count, count, 2 * count + 1, 0 * count + 7, 0 * count + 0.5, -count], axis=1)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


# -- as any other data ---------------------------------------------------------------------------------------------


@pytest.fixture
def own_config(tiny_config):
    """`own_config(path, row)`: a config that trains on one file by its row, in seconds."""

    def make(path, row, overlay=None, **chosen):
        own = {"family": "custom", "files": [path.name], "custom": row, **chosen}
        changes = {"data.datasets": {"own": own}, "data.root": str(path.parent), "data.split.test_fraction": 0.2}
        return overlays.resolve(overlays.flatten({**changes, **(overlay or {})}), base=tiny_config(("darcy",)))

    return make


def waves(folder):
    """A vector and a parameter in one dimension, in NumPy's format."""
    np.savez(folder / "waves.npz", uv=np.moveaxis(own_fields(20, 8, (32,)), 2, -1), nu=np.arange(20.0))
    arrays = {"uv": {"axes": ["sample", "time", "x", "channel"], "channels": ["u", "v"]}}
    known = {"title": "waves", "symmetries": ["shift", "sign"], "priors": ["conservation"], "units": {"u": "m/s"}}
    row = {
        "arrays": arrays,
        "periodic": [True],
        "domain": [[0, 2]],
        "time_step": 0.5,
        "parameters": {"nu": "nu"},
        **known,
    }
    return folder / "waves.npz", row, {"input_frames": 2, "output_frames": 2, "augment": True}


def proposed_well(folder):
    """The Well's layout, by the row that a look proposes."""
    path = well_file(folder / "well.hdf5")
    ((name, told),) = overlays.plain_yaml.mapping("\n".join(look.propose(path)), "look")["data"]["datasets"].items()
    assert name == "well_data" and told["files"] == ["well.hdf5"]
    return path, told["custom"], {}


BOX = own_fields(10, 4, (8, 6, 4), 3)
BOX_AXES = {"axes": ["sample", "time", "x", "y", "z", "channel"], "channels": ["u", "v", "w"]}
BOX_ROW = {"periodic": [True] * 3, "domain": [[0, 4], [0, 3], [0, 2]], "time_step": 0.1, "parameters": {"nu": "nu"}}


def box(folder):
    """A vector in three dimensions over a given field, in HDF5."""
    arrays = {"u": np.moveaxis(BOX, 2, -1), "ground": BOX[0, 0, 0, ..., 0], "nu": np.arange(10.0)}
    ground = {"axes": ["x", "y"], "channels": ["depth"], "given": True}
    known = {"symmetries": ["shift"], "vectors": [["u", "v", "w"]]}
    row = {**BOX_ROW, "arrays": {"u": BOX_AXES, "ground": ground}, **known}
    return write(folder / "box.h5", arrays), row, {"augment": True, "tokens": 24}


def box_of_numpy(folder):
    """The same in NumPy's format, to be given whole as input of another field."""
    np.savez(folder / "box.npz", u=np.moveaxis(BOX[:, 0], 1, -1), p=BOX[:, 1, 0], nu=np.arange(10.0))
    vector = {"axes": BOX_AXES["axes"][:1] + BOX_AXES["axes"][2:], "channels": BOX_AXES["channels"], "given": True}
    arrays = {"u": vector, "p": {"axes": ["sample", "x", "y", "z"], "channels": ["p"]}}
    return folder / "box.npz", {**BOX_ROW, "arrays": arrays, "time_step": None}, {"tokens": 24}


@pytest.mark.parametrize("make", [waves, proposed_well, box, box_of_numpy], ids=lambda make: make.__name__)
def test_own_arrays_train_are_reported_on_and_load_again(own_config, train_here, tmp_path, make):
    path, row, chosen = make(tmp_path)
    overlay = {"training.lambda_conservation": 0.1} if "priors" in row else {}
    config = own_config(path, row, {"training.batch_size": 4, **overlay}, **chosen)
    run = tmp_path / "run"
    events = train_here(config, run)
    assert events[-1]["kind"] == "end" and events[-1]["reason"] == "epochs"
    (step, *_) = [event for event in events if event["kind"] == "step"]
    assert ("conservation" in step["losses"]) == bool(overlay)
    attached = Run.attach(run)
    assert attached.config == config == configs.load(run / runfolder.CONFIG)
    family = family_of(config.data.datasets["own"])
    told = list(results.table(results.run_numbers(attached))["dataset"])
    several = [f"own: {channel}" for channel in family.channels] if len(family.channels) > 1 else []
    assert [name for name in told if "distinct" not in name] == ["own", *several]
    drawn = figures.RunFigures.of(attached)
    drawings = drawn.all()
    rollout = {"rollout_own"} if family.time_dependent else set()
    assert drawings.keys() > {"prediction_own", "spectrum_own", "error_distribution"} | rollout
    assert all(draw().axes for name, draw in drawings.items() if "own" in name)
    labels = {ax.get_ylabel() for figure in (drawn.prediction("own"),) for ax in figure.axes}
    assert make is not waves or "u [m/s]" in labels
    spec = load_model(run).specs["own"]
    assert spec.parameter_names == tuple(row["parameters"]) and spec.periodic == tuple(row["periodic"])
    dataset = datasets.open_dataset("own", config, tmp_path)
    assert data_report.samples(dataset).axes and data_report.spectra({"own": dataset}).axes
    assert list(results.data_table({"own": dataset})["equation"]) == [row.get("title") or "own data"]
    assert predict.predict(config, tmp_path).nbytes > dataset.num_bytes


def test_a_static_pair_is_audited_and_drawn(own_config, tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(30, 8, 8))
    x[25:] = x[:5]  # seen in training
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.cumsum(x, axis=1))
    arrays = {
        "array": {"axes": ["sample", "x", "y"], "channels": ["k"], "given": True},
        "y.npy": {"axes": ["sample", "x", "y"], "channels": ["p"]},
    }
    config = own_config(tmp_path / "x.npy", {"arrays": arrays, "periodic": [False, False], "units": {"p": "Pa"}})
    dataset = datasets.open_dataset("own", config, tmp_path)
    assert dataset.spec.time_dependent is False and dataset.spec.dt == 0.0
    report, audits = data_report.report({"own": dataset}, tmp_path)
    assert "the test split leaks" in [finding.name for finding in audits["own"].findings]
    assert report["datasets"]["own"]["family"] == "custom"
    drawn = [data_report.samples(dataset), data_report.values({"own": dataset})]
    for figure in drawn:
        assert "p [Pa]" in {text.get_text() for text in figure.findobj(Text)}


def test_three_dimensions_split_and_are_looked_up(tmp_path):
    np.save(tmp_path / "u.npy", own_fields(10, 3, (4, 6, 8), 1)[:, :, 0])
    arrays = {"array": {"axes": ["sample", "time", "x", "y", "z"], "channels": ["u"]}}
    source = read(tmp_path / "u.npy", {"arrays": arrays, "periodic": [True] * 3, "time_step": 0.1})
    splits = split_samples(source, "distinct", 0.0, 0.2)
    assert len(splits["test"]) == 2 and audit.audit(source, splits).num_distinct == 10


# -- rows that contradict themselves -------------------------------------------------------------------------------

ARRAY = {"axes": ["sample", "time", "x"], "channels": ["u"]}
GOOD = {"arrays": {"u": ARRAY}, "periodic": [True], "time_step": 0.1}
GIVEN = {"axes": ["sample", "x"], "channels": ["k"], "given": True}


def of_array(**changes) -> dict:
    return {"arrays": {"u": ARRAY | changes}}


ROWS = {
    "no dimension": ({"periodic": []}, r"custom.periodic: has 0 values"),
    "four dimensions": ({"periodic": [True] * 4}, r"custom.periodic: has 4 values"),
    "an axis twice": (of_array(axes=["sample", "time", "x", "x"]), r"arrays.u.axes: .* name each axis once"),
    "an axis too many": (of_array(axes=["sample", "time", "x", "y"]), r"arrays.u.axes: .* take out y"),
    "no samples": (of_array(axes=["time", "x"]), r"arrays.u.axes: .*sample is missing -> name it"),
    "no space": (of_array(axes=["sample", "time"]), r"arrays.u.axes: .*x is missing"),
    "an unknown axis": (of_array(axes=["sample", "t", "x"]), r"arrays.u.axes.1: got the text 't' -> choose 'sample'"),
    "samples twice": ({"arrays": {"s*/u": ARRAY}}, r"name the samples once"),
    "two channels on no axis": (of_array(channels=["u", "v"]), r"channels: 2 are named, .* the axis `channel`"),
    "no channel": (of_array(channels=[]), r"channels: 0 are named"),
    "a name of no channel": (of_array(channels=["a b"]), r"arrays.u.channels.0: got the text 'a b'"),
    "no array": ({"arrays": {}}, r"custom.arrays: has none that is predicted"),
    "a channel twice": ({"arrays": {"u": ARRAY, "v": ARRAY}}, r"the channel u is there twice"),
    "a given time": ({"arrays": {"u": ARRAY, "k": GIVEN | {"axes": ["sample", "time", "x"]}}}, r"given has no time"),
    "a time here, none there": ({"arrays": {"u": ARRAY, "k": GIVEN | {"given": False}}}, r"some have a time and"),
    "no time step": ({"time_step": None}, r"custom.time_step: .* write one of them"),
    "two times": ({"times": "t"}, r"custom.time_step: .* write one of them"),
    "a step of nothing": (of_array(axes=["sample", "x"]), r"no array has an axis `time`"),
    "nothing goes in": (of_array(axes=["sample", "x"]) | {"time_step": None}, r"nothing is given and nothing has"),
    "a domain of two": ({"domain": [[0, 1], [0, 1]]}, r"custom.domain: has 2 entries"),
    "a domain backwards": ({"domain": [[1, 0]]}, r"custom.domain: x from 1 to 0"),
    "an unknown symmetry": ({"symmetries": ["rotate"]}, r"symmetries.0: got the text 'rotate' -> choose 'shift'"),
    "a shift into walls": ({"symmetries": ["shift"], "periodic": [False]}, r"a shift needs an axis that is periodic"),
    "half a vector": ({"vectors": [["u", "v"]]}, r"custom.vectors: \[u, v\] -> name 1 channels"),
    "an unknown prior": ({"priors": ["boundary"]}, r"priors.0: got the text 'boundary' -> choose 'conservation'"),
    "a unit of nothing": ({"units": {"w": "m"}}, r"custom.units.w: no channel has this name -> there are u"),
    "an unknown setting": ({"axis": 1}, r"custom.axis: unknown setting"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), ROWS.values(), ids=ROWS)
def test_a_row_that_cannot_be_is_refused_with_its_setting(change, said):
    own = {"family": "custom", "files": ["u.npy"], "custom": GOOD | change}
    with pytest.raises(ConfigError, match=r"data\.datasets\.own\.custom.*" + said.removeprefix("custom.")) as caught:
        overlays.resolve({"data.datasets": {"own": own}})
    assert all(" -> " in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(("own", "said"), [
    ({"family": "custom"}, "own.custom: is empty -> a row belongs to family: custom"),
    ({"family": "darcy2d", "custom": GOOD, "files": ["a"]}, "own.custom: is there, and the family is darcy2d"),
    ({"family": "custom", "custom": GOOD}, "own.files: is empty, and own data have no solver -> name the files"),
    ({"family": "custom", "custom": GOOD, "files": ["a"], "augment": True}, "augment: no symmetry of custom is known"),
])  # fmt: skip
def test_a_row_belongs_to_the_custom_family_and_to_files(own, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        overlays.resolve({"data.datasets": {"own": own}})


def test_what_the_documents_say_of_own_arrays_works_as_written(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/data.md").read_text()
    blocks = re.findall(r"^```(yaml|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    rows = [overlays.plain_yaml.mapping(block, "docs") for _, block in blocks if "family: custom" in block]
    chosen = {name: data for row in rows for name, data in overlays.resolve(row).data.datasets.items()}
    bay = family_of(chosen["bay"])
    assert bay.input_channels == ("h", "u", "v", "depth") and bay.quantity("u") == "u [m/s]"
    monkeypatch.chdir(tmp_path)
    (script,) = [block for kind, block in blocks if kind == "python" and "np.savez" in block]
    exec(script, {})  # makes the files of the examples
    well_file(tmp_path / "flow.hdf5")
    waves, runs, flow = (open_source(family_of(chosen[name]), chosen[name].files) for name in chosen if name != "bay")
    assert (waves.num_samples, waves.num_times, waves.grid_shape, flow.num_samples) == (100, 21, (64,), 10)
    np.testing.assert_array_equal(waves.read_all()[0], runs.read_all()[0])
    proposed = overlays.plain_yaml.mapping("\n".join(look.propose(tmp_path / "flow.hdf5")), "look")
    assert proposed["data"]["datasets"] == {"flow_data": rows[-2]["data"]["datasets"]["flow_data"]}


# -- files that are not as the row says ----------------------------------------------------------------------------


def pair(**changes):
    """A row of two arrays, of x and time, and what is in its file."""
    arrays = {
        "u": FIELDS[:, :, 0, :, 0],
        "k": FIELDS[:, 0, 0, :, 0],
        "t": np.arange(6.0),
        "x": np.arange(8) / 8 + 1 / 16,
    }
    return {key: value for key, value in (arrays | changes).items() if value is not None}


TWO = GOOD | {"arrays": {"u": ARRAY, "k": GIVEN}, "times": "t", "time_step": None, "coordinates": ["x"]}
FILES = {
    "no array": (pair(k=None), "key 'k' is missing"),
    "an axis more": (pair(k=np.ones((10, 8, 2))), r"k: shape \(10, 8, 2\), expected axes \[sample, x\]"),
    "another grid": (pair(k=np.ones((10, 9))), "x has 8 in u and 9 in k"),
    "other samples": (pair(k=np.ones((9, 8))), "sample has 10 in u and 9 in k"),
    "no samples": (pair(u=np.ones((0, 6, 8))), r"u: shape \(0, 6, 8\) holds no values"),
    "integers": (pair(k=np.ones((10, 8), int)), "k: dtype int64, expected float32"),
    "no times": (pair(t=None), "key 't' is missing"),
    "fewer times": (pair(t=np.arange(5.0)), r"t: float64 of shape \(5,\), expected numbers \(6,\)"),
    "times in disorder": (pair(t=np.array([0.0, 2, 1, 3, 4, 5])), "t: not increasing in even steps -> save evenly"),
    "times of their own": (pair(t=np.arange(6.0) * np.arange(1, 11)[:, None]), "at different times -> split"),
    "a time that is none": (pair(t=np.full(6, np.nan)), "t: holds NaN"),
    "uneven points": (pair(x=np.sqrt(np.arange(8.0) / 8)), "x: not increasing in even steps"),
    "another domain": (pair(x=np.arange(8.0)), r"x runs from 0 to 7, custom covers \(0, 1\)"),
}


@pytest.mark.parametrize("ending", ["h5", "npz"])
@pytest.mark.parametrize(("arrays", "said"), FILES.values(), ids=FILES)
def test_a_file_that_is_not_as_its_row_says_is_refused_in_a_sentence(tmp_path, arrays, said, ending):
    path = tmp_path / f"bad.{ending}"
    write(path, arrays) if ending == "h5" else np.savez(path, **arrays)
    with pytest.raises(DataError, match=rf"bad\.{ending}: .*{said}") as caught:
        read(path, TWO)
    assert " -> " in str(caught.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_for_each_of_many_samples_takes_neither_a_file_nor_memory_each(tmp_path, save):
    """Of 300 samples, beside a limit of 200 open files, with no more than a few unpacked at a time."""
    fields = np.random.default_rng(0).normal(size=(300, 6, 2, 8, 12)).astype(np.float32)
    save(tmp_path / "u.npz", **{f"u{number}": field for number, field in enumerate(fields)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        source = read(tmp_path / "u.npz", row_of(["time", "channel", "x", "y"], "u*"))
        np.testing.assert_array_equal(source.read_all()[0], fields)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(source._handle(0)._unpacked) <= numpy_files.MOST_KEPT


FEW_FRAMES = {"input_frames": 2, "output_frames": 2}


def test_mirror_images_of_some_cells_between_walls_are_refused(own_config, tmp_path):
    """Of every second cell the first lies half a cell from its wall, the last one and a half."""
    np.savez(tmp_path / "u.npz", u=FIELDS)
    row = row_of(AXES[0], periodic=[False, False], symmetries=["turn"])
    config = own_config(tmp_path / "u.npz", row, augment=True, reduced_resolution=2, **FEW_FRAMES)
    with pytest.raises(DataError, match="own.augment: mirror images of cells between walls"):
        datasets.open_all(config, Path())
    whole = {"data.datasets.own.reduced_resolution": 1}
    for fine in (whole, {"data.datasets.own.augment": False}, {"data.datasets.own.custom.periodic": [True, True]}):
        assert datasets.open_all(overlays.apply(config, fine), Path())


def test_files_of_other_times_are_not_mixed_however_short_their_unit(tmp_path):
    for number, step in enumerate((1e-6, 2e-6)):
        np.savez(tmp_path / f"{number}.npz", u=ordered(AXES[0]), t=np.arange(6) * step)
    row = row_of(AXES[0], times="t", time_step=None)
    dataset = DatasetConfig.model_validate_json(json.dumps({"family": "custom", "files": ["0.npz"], "custom": row}))
    with pytest.raises(DataError, match="t from 0 and from 0.* -> mix only files"):
        open_source(family_of(dataset), [tmp_path / "0.npz", tmp_path / "1.npz"])


@pytest.mark.parametrize("size", [1e-13, 1.0, 1e6])
def test_a_channel_is_constant_beside_its_size_whatever_its_unit(own_config, tmp_path, size):
    fields = FIELDS * size
    np.savez(tmp_path / "u.npz", u=fields)
    config = own_config(tmp_path / "u.npz", row_of(AXES[0]), **FEW_FRAMES)
    assert datasets.open_all(config, Path())["own"].spec.output_std[0] == pytest.approx(size, rel=0.3)
    fields[:, :, 1] = 293.15 * size
    np.savez(tmp_path / "u.npz", u=fields)
    with pytest.raises(DataError, match="channel 1 is constant .* -> there is nothing to learn from it: take more"):
        datasets.open_all(config, Path())


def test_a_star_in_a_time_or_a_parameter_needs_one_in_the_arrays(tmp_path):
    np.savez(tmp_path / "u.npz", u=ordered(AXES[0]), t=np.arange(6.0), t_0=np.arange(6.0))
    with pytest.raises(DataError, match=r"t_\*: samples are an axis of the arrays"):
        read(tmp_path / "u.npz", row_of(AXES[0], times="t_*", time_step=None))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, lambda path, **arrays: write(path, arrays)])
def test_a_value_that_is_not_finite_names_its_sample(tmp_path, save):
    fields = FIELDS[:, :, 0, :, 0].copy()
    fields[4, 2, 3] = np.nan
    path = tmp_path / ("u.h5" if "lambda" in save.__name__ else "u.npz")
    save(path, u=fields)
    source = read(path, GOOD)
    with pytest.raises(DataError, match="u: NaN or infinity in sample 4, first at frame 2"):
        source.read_all()
    source.read([0, 9])


def declared(path, shape):
    """A header that says more than there is."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.write(bytes(64))


def pickled(path):
    np.save(path, np.array([{"u": 1}, None], dtype=object), allow_pickle=True)


NUMPY = {
    "more than there is": (
        lambda path: declared(path, (10**6, 10**6)),
        "takes 3.73e.03 GiB, .* not written to its end",
    ),
    "fewer than none": (lambda path: declared(path, (-4, 6, 8)), "not written to its end"),
    "objects": (pickled, "object is no kind of number, and is not read"),
    "text": (lambda path: path.write_text("u, v\n1, 2\n"), "no array of NumPy"),
    "nothing": (lambda path: path.touch(), "0 bytes"),
    "no file": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize(("spoil", "said"), NUMPY.values(), ids=NUMPY)
def test_a_damaged_numpy_file_is_one_sentence(tmp_path, spoil, said):
    path = tmp_path / "bad.npy"
    spoil(path)
    row = {"arrays": {"array": ARRAY}, "periodic": [True], "time_step": 0.1}
    with pytest.raises(DataError, match=rf"bad\.npy.*{said}") as caught:
        read(path, row)
    assert " -> " in str(caught.value)


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.05])
@pytest.mark.parametrize("store", [in_npz, in_packed_npz, in_a_group, in_groups], ids=lambda store: store.__name__)
def test_a_truncated_file_is_one_sentence(tmp_path, store, kept):
    path, row = store(tmp_path, AXES[0])
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=rf"{path.name}: truncated or damaged .* -> (save|download)"):
        read(path, row)


@pytest.mark.parametrize("kind", ["contiguous", "chunked", "packed", "virtual"])
def test_an_array_that_was_declared_and_never_written_is_one_sentence(tmp_path, kind):
    """Of 10^12 elements: nothing of that size is allocated, and no zeros are trained on."""
    path, shape, chunks = tmp_path / "bad.h5", (10**6, 100, 10**4), None if kind == "contiguous" else (1, 100, 100)
    with h5py.File(path, "w") as handle:
        if kind == "virtual":
            handle.create_virtual_dataset("u", h5py.VirtualLayout(shape, "f4"))
        else:
            packed = "gzip" if kind == "packed" else None
            made = handle.create_dataset("u", shape, "f4", chunks=chunks, compression=packed)
            if kind == "packed":
                made[5] = 0
    with pytest.raises(DataError, match=r"bad\.h5: u: (shape .* takes 3.73e.03 GiB|holds no values of its own).* -> "):
        read(path, GOOD)


def test_samples_that_differ_or_lack_an_array_are_named(tmp_path):
    arrays = {f"s{n}/u": np.ones((6, 8)) for n in range(4)} | {f"s{n}/k": np.ones(8) for n in range(4)}
    row = GOOD | {"arrays": {
        "s*/u": {"axes": ["time", "x"], "channels": ["u"]},
        "s*/k": {"axes": ["x"], "channels": ["k"], "given": True},
    }}  # fmt: skip
    for change, said in (
        ({"s2/k": None}, r"s\*/k: there is none for the sample '2'"),
        ({"s3/u": np.ones((6, 9))}, r"s0/u has shape \(6, 8\) and s3/u \(6, 9\)"),
        (dict.fromkeys(arrays), r"s\*/u: nothing is called so"),
    ):
        kept = {key: value for key, value in (arrays | change).items() if value is not None}
        with pytest.raises(DataError, match=said):
            read(write(tmp_path / "a.h5", kept | {"other": np.ones(1)}), row)

"""An audit finds by itself what a dataset cannot test, and nothing where there is nothing."""

import dataclasses
import json

import h5py
import numpy as np
import pytest
import yaml
from tiny_files import own_fields, well_file, write

from upsnb import __main__ as command
from upsnb.data import audit, datasets, generate, source
from upsnb.data.families import FAMILIES
from upsnb.data.spec import DatasetSpec
from upsnb.errors import DataError
from upsnb.training import metrics


@pytest.fixture(scope="module")
def waves(tmp_path_factory):
    """A file of 60 advection samples."""
    path = tmp_path_factory.mktemp("audit") / "1D_Advection_Sols_beta0.4.hdf5"
    return generate.generate(FAMILIES["advection1d"], path, 60, {"beta": 0.4}, resolution=32, num_times=13)


@pytest.fixture
def repeated(waves, tmp_path):
    """The same file, but its samples begin to repeat after 20 of them."""
    path = tmp_path / waves.name
    path.write_bytes(waves.read_bytes())
    with h5py.File(path, "r+") as handle:
        handle["tensor"][:] = handle["tensor"][:][np.arange(60) % 20]
    return path


def audited(path, convention="pdebench", family="advection1d", fractions=(0.1, 0.1)):
    opened = source.open_source(family, path)
    return audit.audit(opened, source.split_samples(opened, convention, *fractions))


def names(found: audit.Audit) -> list[str]:
    return [finding.name for finding in found.findings]


def test_nothing_is_found_where_nothing_is(waves):
    found = audited(waves)
    assert names(found) == [] and found.num_distinct == found.num_samples == 54
    assert found.lookup_nrmse > 0.2 and found.persistence_nrmse > 0.2 and found.drift < audit.DRIFT


def test_samples_that_repeat_are_counted_and_a_look_up_scores_nothing(repeated):
    found = audited(repeated)
    assert (found.num_distinct, found.test_seen, found.lookup_nrmse) == (20, 1.0, 0.0)
    assert names(found) == ["the test split leaks", "samples repeat", "a look-up is enough"]


def test_a_distinct_split_keeps_what_begins_alike_on_one_side(repeated):
    opened = source.open_source("advection1d", repeated)
    splits = source.split_samples(opened, "distinct")
    assert sorted(np.concatenate(list(splits.values()))) == list(range(60))
    seen = [{sample % 20 for sample in part} for part in splits.values()]
    assert all(seen) and not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    assert {0, 1} <= seen[2], "PDEBench tests on the first samples of these files"
    assert audited(repeated, "distinct").test_seen == 0


def test_where_all_differ_distinct_is_the_split_of_pdebench(waves):
    opened = source.open_source("advection1d", waves)
    one, other = (source.split_samples(opened, convention) for convention in ("pdebench", "distinct"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_no_distinct_split_of_a_single_state(waves, tmp_path):
    path = tmp_path / waves.name
    path.write_bytes(waves.read_bytes())
    with h5py.File(path, "r+") as handle:
        handle["tensor"][:] = handle["tensor"][:1]
    with pytest.raises(DataError, match="the validation split would be empty"):
        source.split_samples(source.open_source("advection1d", path), "distinct")


@pytest.mark.parametrize(("dimensions", "linear"), [(1, 2), (2, 4)])
def test_dimensions_of_a_curve_and_of_a_torus(dimensions, linear):
    """Both lie in 30 linear dimensions, rotated, of which they fill two a circle."""
    random = np.random.default_rng(0)
    angles = random.uniform(0, 2 * np.pi, size=(400, dimensions))
    circles = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    states = (circles @ np.linalg.qr(random.normal(size=(30, linear)))[0].T).astype(np.float32)
    assert audit.linear_dimensions(states) == linear
    assert audit.intrinsic_dimensions(states) == pytest.approx(dimensions, rel=0.25)


def test_the_nearest_state_is_found_in_spite_of_float32(waves):
    known = np.random.default_rng(0).normal(size=(50, 4000)).astype(np.float32)
    nearest, distance = source.nearest_states(known[[7, 30]] * np.float32(1 + 1e-7), known)
    assert nearest.tolist() == [7, 30] and distance.max() < audit.SAME


def test_of_states_that_are_equally_far_the_first_is_the_nearest_however_many_are_asked_for():
    known = (0.1 + 0.9 * np.random.default_rng(0).integers(0, 2, size=(400, 100))).astype(np.float32)
    asked = (0.1 + 0.9 * np.random.default_rng(1).integers(0, 2, size=(40, 100))).astype(np.float32)
    far = (asked[:, None] != known).sum(axis=2)
    assert (far == far.min(axis=1)[:, None]).sum(axis=1).max() > 1, "or there is nothing to choose"
    for some in (asked, asked[:7], asked[:1]):
        assert source.nearest_states(some, known)[0].tolist() == far.argmin(axis=1)[: len(some)].tolist()


def test_errors_are_those_of_the_reports(waves):
    import torch

    random = np.random.default_rng(0)
    forecast, truth = random.normal(size=(2, 3, 4, 2, 16)).astype(np.float32)
    statistics = metrics.sample_statistics(torch.from_numpy(forecast), torch.from_numpy(truth))
    np.testing.assert_allclose(audit.nrmse(forecast, truth), metrics.nrmse_per_sample(statistics), rtol=1e-5)


def test_darcy_of_pdebench_is_found_to_be_no_steady_state(shared_data):
    found = audited(shared_data / "2D_DarcyFlow_beta1.0_Train.hdf5", family="darcy2d")
    assert names(found) == ["not steady"] and 0.02 < found.steady_nrmse < 0.05


def test_published_shallow_water_and_sorption_are_found_to_be_one_number_each(shared_data):
    for family, file in (("shallowwater2d", "2D_rdb_NA_NA.h5"), ("diffsorp1d", "1D_diff-sorp_NA_NA.h5")):
        found = audited(shared_data / file, family=family, fractions=(0.0, 0.2))
        assert {"few dimensions", "a look-up is enough"} <= set(names(found)) and found.dimensions < 1.5


def test_dams_of_one_centre_repeat_because_a_grid_knows_few_radii(tmp_path):
    """As published: of 1,000 dams on 128 x 128 points 81 differ."""
    x = -2.5 + 5 * (np.arange(24) + 0.5) / 24
    radii = np.random.default_rng(0).uniform(0.3, 0.7, 60)
    arrays, distance = {}, np.hypot(x[:, None], x)
    for number, radius in enumerate(radii):
        height = np.where(distance <= radius, 2.0, 1.0).astype(np.float32)
        arrays[f"{number:04d}/data"] = np.stack([height, height])[..., None]
        arrays |= {f"{number:04d}/grid/{axis}": x for axis in "xy"} | {f"{number:04d}/grid/t": np.array([0.0, 1.0])}
    found = audited(write(tmp_path / "2D_rdb_NA_NA.h5", arrays), family="shallowwater2d")
    different = len({(distance <= radius).tobytes() for radius in radii[:54]})  # those of no validation
    assert found.num_distinct == different < 10 and found.test_seen == 1.0
    assert {"the test split leaks", "samples repeat", "a look-up is enough"} <= set(names(found))


def test_reaction_that_was_lost_shows_in_the_fields(tmp_path):
    path = generate.generate(FAMILIES["reacdiff1d"], tmp_path / "ReacDiff_Nu0.5_Rho1.0.hdf5", 20, {"rho": 0.3}, 32, 21)
    assert audited(path, family="reacdiff1d").coefficients["rho"] == pytest.approx((0.3, 0.3), rel=1e-2)
    with h5py.File(path, "r+") as handle:
        handle.attrs["rho"] = 1.0
    found = audited(path, family="reacdiff1d")
    (said,) = [finding for finding in found.findings if finding.name == "another coefficient"]
    assert said.found.startswith("rho is 1 by name, and 0.3")


def test_files_that_differ_in_a_coefficient_are_each_judged_by_their_own(tmp_path):
    paths = [
        generate.generate(
            FAMILIES["reacdiff1d"], tmp_path / f"ReacDiff_Nu0.5_Rho{rho:g}.hdf5", 20, {"rho": rho}, 32, 21
        )
        for rho in (0.3, 1.2)
    ]
    found = audited(paths, family="reacdiff1d")
    assert found.coefficients["rho"] == pytest.approx((0.75, 0.75), rel=1e-2) and not found.findings


def test_generated_darcy_is_steady_and_of_every_second_cell_nobody_can_say(tmp_path):
    path = generate.generate(FAMILIES["darcy2d"], tmp_path / "2D_DarcyFlow_beta1.0.hdf5", 20, {}, resolution=16)
    assert audited(path, family="darcy2d").steady_nrmse < 1e-6
    opened = source.open_source("darcy2d", path, reduced_resolution=2)
    found = audit.audit(opened, source.split_samples(opened, "pdebench"))
    assert found.steady_nrmse is None and not opened.mirrors


@pytest.mark.parametrize(
    "cells, stride, ghosts",
    ((16, 1, (1, 1)), (16, 2, (0.5, 1)), (17, 2, (0.5, 0.5)), (16, 3, (1 / 3, 1 / 3)), (16, 6, (1 / 6, 4 / 6))),
)
def test_ghosts_stay_where_they_are_whichever_cells_are_kept(tmp_path, cells, stride, ghosts):
    path = generate.generate(FAMILIES["darcy2d"], tmp_path / "2D_DarcyFlow_beta1.0.hdf5", 2, {}, resolution=cells)
    opened = source.open_source("darcy2d", path, reduced_resolution=stride)
    assert opened.ghosts == [ghosts] * 2 and opened.mirrors == (ghosts[0] == ghosts[1])


@pytest.mark.parametrize("stride, ghosts", ((1, (1, 1)), (2, (0.5, 1))))
def test_a_model_is_told_where_ghosts_lie_and_so_is_one_that_was_saved(tiny_config, data_root, stride, ghosts):
    config = tiny_config(("darcy",), **{"data.datasets.darcy.reduced_resolution": stride})
    spec = datasets.open_dataset("darcy", config, data_root).spec
    saved = DatasetSpec.from_plain(json.loads(json.dumps(dataclasses.asdict(spec))))
    assert spec.ghosts(spec.grid_shape) == saved.ghosts(saved.grid_shape) == [ghosts] * 2


@pytest.mark.parametrize("room", [1, 4 * 2 * 32])  # bytes: a frame of a sample at a time, two frames at a time
def test_what_is_measured_does_not_depend_on_how_much_is_read_at_a_time(waves, monkeypatch, room):
    at_once = audited(waves)
    monkeypatch.setattr(source, "BLOCK_BYTES", room)
    piecewise = audited(waves)
    for name in ("lookup_nrmse", "persistence_nrmse", "drift", "num_distinct", "test_near"):
        assert getattr(piecewise, name) == pytest.approx(getattr(at_once, name), rel=1e-6), name


def test_check_takes_a_sample_of_every_file_however_few_it_has(tmp_path, capsys):
    paths = [tmp_path / f"1D_Advection_Sols_beta{beta}.hdf5" for beta in (0.4, 1.0)]
    for path, beta, count in zip(paths, (0.4, 1.0), (4, 40)):
        generate.generate(FAMILIES["advection1d"], path, count, {"beta": beta}, resolution=32, num_times=13)
    assert command.main(["data", "check", *map(str, paths)]) == 0
    assert "44 samples" in capsys.readouterr().out


def test_check_prints_what_was_found_and_look_what_is_there(repeated, capsys):
    assert command.main(["data", "check", str(repeated)]) == command.OK
    printed = capsys.readouterr().out
    assert "the test split leaks: 6 of 6 test samples" in printed and "data.split.convention: distinct" in printed
    assert command.main(["data", "look", str(repeated)]) == command.OK
    printed = capsys.readouterr().out
    assert "tensor: float32 (60, 13, 32)" in printed and "is read as: advection1d" in printed


def test_check_measures_own_arrays_by_their_row_and_the_wells_by_what_it_says(tmp_path, capsys):
    fields = own_fields(20, 9, (16,), 1)[:, :, 0]
    fields[18:] = fields[:2]  # seen in training
    np.savez(tmp_path / "waves.npz", u=fields)
    found = "the test split leaks: 2 of 2 test samples begin as a training sample does -> data.split.convention"
    assert command.main(["data", "check", str(tmp_path / "waves.npz")]) == command.OK
    printed = capsys.readouterr().out
    assert "custom: 20 samples, 9 frames, grid (16,)" in printed and "guessed row" in printed and found in printed
    row = {"arrays": {"u": {"axes": ["sample", "time", "x"], "channels": ["u"]}}, "periodic": [True], "time_step": 1.0}
    waves = {"family": "custom", "files": ["waves.npz"], "custom": row}
    for convention, said in (("last", found), ("distinct", "samples repeat: 18 different initial states in 20")):
        split = {"convention": convention, "validation_fraction": 0.0, "test_fraction": 0.1}
        data = {"root": str(tmp_path), "datasets": {"waves": waves}, "split": split}
        (tmp_path / "waves.yaml").write_text(yaml.safe_dump({"data": data}))
        assert command.main(["data", "check", str(tmp_path / "waves.yaml")]) == command.OK
        printed = capsys.readouterr().out
        assert "waves: 20 samples" in printed and said in printed and "guessed" not in printed
    assert found not in printed
    assert command.main(["data", "check", str(well_file(tmp_path / "well.hdf5", 20))]) == command.OK
    printed = capsys.readouterr().out
    assert "custom: 20 samples, 6 frames, grid (8, 8)" in printed and "guessed" not in printed


def test_a_file_that_is_none_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "a.hdf5").write_text("<html>")
    for act in ("look", "check"):
        assert command.main(["data", act, str(tmp_path / "a.hdf5")]) == command.REFUSED
        assert "Traceback" not in (said := capsys.readouterr().err) and "a.hdf5" in said

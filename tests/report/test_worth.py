"""A model is weighed against a solver that errs as much, asked for the same samples on coarser grids."""

import json
from dataclasses import replace

import numpy as np
import pytest

from upsnb import __main__
from upsnb.data.families import FAMILIES
from upsnb.errors import DataError, RunError
from upsnb.report import worth
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import REPORT

STRETCHED = [name for name, family in FAMILIES.items() if len(family.stretches) > 1]


def task(name, points, num_times=6, given=2, stride=1, samples=2, **parameters):
    family = FAMILIES[name]
    times = np.linspace(*family.time_range, num_times)[: num_times if family.time_dependent else 1]
    groups = ((range(samples), family.parameters | parameters),)
    return worth.Task(family, points, stride, times, given if family.time_dependent else 0, groups)


def solver(error, ms, points=8, stretch=1.0):
    return {"points": points, "stretch": stretch, "error": error, "ms": ms, "exact": error == 0}


def row(error, ms, *solvers):
    found = {"model": {"error": error, "ms": ms}, "solver": [*solvers], "frames": 3, "persistence": 0.5}
    return found | {"as_good": None if error is None else worth._as_good(found)}  # NaN is null in a report


CHEAP, BETTER, OWN = solver(0.1, 1.0), solver(0.01, 4.0, 16, 2.0), solver(0.0, 300.0, 64)


@pytest.mark.parametrize(
    ("error", "ms", "said"),
    [
        (0.2, 2.0, "errs by 0.2 in 2 ms a trajectory; the solver on 8 points errs no more in 1 ms, 2 times less"),
        (0.05, 0.5, "the solver on 16 points, time 2 times as coarse errs no more in 4 ms, 8 times as long"),
        (0.001, 1.0, "the solver that made the data errs no more in 300 ms, 300 times as long"),
        (0.05, 3.8, "errs no more in 4 ms, about as long"),
        (0.6, 1.0, "errs by 0.6 of the fields: too much for its speed to matter"),
        (None, 1.0, "errs by - of the fields: too much for its speed to matter"),
    ],
)
def test_what_errs_as_little_and_is_cheapest_is_what_a_model_is_weighed_against(error, ms, said):
    assert said in worth.finding("waves", row(error, ms, CHEAP, BETTER, OWN))


@pytest.mark.parametrize(("name", "mode"), [("advection1d", "periodic"), ("shallowwater2d", "walls")])
def test_what_is_made_finer_keeps_smooth_fields_on_their_cells(name, mode):
    family = FAMILIES[name]

    def field(points):
        x = (np.arange(points) + 0.5) / points
        line = np.sin(2 * np.pi * x) if mode == "periodic" else np.cos(np.pi * x)
        return np.stack([line, -line]) if family.num_dims == 1 else np.stack([np.multiply.outer(line, line)])

    np.testing.assert_allclose(worth._finer(field(16), 4, family), field(64), atol=0.02)


def test_the_truth_is_what_a_file_of_that_seed_would_hold_on_the_points_that_are_kept():
    whole, half = task("burgers1d", 32), task("burgers1d", 32, stride=2)
    (first, *_) = whole.family.solve(worth.SEED, range(1), whole.groups[0][1], 32, whole.times)
    np.testing.assert_array_equal(whole.outputs(whole.fields)[0, :, 0], first["u"])
    np.testing.assert_array_equal(half.outputs(half.fields), whole.outputs(whole.fields)[..., ::2])
    np.testing.assert_array_equal(half.inputs(), whole.outputs(whole.fields)[:, :2, :, ::2].astype(np.float32))


@pytest.mark.parametrize("name", ["incompressible2d", "darcy2d"])
def test_given_fields_stand_in_every_frame_that_a_model_is_shown(name):
    asked = task(name, 16)
    inputs, family = asked.inputs(), asked.family
    assert inputs.shape == (2, asked.given or 1, len(family.input_channels), 16, 16)
    for channel in family.given:
        at = family.input_channels.index(channel)
        for frame in range(inputs.shape[1]):
            np.testing.assert_allclose(inputs[:, frame, at], asked.fields[channel], rtol=1e-6)


@pytest.mark.parametrize("name", STRETCHED)
def test_longer_steps_begin_with_the_same_samples_and_err_a_little_more(name):
    asked = task(name, 32, num_times=4, samples=1)
    truth, errors = asked.outputs(asked.fields), []
    for stretch in asked.family.stretches[:2]:
        fields = asked.outputs(asked.solve(32, stretch))
        np.testing.assert_allclose(fields[:, 0], truth[:, 0], atol=1e-9 + 0.05 * (name == "kuramoto1d"))
        errors.append(worth._error(fields[:, 1:], truth[:, 1:]))
    assert errors[0] == 0 and 0 < errors[1] < 0.2


@pytest.mark.parametrize("name", ["advection1d", "darcy2d", "reacdiff1d"])
def test_of_solvers_only_those_are_told_that_nothing_cheaper_beats(name):
    asked = task(name, 32)
    found = worth._solvers(asked, print)
    errors, times = ([solver[key] for solver in found["solver"]] for key in ("error", "ms"))
    assert times == sorted(times) and errors == sorted(errors, reverse=True) and errors[-1] == 0
    assert len(set(errors)) == len(errors) and found["solver"][-1]["points"] == 32
    assert (found["persistence"] is None) == (name == "darcy2d") and found["frames"] == (1 if name == "darcy2d" else 4)


def test_a_solver_that_breaks_down_is_left_out():
    def fails(seed, samples, parameters, points, times):
        for sample in real.solve(seed, samples, parameters, points, times):
            if points == 16:
                raise DataError("no convergence")
            yield {"u": sample["u"] * (np.nan if points == 8 else 1)}

    real, asked = FAMILIES["advection1d"], task("advection1d", 32)
    found = worth._solvers(replace(asked, family=replace(real, solve=fails)), print)["solver"]
    assert {solver["points"] for solver in found} <= {4, 32}


@pytest.fixture(scope="module")
def trained(tiny_config, train_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worth") / "run"
    train_here(tiny_config(), folder)
    return folder


def test_a_run_is_weighed_without_a_look_at_its_test_split(trained, tmp_path, capsys):
    assert __main__.main(["worth", str(trained), "-o", str(tmp_path / "found")]) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "found" / REPORT).read_text())
    assert list(report["datasets"]) == ["advection", "darcy"] and report["kind"] == "worth"
    for name, found in report["datasets"].items():
        assert f"{name}: the model errs by" in said and found["model"]["ms"] > 0
        assert found["grid"] == [32] if name == "advection" else [16, 16]
        assert found["frames"] == (11 if name == "advection" else 1) and found["samples"] == worth.SAMPLES
    assert (tmp_path / "found/figures/worth.png").is_file()
    assert [event["split"] for event in Run(trained).events(("opened",))] == ["test"], "by the run itself"
    assert __main__.main(["show", str(tmp_path / "found")]) == 0 and "solver on one core" in capsys.readouterr().out


def test_as_many_samples_have_each_of_the_parameters_that_were_trained_on(trained, monkeypatch):
    run = Run(trained)
    source = worth.datasets.open_files("advection", run.config, worth.runfolder.project_root() / run.config.data.root)
    source.parameters[: len(source.parameters) // 2] = 0.7
    monkeypatch.setattr(worth.datasets, "open_files", lambda *_: source)
    asked = worth._task("advection", run.config, run.load_model(), worth.runfolder.project_root())
    np.testing.assert_allclose(asked.parameters[:, 0], np.repeat([0.4, 0.7], worth.SAMPLES // 2))
    assert [len(samples) for samples, _ in asked.groups] == [worth.SAMPLES // 2] * 2
    assert len(np.unique(asked.outputs(asked.fields)[:, 0], axis=0)) == worth.SAMPLES


def test_what_nobody_solves_here_is_refused(trained, monkeypatch, tmp_path):
    unsolved = replace(FAMILIES["advection1d"], solve=None)
    monkeypatch.setattr(worth, "family_of", lambda chosen: unsolved)
    with pytest.raises(RunError, match="no dataset has an equation that is solved here -> "):
        worth.measure(Run(trained), tmp_path)

"""Metrics say how good the model is: not how it was batched, on how many ranks, or in which order."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from waiting import LONGEST_S

from upsnb.config import EvaluationConfig
from upsnb.data import audit
from upsnb.data.symmetries import turn
from upsnb.training import evaluation, metrics, parallel
from upsnb.training.evaluation import evaluate, spread
from upsnb.training.parallel import Ranks


@pytest.fixture
def setup(tiny_setup, perturb):
    """Both datasets with a third of their samples to evaluate, and a model that predicts something."""
    made = tiny_setup(**{"data.split.validation_fraction": 0.25, "training.batch_size": 4})
    perturb(made.model)
    return made


def flat(value, path=""):
    """{path: number} of nested results."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{path}/{i}").items()}
    return {path: value}


def expect_close(first, second, rel=1e-5):
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for key, value in first.items():
        expected = (
            pytest.approx(second[key], rel=rel, abs=1e-7, nan_ok=True) if isinstance(value, float) else second[key]
        )
        assert value == expected, key


def run(setup, split="validation", lookup=True, **settings):
    with evaluation.evaluation_model(setup) as model:
        return evaluate(model, setup.datasets, split, EvaluationConfig(**settings), setup.ranks, lookup=lookup)


def test_a_look_up_scores_what_an_audit_says(setup):
    found = run(setup, "test")
    for name, key in (("advection", "rollout_lookup_nrmse_mean"), ("darcy", "lookup_nrmse_mean")):
        dataset = setup.datasets[name]
        assert found[name][key] == pytest.approx(audit.audit(dataset.source, dataset.splits).lookup_nrmse, rel=1e-5)


def test_where_a_split_leaks_what_it_does_not_leak_is_scored_apart(setup):
    clean = run(setup, "test")
    for name, dataset in setup.datasets.items():
        seen = np.concatenate([dataset.splits["train"][:3], dataset.splits["test"]])
        setup.datasets[name] = dataclasses.replace(dataset, splits=dataset.splits | {"test": np.sort(seen)})
    for name, result in run(setup, "test").items():
        assert "leak" not in clean[name] and result["num_samples"] == clean[name]["num_samples"] + 3
        leak = result["leak"]
        assert (leak["seen"], leak["near"]) == (3, 3)
        assert leak["distinct"].keys() > {"nrmse_mean", "nrmse_p90"}
        scalars = {key: value for key, value in clean[name].items() if not isinstance(value, (dict, list))}
        expect_close(leak["distinct"], scalars)
    for name, result in run(setup, "test", lookup=False).items():  # as a validation
        assert audit.headline(result) == pytest.approx(audit.headline(clean[name]), rel=1e-5)


def test_the_mean_trajectory_stands_beside_the_forecasts(setup):
    dataset, found = setup.datasets["advection"], run(setup, "test")["advection"]
    mean = dataset.source.read(dataset.splits["train"], dataset.frames)[1].mean(axis=0)[dataset.given_frames :]
    truth = dataset.source.read(dataset.splits["test"], dataset.frames)[1][:, dataset.given_frames :]
    expected = audit.nrmse(np.broadcast_to(mean, truth.shape), truth).mean()
    assert found["rollout_training_mean_nrmse_mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["advection", "darcy"])
def test_a_protocol_knows_data_by_their_values_and_not_by_their_place(setup, name, monkeypatch):
    dataset = setup.datasets[name]
    known = evaluation.protocol(dataset, "test")
    source, read = dataset.source, dataset.source.read
    assert evaluation.protocol(dataclasses.replace(dataset, name="other", augment=True), "test") == known
    assert {what for what, value in evaluation.protocol(dataset, "validation").items() if value != known[what]} >= {
        *("split", "data")
    }
    fewer = {**dataset.splits, "test": dataset.splits["test"][1:]}
    assert evaluation.protocol(dataclasses.replace(dataset, splits=fewer), "test")["data"] != known["data"]
    monkeypatch.setattr(source, "read", lambda *asked: tuple(np.nextafter(fields, 9) for fields in read(*asked)))
    assert {what for what, value in evaluation.protocol(dataset, "test").items() if value != known[what]} == {"data"}
    spec = dataclasses.replace(dataset.spec, output_std=(9.0,))
    changed = evaluation.protocol(dataclasses.replace(dataset, spec=spec), "test")
    assert changed["training data"] != known["training data"]


def test_what_is_written_has_its_protocol_and_the_floor_of_steady_data(setup, tmp_path):
    evaluation.write(tmp_path, run(setup, "test"), setup.datasets, "test", "last")
    found = json.loads((tmp_path / "evaluation.json").read_text())["datasets"]
    assert found["darcy"]["test"]["floor_nrmse_mean"] < 1e-4, "generated data are steady"
    assert "floor_nrmse_mean" not in found["advection"]["test"]
    assert found["advection"]["test"]["protocol"]["frames given"] == 10


def test_metrics_do_not_depend_on_samples_per_call(setup):
    whole = run(setup, samples_per_call=32)
    assert all(result["num_samples"] == 5 for result in whole.values())
    for samples in (1, 2, 3):
        expect_close(whole, run(setup, samples_per_call=samples))


@pytest.mark.parametrize("num_ranks", (2, 4, 7))  # 7: two ranks have no sample at all
def test_metrics_do_not_depend_on_the_number_of_ranks(setup, monkeypatch, num_ranks):
    alone = run(setup)
    barrier, given = threading.Barrier(num_ranks, timeout=LONGEST_S), [None] * num_ranks

    def all_gather(ranks, value):
        given[ranks.rank] = value
        barrier.wait()
        values = list(given)
        barrier.wait()
        return values

    monkeypatch.setattr(parallel, "all_gather_objects", all_gather)
    monkeypatch.setattr(torch.nn.Module, "train", lambda self, mode=True: self)  # one model, many threads
    results, calls = [None] * num_ranks, []

    def one(rank):
        ranks = Ranks(rank, num_ranks)
        results[rank] = evaluate(setup.model, setup.datasets, "validation", EvaluationConfig(), ranks, lookup=True)
        calls.append(rank)

    setup.model.eval()
    for dataset in setup.datasets.values():
        monkeypatch.setattr(dataset.source, "read", _with_lock(dataset.source.read))
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == list(range(num_ranks))
    for result in results:
        expect_close(alone, result)


LOCK = threading.Lock()


def _with_lock(function):
    def call(*arguments):
        with LOCK:
            return function(*arguments)

    return call


def test_spectra_are_of_every_sample_at_the_last_frame(setup):
    for name, result in run(setup).items():
        dataset = setup.datasets[name]
        frames = dataset.frames if dataset.spec.time_dependent else slice(None)
        truth = torch.from_numpy(dataset.source.read(dataset.splits["validation"], frames)[1])[:, -1:]
        wavenumber, energy = metrics.energy_spectrum(truth)
        assert len(truth) == 5 and result["spectrum"]["wavenumber"] == wavenumber.tolist()
        assert result["spectrum"]["truth"] == pytest.approx(energy.double().mean(0)[0, 0].tolist())
        assert result["spectrum"]["error"] != result["spectrum"]["prediction"] != result["spectrum"]["truth"]


def test_a_perfect_model_has_no_error(setup, monkeypatch):
    truth = {name: d.source.read(d.splits["validation"], d.frames)[1] for name, d in setup.datasets.items()}
    frames = {"advection": torch.from_numpy(truth["advection"]), "darcy": torch.from_numpy(truth["darcy"])}

    def forward(name, fields, parameters, dt, points=None):
        if name == "darcy":
            return frames[name]
        first = next(i for i in range(10) if torch.equal(fields, frames[name][:, i : i + 2]))
        return frames[name][:, first + 2 : first + 4]

    def rollout(name, given, parameters, dt, num_frames):
        assert torch.equal(given, frames[name][:, : given.shape[1]])
        return frames[name][:, given.shape[1] :][:, :num_frames]

    monkeypatch.setattr(setup.model, "forward", forward)
    monkeypatch.setattr(setup.model, "rollout", rollout)
    results = run(setup)
    for name, result in results.items():
        known = ("rmse", "nrmse", "vrmse", "crmse", "max_error", "brmse", "frmse")
        errors = [key for key in result if key.startswith(known) and np.isfinite(result[key])]
        assert "nrmse_mean" in errors and all(result[key] == 0 for key in errors), name
    assert {results[name]["baseline"] for name in results} == {"persistence", "training mean"}
    rolled = results["advection"]
    assert rolled["rollout_nrmse_mean"] == 0 and set(rolled["per_time"]["rollout_nrmse"]) == {0.0}
    assert rolled["persistence_nrmse_mean"] > 0 and results["darcy"]["baseline_nrmse_mean"] > 0


def test_persistence_of_a_static_field_is_perfect(setup, monkeypatch):
    source = setup.datasets["advection"].source
    read = source.read

    def standing(samples, times=slice(None)):
        fields = read(samples, times)[0]
        fields = np.broadcast_to(fields[:, :1], fields.shape).copy()
        return fields, fields

    monkeypatch.setattr(source, "read", standing)
    result = run(setup)["advection"]
    assert result["persistence_nrmse_mean"] == result["rollout_persistence_nrmse_mean"] == 0
    assert set(result["per_time"]["persistence_nrmse"]) == {0.0}
    assert result["nrmse_mean"] > 0


def test_the_static_baseline_knows_the_training_split_alone(setup, monkeypatch):
    source = setup.datasets["darcy"].source
    asked, read = [], source.read
    monkeypatch.setattr(
        source, "read", lambda samples, *rest: asked.append(np.asarray(samples)) or read(samples, *rest)
    )
    mean = setup.datasets["darcy"].training_mean
    train = setup.datasets["darcy"].splits["train"]
    assert np.array_equal(np.sort(np.concatenate(asked)), train)
    np.testing.assert_allclose(mean, read(train)[1].mean(axis=0), rtol=1e-5)


def test_the_rollout_starts_after_the_given_frames_and_reaches_the_end(setup):
    dataset, result = setup.datasets["advection"], run(setup)["advection"]
    assert dataset.given_frames == 10
    times = dataset.source.times[dataset.frames]
    assert result["per_time"]["time"] == times[10:].tolist()
    assert result["per_time"]["given_until"] == pytest.approx(times[9])
    inputs, _, parameters = evaluation.read_samples(dataset, dataset.splits["validation"], "cpu")
    with torch.no_grad():
        forecast = setup.model.rollout("advection", inputs[:, :10], parameters, dataset.dt, inputs.shape[1] - 10)
    nrmse = (forecast - inputs[:, 10:]).flatten(2).norm(dim=-1) / inputs[:, 10:].flatten(2).norm(dim=-1)
    assert result["rollout_nrmse_mean"] == pytest.approx(float(nrmse.mean()), rel=1e-4)


def test_each_split_is_evaluated_on_its_own_samples(setup):
    for split in ("validation", "test"):
        for name, result in run(setup, split).items():
            assert sorted(result["per_sample"]["samples"]) == setup.datasets[name].splits[split].tolist()


def test_scores_stand_beside_their_samples(setup):
    dataset, result = setup.datasets["darcy"], run(setup)["darcy"]
    for sample, score in zip(result["per_sample"]["samples"], result["per_sample"]["nrmse"]):
        inputs, targets, parameters = evaluation.read_samples(dataset, np.array([sample]), "cpu")
        with torch.no_grad():
            error = evaluation.predict(setup.model, dataset, inputs, parameters) - targets
        assert score == pytest.approx(float(error.norm() / targets.norm()), rel=1e-4)


def test_an_empty_split_has_no_result(setup):
    setup.datasets["darcy"].splits["validation"] = np.zeros(0, dtype=np.int64)
    assert list(run(setup)) == ["advection"]


def test_evaluating_changes_nothing_in_the_model(setup):
    before, mode = {k: v.clone() for k, v in setup.model.state_dict().items()}, setup.model.training
    state = torch.get_rng_state()
    run(setup)
    assert setup.model.training == mode and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in setup.model.state_dict().items())
    assert all(p.grad is None for p in setup.model.parameters())


# -- symmetries --------------------------------------------------------------------------------------------------------


def square(setup):
    dataset = setup.datasets["darcy"]
    inputs, _, parameters = evaluation.read_samples(dataset, dataset.splits["validation"], "cpu")
    return dataset, inputs, parameters


def test_averaging_an_equivariant_forecast_changes_nothing(setup, monkeypatch):
    dataset, inputs, parameters = square(setup)
    monkeypatch.setattr(setup.model, "forward", lambda name, x, *_: x.square() - 0.3 * x.mean((-1, -2), keepdim=True))
    plain, averaged = (evaluation.predict(setup.model, dataset, inputs, parameters, on) for on in (False, True))
    torch.testing.assert_close(averaged, plain)


def test_an_averaged_forecast_is_equivariant(setup):
    dataset, inputs, parameters = square(setup)
    with torch.no_grad():
        forecast = evaluation.predict(setup.model, dataset, inputs, parameters, True)
        plain = evaluation.predict(setup.model, dataset, inputs, parameters)
        for element in range(8):
            elements = np.full(len(inputs), element)
            turned = turn(dataset.family, inputs, ("nu",), elements)
            image = evaluation.predict(setup.model, dataset, turned, parameters, True)
            back = turn(dataset.family, image, ("pressure",), elements, back=True)
            torch.testing.assert_close(back, forecast, atol=1e-4, rtol=1e-4)
    assert (plain - forecast).abs().max() > 1e-3  # and the model alone is not


def test_waves_are_not_averaged_over_squares(setup):
    dataset = setup.datasets["advection"]
    inputs, _, parameters = evaluation.read_samples(dataset, dataset.splits["validation"], "cpu")
    with torch.no_grad():
        plain, asked = (evaluation.predict(setup.model, dataset, inputs[:, :2], parameters, on) for on in (False, True))
    assert torch.equal(plain, asked)


# -- examples ----------------------------------------------------------------------------------------------------------


def test_examples_are_the_best_the_middle_and_the_worst(setup, tmp_path):
    results = run(setup)
    config = EvaluationConfig(num_examples=3)
    evaluation.save_examples(tmp_path / "examples.npz", setup.model, setup.datasets, results, config, "cpu")
    with np.load(tmp_path / "examples.npz") as arrays:
        for name, result in results.items():
            scores = result["per_sample"].get("rollout_nrmse", result["per_sample"]["nrmse"])
            assert arrays[f"{name}/nrmse"].tolist() == [sorted(scores)[i] for i in (0, 2, 4)]
            truth, forecast = arrays[f"{name}/truth"], arrays[f"{name}/forecast"]
            assert truth.shape == forecast.shape
            error = np.sqrt(((forecast - truth) ** 2).mean((3, *range(4, truth.ndim))))
            size = np.sqrt((truth**2).mean((3, *range(4, truth.ndim))))
            np.testing.assert_allclose((error / size).mean((1, 2)), arrays[f"{name}/nrmse"], rtol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_evaluated_in_its_mode_and_left_as_it_was_found(setup, training):
    setup.model.train(training)
    with pytest.raises(ZeroDivisionError), evaluation.evaluation_model(setup) as model:
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert all(module.training == training for module in setup.model.modules())


def test_fewer_samples_than_examples_are_all_kept(setup, tmp_path):
    dataset = setup.datasets["darcy"]
    dataset.splits["validation"] = dataset.splits["validation"][:2]
    datasets = {"darcy": dataclasses.replace(dataset)}
    results = evaluate(setup.model, datasets, "validation", EvaluationConfig(), Ranks())
    path = tmp_path / "examples.npz"
    evaluation.save_examples(path, setup.model, datasets, results, EvaluationConfig(num_examples=3), "cpu")
    with np.load(path) as arrays:
        assert len(arrays["darcy/samples"]) == 2


@pytest.mark.parametrize(("count", "fraction", "expected"), [(8, 0.25, 2), (8, 1.0, 8), (3, 0.01, 1), (0, 0.5, 0)])
def test_a_share_of_a_split_is_spread_over_all_of_it(count, fraction, expected):
    chosen = spread(np.arange(count), fraction)
    assert len(chosen) == len(set(chosen)) == expected
    assert expected < 2 or np.ptp(np.diff(chosen)) <= 1


def test_validation_on_a_share_measures_only_it_and_the_report_all(tiny_config, train_here, tmp_path):
    config = tiny_config(**{"evaluation.fraction": 0.5, "evaluation.split": "validation"})
    (event,) = (event for event in train_here(config, tmp_path) if event["kind"] == "eval")
    assert event["fraction"] == 0.5
    whole = json.loads((tmp_path / "evaluation.json").read_text())["datasets"]
    reported = {name: splits["validation"] for name, splits in whole.items()}
    assert any(
        event["val_nrmse"][name] != result.get("rollout_nrmse_mean", result["nrmse_mean"])
        for name, result in reported.items()
    )


def test_evaluation_has_no_tensorfloat32_and_training_has_it_back(setup):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with evaluation.evaluation_model(setup):
            assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)

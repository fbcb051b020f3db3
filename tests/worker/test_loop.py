"""A run on one rank, from its first event to its last: it learns, says what it does, and ends when it should."""

import json
import weakref

import numpy as np
import pytest
import torch
from figure_checks import check

from upsnb.report import figures
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import checkpoint, evaluation, timing
from upsnb.training.setup import Setup

STEP_FIELDS = {  # what every step event holds
    "kind", "time", "step", "step_time_ms", "samples_per_s", "data_wait_ms", "loss", "losses", "learning_rate",
    "peak_memory_gib", "time_s",
}  # fmt: skip
KINDS = {"start", "step", "eval", "opened", "checkpoint", "warning", "end", "progress", "first_step", "compile"}


def of_kind(events, kind):
    return [event for event in events if event["kind"] == kind]


def column(events, key):
    return [event[key] for event in of_kind(events, "step")]


@pytest.fixture
def finished(cache, tiny_config, train_here, tmp_path_factory):
    """(folder, events, config) of a run of two epochs that went to its end."""
    if not cache:
        config = tiny_config(
            **{
                "stages.operator.epochs": 2,
                "training.ema_decay": 0.9,
                "training.accum_steps": 2,
                "training.lambda_spectral": 0.1,
                "training.query_sampling.num_queries": 100,
                "checkpoint.interval": 10,
            }
        )
        folder = tmp_path_factory.mktemp("finished") / "run"
        cache["run"] = folder, train_here(config, folder), config
    return cache["run"]


# -- what a run says ---------------------------------------------------------------------------------------------------


def test_every_event_is_a_line_of_json_with_kind_time_and_step(finished):
    folder, events, _ = finished
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == events
    for event in events:
        assert event["kind"] in KINDS and event["time"] > 1e9 and isinstance(event["step"], int)


def test_every_step_event_has_its_fields(finished):
    _, events, config = finished
    steps = of_kind(events, "step")
    assert [event["step"] for event in steps] == list(range(1, 41))
    for event in steps:
        assert event.keys() >= STEP_FIELDS
        assert set(event["losses"]) == {"relative", "spectral"}
        total = event["losses"]["relative"] + 0.1 * event["losses"]["spectral"]
        assert event["loss"] == pytest.approx(total, rel=1e-4)
        assert event["samples_per_s"] == pytest.approx(16 / event["step_time_ms"] * 1e3, rel=1e-3)
        assert event["peak_memory_gib"] > 0 and event["data_wait_ms"] >= 0 and event["step_time_ms"] > 0
    assert config.training.batch_size * config.training.accum_steps == 16


def test_step_times_add_up_to_the_clock(finished):
    _, events, _ = finished
    times = column(events, "time_s")
    assert times == sorted(times)
    inside = sum(column(events, "step_time_ms")) / 1e3
    assert inside <= times[-1] + 0.05  # what is between steps, validation and checkpoints, belongs to none
    assert times[-1] <= of_kind(events, "end")[0]["train_time_s"] + 0.05


def test_first_steps_and_steps_after_interruptions_are_not_steady(finished):
    _, events, _ = finished
    steady = column(events, "steady")
    interrupted = {event["step"] + 1 for event in events if event["kind"] in ("checkpoint", "eval")}
    assert not any(steady[: timing.WARMUP_STEPS])
    for step, flag in enumerate(steady, start=1):
        assert flag == (step > timing.WARMUP_STEPS and step not in interrupted)


def test_the_loss_falls(finished):
    _, events, _ = finished
    loss = column(events, "loss")
    assert np.mean(loss[-5:]) < 0.8 * np.mean(loss[:5])


def test_the_learning_rate_warms_up_and_ends_near_zero(finished):
    _, events, config = finished
    rates = column(events, "learning_rate")
    assert max(rates) == pytest.approx(config.optimizer.lr, rel=0.01) and 0 < rates[0] < 0.1 * max(rates)
    assert rates[-1] < 0.02 * max(rates)


def test_every_epoch_is_validated_the_last_included(finished):
    _, events, _ = finished
    evals = of_kind(events, "eval")
    assert [(event["epoch"], event["step"]) for event in evals] == [(1, 20), (2, 40)]
    for event in evals:
        assert set(event["val_nrmse"]) == {"advection", "darcy"} and event["split"] == "validation"


def test_a_run_ends_with_its_end_event_and_its_checkpoint(finished):
    folder, events, _ = finished
    assert events[-1]["kind"] == "end"
    assert (events[-1]["reason"], events[-1]["step"], events[-1]["epochs"]) == ("epochs", 40, 2)
    assert checkpoint.load(folder)["step"] == 40
    saved = of_kind(events, "checkpoint")
    assert {10, 20, 30, 40} <= {event["step"] for event in saved}
    assert all(event["size_mib"] > 0 for event in saved)


def test_the_report_is_of_the_asked_split_and_the_averaged_weights(finished):
    folder, events, config = finished
    report = json.loads((folder / runfolder.EVALUATION).read_text())
    assert report["split"] == config.evaluation.split == "test" and "averaged" in report["weights"]
    assert [event["split"] for event in of_kind(events, "opened")] == ["test"], "so that looks can be counted"
    for name in ("advection", "darcy"):
        assert report["datasets"][name]["test"]["nrmse_mean"] > 0
    with np.load(folder / runfolder.EXAMPLES) as arrays:
        assert {"advection/forecast", "darcy/forecast"} <= set(arrays)


def test_the_start_event_says_what_is_trained(finished):
    _, events, _ = finished
    start = of_kind(events, "start")[0]
    assert (start["num_ranks"], start["device"], start["total_steps"], start["samples_per_step"]) == (1, "cpu", 40, 16)
    assert start["datasets"]["advection"]["pairs"] == 160 and start["datasets"]["darcy"]["pairs"] == 16
    assert start["datasets"]["advection"]["samples"] == {"train": 16, "validation": 2, "test": 2}


def test_query_sampling_that_samples_nothing_is_said(finished):
    _, events, _ = finished
    warned = [event["message"] for event in of_kind(events, "warning") if "num_queries" in event["message"]]
    assert len(warned) == 1 and "advection has 32 grid points" in warned[0]  # Darcy's 256 points are sampled


def test_the_model_can_be_loaded_from_the_folder(finished):
    from upsnb.training.trained import load_model

    folder, _, config = finished
    model = load_model(folder)
    average = checkpoint.load(folder)["setup"]["ema"]["average"]
    assert not model.training and all(torch.equal(p, average[name]) for name, p in model.named_parameters())


# -- when a run ends ---------------------------------------------------------------------------------------------------


def test_the_time_limit_ends_training_within_a_step(tiny_config, train_here, tmp_path, clock):
    config = tiny_config(("darcy",), **{"training.time_limit_s": 1.0, "stages.operator.epochs": 100000})
    begun = []

    def take_a_while(step):
        if step not in begun:
            begun.append(step)
            clock.advance(0.15)

    events = train_here(config, tmp_path / "run", take_a_while)
    assert (events[-1]["reason"], events[-1]["step"]) == ("time", 7)
    # `time_s` counts from the first step; all but the last step had ended before the limit
    assert column(events, "time_s")[-2] <= 1.0 <= events[-1]["train_time_s"]
    rates = column(events, "learning_rate")
    assert rates[-1] < 0.5 * max(rates)  # the schedule followed the clock


def test_a_stop_request_is_obeyed_after_the_step(tiny_config, train_here, tmp_path):
    folder = tmp_path / "run"
    events = train_here(
        tiny_config(**{"stages.operator.epochs": 50}),
        folder,
        lambda step: runfolder.write_control(folder, None, runfolder.STOP) if step == 7 else None,
    )
    assert (events[-1]["reason"], events[-1]["step"]) == ("stopped", 8)
    assert checkpoint.load(folder)["step"] == 8 and (folder / runfolder.EVALUATION).is_file()


@pytest.fixture
def scored(monkeypatch):
    """`scored([...])`: what validations will say of distinct samples, in their order, whatever the model does."""

    def script(scores):
        real, left = evaluation.evaluate, list(scores)

        def evaluate(model, datasets, split, *rest, **options):
            results = real(model, datasets, split, *rest, **options)
            if split == "validation":
                score = left.pop(0)
                for result in results.values():
                    result["leak"] = {"distinct": {"nrmse_mean": score}}
            return results

        monkeypatch.setattr(evaluation, "evaluate", evaluate)

    return script


QUICK = {"training.batch_size": 16, "stages.operator.epochs": 6}  # one step an epoch on Darcy alone


def test_patience_ends_training(tiny_config, train_here, tmp_path, scored):
    scored([0.5, 0.4, 0.4, 0.45, 0.3, 0.2])
    events = train_here(tiny_config(("darcy",), **QUICK, **{"training.patience": 2}), tmp_path / "run")
    assert events[-1]["reason"] == "patience" and events[-1]["epochs"] == 4
    assert [event["best"] for event in of_kind(events, "eval")] == [True, True, False, False]


def test_the_best_weights_are_reported_where_they_are_asked_for(tiny_config, train_here, tmp_path, scored):
    scored([0.5, 0.2, 0.4, 0.4, 0.4, 0.4])
    folder = tmp_path / "run"
    train_here(tiny_config(("darcy",), **QUICK, **{"evaluation.checkpoint": "best"}), folder)
    report = json.loads((folder / runfolder.EVALUATION).read_text())
    assert report["weights"] == "best, step 2"
    assert checkpoint.load(folder, "best")["step"] == 2 and checkpoint.load(folder)["step"] == 6


def test_the_last_weights_are_reported_where_the_best_had_no_room(tiny_config, train_here, tmp_path, scored):
    scored([0.5, 0.2, 0.4, 0.4, 0.4, 0.4])
    settings = {"evaluation.checkpoint": "best", "checkpoint.budget_gb": 1e-6}
    events = train_here(tiny_config(("darcy",), **QUICK, **settings), tmp_path / "run")
    assert json.loads((tmp_path / "run" / runfolder.EVALUATION).read_text())["weights"] == "last"
    assert "the last weights are reported instead" in " ".join(event["message"] for event in of_kind(events, "warning"))


def test_the_last_weights_may_be_the_best_ones(tiny_config, train_here, tmp_path, scored):
    scored([0.5, 0.4, 0.1])
    folder = tmp_path / "run"
    config = tiny_config(("darcy",), **QUICK, **{"evaluation.checkpoint": "best", "evaluation.every_epochs": 2})
    train_here(config, folder)
    assert json.loads((folder / runfolder.EVALUATION).read_text())["weights"] == "last"


def test_weights_that_were_stopped_at_are_validated_before_the_best_are_chosen(
    tiny_config, train_here, tmp_path, scored
):
    scored([0.5, 0.1])
    folder = tmp_path / "run"
    settings = {"evaluation.checkpoint": "best", "evaluation.every_epochs": 2}
    train_here(
        tiny_config(("darcy",), **QUICK, **settings),
        folder,
        lambda step: runfolder.write_control(folder, None, runfolder.STOP) if step == 2 else None,
    )
    report = json.loads((folder / runfolder.EVALUATION).read_text())
    assert report["weights"] == "last" and checkpoint.load(folder, "best")["step"] == 3


def test_a_plateau_lowers_the_learning_rate(tiny_config, train_here, tmp_path, scored):
    scored([0.5] * 6)
    scheduler = {"name": "plateau", "plateau_patience": 2, "plateau_factor": 0.1, "warmup_fraction": 0.0}
    config = tiny_config(("darcy",), **QUICK, **{"stages.operator.scheduler": scheduler})
    rates = np.array(column(train_here(config, tmp_path / "run"), "learning_rate")) / config.optimizer.lr
    np.testing.assert_allclose(rates, [1, 1, 1, 0.1, 0.1, 0.01], rtol=1e-6)


def test_a_plateau_that_is_asked_for_later_lowers_the_learning_rate_too(tiny_config, train_here, tmp_path, scored):
    scored([0.5] * 6)
    scheduler = {"name": "constant", "plateau_patience": 2, "plateau_factor": 0.1, "warmup_fraction": 0.0}
    config = tiny_config(("darcy",), **QUICK, **{"stages.operator.scheduler": scheduler})
    asked = {0: {"stages.operator.scheduler.name": "plateau"}}
    rates = column(
        train_here(
            config, tmp_path / "run", lambda step: step in asked and Run(tmp_path / "run").update(asked.pop(step))
        ),
        "learning_rate",
    )
    assert rates[-1] == pytest.approx(0.01 * config.optimizer.lr)


def test_nothing_is_validated_without_a_validation_split(tiny_config, train_here, tmp_path):
    config = tiny_config(("darcy",), **QUICK, **{"data.split.validation_fraction": 0.0})
    events = train_here(config, tmp_path / "run")
    assert not of_kind(events, "eval") and events[-1]["reason"] == "epochs"


# -- how a run computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_half_precision_learns_like_single_precision(tiny_config, train_here, tmp_path, dtype):
    found = {}
    for amp in (False, True):
        settings = {"training.amp": amp, "training.amp_dtype": dtype, "optimizer.lr": 3e-3}
        config = tiny_config(**settings)
        events = train_here(config, tmp_path / str(amp))
        found[amp] = np.array(column(events, "loss"), dtype=float)
        assert np.isfinite(found[amp]).all()
    assert not np.array_equal(found[True], found[False])
    assert found[True][-6:].mean() == pytest.approx(found[False][-6:].mean(), rel=0.15)
    state = checkpoint.load(tmp_path / "True")["setup"]
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    assert bool(state["scaler"]) == (dtype == "float16")


def test_the_wait_for_data_is_measured(tiny_config, train_here, tmp_path, slow_reading):
    slow_reading(0.03)
    events = train_here(tiny_config(("darcy",), **{**QUICK, "training.batch_size": 8}), tmp_path / "run")
    waits, times = column(events, "data_wait_ms"), column(events, "step_time_ms")
    assert waits == pytest.approx([30.0] * len(waits), abs=1.0)
    assert all(wait < total for wait, total in zip(waits, times))


def test_a_loss_that_is_not_a_number_is_still_a_valid_event(tiny_config, train_here, tmp_path, monkeypatch):
    from upsnb.training import losses

    monkeypatch.setattr(losses, "relative_error", lambda prediction, *_: (prediction * torch.nan).mean())
    folder = tmp_path / "run"
    train_here(tiny_config(("darcy",), **QUICK), folder)
    assert "NaN" not in (folder / "events.jsonl").read_text()
    assert column(runfolder.read_events(folder), "loss") == [None] * 6


def test_a_config_that_this_machine_cannot_run_starts_nothing(tiny_config, train_here, tmp_path):
    from upsnb.errors import ConfigError

    config = tiny_config(("darcy",), **{"operator.pdet.attention": "flex"})
    with pytest.raises(ConfigError, match="FlexAttention"):
        train_here(config, tmp_path / "run")
    assert not of_kind(runfolder.read_events(tmp_path / "run"), "start")


@pytest.mark.slow
def test_compiled_steps_are_the_eager_ones_up_to_rounding(tiny_config, train_here, tmp_path):
    found = {}
    for compiled in (False, True):
        settings = {"training.compile": compiled, "optimizer.name": "adamw", "stages.operator.epochs": 3}
        events = train_here(tiny_config(("darcy",), **settings), tmp_path / str(compiled))
        found[compiled] = events
    np.testing.assert_allclose(column(found[True], "loss"), column(found[False], "loss"), rtol=1e-3)
    graphs = of_kind(found[True], "compile")
    assert graphs and graphs[0]["step"] == 1 and not of_kind(found[False], "compile")
    assert [e for e in graphs if e["step"] > 2] == []  # nothing is compiled again later
    states = [checkpoint.load(tmp_path / str(compiled))["setup"]["model"] for compiled in (False, True)]
    assert states[0].keys() == states[1].keys()


def test_each_validation_leaves_its_forecast_of_the_same_sample(tiny_config, train_here, tmp_path):
    folder, seen = tmp_path / "run", []

    def look(step):
        if (folder / runfolder.GLANCE).exists():
            with np.load(folder / runfolder.GLANCE) as file:
                seen.append({key: file[key] for key in file.files})

    config = tiny_config(**{**QUICK, "stages.operator.epochs": 3})
    events = train_here(config, folder, at_step=look)
    assert len(of_kind(events, "eval")) == 3
    first, last = seen[0], seen[-1]
    for name in config.data.datasets:
        assert first[f"{name}/samples"] == last[f"{name}/samples"]
        assert (first[f"{name}/truth"] == last[f"{name}/truth"]).all()
        assert (first[f"{name}/forecast"] != last[f"{name}/forecast"]).any()
    check(figures.glance(folder))


def test_a_stage_begins_without_what_the_one_before_held(tiny_config, train_here, tmp_path, monkeypatch):
    """Its data, weights and moments would lie on a GPU twice."""
    built, alive, build = [], [], Setup.build

    def watched(*arguments, **options):
        alive.append([setup() is not None for setup in built])
        made = build(*arguments, **options)
        built.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Setup, "build", watched)
    train_here(tiny_config(**{"stages.finetune.epochs": 1}), tmp_path / "run")
    assert alive == [[], [False]]

"""Training through several calls in a row: what a step minimises, how it grows, and what it takes."""

import pytest
import torch

from upsnb.config import setting_paths
from upsnb.data import datasets
from upsnb.errors import ConfigError, DataError
from upsnb.memory.predict import predict
from upsnb.models.ups import UPS
from upsnb.profile import flops
from upsnb.report import results
from upsnb.runs import handle
from upsnb.training import compiling, stages
from upsnb.training.losses import relative_error
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.training.trained import load_model

NAME = "finetune"
FNO = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 8, "modes": 4, "depth": 2}}}
FNO |= {"optimizer.name": "adamw"}


@pytest.fixture
def setup(tiny_config, tmp_path):
    """`setup(unroll)`: everything a step of this stage needs."""

    def make(unroll=3, **overlay) -> Setup:
        config = tiny_config(**{"stages.finetune.epochs": 1, "stages.finetune.unroll": unroll, **overlay})
        return Setup.build(config, tmp_path, Ranks(), lambda message: None, NAME)

    return make


def batch_of(setup, name):
    return next(batch for batch in setup.loader.peek() if batch.dataset == name)


@pytest.mark.parametrize("model", [{}, {"operator.rollout": "latent", "training.lambda_inv_enc": 0.1}, FNO], ids=str)
def test_its_loss_is_the_error_of_a_rollout_summed_over_calls_and_so_are_its_gradients(setup, model):
    overlay = {"training.lambda_forward": 0.1} if "operator.rollout" in model else {}
    made = setup(3, **model, **overlay)
    made.set_learning_rate(1.0)
    made.model.eval()
    batch = batch_of(made, "advection")
    wanted = made.objective.weights(0, 0)
    total, _ = made.objective(batch, {term: wanted[term] for term in ("relative", "rollout")}, None)
    spec = made.model.specs["advection"]
    frames = 3 * spec.output_frames
    assert batch.targets.shape[1] == frames
    rolled = made.model.rollout("advection", batch.inputs, batch.parameters, spec.dt, frames)
    summed = sum(relative_error(*pair) for pair in zip(rolled.split(2, dim=1), batch.targets.split(2, dim=1)))
    torch.testing.assert_close(total, summed, rtol=1e-4, atol=1e-5)
    parameters = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
    gradients, expected = (
        torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True) for loss in (total, summed)
    )
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


def test_what_has_no_time_is_trained_by_its_one_call(setup):
    made = setup(4)
    _, terms = made.objective(batch_of(made, "darcy"), made.objective.weights(0, 0), None)
    assert set(terms) == {"relative"}


@pytest.mark.parametrize(("unroll", "calls"), [(2, [2, 2, 2, 2]), (3, [2, 2, 3, 3]), (4, [2, 2, 3, 4])])
def test_calls_become_more_over_the_stage_and_never_more_than_asked_for(setup, unroll, calls):
    made = setup(unroll)
    found = []
    for progress in (0.0, 0.3, 0.5, 0.99):
        made.set_learning_rate(progress)
        found.append(made.objective.calls)
    assert found == calls
    made.set_learning_rate(1.0)
    assert made.objective.calls == unroll


def test_the_operator_before_it_trains_on_one_call(tiny_setup):
    made = tiny_setup(**{"stages.finetune.epochs": 1, "stages.finetune.unroll": 4})
    batch = batch_of(made, "advection")
    assert made.objective.weights(0, 0) == {"relative": 1.0}
    assert batch.targets.shape[1] == made.model.specs["advection"].output_frames


def test_more_calls_are_asked_for_while_it_trains(setup):
    made = setup(2)
    made.set_learning_rate(1.0)
    pairs, fields = len(made.loader.schedule.pairs["advection"]), made.loader.reader.fields
    made.update(made.config.model_copy(update={"stages": _with_unroll(made.config.stages, 4)}))
    assert made.objective.calls == 4
    assert batch_of(made, "advection").targets.shape[1] == 8
    assert made.loader.reader.fields is fields, "the data lie there already"
    assert len(made.loader.schedule.pairs["advection"]) < pairs
    loss, _, _ = made.step(made.loader.peek(), 0)
    assert loss.isfinite()


def _with_unroll(stages, unroll):
    return stages.model_copy(update={NAME: stages.finetune.model_copy(update={"unroll": unroll})})


def test_a_run_goes_from_one_to_the_other_and_its_report_tells_both(tiny_config, train_here, tmp_path):
    config = tiny_config(**{"stages.finetune.epochs": 1, "stages.finetune.optimizer.lr": 1e-4})
    events = train_here(config, tmp_path)
    starts = [event for event in events if event["kind"] == "start"]
    assert [event["stage"] for event in starts] == ["operator", NAME]
    assert starts[0]["datasets"]["advection"]["pairs"] > starts[1]["datasets"]["advection"]["pairs"]
    assert isinstance(load_model(tmp_path), UPS)
    report = results.run_numbers(handle.Run(tmp_path))
    steps = [[event for event in events if event["kind"] == "step" and event["stage"] == s] for s in ("operator", NAME)]
    assert [(stage["stage"], stage["steps"]) for stage in report["stages"]] == [
        ("operator", len(steps[0])),
        (NAME, len(steps[1])),
    ]
    said = results.costs(report)
    for stage in report["stages"]:
        assert f"stage {stage['stage']}: {stage['steps']} steps" in said
        assert stage["val_nrmse"].keys() == {"advection", "darcy"}
    assert report["steps"] == sum(stage["steps"] for stage in report["stages"])


def test_its_own_clock_ends_it(tiny_config, train_here, tmp_path):
    config = tiny_config(**{"stages.finetune.epochs": 10000, "stages.finetune.time_limit_s": 0.01})
    events = train_here(config, tmp_path)
    assert [event["time_limit_s"] for event in events if event["kind"] == "start"] == [None, 0.01]
    (end,) = [event for event in events if event["kind"] == "end"]
    assert end["reason"] == "time" and end["stage"] == NAME


def test_a_stage_that_the_clock_ends_is_validated_at_its_end(tiny_config, train_here, tmp_path):
    clock = {"stages.operator.epochs": 10000, "training.time_limit_s": 0.01}
    events = train_here(tiny_config(**{**clock, "stages.finetune.epochs": 1}), tmp_path)
    last = [event["step"] for event in events if event["kind"] == "step" and event["stage"] == "operator"][-1]
    assert [event["step"] for event in events if event["kind"] == "eval" and event["stage"] == "operator"] == [last]


@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_fused_in_a_stage_with_an_optimizer_of_its_own(tiny_config, fused):
    config = tiny_config(**{"stages.finetune.optimizer": {"lr": 1e-4, "foreach": True}, "optimizer.fused": fused})
    own = stages.optimizer(config, NAME)
    assert (own.lr, own.fused, own.foreach) == (1e-4, fused, None if fused else True)
    assert stages.optimizer(config, "operator") is config.optimizer


def test_fields_that_are_too_short_for_its_calls_are_refused_with_what_is_needed(tiny_config, data_root):
    config = tiny_config(**{"stages.finetune.epochs": 1, "stages.finetune.unroll": 6})
    with pytest.raises(DataError, match=r"13 frames .* 14 are needed \(2 in, 6 x 2 out"):
        datasets.open_dataset("advection", config, data_root)


def test_where_nothing_changes_in_time_it_trains_the_one_call_on(tiny_config, train_here, tmp_path):
    events = train_here(tiny_config(names=("darcy",), **{"stages.finetune.epochs": 1}), tmp_path)
    steps = [event for event in events if event["kind"] == "step" and event["stage"] == NAME]
    assert steps and all(set(event["losses"]) == {"relative"} for event in steps)


@pytest.mark.parametrize("unroll", [0, 1, 65])
def test_one_call_is_no_row_of_calls(tiny_config, unroll):
    with pytest.raises(ConfigError, match="stages.finetune.unroll"):
        tiny_config(**{"stages.finetune.unroll": unroll})


def test_memory_and_operations_are_those_of_all_its_calls(tiny_config, data_root):
    plain = tiny_config(names=("advection",))
    config = tiny_config(names=("advection",), **{"stages.finetune.epochs": 1, "stages.finetune.unroll": 4})
    first, later = (predict(each, data_root).nbytes for each in (plain, config))
    assert later > 1.5 * first
    found = {"advection": datasets.open_dataset("advection", config, data_root)}
    one = flops.per_microbatch(config, found)["advection"]
    two, four = (flops.per_microbatch(config, found, NAME, progress)["advection"] for progress in (0.0, 1.0))
    assert two == pytest.approx(2 * one, rel=0.05) and four == pytest.approx(4 * one, rel=0.05)


def test_its_settings_are_those_of_every_stage_and_one_more():
    paths = setting_paths()
    own = {path.removeprefix("stages.finetune.") for path in paths if path.startswith("stages.finetune.")}
    operator = {path.removeprefix("stages.operator.") for path in paths if path.startswith("stages.operator.")}
    assert own - operator == {"unroll"}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The compiler's tracing half, of what it is given on one GPU, where model and losses are one graph."""
    as_a_whole = compiling.as_a_whole
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(compiling, "as_a_whole", lambda *chosen: as_a_whole(*chosen[:2], "cuda"))
    yield
    torch._dynamo.reset()


def test_a_growing_number_of_calls_is_no_graph_of_the_whole_model_for_each(setup, as_on_a_gpu, monkeypatch):
    made = setup(2, **{"training.compile": True, "operator.pdet.depth": 1})
    assert "direct_terms" in vars(made.objective), "two calls throughout: one graph"
    made.update(made.config.model_copy(update={"stages": _with_unroll(made.config.stages, 5)}))
    assert "direct_terms" not in vars(made.objective)
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 3)  # of one code, for two datasets; more end the run
    for step, progress in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        made.set_learning_rate(progress)
        loss, _, _ = made.step(made.loader.peek(), step)
    assert loss.isfinite() and made.objective.calls == 5

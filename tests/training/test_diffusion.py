"""Stages with a denoiser: their noise levels, what they minimise, what they draw, and what they do to a run."""

import functools
import math

import numpy as np
import pytest
import torch

from upsnb import overlays
from upsnb.errors import ConfigError, DataError
from upsnb.memory.predict import predict as predict_memory
from upsnb.models import diffusion, inference
from upsnb.profile import flops
from upsnb.report import results
from upsnb.runs import handle, runfolder
from upsnb.training import frozen, gates, stages
from upsnb.training.diffusion import ConsistencyObjective, DiffusionObjective, RefineObjective
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.training.trained import load_model
from upsnb.worker import staging

NAME, STUDENT, REFINE = "diff_residual", "consistency_distill", "refine"
FNO = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 8, "modes": 4, "depth": 2}}}
FNO |= {"optimizer.name": "adamw"}
STAGES = {f"stages.{NAME}.epochs": 2, "evaluation.members": 4, "training.ema_decay": 0.9}


@pytest.fixture
def setup(tiny_config, tmp_path):
    """`setup()`: everything a step of a stage needs, begun at the operator's weights."""

    def make(stage=NAME, **overlay) -> Setup:
        config = tiny_config(**{f"stages.{stage}.epochs": 1, **overlay})
        weights = stages.build(config, Setup.build(config, tmp_path, Ranks(), print).datasets).model.state_dict()
        return Setup.build(config, tmp_path, Ranks(), lambda message: None, stage, weights)

    return make


def batch_of(setup, name):
    return next(batch for batch in setup.loader.peek() if batch.dataset == name)


class Exact(torch.nn.Module):
    """The denoiser's part of a process whose corrections are normal: all that can be known of them, in closed form."""

    def __init__(self, channels: int, mean: float, std: float):
        super().__init__()
        self.channels, self.mean, self.std = channels, mean, std

    def predict(self, name, x, parameters, relative_dt):
        sigma = (4 * parameters[:, -1]).exp().reshape(-1, *(1,) * (x.dim() - 1))
        keep = (1 + sigma.square()).rsqrt()
        z = x[:, :, -self.channels :] / keep
        share = self.std**2 / (self.std**2 + sigma.square())
        return ((self.mean + share * (z - self.mean)) - keep.square() * z) / (sigma * keep)


def exact(model, name, mean, std):
    """The model with a denoiser that knows the answer."""
    spec = model.specs[name]
    model.denoiser = Exact(spec.output_frames * spec.output_channels, mean, std)
    return model.eval()


def test_noise_levels_fall_from_the_highest_to_none():
    levels = diffusion.noise_levels(8)  # any number
    assert levels[0] == pytest.approx(20) and levels[-2] == pytest.approx(0.01) and levels[-1] == 0
    assert len(levels) == 9 and levels == sorted(levels, reverse=True)
    roots = np.array(levels[:-1]) ** (1 / 7)
    np.testing.assert_allclose(np.diff(roots), np.diff(roots)[0])


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.4, 0.5), (-1.0, 0.1)])
def test_with_an_exact_denoiser_what_is_drawn_has_the_mean_and_spread_of_the_errors(setup, mean, std):
    made = setup()
    model, batch = exact(made.model, "advection", mean, std), batch_of(made, "advection")
    model.set_spread("advection", torch.tensor([1.0]), torch.tensor([0.25]))
    given, parameters = batch.inputs[:2], batch.parameters[:2]
    drawn = model.ensemble("advection", given, parameters, 0.05, 2, members=64)
    forecast = model.before.eval().rollout("advection", given, parameters, 0.05, 2)
    errors = (drawn - forecast) / model.specs["advection"].output_std[0] / 0.25
    assert errors.mean().item() == pytest.approx(mean, abs=0.03)
    assert errors.std().item() == pytest.approx(std, rel=0.09), "through 12 noise levels"


def test_its_loss_is_least_for_an_exact_denoiser_and_one_for_none(setup):
    made = setup(**{"training.batch_size": 12})
    objective, model, batch = made.objective, made.model, batch_of(made, "advection")
    error = objective.errors("advection", batch.inputs, batch.targets[:, :2], batch.parameters)[0]
    model.set_spread("advection", error.square().mean().sqrt()[None], torch.ones(1))

    def loss() -> float:
        made.generator.manual_seed(5)
        with torch.no_grad():
            return np.mean([objective(batch, {"diffusion": 1.0}, None)[0].item() for _ in range(200)])

    untrained = loss()
    exact(model, "advection", 0.0, 1.0)  # of what is as wide as the errors and knows nothing of them: says 0
    assert loss() == pytest.approx(1.0, rel=0.1) and untrained > 0.9
    exact(model, "advection", 0.0, 3.0)
    assert loss() > 1.05


def test_what_noise_was_added_and_what_is_to_be_said_are_those_of_the_paper(setup):
    """With what the network should have said, denoising gives the error back, whatever the noise."""
    made = setup()
    objective, model, batch = made.objective, made.model, batch_of(made, "advection")
    error, *given = objective.errors("advection", batch.inputs, batch.targets[:, :2], batch.parameters)
    noise, level = torch.randn(error.shape), torch.linspace(0.01, 20, len(error))
    sigma = level.reshape(-1, 1, 1, 1)
    wanted = (sigma * error - noise) * (1 + sigma.square()).rsqrt()
    model.denoiser.predict = lambda *asked: wanted.reshape(len(error), 1, -1, *error.shape[3:])
    found, _ = diffusion.denoise(model.denoiser, "advection", error + sigma * noise, level, tuple(given))
    torch.testing.assert_close(found, error, rtol=1e-4, atol=1e-4)


def test_corrections_are_as_wide_as_errors_on_samples_that_were_not_trained_on(setup):
    made = setup()
    batch = batch_of(made, "darcy")
    for name in ("advection", "darcy"):
        seen, unseen = made.model.state_dict()[f"spread_{name}"]
        assert (seen > 0).all() and (unseen > 0).all() and (seen != unseen).all(), "of other samples"
    model = exact(made.model, "darcy", 0.0, 1.0)
    drawn = []
    for unseen in (0.5, 1.0):
        model.set_spread("darcy", torch.ones(1), torch.tensor([unseen]))
        drawn.append(model.ensemble("darcy", batch.inputs, batch.parameters, 0.0, 1, members=2))
    forecast = model.before(batch.dataset, batch.inputs, batch.parameters, 0.0)
    torch.testing.assert_close(2 * (drawn[0] - forecast), drawn[1] - forecast, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [NAME, REFINE])
@pytest.mark.parametrize("overlay", [{}, FNO], ids=["ups", "fno"])
def test_a_step_trains_the_denoiser_and_leaves_the_operator_as_it_was(setup, overlay, stage):
    made = setup(stage, **overlay)
    assert isinstance(made.objective, RefineObjective if stage == REFINE else DiffusionObjective)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.set_learning_rate(0.5)
    for step in range(6):
        made.step(made.loader.peek(), step)
    moved = {name for name, value in made.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("denoiser.")}
    assert not made.model.before.training and made.model.denoiser.training


@pytest.mark.parametrize("overlay", [{}, FNO], ids=["ups", "fno"])
def test_the_noise_level_changes_what_is_said(setup, overlay):
    made = setup(**overlay)
    draws = torch.Generator().manual_seed(3)
    for parameter in made.model.denoiser.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draws)
    model, batch = made.model.eval(), batch_of(made, "advection")
    error, *given = made.objective.errors("advection", batch.inputs, batch.targets[:, :2], batch.parameters)
    low, high = (
        diffusion.denoise(model.denoiser, "advection", error, torch.full((len(error),), level), tuple(given))[1]
        for level in (0.5, 0.6)
    )
    assert (low - high).abs().max() > 1e-4


def test_members_are_found_again_on_any_grid_and_at_points(setup):
    made = setup()
    model, batch = made.model.eval(), batch_of(made, "advection")
    asked = "advection", batch.inputs, batch.parameters, 0.05, 6
    drawn = model.ensemble(*asked, members=3)
    assert drawn.shape[:3] == (3, len(batch.inputs), 6) and (drawn[0] - drawn[1]).abs().max() > 1e-4
    of_two = model.ensemble("advection", batch.inputs[1:3], batch.parameters[1:3], 0.05, 6, 3, samples=[1, 2])
    torch.testing.assert_close(drawn[:, 1:3], of_two, rtol=1e-3, atol=1e-4)
    finer = batch.inputs.repeat_interleave(2, dim=-1)
    assert model.ensemble("advection", finer, batch.parameters, 0.05, 2, members=2).shape[-1] == 64
    centres = (torch.arange(32)[:, None] + 0.5) / 32
    on_grid, at = (model("advection", batch.inputs, batch.parameters, 0.05, points) for points in (None, centres))
    torch.testing.assert_close(on_grid, at, rtol=1e-4, atol=1e-5)


@pytest.fixture
def run(tiny_config, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "FEWEST", 2)
    events = train_here(tiny_config(**STAGES, **{"stages.finetune.epochs": 1}), tmp_path)
    return events, tmp_path


def test_a_run_trains_it_from_the_operator_judges_it_and_can_be_asked(run):
    events, folder = run
    assert [event["stage"] for event in events if event["kind"] == "start"] == ["operator", "finetune", NAME]
    said = [event["message"] for event in events if "times those on training samples" in event.get("message", "")]
    assert len(said) == 2
    (judged,) = [event for event in events if event["kind"] == "gate" and event["stage"] == NAME]
    assert judged["against"] == "finetune" and judged["ratio"] > 0
    assert {found["members"] for found in runfolder.measured(folder, NAME).values()} == {4}
    weights = gates.kept(folder, "operator")
    model = load_model(folder, stage=NAME)
    assert all(torch.equal(value, weights[name]) for name, value in model.before.state_dict().items())
    fields = np.random.default_rng(0).normal(size=(2, 2, 1, 32))
    drawn = handle.Run(folder).predict(fields, "advection", 0.4, num_frames=4, members=3, stage=NAME)
    assert drawn.shape == (3, 2, 4, 1, 32) and drawn.std(axis=0).min() > 0
    with pytest.raises(DataError, match="draws nothing"):
        inference.predict(load_model(folder, stage="operator"), fields, "advection", 0.4, members=2)


@pytest.mark.long
@pytest.mark.parametrize("stage", [NAME, REFINE])
def test_killed_in_this_stage_a_run_goes_on_bit_equal(tiny_config, killed_and_continued, tmp_path, stage):
    overlay = {**STAGES, f"stages.{NAME}.epochs": 0, f"stages.{stage}.epochs": 2, "checkpoint.interval": 5}
    there, again = (
        gates.kept(path, stage) for path in killed_and_continued(tiny_config(**overlay), tmp_path, 8, stage)
    )
    assert all(torch.equal(value, again[name]) for name, value in there.items())
    assert any("spread_" in name for name in there), "and with it what was measured when it began"


@pytest.mark.parametrize("stage", [NAME, REFINE])
def test_phases_are_flipped_in_it(setup, stage):
    made = setup(stage)
    batches = made.loader.peek()
    losses = []
    half = {"training.amp": True, "training.amp_dtype": "bfloat16"}
    for changes in ({}, half, {"operator.pdet.use_activation_checkpoint": True}):
        made.update(overlays.apply(made.config, changes))
        loss, _, norm = made.step(batches, 0)
        losses.append(loss.item())
        assert math.isfinite(loss.item()) and norm > 0
    assert all(getattr(block, "recompute", None) for block in made.model.denoiser.blocks())


@pytest.mark.parametrize("stage", [NAME, REFINE])
def test_memory_is_predicted_for_both_models(tiny_config, data_root, stage):
    plain, config = (tiny_config(names=("advection",), **more) for more in ({}, {f"stages.{stage}.epochs": 1}))
    first, later = (predict_memory(each, data_root).nbytes for each in (plain, config))
    assert later > first


# -- the refiner -------------------------------------------------------------------------------------------------------


class Knows(Exact):
    """The denoiser's part where what is noised is known."""

    def __init__(self, clean):
        super().__init__(clean.shape[1] * clean.shape[2], 0.0, 0.0)
        self.clean, self.levels = clean, []

    def predict(self, name, x, parameters, relative_dt):
        self.mean = self.clean.reshape(len(x), 1, -1, *x.shape[3:])
        self.levels.append((4 * parameters[0, -1]).exp().item())
        return super().predict(name, x, parameters, relative_dt)


def test_noise_falls_in_equal_ratios_from_twice_the_error_to_a_thousandth_of_it(setup):
    model = setup(REFINE).model
    model.set_spread("advection", torch.full((2, 1), 0.5), torch.full((2, 1), 0.05))
    levels = model.levels("advection")
    assert len(levels) == diffusion.REFINEMENTS
    assert levels[0].item() == pytest.approx(0.2) and levels[-1].item() == pytest.approx(1e-4)
    assert (levels[1:] / levels[:-1]).tolist() == pytest.approx([2000**-0.5] * 2)
    model.set_spread("advection", torch.full((2, 1), 0.5), torch.full((2, 1), 1e-4))
    assert model.levels("advection")[-1].item() == pytest.approx(1e-5), "float32 tells no less"


@pytest.mark.parametrize("name", ["advection", "darcy"])
def test_a_denoiser_that_knows_the_truth_gives_the_truth_whatever_the_forecast(setup, name):
    made = setup(REFINE)
    model, batch = made.model.eval(), batch_of(made, name)
    fields = batch.inputs, batch.targets[:, : model.specs[name].output_frames], batch.parameters
    clean, (x, *_) = made.objective.clean(name, *fields)
    assert clean.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.5), "in units of the data's own"
    model.denoiser = Knows(clean)
    found = model(name, batch.inputs, batch.parameters, model.specs[name].dt)
    torch.testing.assert_close(found, fields[1], rtol=1e-3, atol=1e-4)
    assert model.denoiser.levels == pytest.approx(model.levels(name).tolist(), rel=1e-3), "each level in its call"


def test_a_denoiser_that_knows_nothing_leaves_a_forecast_within_the_noise(setup):
    """What the network says is then 0: of z it keeps 1 / (1 + level^2)."""
    made = setup(REFINE)
    model, batch = made.model.eval(), batch_of(made, "advection")
    model.set_spread("advection", torch.ones(2, 1), torch.full((2, 1), 0.01))
    model.denoiser.predict = lambda name, x, *_: torch.zeros_like(x[:, :, -2:])
    asked = "advection", batch.inputs, batch.parameters, 0.05
    apart = (model(*asked) - model.before(*asked)) / model.specs["advection"].output_std[0]
    assert apart.std().item() == pytest.approx(0.02, rel=0.2)


def test_its_loss_is_least_for_a_denoiser_that_knows_and_one_for_none(setup):
    made = setup(REFINE)
    model, batch = made.model, batch_of(made, "advection")
    fields = batch.inputs, batch.targets[:, : model.specs["advection"].output_frames], batch.parameters
    clean, _ = made.objective.clean("advection", *fields)

    def loss() -> float:
        with torch.no_grad():
            return np.mean([made.objective(batch, {REFINE: 1.0}, None)[0].item() for _ in range(50)])

    model.denoiser.predict = lambda name, x, *_: torch.zeros_like(x[:, :, -2:])
    assert loss() == pytest.approx(1.0, rel=0.2)
    model.denoiser = Knows(clean)
    assert loss() < 1e-3


def test_without_random_numbers_a_refined_forecast_is_the_same_each_time_and_with_them_not(setup):
    made = setup(REFINE)
    model, batch = made.model.eval(), batch_of(made, "advection")
    asked = "advection", batch.inputs, batch.parameters, 0.05, 6
    torch.rand(3)  # whatever else is drawn
    first, second = model.rollout(*asked), model.rollout(*asked)
    assert torch.equal(first, second)
    drawn = model.ensemble(*asked, members=2)
    assert drawn.shape[:3] == (2, len(batch.inputs), 6) and not torch.equal(drawn[0], drawn[1])
    finer = batch.inputs.repeat_interleave(2, dim=-1)
    assert model("advection", finer, batch.parameters, 0.05).shape[-1] == 64


def test_a_run_refines_and_judges_it(tiny_config, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "FEWEST", 2)
    overlay = {**STAGES, f"stages.{NAME}.epochs": 0, "stages.finetune.epochs": 1, f"stages.{REFINE}.epochs": 2}
    events = train_here(tiny_config(**overlay), tmp_path)
    (judged,) = [event for event in events if event["kind"] == "gate" and event["stage"] == REFINE]
    assert judged["against"] == "finetune" and judged["ratio"] > 0
    assert sum("noise on forecasts" in event.get("message", "") for event in events) == 2
    model, weights = load_model(tmp_path, stage=REFINE), gates.kept(tmp_path, "operator")
    assert all(torch.equal(value, weights[name]) for name, value in model.before.state_dict().items())


# -- the student -------------------------------------------------------------------------------------------------------


class ExactStudent(Exact):
    """Where the paths of `Exact` begin, at the lowest noise level, in closed form."""

    def predict(self, name, x, parameters, relative_dt):
        sigma = (4 * parameters[:, -1]).exp().reshape(-1, *(1,) * (x.dim() - 1))
        scale, above = (1 + sigma.square()).rsqrt(), sigma - diffusion.LOWEST
        z = x[:, :, -self.channels :] / scale
        wide = ((self.std**2 + diffusion.LOWEST**2) / (self.std**2 + sigma.square())).sqrt()
        wanted = self.mean + wide * (z - self.mean)
        said = (wanted - z / (1 + above.square())) / (above * scale)
        return torch.where(above > 1e-6, said, 0.0)


@pytest.fixture
def taught(setup, tmp_path):
    """`taught()`: what a step of the student needs, begun at a diffusion model's weights."""

    def make(**overlay) -> Setup:
        teacher = setup(**{f"stages.{STUDENT}.epochs": 1, **overlay})
        weights = teacher.model.state_dict()
        return Setup.build(teacher.config, tmp_path, Ranks(), lambda message: None, STUDENT, weights)

    return make


def test_a_student_begins_as_its_teacher_and_takes_its_spread(taught):
    made = taught()
    model, weights = made.model, made.model.state_dict()
    assert isinstance(made.objective, ConsistencyObjective)
    of_teacher = {name: value for name, value in weights.items() if name.startswith("teacher.")}
    assert of_teacher and all(
        torch.equal(value, weights[name.replace("teacher.", "denoiser.", 1)]) for name, value in of_teacher.items()
    )
    assert all(weights[f"spread_{name}"].ne(1).all() for name in model.specs)


def test_corrections_may_be_found_by_fewer_blocks_and_refiners_have_as_many_as_the_operator(taught, setup):
    shallow = {"diffusion.depth": 1}
    for made in (setup(**shallow), taught(**shallow)):
        assert len(made.model.before.blocks()) == 2 and len(made.model.denoiser.blocks()) == 1
    assert len(made.model.teacher.blocks()) == 1
    assert len(setup(REFINE, **shallow).model.blocks()) == 2
    assert len(setup().model.blocks()) == 2


def test_at_the_lowest_level_a_student_gives_back_what_it_is_given(taught):
    made = taught()
    batch = batch_of(made, "advection")
    z, *given = made.objective.errors("advection", batch.inputs, batch.targets[:, :2], batch.parameters)
    level = torch.full((len(z),), diffusion.LOWEST)
    found, _ = diffusion.denoise(made.model.denoiser, "advection", z, level, tuple(given), diffusion.LOWEST)
    torch.testing.assert_close(found, z, rtol=1e-6, atol=1e-6)


def test_its_loss_is_least_for_a_student_that_knows_the_paths_of_its_teacher(taught):
    """One that answers with the mean, as squared errors would have it, is told from one that keeps the spread."""
    made = taught(**{"training.batch_size": 12})
    objective, model, batch = made.objective, made.model, batch_of(made, "advection")
    channels = 2
    model.teacher = Exact(channels, 0.0, 1.0)

    def loss(student) -> float:
        model.denoiser = student
        made.generator.manual_seed(5)
        with torch.no_grad():
            return np.mean([objective(batch, {"consistency": 1.0}, None)[0].item() for _ in range(100)])

    knows, mean = loss(ExactStudent(channels, 0.0, 1.0)), loss(Exact(channels, 0.0, 1.0))
    other = loss(ExactStudent(channels, 0.0, 0.3))
    assert knows < 0.3 * mean and knows < 0.3 * other


def test_a_student_draws_in_one_call_what_is_as_wide(taught):
    made = taught()
    model, batch = made.model.eval(), batch_of(made, "advection")
    model.denoiser, calls = ExactStudent(2, 0.2, 0.5), []
    predict = model.denoiser.predict
    model.denoiser.predict = lambda *asked: (calls.append(1), predict(*asked))[1]
    model.set_spread("advection", torch.ones(1), torch.tensor([0.25]))
    given, parameters = batch.inputs[:2], batch.parameters[:2]
    drawn = model.ensemble("advection", given, parameters, 0.05, 2, members=64)
    forecast = model.before.rollout("advection", given, parameters, 0.05, 2)
    errors = (drawn - forecast) / model.specs["advection"].output_std[0] / 0.25
    assert len(calls) == 1
    assert errors.mean().item() == pytest.approx(0.2, abs=0.03) and errors.std().item() == pytest.approx(0.5, rel=0.05)


def test_a_step_trains_the_student_and_leaves_its_teacher_and_the_operator(taught):
    made = taught()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.set_learning_rate(0.5)
    for step in range(6):
        made.step(made.loader.peek(), step)
    moved = {name for name, value in made.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("denoiser.") for name in moved)


@pytest.mark.slow
def test_a_student_is_judged_against_its_teacher_and_resumed_bit_equal(
    tiny_config, killed_and_continued, tmp_path, monkeypatch
):
    monkeypatch.setattr(gates, "FEWEST", 2)
    overlay = {**STAGES, "checkpoint.interval": 5, f"stages.{STUDENT}.epochs": 2, "diffusion.depth": 1}
    whole, cut = killed_and_continued(tiny_config(**overlay), tmp_path, 8, STUDENT)
    gate = runfolder.read_events(whole, ("gate",))[-1]
    assert gate["stage"] == STUDENT and gate["against"] == NAME
    there, again = (gates.kept(folder, STUDENT) for folder in (whole, cut))
    assert all(torch.equal(value, again[name]) for name, value in there.items())
    teacher = gates.kept(whole, NAME)
    taught = load_model(whole, stage=STUDENT).teacher.state_dict()
    assert all(torch.equal(value, teacher[f"denoiser.{name}"]) for name, value in taught.items())


def test_a_student_without_a_teacher_is_refused(tiny_config):
    with pytest.raises(ConfigError, match="no diffusion model to learn from -> train stages.diff_residual too"):
        tiny_config(**{f"stages.{STUDENT}.epochs": 1})


@pytest.mark.parametrize(("teacher", "answers"), [("pass", STUDENT), ("no gain", "operator")])
def test_a_student_answers_where_its_teacher_did(tiny_config, tmp_path, teacher, answers):
    runfolder.create(tiny_config(), tmp_path)
    for stage, verdict in (("operator", ""), (NAME, teacher), (STUDENT, "pass")):
        (tmp_path / runfolder.STAGES).mkdir(exist_ok=True)
        (tmp_path / runfolder.STAGES / f"{stage}.pt").touch()
        gates.note(tmp_path, stage, verdict)
    assert gates.answering(tmp_path) == answers


def test_a_student_that_is_nearly_as_good_passes_and_no_other_stage_would():
    errors, nearly = {"a": [1.0] * 20}, {"a": [1.03] * 20}
    assert gates.judge(nearly, errors)["verdict"] == "harm"
    assert gates.judge(nearly, errors, gates.bar(STUDENT))["verdict"] == "pass" and gates.bar(NAME) == 1


@pytest.mark.parametrize("stage", [NAME, REFINE])
def test_every_weight_that_trains_is_reached_or_named_as_not_reached(setup, stage):
    """Ranks that average need a gradient of each in every step; the denoiser has inverse parts that nothing asks."""
    made = setup(stage, **{"training.lambda_inv_enc": 0.1, "training.lambda_inv_dec": 0.1})
    for batch in made.loader.peek():
        made.model.zero_grad(set_to_none=True)
        total, terms = made.loss(batch, made.objective.weights(0, 0), None)
        total.backward()
        parts = made.objective.unreached({(batch.dataset, term) for term in terms})
        named = {parameter for part in parts for parameter in part.parameters()}
        trained = {name: parameter for name, parameter in made.model.named_parameters() if parameter.requires_grad}
        assert not [name for name, p in trained.items() if (p.grad is None) != (p in named)]


def test_what_is_to_be_learned_is_computed_in_float32_under_autocast_too(setup):
    """As it is kept, measured and corrected: what 16 bits err by is as large."""
    made, name = setup(), "advection"
    batch = batch_of(made, name)
    given = name, batch.inputs, batch.targets[:, : made.model.specs[name].output_frames], batch.parameters
    with torch.no_grad():
        plain = made.objective.errors(*given)[0]
        with torch.autocast("cpu", torch.bfloat16):
            half = made.objective.errors(*given)[0]
    assert torch.equal(plain, half)


# -- forecasts that are kept ------------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch):
    """Forecasts are kept whatever this machine measures."""
    monkeypatch.setattr(frozen.Costs, "against", lambda *_: "")


def test_forecasts_of_other_pairs_are_neither_read_nor_found_again(setup, tmp_path, always):
    """A rollout term, which may be asked for meanwhile, takes longer pairs, and so fewer."""
    made = setup(**{f"stages.{NAME}.cache": "auto"})
    staging.keep_forecasts(made, tmp_path, print)
    assert made.objective.forecasts.keys() == {"advection", "darcy"}
    before = {path.name for path in tmp_path.rglob("*.npy")}
    made.update(overlays.apply(made.config, {"training.lambda_rollout": 0.1}))
    assert made.objective.forecasts.keys() == {"darcy"}
    staging.keep_forecasts(made, tmp_path, print)
    after = {path.name for path in tmp_path.rglob("*.npy")}
    assert made.objective.forecasts.keys() == {"advection", "darcy"} and len(after - before) == 1


def test_a_step_on_kept_forecasts_is_counted_without_the_frozen_model(setup):
    made = setup()
    given = made.config, made.datasets, NAME, 0.0
    whole, read = flops.per_microbatch(*given), flops.per_microbatch(*given, kept={"darcy"})
    assert read["advection"] == whole["advection"] and read["darcy"] < 0.9 * whole["darcy"]


def test_a_step_on_kept_forecasts_is_the_step_on_computed_ones(setup, tmp_path, always):
    losses, gradients, calls = [], [], []
    for cache in ("off", "auto"):
        made = setup(**{f"stages.{NAME}.cache": cache})
        said = staging.keep_forecasts(made, tmp_path / cache, print)
        assert said.keys() == (made.datasets.keys() if cache == "auto" else set())
        made.generator.manual_seed(4)
        batches, predict = made.loader.peek(), made.model.before.predict
        made.model.before.predict = functools.partial(counted, calls, cache, predict)
        found = [made.objective(batch, {"diffusion": 1.0}, None)[0] for batch in batches]
        sum(found).backward()
        losses.append([loss.item() for loss in found])
        gradients.append([parameter.grad for parameter in made.model.denoiser.parameters()])
    assert calls == ["off", "off"], "of those that are kept none is computed"
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for there, again in zip(*gradients):
        torch.testing.assert_close(there, again, rtol=1e-4, atol=1e-7)
    made.update(overlays.apply(made.config, {f"stages.{NAME}.cache": "off"}))
    made.objective(batches[0], {"diffusion": 1.0}, None)
    assert len(calls) == 3, "and off while it trains, it is computed"


def counted(calls, what, predict, *asked):
    calls.append(what)
    return predict(*asked)


def test_images_drawn_anew_are_never_kept_and_the_run_says_why(setup, tmp_path):
    made = setup(**{f"data.datasets.{name}.augment": True for name in ("advection", "darcy")})
    said = staging.keep_forecasts(made, tmp_path, print)
    assert {(known["on"], known["why"]) for known in said.values()} == {
        (False, "each pair is shown in random images, another one each time")
    }
    assert not made.objective.forecasts and made.loader.peek()[0].pairs is None


def test_a_student_reads_what_its_teacher_did_and_nothing_stays(tiny_config, train_here, tmp_path, monkeypatch, always):
    monkeypatch.setattr(gates, "FEWEST", 2)
    built, build = [], frozen.build

    def noted(path, *more):
        built.append((path, path.exists()))
        return build(path, *more)

    monkeypatch.setattr(frozen, "build", noted)
    events = train_here(tiny_config(**STAGES, **{f"stages.{STUDENT}.epochs": 1}), tmp_path)
    started = {event["stage"]: event["cache"] for event in events if event["kind"] == "start"}
    assert not started["operator"] and all(known["on"] for known in started[STUDENT].values())
    assert [there for _, there in built] == [False, False, True, True] and len({path for path, _ in built}) == 2
    assert not (tmp_path / runfolder.STAGES / staging.FORECASTS).exists()
    (line,) = [known["cache"] for known in results.stages(events) if known["stage"] == STUDENT]
    assert line.keys() == {"advection", "darcy"}

"""The stage that learns to draw: where it starts, what it minimises, how it ends, and what is asked of its model."""

import numpy as np
import pytest
import torch

from upsnb.data.datasets import open_all
from upsnb.errors import ConfigError, DataError, RunError
from upsnb.memory.predict import predict as predict_memory
from upsnb.models import inference
from upsnb.models.perturbed import Perturbed
from upsnb.models.surrogate import Surrogate
from upsnb.models.wrapped import Wrapped
from upsnb.report import results
from upsnb.runs import handle, runfolder
from upsnb.training import gates, stages
from upsnb.training.evaluation import evaluate_ensembles
from upsnb.training.losses import CrpsObjective
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, idle_settings
from upsnb.training.trained import load_model

NAME = "crps"
FNO = {
    "model": {
        "build": "upsnb.models.fno:FNO",
        "settings": {"width": 8, "modes": 4, "depth": 2},
        "append_parameters": True,
    },
    "optimizer.name": "adamw",
}
LATENT = {"operator.rollout": "latent", "training.lambda_forward": 0.1, "training.lambda_inv_enc": 0.1}


@pytest.fixture
def setup(tiny_config, tmp_path):
    """`setup()`: everything a step of this stage needs."""

    def make(stage=NAME, **overlay) -> Setup:
        config = tiny_config(**{"stages.crps.epochs": 1, **overlay})
        return Setup.build(config, tmp_path, Ranks(), lambda message: None, stage)

    return make


def judged_again(run, stage) -> dict:
    """What the weights that a stage has left are worth."""
    datasets = open_all(run.config, runfolder.project_root(), lambda message: None)
    return evaluate_ensembles(run.load_model(stage=stage), datasets, "validation", run.config.evaluation, Ranks())


def batch_of(setup, name):
    return next(batch for batch in setup.loader.peek() if batch.dataset == name)


def trained(made) -> None:
    """As if training had given the random numbers a meaning."""
    draws = torch.Generator().manual_seed(3)
    for name, parameter in made.model.named_parameters():
        if "noise" in name or "modulation" in name or "output" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=draws)


@pytest.mark.parametrize("overlay", [{}, LATENT, FNO], ids=["fields", "latent", "fno"])
def test_at_its_first_step_it_is_the_operator_exactly(setup, overlay):
    before, after = setup("operator", **overlay), setup(**overlay)
    weights = before.model.state_dict()
    new = set(after.model.state_dict()) - set(weights)
    assert len(new) == 2 and all("noise" in name for name in new)
    after.model.load_state_dict(weights, strict=False)
    for made in (before, after):
        made.model.eval()
    batch = batch_of(before, "advection")
    asked = "advection", batch.inputs, batch.parameters, 0.05, 6
    expected = before.model.rollout(*asked)
    assert torch.equal(expected, after.model.rollout(*asked))
    drawn = after.model.ensemble(*asked, members=3)
    torch.testing.assert_close(drawn, expected.expand(3, *expected.shape), rtol=1e-4, atol=1e-5)  # in larger batches


def test_members_differ_and_are_found_again_whatever_stands_beside_them(setup):
    made = setup()
    trained(made)
    model, batch = made.model.eval(), batch_of(made, "advection")
    drawn = model.ensemble("advection", batch.inputs, batch.parameters, 0.05, 6, members=3)
    assert (drawn[0] - drawn[1]).abs().amax(dim=(1, 2, 3)).min() > 1e-4
    of_two = model.ensemble("advection", batch.inputs[1:3], batch.parameters[1:3], 0.05, 6, 3, samples=[1, 2])
    torch.testing.assert_close(drawn[:, 1:3], of_two, rtol=1e-4, atol=1e-5)
    other = model.ensemble("advection", batch.inputs, batch.parameters, 0.05, 6, members=3, seed=1)
    assert not torch.allclose(drawn, other)
    numbers = [model.noise(stages.NOISE, [0, 1], member, 3) for member in range(2)]
    assert numbers[0].shape == (3, 2, stages.NOISE)
    together = torch.cat([row.flatten() for row in numbers])
    assert len(set(together.tolist())) == together.numel(), "each call of each member draws its own"


def test_perturbed_frames_are_an_ensemble_as_wide_as_their_noise(setup):
    made = setup("operator")
    model, batch = made.model.eval(), batch_of(made, "advection")
    asked = "advection", batch.inputs, batch.parameters, 0.05, 6
    single, noisy = (Perturbed(model, {"advection": size}) for size in (0.0, 0.1))
    expected = model.rollout(*asked)
    torch.testing.assert_close(single.ensemble(*asked, members=2)[0], expected, rtol=1e-4, atol=1e-5)
    given, inner = [], model.rollout
    model.rollout = lambda name, frames, *rest: (given.append(frames), inner(name, frames, *rest))[1]
    drawn = noisy.ensemble(*asked, members=3)
    (frames,) = given
    noise = frames.unflatten(0, (3, -1)) - batch.inputs[:, -2:]
    assert noise.std().item() == pytest.approx(0.1 * model.specs["advection"].input_std[0], rel=0.1)
    assert abs(noise.mean().item()) < 0.01 and (drawn[0] - drawn[1]).abs().amax(dim=(1, 2, 3)).min() > 1e-4
    again = noisy.ensemble("advection", batch.inputs[1:2], batch.parameters[1:2], 0.05, 6, 3, samples=[1])
    torch.testing.assert_close(again, drawn[:, 1:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("members", "unroll"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("overlay", [{}, LATENT], ids=["fields", "latent"])
def test_its_loss_is_the_fair_crps_of_self_fed_forecasts(setup, members, unroll, overlay):
    made = setup(**{"stages.crps.members": members, "stages.crps.unroll": unroll, **overlay})
    trained(made)
    made.model.eval()
    objective, batch = made.objective, batch_of(made, "advection")
    state = made.generator.get_state()
    total, terms = objective(batch, objective.weights(0, 0), None)
    assert set(terms) == {"crps"} and total.requires_grad
    made.generator.set_state(state)
    pairs, spec = len(batch.inputs), made.model.specs["advection"]
    noise = torch.randn(unroll, members * pairs, stages.NOISE, generator=made.generator)
    frames = unroll * spec.output_frames
    rolled = [
        made.model.rollout("advection", batch.inputs, batch.parameters, spec.dt, frames, noise[:, own])
        for own in torch.arange(members * pairs).split(pairs)
    ]
    rolled, truth = torch.stack(rolled) / spec.output_std[0], batch.targets[:, :frames] / spec.output_std[0]
    skill = np.mean([(one - truth).abs().mean().item() for one in rolled])
    apart = np.mean([(rolled[i] - rolled[j]).abs().mean().item() for i in range(members) for j in range(i)])
    assert total.item() == pytest.approx(skill - apart / 2, rel=1e-4)


def test_noise_of_the_operator_is_not_added_to_what_its_members_are_given(setup):
    still, noisy = setup(), setup(**{"training.noise": 0.5})
    batch = batch_of(still, "advection")
    values = []
    for made in (still, noisy):
        made.model.load_state_dict(still.model.state_dict())
        made.model.eval()
        values.append(made.objective(batch, {"crps": 1.0}, None)[0])
    assert torch.equal(*values)


def test_a_step_trains_what_draws_and_all_else(setup):
    made = setup()
    assert isinstance(made.objective, CrpsObjective)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.set_learning_rate(0.5)
    for step in range(6):  # a block's output and its modulation begin at zero: what is behind them waits for both
        made.step(made.loader.peek(), step)
    unmoved = {name for name, value in made.model.state_dict().items() if torch.equal(value, before[name])}
    assert not unmoved


def test_another_model_draws_too_and_its_run_can_be_asked(tiny_config, train_here, tmp_path):
    train_here(tiny_config(**{**STAGES, **FNO}), tmp_path)
    model = load_model(tmp_path, stage=NAME)
    trained_noise = [value for name, value in model.state_dict().items() if "noise" in name]
    assert trained_noise and all(value.abs().max() > 0 for value in trained_noise)
    fields = np.random.default_rng(0).normal(size=(2, 2, 1, 32))
    drawn = inference.predict(model, fields, "advection", 0.4, num_frames=4, members=5)
    assert drawn.std(axis=0).min() > 0
    assert not model.refuses("advection", (64,)), "another grid is tried without random numbers"


def test_a_model_that_takes_no_random_numbers_is_refused(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Wrapped, "take_noise", Surrogate.take_noise)
    config = tiny_config(**{"stages.crps.epochs": 1, **FNO})
    with pytest.raises(ConfigError, match="stages.crps.epochs: FNO takes no random numbers -> set it to 0"):
        Setup.build(config, tmp_path, Ranks(), lambda message: None, NAME)


def test_memory_is_that_of_all_members(tiny_config, data_root):
    plain = tiny_config(names=("advection",))
    config = tiny_config(names=("advection",), **{"stages.crps.epochs": 1, "stages.crps.members": 6})
    first, later = (predict_memory(each, data_root).nbytes for each in (plain, config))
    assert later > 1.5 * first


def test_a_split_that_is_too_small_for_a_verdict_is_named_before_anything_trains(setup, tiny_setup):
    said = [text for text in idle_settings(setup("operator")) if "verdict" in text]
    assert said[0].startswith("advection has 2 validation samples and a verdict on a stage needs 8 -> ")
    assert "raise data.split.validation_fraction" in said[0] and said[1].startswith("darcy has")
    assert not [text for text in idle_settings(tiny_setup()) if "verdict" in text], "a single stage asks for none"


STAGES = {"stages.finetune.epochs": 1, "stages.crps.epochs": 2, "evaluation.members": 4, "training.ema_decay": 0.9}


@pytest.fixture
def run(tiny_config, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "FEWEST", 2)
    events = train_here(tiny_config(**STAGES), tmp_path)
    return events, tmp_path


def test_a_run_trains_it_from_the_operator_and_judges_it_against_finetune(run):
    events, folder = run
    assert [event["stage"] for event in events if event["kind"] == "start"] == ["operator", "finetune", NAME]
    judged = [event for event in events if event["kind"] == "gate"]
    assert [(event["stage"], event["against"]) for event in judged] == [("finetune", "operator"), (NAME, "finetune")]
    assert all(event["samples"] == 2 and event["ratio"] > 0 for event in judged)
    assert [event["perturbed_ratio"] is not None for event in judged] == [False, True], "where one draws first"
    passed = [event["stage"] for event in judged if event["verdict"] == "pass"]
    answers = passed[-1] if passed else "operator"
    model = load_model(folder)
    assert model.draws == (stages.NOISE if answers == NAME else 0)
    for stage in ("operator", "finetune", NAME):
        kept = gates.kept(folder, stage)
        assert all(
            torch.equal(value, kept[name]) for name, value in load_model(folder, stage=stage).state_dict().items()
        )
        measured, again = runfolder.measured(folder, stage), judged_again(handle.Run(folder), stage)
        for name, found in again.items():
            assert measured[name]["per_sample"]["crps"] == pytest.approx(found["per_sample"]["crps"], rel=1e-4)
        assert {name: found["members"] for name, found in measured.items()} == dict.fromkeys(
            ("advection", "darcy"), 4 if stage == NAME else 1
        )
    report = results.run_numbers(handle.Run(folder))
    assert [stage["gate"] and stage["gate"]["verdict"] for stage in report["stages"]] == [
        None,
        *(event["verdict"] for event in judged),
    ]
    said = results.costs(report)
    for event in judged:
        assert f"{event['verdict']}: " in said and f"of the error of {event['against']}" in said


def test_what_passed_answers_and_its_ensembles_are_reported(tiny_config, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gates, "judge", lambda ours, theirs, *bar: {"verdict": "pass", "ratio": 0.5, "ci95": [0.4, 0.6], "samples": 2}
    )
    train_here(tiny_config(**STAGES), tmp_path)
    found = results.read_evaluation(tmp_path, handle.Run(tmp_path).events())
    for name, frames in (("advection", 3), ("darcy", 1)):
        ensemble = found["datasets"][name]["test"]["ensemble"]
        assert ensemble["members"] == 4 and len(ensemble["rank_histogram"]) == 5
        assert len(ensemble["per_time"]["crps"]) == frames
        assert ("correlation_time" in ensemble) == (name == "advection")
    model = load_model(tmp_path)
    fields = np.random.default_rng(0).normal(size=(3, 2, 1, 32))
    drawn = inference.predict(model, fields, "advection", 0.4, num_frames=4, members=5)
    assert drawn.shape == (5, 3, 4, 1, 32)
    alone = inference.predict(model, fields[0], "advection", 0.4, num_frames=4, members=5)
    np.testing.assert_allclose(alone, drawn[:, 0], rtol=1e-4, atol=1e-4)
    assert handle.Run(tmp_path).predict(fields, "advection", 0.4, members=2, seed=4).shape == (2, 3, 2, 1, 32)
    with pytest.raises(DataError, match="members: got 0 -> give 1 or more"):
        inference.predict(model, fields, "advection", 0.4, members=0)
    with pytest.raises(DataError, match="members: UPS draws nothing -> train a stage that draws"):
        inference.predict(load_model(tmp_path, stage="operator"), fields, "advection", 0.4, members=2)


def test_what_did_not_pass_is_left_out_of_the_report_unless_asked_for(tiny_config, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gates, "judge", lambda ours, theirs, *bar: {"verdict": "harm", "ratio": 1.5, "ci95": [1.4, 1.6], "samples": 2}
    )
    monkeypatch.setattr(gates, "harms", lambda *_: True)
    monkeypatch.setattr(gates, "FEWEST", 1)
    train_here(tiny_config(**STAGES), tmp_path)
    looked_at = {stage: runfolder.measured(tmp_path, stage) for stage in ("operator", "finetune", NAME)}
    counts = {stage: {len(found["samples"]) for found in each.values()} for stage, each in looked_at.items()}
    assert counts == {"operator": {2}, "finetune": {1}, NAME: {1}}, "a few samples were enough to see the harm"
    report = results.run_numbers(handle.Run(tmp_path))
    assert report["weights"] == "last of stage operator, which no later one has beaten, averaged"
    assert load_model(tmp_path).draws == 0 and load_model(tmp_path, stage=NAME).draws == stages.NOISE
    with pytest.raises(RunError, match="choose one that has ended: crps, finetune, operator"):
        load_model(tmp_path, stage="refine")


@pytest.mark.slow
def test_killed_in_this_stage_a_run_goes_on_bit_equal(tiny_config, killed_and_continued, tmp_path):
    folders = killed_and_continued(tiny_config(**STAGES, **{"checkpoint.interval": 5}), tmp_path, 8, NAME)
    there, again = (gates.kept(folder, NAME) for folder in folders)
    assert all(torch.equal(value, again[name]) for name, value in there.items())


def test_without_what_it_is_compared_with_it_says_so_and_ends(tiny_config, train_here, tmp_path):
    """A run that goes on from a mirror of its checkpoints has nothing of earlier stages."""
    config = tiny_config(**{**STAGES, "checkpoint.interval": 100})

    def lose(step):
        for path in (tmp_path / runfolder.STAGES).glob("*.*"):
            path.unlink()

    events = train_here(config, tmp_path, at_step=lose)
    assert [event["verdict"] for event in events if event["kind"] == "gate"] == ["not measurable"] * 2
    assert [event for event in events if event["kind"] == "end"]
    assert handle.Run(tmp_path).manifest["answers"] == "operator" and load_model(tmp_path).draws == stages.NOISE

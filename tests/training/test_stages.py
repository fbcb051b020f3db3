"""A stage is a row in one table: it trains around the one before it, and is resumed where it was."""

import pytest
import torch

from upsnb import hardware
from upsnb.data.spec import DatasetSpec
from upsnb.models.surrogate import Surrogate
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import stages
from upsnb.training.losses import FieldObjective
from upsnb.training.trained import load_model
from upsnb.worker import staging

NAME = "diff_residual"  # in its place


class Corrected(Surrogate):
    """A frozen forecast with a trained factor on it."""

    def __init__(self, before: Surrogate):
        super().__init__(before.specs)
        self.before = before.requires_grad_(False)
        self.factor = torch.nn.Parameter(torch.ones(()))

    def predict(self, name, x, parameters, relative_dt, points=None):
        return self.factor * self.before.predict(name, x, parameters, relative_dt, points)


def correct(config, datasets, before):
    return FieldObjective(Corrected(before), config.training)


@pytest.fixture
def two_stages(monkeypatch, tiny_config):
    monkeypatch.setitem(stages.STAGES, NAME, correct)
    monkeypatch.setattr(hardware, "check_runnable", lambda config, machine: None)  # which refuses what is not there yet

    def make(**overlay):
        return tiny_config(**{f"stages.{NAME}.epochs": 1, "training.ema_decay": 0.9, **overlay})

    return make


def kinds(events, kind):
    return [event for event in events if event["kind"] == kind]


def test_stages_follow_each_other_on_one_curve(two_stages, train_here, tmp_path):
    events = train_here(two_stages(), tmp_path)
    assert [event["stage"] for event in kinds(events, "start")] == ["operator", NAME]
    steps = kinds(events, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert [event["stage"] for event in steps] == sorted((event["stage"] for event in steps), reverse=True)
    assert len({event["stage"] for event in steps}) == 2
    times = [event["time_s"] for event in steps]
    assert times == sorted(times)
    (end,) = kinds(events, "end")
    assert end["stage"] == NAME and end["reason"] == "epochs"


def test_the_model_of_the_last_stage_holds_the_one_before_as_it_was_left(two_stages, train_here, tmp_path):
    train_here(two_stages(), tmp_path)
    model = load_model(tmp_path, stage=NAME)
    assert isinstance(model, Corrected) and model.factor != 1
    alone = load_model_of_first_stage(tmp_path)
    assert alone.keys() == model.before.state_dict().keys()
    assert all(torch.equal(value, model.before.state_dict()[name]) for name, value in alone.items())
    spec: DatasetSpec = model.specs["darcy"]
    assert model("darcy", torch.ones(1, 1, 1, *spec.grid_shape), torch.ones(1, 1), 0.0).isfinite().all()


def load_model_of_first_stage(folder):
    """Averaged weights at the end of the operator, from its last checkpoint."""
    from upsnb.runs import checkpoint_index
    from upsnb.training import checkpoint_shards

    index = checkpoint_index.read_index(folder)
    name = index["previous"]
    path, files = folder / "checkpoints" / name, tuple(index["checkpoints"][name]["files"])

    def room(path, shape, dtype):
        return torch.empty(shape, dtype=dtype) if path[:3] == ("setup", "ema", "average") else None

    found = checkpoint_shards.read(path, files, room, None, alone=True)
    return {name.removeprefix("setup/ema/average/"): value for name, value in found.items()}


class Killed(Exception):
    """As a machine is lost."""


def test_a_run_that_was_killed_between_two_stages_goes_on_with_the_next(two_stages, train_here, tmp_path, monkeypatch):
    def kill(*_):
        raise Killed

    whole = train_here(two_stages(), tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(staging, "conclude", kill)
        train_here(two_stages(), tmp_path / "cut")
    events = train_here(two_stages(**{"checkpoint.resume": True}), tmp_path / "cut")
    assert kinds(events, "end")[0]["stage"] == NAME
    losses = [{event["step"]: event["loss"] for event in kinds(found, "step")} for found in (events, whole)]
    assert losses[0] == losses[1]


def test_the_stage_that_is_trained_cannot_be_left_out(two_stages, train_here, tmp_path):
    run, asked = Run(tmp_path), []

    def ask(step):
        if not asked and run.manifest["stage"] == NAME:
            asked.append(run.update({f"stages.{NAME}.epochs": 0}))

    events = train_here(two_stages(), tmp_path, ask)
    (flip,) = kinds(events, "flip")
    assert not flip["applied"] and f"stages.{NAME}.epochs: 0, and the stage is being trained" in flip["reason"]
    assert kinds(events, "end")[0]["reason"] == "epochs" and kinds(events, "end")[0]["stage"] == NAME


def test_a_model_knows_the_stage_that_its_weights_are_of(two_stages, train_here, tmp_path):
    train_here(two_stages(), tmp_path)
    assert [load_model(tmp_path, stage=stage).stage for stage in ("operator", NAME)] == ["operator", NAME]
    assert load_model(tmp_path, "best").stage == NAME, (
        "the best one is of the last stage, whichever answers for the run"
    )


def test_a_killed_run_goes_on_in_its_stage(two_stages, killed_and_continued, tmp_path):
    folders = killed_and_continued(two_stages(**{"checkpoint.interval": 5}), tmp_path, 8, NAME)
    whole, events = (runfolder.read_events(folder) for folder in folders)
    assert kinds(events, "start")[-1]["stage"] == NAME
    losses = {event["step"]: event["loss"] for event in kinds(events, "step")}  # repeats replace what was cut off
    assert losses == {event["step"]: event["loss"] for event in kinds(whole, "step")}

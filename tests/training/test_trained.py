"""A run begins with the weights of another one that fit, says which, and needs that one no more once it has begun."""

import shutil
from pathlib import Path

import pytest
import torch

from upsnb import overlays
from upsnb.errors import ConfigError
from upsnb.runs import handle
from upsnb.training import preflight, trained
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.training.trained import load_model


@pytest.fixture(scope="module")
def before(tiny_config, train_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "before"
    train_here(tiny_config(**{"training.ema_decay": 0.9}), folder)
    return folder


def begun(config):
    said = []
    setup = Setup.build(config, Path(), Ranks(), lambda message: None)
    drawn = {name: value.clone() for name, value in setup.model.state_dict().items()}
    assert setup.begin(said.append) == [], "the same split"
    return setup, drawn, said


def test_with_the_same_data_all_weights_are_those_that_the_other_run_answers_with(tiny_config, before):
    setup, drawn, (said,) = begun(tiny_config(**{"model.pretrained": str(before), "training.ema_decay": 0.5}))
    known = load_model(before).state_dict()
    for name, value in setup.model.state_dict().items():
        assert torch.equal(value, known[name]), name
    assert any(not torch.equal(value, known[name]) for name, value in drawn.items())
    assert all(torch.equal(value, known[name]) for name, value in setup.ema.state_dict()["average"].items())
    assert not any(optimizer.state for optimizer in setup.optimizers), "moments begin anew"
    assert "100.0% of all numbers" in said and "drawn anew" not in said


def test_for_other_data_the_operator_is_taken_and_what_speaks_for_them_is_drawn(tiny_config, before):
    own = tiny_config(("darcy",))
    rows = {"ground": own.data.datasets["darcy"].model_dump(mode="json")}
    config = overlays.apply(own, {"data.datasets": rows, "model.pretrained": str(before)})
    setup, drawn, (said,) = begun(config)
    known = load_model(before).state_dict()
    for name, value in setup.model.state_dict().items():
        assert torch.equal(value, (drawn if "ground" in name else known)[name]), name
    assert "encoders.ground" in said and "decoders.ground" in said and "operator" not in said


def test_another_grid_of_a_dataset_draws_what_belongs_to_it_alone(tiny_config, before):
    finer = {"data.datasets.darcy.generate.resolution": 32, "latent.tokens": 64, "model.pretrained": str(before)}
    setup, drawn, (said,) = begun(tiny_config(**finer))
    known = load_model(before).state_dict()
    assert torch.equal(setup.model.state_dict()["operator.input.weight"], known["operator.input.weight"])
    assert "encoders.darcy" in said and "operator" not in said and "encoders.advection" not in said, said


def test_test_samples_that_the_other_run_was_trained_on_are_counted(tiny_config, before):
    turned = {"data.split.convention": "last", "model.pretrained": str(before)}
    setup = Setup.build(tiny_config(("advection",), **turned), Path(), Ranks(), lambda message: None)
    count = len(setup.datasets["advection"].splits["test"])
    (doubt,) = setup.begin(lambda message: None)
    assert doubt.startswith(f"advection: {count} of {count} test samples were seen by {before} in training -> ")
    other = {"data.datasets.advection.generate.seed": 3, **turned}
    setup = Setup.build(tiny_config(("advection",), **other), Path(), Ranks(), lambda message: None)
    assert setup.begin(lambda message: None) == []


def test_a_run_that_has_begun_goes_on_without_the_other_one(tiny_config, train_here, before, tmp_path):
    other = shutil.copytree(before, tmp_path / "other")
    config = tiny_config(**{"model.pretrained": str(other), "stages.operator.epochs": 2})
    events = train_here(config, tmp_path / "run", lambda step: None)
    assert any("begins with weights of" in event.get("message", "") for event in events)
    alone = train_here(tiny_config(**{"stages.operator.epochs": 2}), tmp_path / "alone")
    first, other_first = (next(e["loss"] for e in those if e["kind"] == "step") for those in (events, alone))
    assert first < other_first, "it knows these data"
    shutil.rmtree(other)
    longer = overlays.apply(config, {"checkpoint.resume": True, "stages.operator.epochs": 3})
    assert preflight.check(longer) == []
    said = [event["message"] for event in train_here(longer, tmp_path / "run") if event["kind"] == "progress"]
    assert said[-1].startswith("resumed at step") and sum("begins with" in message for message in said) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.pretrained": "no-such-run"}, "model.pretrained: 'no-such-run': no such folder"),
        ({"model.pretrained": "."}, "model.pretrained: .*: has no checkpoint yet"),
        ({"operator.pdet.hidden_dim": 64}, "operator.* is 16 in .*before, and 32 in this model -> build the same"),
        ({"model.build": "upsnb.models.fno:FNO", "model.settings": {"width": 8}}, "no weights of a name and shape"),
    ],
)
def test_what_it_could_not_begin_with_is_refused_before_anything_starts(tiny_config, before, tmp_path, changes, said):
    config = tiny_config(**{"model.pretrained": str(before), **changes})
    with pytest.raises(ConfigError, match=said):
        handle.start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_whoever_loads_a_model_computes_with_the_cores_that_there_are(before, monkeypatch):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        monkeypatch.setattr(trained.hardware, "num_cores", lambda: 3)
        load_model(before)
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(trained.hardware, "num_cores", lambda: 8)
        load_model(before)
        assert torch.get_num_threads() == 3, "somebody may want fewer"
    finally:
        torch.set_num_threads(threads)

"""Requests that were lost, damaged or numbered backwards: what stood before holds, and the next one is obeyed."""

import json
import os
import time

import pytest

from upsnb.runs import handle, runfolder

ODD = {
    "deleted": lambda path: path.unlink(),
    "half written": lambda path: path.write_text('{"format": 1, "revi'),
    "of another format": lambda path: path.write_text('{"format": 9}'),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


def at(actions):
    """Call each action once, with the first beat of its step."""
    return lambda step: actions.pop(step, lambda: None)()


def kinds(events, *chosen):
    return [event for event in events if event["kind"] in chosen]


@pytest.mark.parametrize("how", ODD)
def test_what_is_no_request_is_said_once_and_changes_nothing(tiny_config, tmp_path, train_here, how):
    path, run = tmp_path / runfolder.CONTROL, handle.Run(tmp_path)
    actions = {2: lambda: run.update({"noise": 0.01}), 4: lambda: ODD[how](path), 12: lambda: run.update({"lr": 1e-3})}
    events = train_here(tiny_config(), tmp_path, at(actions))
    (warning,) = kinds(events, "warning")
    assert warning["step"] == 5 and runfolder.CONTROL in warning["message"]
    first, second = kinds(events, "flip")
    assert (first["revision"], first["step"]) == (1, 3)
    assert second["step"] == 13 and second["revision"] > 1 and second["changes"] == {"optimizer.lr": 1e-3}
    assert second["overlay"] == {"training.noise": 0.01, "optimizer.lr": 1e-3}, "the first is still in force"
    assert kinds(events, "end")[0]["reason"] == "epochs"


@pytest.mark.parametrize("revision", [1, 2, 3])
def test_a_request_by_hand_is_obeyed_whatever_its_number(tiny_config, tmp_path, train_here, revision):
    path, run = tmp_path / runfolder.CONTROL, handle.Run(tmp_path)
    text = json.dumps({"format": 1, "revision": revision, "overlay": {"training.noise": 0.03}, "command": "checkpoint"})
    actions = {2: lambda: run.update({"noise": 0.01}), 4: lambda: run.update({"noise": 0.02})}
    events = train_here(tiny_config(), tmp_path, at({**actions, 6: lambda: path.write_text(text)}))
    assert [(flip["revision"], flip["overlay"]["training.noise"]) for flip in kinds(events, "flip")] == [
        (1, 0.01),
        (2, 0.02),
        (3, 0.03),
    ]
    assert [event["step"] for event in kinds(events, "checkpoint") if event["revision"]] == [7]
    assert runfolder.read_control(tmp_path).revision == 3, "and the next one is counted from there"


def test_a_request_by_hand_may_be_nested_as_params_files_are(tiny_config, tmp_path, train_here):
    config = tiny_config(**{"training.accum_steps": 2})
    text = json.dumps({"format": 1, "revision": 1, "overlay": {"training": {"noise": 0.03}}, "command": None})
    events = train_here(config, tmp_path, at({3: lambda: (tmp_path / runfolder.CONTROL).write_text(text)}))
    (flip,) = kinds(events, "flip")
    assert flip["applied"] and flip["changes"] == {"training.noise": 0.03}, "all else stays as it is"


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_set_right_spends_no_budget(tiny_config, tmp_path, train_here, monkeypatch, hours):
    now = time.time
    config = tiny_config(**{"cost.price_per_hour": 1.0, "cost.budget": 1.0})
    events = train_here(
        config, tmp_path, at({3: lambda: monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)})
    )
    assert kinds(events, "end")[0]["reason"] == "epochs"


def test_a_pause_outlasts_a_damaged_file(tiny_config, tmp_path, train_here):
    beats, path = [], tmp_path / runfolder.CONTROL

    def at_step(step):
        beats.append(step)
        if len(beats) == 4:
            runfolder.write_control(tmp_path, None, runfolder.PAUSE)
        if len(beats) == 10:
            path.write_text("[]")
        if len(beats) == 16:
            runfolder.write_control(tmp_path, None, runfolder.RESUME)

    events = train_here(tiny_config(), tmp_path, at_step)
    paused, warning, resumed = kinds(events, "paused", "warning", "resumed")
    assert paused["step"] == resumed["step"] and resumed["revision"] > paused["revision"]
    assert kinds(events, "end")[0]["reason"] == "epochs"

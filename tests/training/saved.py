"""Checkpoints of a run folder, as tests look at them."""

import json

import torch

from upsnb.runs import checkpoint_index


class Events(list):
    """Stands for a run's events."""

    def write(self, kind, step, **fields):
        self.append({"kind": kind, "step": step, **fields})


def state(step, value=None, size=64):
    return {"step": step, "weights": torch.full((size,), float(step if value is None else value))}


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != checkpoint_index.INDEX)


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}"


def index_of(folder):
    return json.loads((folder / "checkpoints" / checkpoint_index.INDEX).read_text())


def losses(events):
    """{step: loss}, the last one written of each step."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def expect_same_state(first, second):
    """Equal bit for bit, wherever there is a tensor."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            expect_same_state(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second):
            expect_same_state(one, other)
    else:
        assert first == second

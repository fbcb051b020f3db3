"""Step events: everything a reader is promised, and an end to training that has lost its weights."""

import pytest
import torch

from upsnb.errors import RunError
from upsnb.runs.events import EventWriter, read_events
from upsnb.training.compiling import Compilation
from upsnb.training.timing import StepClock
from upsnb.worker.step_log import MOST_NONFINITE, StepLog


@pytest.fixture
def log(tmp_path, clock):
    steps = StepClock(torch.device("cpu"))
    steps.start()
    events = EventWriter(tmp_path)
    yield StepLog(events, steps, lambda *observed: None)
    events.close()


def add(log: StepLog, step: int, loss: float) -> None:
    known = {"step": step, "epoch": 0, "data_wait_ms": 0.1, "datasets": ["a"], "learning_rate": 1e-3}
    known |= {"compiled": Compilation(), "optimizer": (0.0, 0.001)}
    log.add(known, torch.tensor(loss), {"relative": torch.tensor(loss)}, torch.tensor(1.0), samples=8)


def test_each_step_is_one_event_with_its_terms(log, clock, tmp_path):
    for step in range(1, 9):
        clock.advance(0.002)
        add(log, step, 1.0 / step)
    events = read_events(tmp_path, ("step",))
    assert [event["step"] for event in events] == list(range(1, 9))
    assert all(event["losses"] == {"relative": event["loss"]} for event in events)
    assert all(event["samples_per_s"] == pytest.approx(8e3 / event["step_time_ms"], rel=0.01) for event in events)


def test_losses_that_stay_nonfinite_end_the_run_and_name_the_first_step(log):
    add(log, 1, 0.5)
    for step in range(2, MOST_NONFINITE + 1):
        add(log, step, float("nan"))
    with pytest.raises(RunError, match="since step 2 "):
        add(log, MOST_NONFINITE + 1, float("inf"))


def test_a_finite_loss_starts_the_count_anew(log):
    for step in range(1, 3 * MOST_NONFINITE):
        add(log, step, 0.5 if step % MOST_NONFINITE == 0 else float("nan"))

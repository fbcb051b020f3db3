"""A run's events as a few lines of text: readable in a notebook, a terminal and a log file alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from upsnb.config import OPERATOR
from upsnb.report.file import verdict
from upsnb.runs.events import naming

EVERY_S = 5.0  # between two lines at first
SLOWER = 0.03  # of the time so far: a night of training prints a few hundred lines, not ten thousand
SAID = {  # by kind of event; what other kinds say is more than their fields
    "progress": "{message}",
    "warning": "warning: {message}",
    "compile": "step {step}: compiled {graphs} graphs, {duration_s:.1f} s",
    "guard": "step {step}: guard {guard}, {action}: {reason}",
    "paused": "step {step}: paused",
}
_print = partial(print, flush=True)  # papermill and a pipe show a line only once it is flushed


def rewrite(text: str) -> None:
    """Print a line that the next one replaces: of a long work with many steps a notebook keeps the last."""
    print(f"{text:<79}", end="\r", flush=True)


class Progress:
    """Says what matters as events come: `run.wait(on_event=Progress())`.

    Time is the events' own, so attaching to an older run prints the same lines, only faster.
    """

    def __init__(self, log: Callable[[str], None] = _print):
        self._log = log
        self._start: dict = {}
        self._steps: list[dict] = []  # since the last line
        self._shown_s = -math.inf

    def __call__(self, event: dict) -> None:
        """Take the next event."""
        kind = event["kind"]
        if kind in SAID:
            self._log(SAID[kind].format(**event))
        elif kind == "segment" and event["number"]:
            self._log(f"launch {event['number'] + 1}, from about step {event['step']}")
        elif kind == "start":
            self._start = event
            self._log(_greeting(event))
        elif kind == "eval":
            errors = ", ".join(f"{name} {_number(value)}" for name, value in event["val_nrmse"].items())
            metric = naming(self._start)["metric"]
            self._log(f"step {event['step']:,} | validation {metric}: {errors}{', the best so far' * event['best']}")
        elif kind == "gate":
            self._log(f"step {event['step']:,} | {event['stage']}: {verdict(event)}")
        elif kind == "flip":
            self._log(_flipped(event))
        elif kind == "relaunch":
            self._log(f"step {event['step']}: saved, to be launched again with {_settings(event['changes'])}")
        elif kind == "resumed":
            self._log(f"step {event['step']}: goes on after a pause of {duration(event['paused_s'])}")
        elif kind == "step":
            self._steps.append(event)
            if event["time_s"] - self._shown_s >= max(EVERY_S, SLOWER * event["time_s"]):
                self._show()
        elif kind == "end":
            self._show()
            self._log(f"ended by {event['reason']} after {duration(event['train_time_s'])} of training")

    def _show(self) -> None:
        """One line on the steps since the last: means, because datasets take turns and cost differently."""
        if not self._steps:
            return
        last, step_s = self._steps[-1], [step["step_time_ms"] / 1e3 for step in self._steps]
        samples = sum(step["samples_per_s"] * seconds for step, seconds in zip(self._steps, step_s))
        _, left_s = progress(self._start, last["step"], last["time_s"])
        parts = (
            f"step {last['step']:,}",
            f"epoch {last['epoch'] + 1}",
            f"loss {self._losses()}",
            f"{_number(samples / sum(step_s))} {naming(self._start)['unit']}/s",
            duration(last["time_s"]) + (f", {duration(left_s)} left" if left_s < math.inf else ""),
        )
        self._log(" | ".join(parts))
        self._shown_s = last["time_s"]
        self._steps.clear()

    def _losses(self) -> str:
        """Mean loss of each dataset; of the whole step where datasets share one."""
        losses: dict[str, list[float | None]] = {}
        for step in self._steps:
            losses.setdefault(" + ".join(step["datasets"]), []).append(step["loss"])
        means = {name: None if None in values else sum(values) / len(values) for name, values in losses.items()}
        if len(means) == 1:
            return _number(next(iter(means.values())))
        return ", ".join(f"{name} {_number(mean)}" for name, mean in sorted(means.items()))


def progress(start: dict, step: int, time_s: float) -> tuple[float, float]:
    """(share of the stage done, seconds of it left); the clock or the last epoch ends it, whichever is first.

    Args:
        start: the latest `start` event, of a launch or of a stage.
        step: done in all stages, like `time_s`.
    """
    total, limit, from_step = start.get("total_steps"), start.get("time_limit_s"), start.get("stage_from_step", 0)
    step, time_s = step - from_step, time_s - start.get("stage_from_s", 0.0)
    by_steps, by_clock = step / (total - from_step) if total else 0.0, time_s / limit if limit else 0.0
    left = [time_s * (1 / by_steps - 1)] if by_steps else []
    left += [limit - time_s] if limit else []
    return min(max(by_steps, by_clock), 1.0), max(min(left, default=math.inf), 0.0)


def duration(seconds: float) -> str:
    """`8 s`, `2 min 5 s`, `3 h 20 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def _flipped(event: dict) -> str:
    skipped = "".join(f"; skipped {phase}: {reason}" for phase, reason in (event.get("skipped") or {}).items())
    if not event["applied"]:
        return f"step {event['step']}: change {event['revision']} was refused: {event['reason']}"
    return f"step {event['step']}: change {event['revision']}: {_settings(event['changes']) or 'nothing new'}{skipped}"


def _settings(changes: dict) -> str:
    return ", ".join(f"{path} {value}" for path, value in changes.items())


def _greeting(start: dict) -> str:
    pairs = ", ".join(f"{name} {found['pairs']:,}" for name, found in start["datasets"].items())
    stage = start.get("stage") or OPERATOR
    return f"{stage}: " * (stage != OPERATOR) + (
        f"{start['parameters']:,} parameters on {start['num_ranks']} x {start['device']}, "
        f"{start['samples_per_step']} {naming(start)['unit']} a step; training pairs: {pairs}"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"

"""Step events whose numbers are still on the device when the next step begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from upsnb.errors import RunError
from upsnb.runs.events import EventWriter
from upsnb.training.timing import StepClock, elapsed_ms, peak_memory_gib

MOST_NONFINITE = 20  # losses in a row: float16's scaler needs a few to find its scale, lost weights never come back
Observer = Callable[[int, float, float, bool], None]  # step, samples per second, step time [ms], steady


class StepLog:
    """Writes one event a step, as late as its numbers are there, so that no step waits for them."""

    def __init__(self, events: EventWriter, clock: StepClock, observe: Observer):
        self.events, self.clock, self.observe = events, clock, observe
        self.pending: deque[tuple[dict, list[str], Tensor, int]] = deque()
        self.time_before_s = 0.0  # training time of earlier launches
        self.nonfinite = 0  # losses in a row, so far
        self.guarded = False  # the guard `nonfinite` looks after such losses

    def add(self, known: dict, loss: Tensor, terms: dict[str, Tensor], norm: Tensor, samples: int) -> None:
        """Take a step that has been launched; call once a step, before anything else is launched.

        Args:
            known: fields the host knows already, among them `step`, `compiled` (the Compilation of this step) and
                `optimizer` (marks of its begin and end on the device).
            loss, terms, norm: scalars on the device.
            samples: pairs of the step, all ranks.
        """
        values = torch.stack([x.detach().float() for x in (loss, norm, *terms.values())])
        if values.device.type == "cuda":
            # Its own copy, queued behind this step: reading the device's later would wait for the steps after it.
            host = torch.empty(values.shape, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        self.clock.step()
        self.pending.append((known, list(terms), values, samples))
        self.drain()

    def drain(self, everything: bool = False) -> None:
        """Write the events whose numbers the device has finished; never waits unless asked for everything.

        On all ranks but the first, which alone takes note of steps, there is nothing to write.

        Raises:
            RunError: the loss has been infinite or NaN for so long that training cannot recover.
        """
        while self.pending:
            measured = self.clock.read(wait=everything)
            if measured is None:
                return
            known, terms, values, samples = self.pending.popleft()
            self._write(known, terms, values.tolist(), samples, *measured)

    def _write(self, known: dict, terms: list[str], values: list[float], samples: int, time_s: float, step_ms: float):
        fields = dict(known)
        step, compiled, optimizer = (fields.pop(key) for key in ("step", "compiled", "optimizer"))
        steady, samples_per_s = self.clock.is_steady(step, compiled), samples / step_ms * 1e3
        loss, norm, *losses = values
        self.events.write(
            "step",
            step,
            time_s=round(self.time_before_s + time_s, 4),
            step_time_ms=round(step_ms, 3),
            samples_per_s=round(samples_per_s, 3),
            loss=loss,
            losses=dict(zip(terms, losses, strict=True)),
            gradient_norm=norm,
            optimizer_ms=round(elapsed_ms(*optimizer), 3),  # before the end of the step, which the device has passed
            **fields,
            peak_memory_gib=round(peak_memory_gib(self.clock.device), 4),
            steady=steady,
        )
        if compiled:
            self.events.write("compile", step, **compiled.as_dict())
        self.observe(step, samples_per_s, step_ms, steady)
        self.nonfinite = 0 if math.isfinite(loss) or self.guarded else self.nonfinite + 1
        if self.nonfinite == MOST_NONFINITE:
            raise RunError(
                f"the loss is infinite or NaN since step {step - MOST_NONFINITE + 1} -> lower optimizer.lr, or use "
                "training.amp_dtype bfloat16 or float32; the last good checkpoint is kept"
            )

"""Names for the parts of a step, free as long as nobody takes a profile.

`with span("forward"):` costs 0.3 microseconds; what a profile makes of it is in `upsnb.profile.recorder`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

DATA, COPY, FORWARD, INVERSE = "data wait", "copy", "forward", "inverse losses"
BACKWARD, OPTIMIZER, OTHER = "backward", "optimizer", "other"
OUTSIDE = "outside"  # of steps: validation, checkpoints, pauses
PARTS = (DATA, COPY, FORWARD, INVERSE, BACKWARD, OPTIMIZER, OTHER)  # of a step; OTHER is what has no name


class Recorder(Protocol):
    """Told where one part ends and the next begins; parts never overlap."""

    def switch(self, name: str) -> None: ...


class _Current:
    """The recorder of this process, if a profile is being taken, and the part it is in."""

    recorder: Recorder | None = None
    name: str = OTHER


class span:
    """Within it, time counts for a part of the step; an inner part takes its time from the outer one."""

    __slots__ = ("name", "outer")

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        if _Current.recorder is not None:
            self.outer, _Current.name = _Current.name, self.name
            _Current.recorder.switch(self.name)

    def __exit__(self, *_) -> None:
        # Entered before the recording began, it has no outer part: recordings begin and end between two steps.
        if _Current.recorder is not None and hasattr(self, "outer"):
            _Current.name = self.outer
            _Current.recorder.switch(self.outer)


def outside_step(function: Callable) -> Callable:
    """Decorate what happens between two steps and counts for none."""

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        with span(OUTSIDE):
            return function(*arguments, **options)

    return wrapped


def record(recorder: Recorder | None) -> None:
    """From here on tell `recorder`, which replaces the one before; None: nobody."""
    _Current.recorder, _Current.name = recorder, OTHER

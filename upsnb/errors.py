"""Errors a user can act on: each says where, what was found and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

if sys.platform == "win32":  # here, because every module imports this one before it finds out by itself
    raise ImportError("upsnb runs on Linux and macOS -> on Windows, start it in WSL")

MOST_LISTED = 20  # problems in one message
MOST_SHOWN = 80  # characters of a value in it


def shown(value) -> str:
    """A value as a message quotes it: on one line, no longer than a reader takes in."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no whole number of more than 4300 digits
        text = f"a value too large to be written ({type(value).__name__})"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class Problem(NamedTuple):
    """What is wrong with one setting, and what to do about it."""

    setting: str  # its dotted path
    found: str
    remedy: str
    source: str = ""  # who said so: a file and its line, a parameter; empty where that is not known

    def __str__(self) -> str:
        setting = self.setting if self.setting.isprintable() and len(self.setting) <= 200 else shown(self.setting)
        return f"{self.source}{': ' * bool(self.source)}{setting}: {self.found} -> {self.remedy}"


class UpsError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(UpsError, ValueError):
    """A configuration is invalid; lists every problem at once, but for a flood of them."""

    def __init__(self, problems: Iterable[Problem | str], where: str = "the configuration"):
        self.problems = list(dict.fromkeys(problems))
        self.where = where
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"{len(self.problems)} {noun} in {where}"]
        left = len(self.problems) - MOST_LISTED
        lines += [*map(str, self.problems[:MOST_LISTED]), *([f"and {left} more"] if left > 0 else [])]
        super().__init__("\n  ".join(lines))


class DataError(UpsError, ValueError):
    """A data file or its content is not usable; names file, key and sample."""


class RunError(UpsError):
    """A run folder is missing, damaged or in a state that forbids the request."""


class OutOfMemory(RunError):
    """A step ran out of memory and could not be saved in process; a relaunch with a smaller microbatch may help."""


class RunTimeout(RunError, TimeoutError):
    """What a run was waited for did not come in time; the run goes on."""


class RunFailed(RunError):
    """A run ended without finishing; carries its status, folder and cause."""

    def __init__(self, folder, status: str, cause: str, log_tail: str = ""):
        self.folder, self.status, self.cause, self.log_tail = folder, status, cause, log_tail
        message = f"run {folder} {status}: {cause}"
        if log_tail:
            message += f"\n--- last lines of {folder}/worker.log ---\n{log_tail}"
        super().__init__(message)

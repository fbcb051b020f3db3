"""Turns that are as long on a slow machine as on a fast one."""

import time
from types import SimpleNamespace

import pytest

from upsnb.compare import turns


@pytest.fixture
def turns_of_steps(tmp_path, monkeypatch):
    """On the clock of turns a second is ten steps of the runs below tmp_path: a turn of 2 s has 20, most steady."""

    def seconds() -> float:
        return sum(path.read_bytes().count(b'{"kind": "step"') for path in tmp_path.rglob("events.jsonl")) / 10

    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=seconds, sleep=time.sleep))

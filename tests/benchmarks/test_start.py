"""What starting costs: wall time told apart without gaps, and how the README says it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import readme
import start

from upsnb import overlays
from upsnb.report import file

BEGAN = 1_700_000_000.0


def cell(source: str, since: float, until: float) -> dict:
    return {"cell_type": "code", "source": [source], "metadata": {"papermill": times(since, until)}}


def times(since: float, until: float) -> dict:
    names = ("start_time", "end_time")
    return {name: datetime.fromtimestamp(BEGAN + t, UTC).isoformat() for name, t in zip(names, (since, until))}


EXECUTED = {
    "metadata": {"papermill": times(3, 60)},
    "cells": [
        {"cell_type": "markdown", "source": ["from upsnb import launch; run.wait()"], "metadata": {}},
        cell("preset = 1", 5, 5),
        cell("from upsnb import launch", 5, 8),
        cell("opened = {}", 8, 10),
        cell("run = handle.start_or_attach(config)", 10, 11),
        cell("panel.start()", 11, 11),
        cell("await panel.watch()\nrun.wait()", 11, 50),
        cell("report.write_figures(drawn)", 50, 59),
    ],
}
EVENTS = [{"kind": "start", "time": BEGAN + 17}, {"kind": "step", "time": BEGAN}, {"kind": "end", "time": BEGAN + 48}]
PARTS = {
    "command": 3,
    "kernel": 2,
    "imports": 3,
    "data and its pictures": 2,
    "launch to training": 7,
    "last save and evaluation": 11,
    "end of the processes": 2,
    "tables and figures": 10,
    "end of the command": 1,
}


def test_parts_and_training_are_the_wall_time():
    parts = start.split(EXECUTED, EVENTS, 20.0, BEGAN, BEGAN + 61)
    assert parts == pytest.approx(PARTS)
    assert sum(parts.values()) + 20.0 == pytest.approx(61)


def test_the_training_notebook_has_the_cells_that_are_looked_for():
    source = Path(start.NOTEBOOK).read_text()
    assert all(source.count(text) == 1 for text in ("handle.start_or_attach(", "run.wait()", "from upsnb import"))


def test_steps_are_enough_for_every_kind_of_microbatch():
    config = overlays.load(start.ROOT / "params/cpu_optimized.yaml")
    for accumulated, steps in ((1, 16), (2, 8), (3, 6)):  # twice, two datasets, inverse losses in every fourth
        assert start.num_steps(overlays.apply(config, {"training.accum_steps": accumulated})) == steps


def test_readme_says_what_was_measured_beside_what_was_wanted():
    assert "not measured yet" in readme.starting(None)[0]
    one = {"first_step_s": 14.0, "compile_s": 4.0}
    made = {"params": "p", "targets": start.TARGETS, "cold": {"first_step_s": 95.0, "compile_s": 80.0}}
    made |= {"warm": [one, {**one, "first_step_s": 22.0}, {**one, "first_step_s": 15.0}]}
    made |= {"notebooks": [{"overhead_s": 41.0, "parts_s": PARTS}]}
    text = "\n".join(readme.starting(file.finish(made, None)))
    assert "15.0 s after its start (14.0 to 22.0, 3 starts)" in text and "wanted: under 10 s and 30 s" in text
    assert "empty cache 95 s" in text and "4.0 s of a warm start, 80 s of a cold one" in text
    assert "41.0 s beside training" in text and "under 20 s" in text and "imports 3.0" in text

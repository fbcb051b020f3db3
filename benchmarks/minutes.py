"""The README's table of notebooks: what each asks, and how long it took where an executed one is kept."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

from keep import NOTEBOOK, REFERENCE

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.runs.runfolder import REPORT

CORES = 2  # of the machine whose minutes the table shows
MOST_SETTINGS = 4  # that are named where a kept notebook had others than its own
QUESTIONS = {
    "01_train": "What does an operator learn from two equations, how good is it, what did it cost?",
    "02_compare": "Is B faster than A, and as good? Interleaved runs, a noise floor, a verdict.",
    "03_memory": "Will it fit, on which GPU, with which batch, and what does each phase save? No GPU needed.",
    "04_phases": "What does each phase buy on this machine: alone, added in order, left out?",
    "05_scaling": "Do 2 and 4 ranks pay, replicated or sharded? Without as many GPUs, a rehearsal.",
    "08_profile": "Where does a step go, how much of the machine is that, and which phase addresses it?",
}


def table(reference: Path = REFERENCE) -> str:
    """A row a notebook."""
    lines = ["| notebook | question | minutes on two cores |", "|---|---|---|"]
    for name, question in QUESTIONS.items():
        took = ", ".join(minutes(name, reference)) or "not measured"
        lines.append(f"| `notebooks/{name}.ipynb` | {question} | {took} |")
    return "\n".join(lines)


def minutes(name: str, reference: Path = REFERENCE) -> list[str]:
    """How long kept executions of one notebook took on a CPU with CORES cores, with the settings that were not its own.

    Their reports say on which machine, because papermill does not.
    """
    found = []
    for path in sorted(reference.glob(f"*/{NOTEBOOK}")):
        executed = json.loads(path.read_text())
        papermill, report = executed["metadata"]["papermill"], json.loads(path.with_name(REPORT).read_text())
        hardware = report["hardware"]
        if Path(papermill["input_path"]).stem != name or (hardware["device"], hardware["num_cores"]) != ("cpu", CORES):
            continue
        time_min = papermill["duration"] / 60
        settings = changed(executed)
        with_these = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())
        if len(settings) > MOST_SETTINGS:
            with_these = "other settings"
        found.append(f"{time_min:.{1 if time_min < 9.95 else 0}f}" + (f" (with {with_these})" if settings else ""))
    return found


def changed(executed: Mapping) -> dict:
    """What an executed notebook was given that its own parameters are not; a params file that says the same is none."""
    own, given = (_assigned(executed, tag) for tag in ("parameters", "injected-parameters"))
    both = {**own, **given}
    others = [name for name in both if name not in (*RunConfig.model_fields, *overlays.PARAMETERS)]
    settings = {name: both[name] for name in others if both[name] != own.get(name)}
    settings |= overlays.difference(overlays.from_notebook(own, others), overlays.from_notebook(both, others))
    settings.pop("logging.name", None)
    return settings


def _assigned(executed: Mapping, tag: str) -> dict:
    """Plain values that the cell of a tag gives to names."""
    cells = (cell for cell in executed["cells"] if tag in cell["metadata"].get("tags", ()))
    body = ast.parse("".join(next(cells, {"source": ""})["source"])).body
    return {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}

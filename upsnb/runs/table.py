"""All runs of a folder at a glance: one row each, from plain files, whatever state they are in."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field, create_model

from upsnb.config import LoggingConfig
from upsnb.data.audit import headline
from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.runs.events import last_events, naming, newest_events
from upsnb.runs.files import Shape
from upsnb.runs.runfolder import REPORT
from upsnb.runs.throughput import steady_throughput

COLUMNS = {  # and their types; nRMSE columns, one a dataset, stand after `steps`
    "run": "string",
    "status": "string",
    "created": "datetime64[s]",
    "train_time_s": "float64",
    "num_ranks": "Int64",
    "device": "string",
    "stage": "string",
    "phases_on": "string",
    "steps": "Int64",
    "split": "string",
    "samples_per_s": "float64",
    "ci95_low": "float64",
    "ci95_high": "float64",
    "unit": "string",
    "metric": "string",
    "dollars": "float64",
    "cause": "string",
    "tags": "string",
    "note": "string",
}
# What anybody may have written into a run's files, as it has to be for the columns.
_TYPES = {"string": str, "float64": float, "Int64": Annotated[int, Field(ge=0, lt=2**63)], "datetime64[s]": datetime}
_Row = create_model(
    "_Row",
    __base__=Shape,
    nrmse=dict[str, float | None],
    **{name: (_TYPES[kind] | None, None) for name, kind in COLUMNS.items()},
)
UNREADABLE = "unreadable"  # status of a folder that holds no run, or one that cannot be read
TAIL_BYTES = 1 << 16  # of events; about 150 steps


def table(root: Path | str | None = None) -> pd.DataFrame:
    """One row a run folder, newest first; a folder that cannot be read is a row that says why. Loads no torch.

    Columns, with missing values for what a run did not get to:
        run: name below `root`, for `Run.attach(root / name)`; `status`: as `Run.status`, or "unreadable".
        created: local time. train_time_s: time spent training, over all launches [s].
        stage: whose errors these are: the one that answers for a run of several, else the one that trains.
        phases_on: names of the phases that were on at last.
        nrmse_<dataset>: one column a dataset, rolled out to the end of the trajectory where there is a time; on
        `split`: the reported one of a run that got there, else of its last validation. Of distinct samples alone where
        the split leaks.
        samples_per_s, ci95_low, ci95_high: median while steady and its 95 % interval, of the whole run where it has a
        report, else of its last steps. unit: what they count. metric: what nrmse_<dataset> holds, by whatever name.
        dollars: what the machine cost so far, where `cost.price_per_hour` was said.
        cause: why the run failed or died, or the folder cannot be read. tags, note: what people wrote (`Run.annotate`).

    Args:
        root: folder of run folders, directly in it or up to two levels deeper; empty: where runs go by default.
    Raises:
        RunError: there is no such folder.
    """
    root = find_root(root)
    rows = [row(folder, folder.relative_to(root).as_posix()) for folder in folders(root)]
    datasets = sorted({f"nrmse_{name}" for values in rows for name in values["nrmse"]})
    rows = [{**values, **{f"nrmse_{name}": number for name, number in values["nrmse"].items()}} for values in rows]
    before = list(COLUMNS).index("split")
    columns = [*list(COLUMNS)[:before], *datasets, *list(COLUMNS)[before:]]
    frame = pd.DataFrame(rows, columns=columns).astype({**COLUMNS, **dict.fromkeys(datasets, "float64")})
    return frame.sort_values("created", ascending=False, kind="stable", ignore_index=True)


def find_root(root: Path | str | None = None) -> Path:
    """The folder of run folders, by default where runs go; an error where there is none."""
    root = Path(root) if root is not None else runfolder.project_root() / LoggingConfig().root
    if not root.is_dir():
        raise RunError(f"{root}: no such folder -> name the folder that holds run folders")
    return root


def folders(root: Path) -> Iterator[Path]:
    """Folders of runs, and those that ought to be; what starts with a dot is nobody's run.

    A comparison or a ladder keeps its runs two levels deep; a report without runs of its own is passed over.
    """
    named = (path for path in root.iterdir() if not path.name.startswith(".") and path.name != runfolder.FIGURES)
    for folder in sorted(path for path in named if path.is_dir()):
        try:
            if (folder / runfolder.MANIFEST).exists():
                yield folder
                continue
            inner = sorted(path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{runfolder.MANIFEST}"))
            is_report = any(path for depth in ("", "*/") for path in folder.glob(f"{depth}{REPORT}"))
        except OSError:  # nobody may look into it; its row says so
            inner, is_report = [], False
        yield from (path.parent for path in inner)
        if not inner and not is_report:
            yield folder


def row(folder: Path, name: str) -> dict:
    """What the table says of one folder; `nrmse` by dataset."""
    common = {"run": os.fsencode(name).decode(errors="backslashreplace"), "created": None, "nrmse": {}}
    try:
        values = _of_run(folder)
        _Row.model_validate(values)
        return common | values
    except Exception as error:  # whatever somebody left in that folder, the other runs are still to be seen
        what = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError):  # it may be gone by now
            common["created"] = datetime.fromtimestamp(folder.stat().st_mtime)
        return common | {"status": UNREADABLE, "cause": what}


def _of_run(folder: Path) -> dict:
    status, cause = runfolder.state(folder)
    manifest, damage = runfolder.read_manifest(folder), []
    report = _read(folder / REPORT, damage)
    launches = max(len(manifest["segments"]), 1)
    if report and report["status"] == status and report["num_launches"] == launches:
        values = _reported(report)
    else:  # none was written, or the run went on since
        values = _followed(folder, damage)
    if not values["nrmse"]:
        values |= _validated(folder)
    causes, notes = "; ".join(filter(None, (cause, *damage))), runfolder.read_notes(folder)
    said = {"cause": causes or None, "tags": ", ".join(notes["tags"]) or None, "note": notes["note"] or None}
    values["stage"] = manifest.get("answers") or manifest.get("stage")
    return {**values, "status": status, "created": datetime.fromtimestamp(manifest["created"]), **said}


def _read(path: Path, damage: list[str]) -> dict:
    """A JSON file, empty where there is none; what is wrong with it goes to `damage`."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        damage.append(f"{path.name}: not JSON ({error})")
        return {}


def _reported(report: dict) -> dict:
    """Of an ended run, from its report."""
    return {
        **{key: report[key] for key in ("train_time_s", "num_ranks", "device", "steps")},
        "phases_on": ", ".join(report["phases_on"]),
        **_speed(report["samples_per_s"]),
        **naming(report),
        "dollars": report.get("cost", {}).get("dollars"),  # older ones have none
        **_headlines(report["datasets"]),
    }


def _followed(folder: Path, damage: list[str]) -> dict:
    """Of any other, from its last events."""
    last = last_events(folder, ("segment", "start", "flip", "step", "end"))
    start, step = last.get("start", {}), last.get("step", {})
    said = [last[kind] for kind in ("start", "flip") if kind in last]
    phases_on = max(said, key=lambda event: event["time"]).get("phases_on") if said else None
    ended = "end" in last and last["end"]["time"] >= last.get("segment", last["end"])["time"]
    evaluation = _read(folder / runfolder.EVALUATION, damage) if ended else {}
    return {
        "train_time_s": step.get("time_s"),
        "num_ranks": start.get("num_ranks"),
        "device": start.get("device"),
        "steps": step.get("step", 0),
        "phases_on": None if phases_on is None else ", ".join(phases_on),
        **_speed(steady_throughput(newest_events(folder, ("segment", "step"), TAIL_BYTES))),
        **naming(start),
        "dollars": runfolder.costs(folder)["dollars"],
        **_headlines(evaluation.get("datasets", {})),
    }


def _validated(folder: Path) -> dict:
    """Of one that reported no errors, those of its last validation."""
    last = last_events(folder, ("eval",))
    return {"nrmse": last["eval"]["val_nrmse"], "split": last["eval"]["split"]} if last else {}


def _speed(throughput: dict) -> dict:
    low, high = throughput["ci95"]
    return {"samples_per_s": throughput["median"], "ci95_low": low, "ci95_high": high}


def _headlines(datasets: dict[str, dict[str, dict]]) -> dict:
    """One number a dataset, as validations have it, and the split they are of."""
    nrmse = {name: headline(result) for name, splits in datasets.items() for result in splits.values()}
    split = next((split for splits in datasets.values() for split in splits), None)
    return {"nrmse": nrmse, "split": "validation" if split == "val" else split}

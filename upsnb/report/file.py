"""What every report shares: its file, where and when it was measured, and how its numbers read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from upsnb.runs import runfolder
from upsnb.runs.events import without_nonfinite


def finish(report: Mapping, folder: Path | str | None, manifest: Mapping | None = None) -> dict:
    """A report with `hardware`, `versions`, `code_revision` and `date`, as plain data with null for NaN and infinity.

    Args:
        folder: where it is written to `report.json`; made if it is missing. None: it is written nowhere.
        manifest: of the run that the numbers are of; None: of this machine and this code, now.
    """
    if manifest is None:
        from upsnb import hardware  # loads torch, which readers of reports do not need

        manifest = {
            "hardware": hardware.detect().as_dict(),
            "versions": hardware.versions(),
            "code_revision": runfolder.code_revision(),
            "created": time.time(),
        }
    origin = {key: manifest[key] for key in ("hardware", "versions", "code_revision")}
    date = time.strftime("%Y-%m-%d", time.gmtime(manifest["created"]))
    report = without_nonfinite({**report, **origin, "date": date})
    if folder is not None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        runfolder.write_json(folder / runfolder.REPORT, report)
    return report


def factor(ratio: Mapping) -> str:
    """A ratio with its 95 % interval, and a word where all of it lies below 1."""
    if ratio["median"] is None:
        return "not measured"
    low, high = ratio["ci95"]
    if low is None:
        return f"{ratio['median']:.2f} (no interval)"
    return f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]" + (", slower" if round(high, 2) < 1 else "")


def number(value: float | None, digits: int = 4) -> str:
    """A few digits; whole numbers in full; `-` for what is not known."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def verdict(gate: dict) -> str:
    """Whether a stage has paid, by its `gate` event: `pass: 0.81 (0.78 to 0.84) of the error of finetune`.

    With the ratio of nRMSE of the means, where that is another one: an ensemble's score is not that of its mean. And
    with that of the CRPS of perturbed frames, where a stage is the first that draws.
    """
    if gate["ratio"] is None:
        return f"{gate['verdict']} against {gate['against']}"
    low, high = (number(value, 3) for value in gate["ci95"])
    mean = gate.get("mean_ratio")
    of_mean = f", {number(mean, 3)} of its mean's" if mean is not None and abs(mean / gate["ratio"] - 1) > 0.05 else ""
    said = f"{gate['verdict']}: {number(gate['ratio'], 3)} ({low} to {high}) of the error of {gate['against']}{of_mean}"
    beside = gate.get("perturbed_ratio")
    if beside is None:
        return said
    low, high = (number(value, 3) for value in gate["perturbed_ci95"])
    return f"{said}; {number(beside, 3)} ({low} to {high}) of what perturbed frames score without it"

"""Checkpoints: the whole state of training in one file, never half-written, verified before it is trusted.

`checkpoints/step-00000500.pt` holds tensors and plain data only and is read without unpickling code;
`checkpoints/index.json` names the latest, the previous and the best, each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch

from upsnb.errors import RunError
from upsnb.runfolder import CHECKPOINTS, write_json

FORMAT = 1
INDEX = "index.json"


def _index(folder: Path) -> dict:
    path = folder / CHECKPOINTS / INDEX
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {"format": FORMAT, "latest": None, "previous": None, "best": None, "files": {}}
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}) -> delete the folder {CHECKPOINTS} to start anew") from None


def save(folder: Path, state: dict, best: bool, budget_gb: float = float("inf")) -> Path:
    """Write a state beside the others, put it in their place, and drop those no longer named.

    Args:
        state: tensors and plain data, with `step`.
        best: also the best on the validation split so far.
        budget_gb: disk space for all of them; above it the previous goes first and the best next, never the latest.
    Raises:
        OSError: the disk is full or not writable; earlier checkpoints stay as they are.
    """
    home = folder / CHECKPOINTS
    home.mkdir(exist_ok=True)
    name = f"step-{state['step']:08d}.pt"
    temporary = home / f".{name}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        digest = _sha256(temporary)
        os.replace(temporary, home / name)
    finally:
        temporary.unlink(missing_ok=True)
    index = _index(folder)
    if index["latest"] != name:
        if _is_whole(folder, index, index["latest"]):  # a damaged one must not push out the one that was resumed from
            index["previous"] = index["latest"]
        index["latest"] = name
    if best:
        index["best"] = name
    index["files"][name] = digest
    for role in ("previous", "best"):
        if _total_bytes(home, index) > budget_gb * 1e9 and index[role] != name:
            index[role] = None
    named = {index[role] for role in ("latest", "previous", "best")} - {None}
    index["files"] = {file: digest for file, digest in index["files"].items() if file in named}
    write_json(home / INDEX, index)
    for path in home.glob("step-*.pt"):
        if path.name not in named:
            path.unlink()
    return home / name


def load(folder: Path, which: str = "latest", device: torch.device | str = "cpu") -> dict | None:
    """The latest or best state that is whole; None where there is no checkpoint at all.

    A damaged latest file is passed over for the one before it.

    Raises:
        RunError: checkpoints are there and none of them is whole.
    """
    index = _index(folder)
    order = [index["best"]] if which == "best" else [index["latest"], index["previous"], index["best"]]
    candidates = [name for name in dict.fromkeys(order) if name]
    damaged = []
    for name in candidates:
        path = folder / CHECKPOINTS / name
        if not path.is_file():
            damaged.append(f"{name} is missing")
        elif _sha256(path) != index["files"].get(name):
            damaged.append(f"{name} does not match its checksum")
        else:
            return torch.load(path, map_location=device, weights_only=True)
    if damaged:
        raise RunError(f"{folder / CHECKPOINTS}: no whole checkpoint ({'; '.join(damaged)}) -> start the run anew")
    return None


def _total_bytes(home: Path, index: dict) -> int:
    """Size of the checkpoints that the index names; each counts once, whatever its roles."""
    named = {index[role] for role in ("latest", "previous", "best")} - {None}
    return sum(path.stat().st_size for path in (home / name for name in named) if path.is_file())


def _is_whole(folder: Path, index: dict, name: str | None) -> bool:
    path = folder / CHECKPOINTS / str(name)
    return path.is_file() and _sha256(path) == index["files"].get(name)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

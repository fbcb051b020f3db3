"""Which checkpoints a run keeps: an index with checksums, roles that move on, and nothing half-written in its place.

    checkpoints/
      index.json             roles, and the size and SHA-256 of every file
      step-00000500/         one checkpoint: a shard per rank, their table of contents, state.json
      .step-00000600/        one that is being written, or was when its process was killed

Knows nothing of tensors, so that readers of a run need no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from upsnb.errors import RunError
from upsnb.rules import did_you_mean
from upsnb.runs.files import Shape, numbered, read_json, sha256_of, write_json
from upsnb.runs.runfolder import CHECKPOINTS

FORMAT = 2
INDEX = "index.json"
ROLES = ("latest", "previous", "best", "epoch")  # epoch: the newest that was written at the end of a whole epoch
DROPPED_FIRST = ("previous", "epoch", "best")  # what a tight budget costs, in this order; never the latest


class _File(Shape):
    bytes: int
    sha256: str


class _Checkpoint(Shape):
    step: int
    files: dict[Annotated[str, Field(pattern=r"^\.?\w[\w.]*$")], _File]  # nothing outside the checkpoint's own folder


class _Index(Shape):
    latest: str | None
    previous: str | None
    best: str | None
    epoch: str | None
    checkpoints: dict[Annotated[str, Field(pattern=r"^step-\d+(-\d+)?$")], _Checkpoint]

    @model_validator(mode="after")
    def _roles_are_there(self):
        lost = {getattr(self, role) for role in ROLES} - {None, *self.checkpoints}
        if lost:
            raise ValueError(f"a role names {sorted(lost)[0]}, which is not listed")
        return self


def home(folder: Path | str) -> Path:
    """Where a run folder keeps its checkpoints."""
    return Path(folder) / CHECKPOINTS


def read_index(folder: Path | str) -> dict:
    """Roles and checkpoints as plain data; empty where nothing was ever saved.

    Raises:
        RunError: the index is damaged or lost, or another version wrote it.
    """
    place, remedy = home(folder), f"or delete the folder {CHECKPOINTS} to start anew"
    try:
        return read_json(place / INDEX, FORMAT, _Index)
    except FileNotFoundError:
        if any(place.glob("step-*")):
            said = f"{place}: has checkpoints but no {INDEX} to check them by"
            raise RunError(f"{said} -> put it back, {remedy}") from None
        return {"format": FORMAT, **dict.fromkeys(ROLES), "checkpoints": {}}
    except RunError as error:
        raise RunError(f"{error} -> start in a new folder, {remedy}") from None


def step_of(index: dict, role: str) -> int | None:
    """The step of the checkpoint that has a role; None where none has it."""
    name = index[role]
    return None if name is None else index["checkpoints"][name]["step"]


# -- writing -------------------------------------------------------------------------------------------------------


def prepare(folder: Path | str) -> None:
    """Make the place ready for a writer: an index from the start, and no leftovers of a killed one."""
    place = home(folder)
    place.mkdir(parents=True, exist_ok=True)
    index = read_index(folder)
    if not (place / INDEX).exists():  # from here on checkpoints without an index are a loss and not a first save
        _write_index(place, index)
    _sweep(place, index)


def temporary(folder: Path | str, step: int) -> Path:
    """Where the checkpoint of a step is written until it is whole."""
    return home(folder) / f".step-{step:08d}"


def discard(folder: Path | str, step: int) -> None:
    """Delete what a failed save left."""
    shutil.rmtree(temporary(folder, step), ignore_errors=True)


def digest(path: Path, count: Callable[[int], None] = lambda num_bytes: None) -> dict:
    """Size and SHA-256 of a file.

    Args:
        count: told the bytes of each block, so that reading a large file is no silence.
    """
    with open(path, "rb") as file:
        checksum = sha256_of(file, lambda block: count(len(block)))
        return {"bytes": file.tell(), "sha256": checksum}


def commit(
    folder: Path | str,
    step: int,
    files: dict[str, dict],
    roles: Iterable[str] = (),
    budget_gb: float = float("inf"),
    last: str | None = None,
) -> Path:
    """Put the whole checkpoint of `temporary` in its place, let roles move on, and drop what has none left.

    A process that is killed in here leaves the old index or the new one, and each names whole checkpoints only: what
    is named is never overwritten, and files are deleted only once the index names them no more.

    Args:
        files: name and `digest` of every file.
        roles: what it is beside the latest: "best", "epoch".
        budget_gb: disk space for all of them [GB].
        last: the checkpoint that training came from, where the index's latest is not to be trusted.
    Raises:
        OSError: the disk is full or not writable; earlier checkpoints stay as they are.
    """
    place, index = home(folder), read_index(folder)
    written = temporary(folder, step)
    _sync_folder(written)
    # Two directories cannot be exchanged in one move.
    name = next(name for name in numbered(f"step-{step:08d}") if not (place / name).exists())
    os.rename(written, place / name)
    _sync_folder(place)
    for role in ROLES:  # one of the same step is replaced
        if step_of(index, role) == step:
            index[role] = name
    before = last if last in index["checkpoints"] else index["latest"]
    if index["latest"] != name:
        index["previous"] = before
    for role in ("latest", *roles):
        index[role] = name
    index["checkpoints"][name] = {"step": step, "files": files}
    for role in DROPPED_FIRST:
        if _total_bytes(index) > budget_gb * 1e9 and index[role] != name:
            index[role] = None
    index["checkpoints"] = {name: index["checkpoints"][name] for name in named(index)}
    _write_index(place, index)
    _sweep(place, index)
    return place / name


def named(index: dict) -> list[str]:
    """Names of the checkpoints that have a role, each once."""
    return list(dict.fromkeys(index[role] for role in ROLES if index[role] is not None))


def _total_bytes(index: dict) -> int:
    return sum(num_bytes(index["checkpoints"][name]["files"]) for name in named(index))


def num_bytes(files: dict[str, dict]) -> int:
    """Size of a checkpoint from the digests of its files."""
    return sum(entry["bytes"] for entry in files.values())


def _write_index(place: Path, index: dict) -> None:
    write_json(place / INDEX, index)
    _sync_folder(place)


def _sweep(place: Path, index: dict) -> None:
    """Delete checkpoints, whole or not, that the index does not name, and the index that a killed writer began."""
    names = named(index)
    for path in (*place.glob("step-*"), *place.glob(".step-*")):
        if path.name not in names and path.is_dir():
            shutil.rmtree(path)
    for path in place.glob(f".{INDEX}.*"):
        path.unlink()


def _sync_folder(path: Path) -> None:
    """Make names in a folder last through a loss of power; fsync of a file does not cover its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some disks over a network know no such thing
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A checkpoint whose every file is as it was written."""

    path: Path
    files: tuple[str, ...]
    passed_over: tuple[str, ...] = ()  # what is wrong with those that should have come first


def choose(
    folder: Path | str, which: str = "latest", check: Callable[[Path], str | None] = lambda path: None
) -> Chosen | None:
    """The checkpoint of a role that is whole; None where there is none at all.

    A damaged latest is passed over for the one before it; no other is replaced, because no other is the best.

    Args:
        which: one of ROLES.
        check: what else is wrong with a checkpoint whose files are as they were written.
    Raises:
        RunError: no checkpoint has that role, or none of them is whole.
    """
    place, index = home(folder), read_index(folder)
    entries, there = index["checkpoints"], [role for role in ROLES if index[role] is not None]
    if which not in ROLES or (there and which not in there):
        hint = "" if which in ROLES else f"{did_you_mean(str(which), ROLES)} "
        raise RunError(f"{place}: has no checkpoint {which!r} -> {hint}it has {', '.join(there) or 'none yet'}")
    order = [index[which]]
    if which == "latest":
        order += [index["previous"]]
        order += sorted((index[role] for role in ("best", "epoch") if index[role]), key=lambda n: -entries[n]["step"])
    damaged = []
    for name in dict.fromkeys(name for name in order if name):
        fault = _fault(place / name, entries[name]["files"]) or check(place / name)
        if fault is None:
            return Chosen(place / name, tuple(entries[name]["files"]), tuple(damaged))
        damaged.append(f"{name}/{fault}")
    if damaged:
        raise RunError(f"{place}: no whole checkpoint ({'; '.join(damaged)}) -> start the run anew")
    return None


def _fault(path: Path, files: dict[str, dict]) -> str | None:
    """The first thing wrong with a checkpoint's files; sizes first, because they cost nothing."""
    wrong = (f"{name} does not match its checksum" for name, entry in files.items() if digest(path / name) != entry)
    return _gap(path, files) or next(wrong, None)


def _gap(path: Path, files: dict[str, dict]) -> str | None:
    """The first file of a checkpoint that is missing or of another length."""
    for name, entry in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != entry["bytes"]:
            return f"{name} has {(path / name).stat().st_size} bytes of {entry['bytes']}"
    return None


def is_there(folder: Path | str, step: int | None = None) -> bool:
    """Whether a checkpoint is there with all its files in their full length.

    Args:
        step: of this one, such as the step that a run ended at; empty: of any, to continue from.
    """
    try:
        index = read_index(folder)
    except RunError:
        return False
    entries = {name: index["checkpoints"][name] for name in named(index)}
    return any(
        step in (None, entry["step"]) and _gap(home(folder) / name, entry["files"]) is None
        for name, entry in entries.items()
    )

"""Files that other processes read while they are written, on disks that may be full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from upsnb.errors import RunError, shown

RESERVE = ".reserve"  # given up when the disk is full, so that the end can still be written down
RESERVE_BYTES = 1 << 20
MOST_BYTES = 1 << 22  # of a JSON file
BLOCK_BYTES = 1 << 22  # read at a time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # what the system calls a disk, or a share of it, that is full
FULL_BYTES = 1 << 16  # a disk with less is full: torch's writer says "unexpected pos" where the system said ENOSPC
MADE_HERE = ".upsnb"  # stands in folders of what can be made again


class Shape(BaseModel, strict=True):
    """Entries that a JSON file must have, and their types; others may stand beside them."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place in one step once it is whole: no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # network disks report a full disk no earlier
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value, last_words: bool = False) -> None:
    """Replace a JSON file in one step.

    Args:
        last_words: on a full disk give up the folder's reserve and try once more; only for how a run ended.
    """
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        if error.errno not in NO_SPACE or not last_words:
            raise
        (path.parent / RESERVE).unlink(missing_ok=True)
        write_json(path, value)


def read_json(path: Path, version: int | None, shape: type[Shape] = Shape, most_bytes: int = MOST_BYTES) -> dict:
    """The mapping in a JSON file; whatever else is found in its place is an error.

    Args:
        version: of its format, which it must carry; None: it carries none.
    Raises:
        FileNotFoundError: there is none.
        RunError: it is no file, too large, damaged, of another version or of another shape.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for its writer
            raise RunError(f"{path}: is no file")
        if found.st_size > most_bytes:
            raise RunError(f"{path}: has {found.st_size} bytes, at most {most_bytes} are read")
        values = from_json(path.read_bytes(), allow_inf_nan=False)  # unlike json's it ends at a depth of 200
        json.dumps(values, allow_nan=False)  # 1e400 is infinity too
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise RunError(f"{path}: holds a {type(values).__name__} instead of a mapping")
    if version is not None and values.get("format") != version:
        raise RunError(f"{path}: format {shown(values.get('format'))}, this version reads {version}")
    try:
        shape.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None
    return values


def sha256_of(stream: BinaryIO, told: Callable[[bytes], object] = lambda block: None) -> str:
    """SHA-256 of what is left of a stream.

    Args:
        told: each block, to write or to count it.
    """
    found = hashlib.sha256()
    while block := stream.read(BLOCK_BYTES):
        told(block)
        found.update(block)
    return found.hexdigest()


def numbered(stem: str) -> Iterator[str]:
    """Names to try until one is free: `stem`, `stem-2`, `stem-3` and so on."""
    yield stem
    for number in itertools.count(2):
        yield f"{stem}-{number}"


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no room left."""
    return shutil.disk_usage(folder).free < FULL_BYTES


def fill_reserve(folder: Path) -> None:
    """Set a little disk space aside; random bytes, because a compressing file system keeps no room for zeros."""
    path = folder / RESERVE
    if not path.exists():
        with contextlib.suppress(OSError):
            path.write_bytes(os.urandom(RESERVE_BYTES))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One reader-modifier-writer at a time, across threads and processes."""
    with open(folder / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def own_folder(folder: Path) -> None:
    """Make a folder for what can be made again; what was made there before goes, and nothing else does.

    Raises:
        RunError: it holds something else, or cannot be made.
    """
    mark = folder / MADE_HERE
    try:
        if folder.exists() and any(folder.iterdir()):
            if not mark.exists():
                raise RunError(f"{folder}: holds something that was not made here -> name a new folder with -o")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}) -> name another folder with -o") from None

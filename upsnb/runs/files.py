"""Files that other processes read while they are written, on disks that may be full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from upsnb.errors import RunError

RESERVE = ".reserve"  # given up when the disk is full, so that the end can still be written down
RESERVE_BYTES = 1 << 20


def write_json(path: Path, value, last_words: bool = False) -> None:
    """Replace a JSON file in one step: a reader sees the old content or the new, never half of it.

    Args:
        last_words: on a full disk give up the folder's reserve and try once more; only for how a run ended.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    for attempt in (1, 2):
        try:
            with open(temporary, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # network disks report a full disk no earlier
            os.replace(temporary, path)
            return
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or attempt == 2 or not last_words:
                raise
            (path.parent / RESERVE).unlink(missing_ok=True)


def read_json(path: Path, version: int) -> dict:
    """The mapping in a JSON file that carries its format's version.

    Raises:
        FileNotFoundError: there is none.
        RunError: it is damaged, or of another version.
    """
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error})") from None
    if values.get("format") != version:
        raise RunError(f"{path}: format {values.get('format')!r}, this version reads {version}")
    return values


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

"""Published files over HTTP: whole ones, gone on with and checked against their MD5, or the first samples of one."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from upsnb.data.families import FAMILIES
from upsnb.data.layouts import BLOCK_BYTES, Family, reason
from upsnb.data.published import PUBLISHED, RemoteFile
from upsnb.data.source import open_source
from upsnb.errors import DataError

URL = "https://darus.uni-stuttgart.de/api/access/datafile/{id}"
BLOCK = 2**20  # bytes read at a time
TIMEOUT_S = 60.0  # of a server that says nothing
TRIES = 5  # in a row that bring nothing
WAIT_S = 2.0  # before the second of them; each further one waits twice as long
POLL_S = 1.0  # between two looks whether another process has fetched the same file
BROKEN = (OSError, http.client.HTTPException)  # what a network does; urllib's own errors are OSErrors

Progress = Callable[[int, int], None]  # (bytes or samples done, of all)


def published(name: str) -> tuple[Family, RemoteFile]:
    """The file of this name, and the family whose samples it holds."""
    for family, files in PUBLISHED.items():
        for file in files:
            if file.name == name:
                return FAMILIES[family], file
    raise DataError(f"{name}: no published file has this name -> python -m upsnb data list shows them")


def get(name: str, root: str | os.PathLike, first: int | None = None, progress: Progress | None = None) -> Path:
    """Fetch a published file into `root`, or the first samples of it, unless it is there.

    Args:
        first: so many samples, in a file that says in its name and its attributes that it is a part.
    Returns:
        Path of the file; it appears under its name only when complete, a whole one when its MD5 is right. What a call
        has fetched that was interrupted stays beside it, and the next one goes on from there. Where another process
        fetches the same file, this one waits for it.
    Raises:
        DataError: no such file, no room, no connection, or something else under its name.
    """
    family, file = published(name)
    if first is not None and first < 1:
        raise DataError(f"{name}: {first} samples were asked for -> ask for one at least")
    progress, url = progress or (lambda done, of: None), URL.format(id=file.id)
    path = Path(root) / (name if first is None else f"{Path(name).stem}_first{first}{Path(name).suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    so_far = (lambda: progress(_size(_part(path)), _bytes(file))) if first is None else (lambda: progress(0, first))
    with _alone(path, so_far):
        if first is None:
            _get_whole(file, url, path, progress)
        elif not path.exists():
            _get_first(family, file, url, path, first, progress)
    return path


@contextmanager
def _alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Let nobody else fetch the same file meanwhile; `waiting` is called as long as somebody does."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        held = open(lock, "w")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held.fileno()), lock.stat()):
                break
        except (BlockingIOError, FileNotFoundError):  # held by another, or removed by it since
            pass
        held.close()
        waiting()
        time.sleep(POLL_S)
    try:
        yield
    finally:
        lock.unlink()
        held.close()


def _part(path: Path) -> Path:
    """What has come of a file."""
    return path.with_name(f".{path.name}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bytes(file: RemoteFile) -> int:
    return round(file.size_gib * 2**30)


# -- whole files -------------------------------------------------------------------------------------------------------


def _get_whole(file: RemoteFile, url: str, path: Path, progress: Progress) -> None:
    if path.exists():
        if _md5(path) != file.md5:  # a generated or reduced file of the same name: the user's, not ours to replace
            raise DataError(f"{path}: exists but is not the published file (MD5) -> move it, or choose another folder")
        return
    part = _part(path)
    _check_room(path, _bytes(file) - _size(part))
    failures, problem = 0, ""
    while failures < TRIES:
        if failures:
            time.sleep(WAIT_S * 2 ** (failures - 1))
        before = _size(part)
        done, total, problem = _go_on(url, part, progress)
        if done == total:
            break
        failures = 0 if done > before else failures + 1
    else:
        raise DataError(f"{path}: download from {url} failed ({problem}) -> try again, what has come is kept")
    found = _md5(part)
    if found != file.md5:
        part.unlink()
        raise DataError(f"{path}: what {url} sent has the MD5 {found}, published is {file.md5} -> try again")
    os.replace(part, path)


def _go_on(url: str, part: Path, progress: Progress) -> tuple[int, int, str]:
    """Append what is missing until it is all there or the connection breaks: bytes there, bytes of all, problem."""
    have, total, problem = _size(part), -1, ""
    try:
        with _ask(url, have) as answer:
            if answer.status != http.client.PARTIAL_CONTENT:
                have = 0  # this server gives whole files only
            total = _total(answer)
            with open(part, "ab" if have else "wb") as out:
                while block := answer.read(BLOCK):
                    out.write(block)
                    have += len(block)
                    progress(have, total)
        total = have if total < 0 else total  # of a server that does not say; the MD5 tells
        if have != total:
            problem = f"{have} of {total} bytes came"
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            problem = f"HTTP {error.code} {error.reason}"
        else:  # nothing comes after what is there
            total = _told(error.headers.get("Content-Range", ""))
            total = have if total < 0 else total  # the MD5 tells
            if have > total >= 0:
                part.unlink()
                have, problem = 0, f"the part was longer than the file's {total} bytes"
    except BROKEN as error:
        problem = reason(error)
    return have, total, problem


def _ask(url: str, start: int, stop: int | None = None) -> http.client.HTTPResponse:
    """The answer to a request for the bytes from `start` to before `stop`."""
    end = "" if stop is None else stop - 1
    return urllib.request.urlopen(
        urllib.request.Request(url, headers={"Range": f"bytes={start}-{end}"}), timeout=TIMEOUT_S
    )


def _total(answer: http.client.HTTPResponse) -> int:
    """Bytes of the whole file; -1 where the server does not say."""
    if answer.status == http.client.PARTIAL_CONTENT:
        return _told(answer.headers.get("Content-Range", ""))
    return _told(answer.headers.get("Content-Length", ""))


def _told(header: str) -> int:
    """The length at the end of a header, such as 200 of `bytes 0-99/200`; -1 where it is `*` or not there."""
    length = header.rpartition("/")[2]
    return int(length) if length.isdigit() else -1


def _check_room(path: Path, needed: float) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise DataError(
            f"{path}: needs about {needed / 2**30:.3g} GiB, {free / 2**30:.1f} GiB are free -> choose another folder, "
            "fetch its first samples, or generate data of any size"
        )


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# -- first samples -----------------------------------------------------------------------------------------------------


class _Remote(io.RawIOBase):
    """A file on a server, read by byte ranges: h5py opens it and asks for the bytes that it needs."""

    def __init__(self, url: str):
        self.url, self.at = url, 0
        with _ask(url, 0, 1) as answer:
            if answer.status != http.client.PARTIAL_CONTENT:
                raise DataError(f"{url}: this server gives no parts of files -> fetch the whole file")
            self.size = _total(answer)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer) -> int:
        stop, view = min(self.at + len(buffer), self.size), memoryview(buffer).cast("B")
        for attempt in range(TRIES):
            if attempt:
                time.sleep(WAIT_S * 2 ** (attempt - 1))
            try:
                if self.at >= stop:
                    return 0
                with _ask(self.url, self.at, stop) as answer:
                    data = answer.read(stop - self.at)
            except BROKEN as error:
                problem = error
                continue
            if data:
                view[: len(data)] = data
                self.at += len(data)
                return len(data)
            problem = "nothing came"
        raise OSError(f"{self.url}: bytes from {self.at} cannot be read ({problem})")


def _get_first(family: Family, file: RemoteFile, url: str, path: Path, first: int, progress: Progress) -> None:
    """Write the first samples of a published file as a file of the same layout, which tells where they are from."""
    part = _part(path)
    try:
        with h5py.File(io.BufferedReader(_Remote(url), BLOCK), "r") as remote, h5py.File(part, "w") as out:
            out.attrs.update({**remote.attrs, "part_of": file.name, "part_of_md5": file.md5, "part_of_url": url})
            if family.layout == "grouped":
                names = sorted(remote)
                _say_parts(out, path, len(names), first)
                for number, name in enumerate(names[:first], 1):
                    remote.copy(name, out)
                    progress(number, first)
            else:
                _copy_first(remote, out, path, family, first, progress)
        open_source(family.name, part).close()
        os.replace(part, path)
    except BROKEN as error:
        raise DataError(f"{path}: download from {url} failed ({reason(error)}) -> try again") from error
    finally:
        part.unlink(missing_ok=True)


def _say_parts(out: h5py.File, path: Path, there: int, first: int) -> None:
    if first > there:
        raise DataError(f"{path}: {first} samples were asked for and the published file has {there} -> ask for fewer")
    out.attrs["part_of_samples"] = there


def _copy_first(remote, out: h5py.File, path: Path, family: Family, first: int, progress: Progress) -> None:
    """The first rows of every array whose axis is the samples, and the whole of every other."""
    samples = remote[next(iter(family.channels.values()))].shape[0]
    _say_parts(out, path, samples, first)
    by_sample = {name: data for name, data in remote.items() if data.shape[0] == samples and data.ndim > 1}
    _check_room(path, first * sum(data.nbytes / samples for data in by_sample.values()))
    for name, data in remote.items():
        if name not in by_sample:
            out[name] = data[()]
    made = {name: out.create_dataset(name, (first, *data.shape[1:]), data.dtype) for name, data in by_sample.items()}
    rows = max(1, int(BLOCK_BYTES // max(data.nbytes / samples for data in by_sample.values())))
    for start in range(0, first, rows):
        stop = min(start + rows, first)
        for name, data in by_sample.items():
            made[name][start:stop] = data[start:stop]
        progress(stop, first)

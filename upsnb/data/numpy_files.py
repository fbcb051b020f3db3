"""Arrays of .npy and .npz files, read where they are asked for and never unpickled."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from upsnb.data.layouts import DEFLATED, check_present, names, told_as
from upsnb.errors import DataError

ENDINGS = (".npy", ".npz")
ONLY = "array"  # the name of what a .npy file holds
MOST_UNPACKED = 2**30  # bytes of a compressed array, which is read as a whole
MOST_KEPT = 16  # unpacked arrays in memory: more than a row names, fewer than there are samples


class Stored(NamedTuple):
    """What an array is, without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype


class NumpyFile(AbstractContextManager):
    """A .npy file or the arrays of a .npz file; stands where an h5py.File does.

    A .npy file's own array is called `array`; others beside it go by their file names, such as `outputs.npy`.
    """

    def __init__(self, path: Path):
        check_present(path)
        self.path, self._arrays, self._zip, self._members = path, {}, None, {ONLY: None}
        self._maps: dict[str, np.memmap] = {}
        self._unpacked: list[str] = []  # compressed arrays in memory, the last one asked for at the end
        if path.suffix.lower() == ".npz":
            with told_as(f"{path}: truncated or damaged", "save it again with np.savez"):
                self._zip = zipfile.ZipFile(path)
            self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for kept in (self._arrays, self._maps, self._unpacked):
            kept.clear()
        if self._zip is not None:
            self._zip.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: str) -> bool:
        return key in self._members or (self._zip is None and self._lone(key).is_file())

    def _lone(self, key: str) -> Path:
        """The .npy file of an array that is not in a .npz file."""
        return self.path if key == ONLY else self.path.parent / key

    def __getitem__(self, key: str) -> np.ndarray:
        """An array; of an uncompressed one nothing is read yet, of compressed ones the last few are kept."""
        if key not in self._arrays:
            file, size = self._content(key)
            with file:
                shape, fortran, dtype = self._described(key, file, size)
                order = "F" if fortran else "C"
                if 0 in shape:
                    values = np.empty(shape, dtype)
                elif isinstance(file, zipfile.ZipExtFile):
                    self._unpacked.append(key)
                    if len(self._unpacked) > MOST_KEPT:
                        self._arrays.pop(self._unpacked.pop(0))
                    values = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype).reshape(
                        shape, order=order
                    )
                else:
                    if file.name not in self._maps:  # one for all arrays of a file: each holds it open
                        self._maps[file.name] = np.memmap(file.name, np.uint8, "r")
                    values = np.ndarray(shape, dtype, self._maps[file.name], file.tell(), order=order)
            self._arrays[key] = values
        return self._arrays[key]

    def header(self, key: str) -> Stored:
        """Shape and dtype of an array, whose values are not read."""
        file, size = self._content(key)
        with file:
            shape, _, dtype = self._described(key, file, size)
        return Stored(shape, dtype)

    def _content(self, key: str) -> tuple[BinaryIO, int]:
        """An open file at the beginning of an array, and how many bytes are there; a compressed one is unpacked."""
        if key not in self:
            raise DataError(f"{self.path}: key {key!r} is missing -> keys found: {names(self)}")
        if self._zip is None:
            return open(self._lone(key), "rb"), self._lone(key).stat().st_size
        info = self._members[key]
        if info.compress_type == zipfile.ZIP_STORED:
            file = open(self.path, "rb")
            file.seek(info.header_offset + 26)  # lengths of the name and of what comes between it and the content
            file.seek(info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))))
        elif info.file_size > min(info.compress_size * DEFLATED, MOST_UNPACKED):
            found = f"{self.path}: {key}: takes {info.file_size / 2**30:.3g} GiB unpacked, and is unpacked as a whole"
            raise DataError(f"{found} -> save it with np.savez: of what is not compressed samples are read one by one")
        else:
            file = self._zip.open(info)
        return file, info.file_size

    def _described(self, key: str, file: BinaryIO, size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
        """Shape, order and dtype of an array of at most so many bytes, which begins here."""
        where, start = f"{self.path}: {key}", file.tell()
        with told_as(f"{where}: no array of NumPy", "save it again with np.save"):
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(file)
        if dtype.hasobject or dtype.names:
            raise DataError(f"{where}: {dtype} is no kind of number, and is not read -> save arrays of numbers only")
        needed, there = math.prod(shape) * dtype.itemsize, size - (file.tell() - start)
        if min(shape, default=0) < 0 or needed > there:
            found = f"shape {shape} takes {needed / 2**30:.3g} GiB, {max(there, 0) / 2**30:.3g} GiB are there"
            raise DataError(f"{where}: {found} -> it was not written to its end, save it again")
        return shape, fortran, dtype

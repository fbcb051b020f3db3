"""What a frozen model makes of a data set, computed once and read again where that is faster.

A cache is one memory-mapped file of rows, named by a hash of all that they depend on. It is written beside its place
and renamed into it, so that what is there is whole. Whether it pays is measured first: latents that others cached were
ten times as large as the fields that they were computed from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upsnb.data.datasets import paced

TRIALS = 3  # of which the middle one counts


def key(weights: Mapping[str, Tensor], *others: object) -> str:
    """A hash of weights and of whatever else rows depend on, as text, 16 hex digits."""
    digest = hashlib.sha256(repr(others).encode())
    for name, value in weights.items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Costs:
    """What a row costs [s], and how large all of them are [bytes]."""

    compute_s: float
    read_s: float
    nbytes: int

    def against(self, seen: float, free: int) -> str:
        """Why a cache would not pay, or an empty text.

        Args:
            seen: how often each row will be asked for.
            free: bytes of the disk that are.
        """
        if self.nbytes > free / 2:
            return f"it takes {self.nbytes / 2**30:,.2f} GiB, and the disk has {free / 2**30:,.2f} GiB left"
        if self.read_s >= self.compute_s:
            return f"reading a row takes {1e3 * self.read_s:.3g} ms and computing it {1e3 * self.compute_s:.3g} ms"
        if seen * (self.compute_s - self.read_s) <= self.compute_s:
            return f"each row is asked for {seen:.2g} times, which saves less than computing all of them once takes"
        return ""


class Rows:
    """All rows of a cache."""

    def __init__(self, path: Path):
        self.path, self.values = path, np.load(path, mmap_mode="r")

    def read(self, numbers: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
        """Rows by their numbers, (B, ...) in the dtype that they were computed in."""
        return torch.from_numpy(self.values[numbers]).to(device, non_blocking=True)


class PairRows:
    """Those of training pairs, one row each.

    Args:
        pairs: (P, 2) int64, as a schedule has them: sample, first frame.
    """

    def __init__(self, rows: Rows, pairs: np.ndarray):
        self.rows, self.pairs, self.frames = rows, pairs, int(pairs[:, 1].max(initial=0)) + 1
        codes = self._codes(pairs)
        self.order = np.argsort(codes)
        self.sorted = codes[self.order]

    def _codes(self, pairs: np.ndarray) -> np.ndarray:
        return pairs[:, 0] * self.frames + pairs[:, 1]

    def has(self, pairs: np.ndarray) -> bool:
        """Whether a schedule has these pairs and no others."""
        return np.array_equal(self.pairs, pairs)

    def read(self, pairs: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
        """(B, 2) -> (B, ...)."""
        return self.rows.read(self.order[np.searchsorted(self.sorted, self._codes(pairs))], device)


Compute = Callable[[np.ndarray], Tensor]  # numbers of rows (B,) -> (B, ...)


def place(folder: Path, name: str, of: str) -> Path:
    """Where the rows of a name live whose key is `of`."""
    return folder / f"{name}-{of}.npy"


def discard_others(path: Path) -> None:
    """Remove files of the same name with another key: for a folder that no other run reads from."""
    name, _, _ = path.stem.rpartition("-")
    for stale in path.parent.glob(f"{name}-*.npy"):
        if stale != path and stale.stem.rpartition("-")[0] == name:  # and not of one whose name begins so
            stale.unlink()


def tried(compute: Compute, rows: int, at_once: int, folder: Path, device: torch.device | str) -> Costs:
    """What computing and reading costs here, by trial on the first rows."""
    numbers = np.arange(min(at_once, rows))
    found = compute(numbers)  # once before, because a first call is slow
    trial = folder / f".trial-{os.getpid()}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        np.save(trial, found.cpu().numpy())
        kept, shuffled = Rows(trial), np.random.default_rng(0).permutation(numbers)
        compute_s = _middle(lambda: compute(numbers), device)
        read_s = _middle(lambda: kept.read(shuffled, device), device)
    finally:
        trial.unlink(missing_ok=True)
    size = found[0].numel() * found.element_size() * rows
    return Costs(compute_s / len(numbers), read_s / len(numbers), size)


def _middle(call: Callable[[], object], device: torch.device | str) -> float:
    times = []
    for _ in range(TRIALS):
        began = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def build(path: Path, compute: Compute, rows: int, at_once: int, log: Callable[[str], None]) -> Rows:
    """Compute all rows into a file, or open the one that is there; one process does this while others wait."""
    if path.exists():
        return Rows(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, values, say = path.with_name(f".{path.name}"), None, paced(log)
    for start in range(0, rows, at_once):
        found = compute(np.arange(start, min(start + at_once, rows))).cpu().numpy()
        if values is None:
            shape = (rows, *found.shape[1:])
            values = np.lib.format.open_memmap(unfinished, mode="w+", dtype=found.dtype, shape=shape)
        values[start : start + len(found)] = found
        say(f"{path.name}: {start + len(found)} of {rows} rows")
    values.flush()
    del values
    os.replace(unfinished, path)
    return Rows(path)


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder lies on or will lie on."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free

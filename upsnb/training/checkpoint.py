"""Checkpoints: the whole state of training in one format whatever was on, never half-written, checked before use.

Tensors go to torch.distributed.checkpoint's files (`shards`), everything else to one plain `state.json`; the index
beside them (`rotation`) says what is whole and what is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upsnb import config as configs
from upsnb.errors import ConfigError, RunError, UpsError
from upsnb.runs import checkpoint_index
from upsnb.runs.events import EventWriter
from upsnb.runs.files import Shape, read_json
from upsnb.runs.recovery import in_one_line
from upsnb.runs.runfolder import CHECKPOINTS, STARTUP_ALLOWANCE_S
from upsnb.training import checkpoint_shards, parallel
from upsnb.training.checkpoint_shards import Allocate
from upsnb.training.parallel import Ranks

FORMAT = checkpoint_index.FORMAT
STATE = "state.json"
WATCH_INTERVAL_S = 1.0


class _State(Shape):
    step: int
    position: dict[str, Any] = {}
    setup: dict[str, Any] = {}
    config: str = ""
    specs: dict[str, dict[str, Any]] = {}


# -- saving --------------------------------------------------------------------------------------------------------


@dataclass
class _Save:
    """One checkpoint on its way to the disk."""

    step: int
    text: str  # of state.json, as it was when the save was asked for
    roles: tuple[str, ...]
    budget_gb: float
    revision: int | None
    started: float
    stall_s: float | None = None  # how long training waited for an asynchronous save; None: to its end


class Saver:
    """Writes the checkpoints of one launch, at most one at a time; all ranks enter every method.

    A synchronous save returns once the checkpoint is in its place. An asynchronous one returns once the state is copied
    to host memory; writing, hashing and rotation happen on a thread and over a process group of their own, and an error
    in there comes out of the next `poll`, `save` or `wait`.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        events: EventWriter,
        beat: Callable[[], None] = lambda: None,
        stall_timeout_s: float = 600.0,
    ):
        """
        Args:
            beat: says that this rank lives; called from another thread while a save blocks and makes progress.
            stall_timeout_s: a rank without progress for so long is hung; ranks wait longer for each other [s].
        """
        self.folder, self.ranks, self.events, self.beat = folder, ranks, events, beat
        self.last: str | None = None  # name of the checkpoint that training came from or wrote last
        # Its own, because messages of two threads in one group would meet in a different order on each rank.
        self.group = parallel.new_gloo_group(STARTUP_ALLOWANCE_S + 2 * stall_timeout_s)
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.in_flight: Future | None = None
        self.stager = None
        self.hashed = 0  # bytes, as a sign of life
        if ranks.rank == 0:
            checkpoint_index.prepare(folder)
        parallel.barrier(ranks)

    def save(
        self,
        state: dict,
        roles: tuple[str, ...] = (),
        asynchronous: bool = False,
        budget_gb: float = math.inf,
        revision: int | None = None,
    ) -> None:
        """Write a state; the `checkpoint` event of rank 0 tells when it is in its place.

        Args:
            state: nested dicts of tensors and plain data, with `step`. Names of tensors may differ between ranks, plain
                data is rank 0's.
            roles: what it is beside the latest: "best", "epoch".
            budget_gb: disk space for all checkpoints [GB].
            revision: of control.json that asked for it, for the event.
        Raises:
            OSError: the disk is full or not writable; earlier checkpoints stay as they are.
        """
        started = time.perf_counter()
        self.wait()
        tensors, plain = checkpoint_shards.split(state)
        text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
        save = _Save(state["step"], text, roles, budget_gb, revision, started)
        written = checkpoint_index.temporary(self.folder, save.step)
        if asynchronous:
            self.stager = self.stager or checkpoint_shards.make_stager(self.ranks.device)
            upload = checkpoint_shards.write_later(tensors, written, self.group, self.stager)
            save.stall_s = time.perf_counter() - started
            self.in_flight = self.thread.submit(self._finish, save, upload.result)
            return
        self._close_stager()
        with self._alive(written):
            self._finish(save, lambda: checkpoint_shards.write(tensors, written, self.group))
        parallel.barrier(self.ranks)

    def poll(self) -> None:
        """Raise what went wrong in the background, if anything has; never waits."""
        if self.in_flight is not None and self.in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more, and raise what went wrong."""
        if self.in_flight is None:
            return
        in_flight, self.in_flight = self.in_flight, None
        with self._alive(checkpoint_index.home(self.folder)):
            in_flight.result()

    def close(self) -> None:
        """Wait, and give host memory and thread back."""
        self.wait()
        self._close_stager()
        self.thread.shutdown()

    def _close_stager(self) -> None:
        if self.stager is not None:
            self.stager.close()
            self.stager = None

    def _finish(self, save: _Save, write: Callable[[], object]) -> None:
        """Write this rank's shards and hash them; on rank 0 put the checkpoint in its place.

        Args:
            write: returns once the shards are on the disk; in the background, where this runs on a thread, it waits.
        """
        try:
            with checkpoint_shards.first_failure():
                write()
            written = checkpoint_index.temporary(self.folder, save.step)
            own = written.glob(f"__{self.ranks.rank}_*")
            digests = {path.name: checkpoint_index.digest(path, self._count) for path in sorted(own)}
            for rank, other in enumerate(parallel.all_gather_objects(self.ranks, digests, self.group)):
                missing = [name for name in other if not (written / name).is_file()]
                if missing and self.ranks.rank == 0:  # alone, because once it has seen all it moves them
                    raise RunError(
                        f"{written / missing[0]}: rank {rank} wrote it and rank 0 does not see it -> "
                        "put the run folder on a disk that all machines share"
                    )
                digests |= other
            if self.ranks.rank == 0:
                self._commit(save, written, digests)
        except BaseException:  # gives the disk space back, so that the end of the run can be written down
            if self.ranks.rank == 0:
                checkpoint_index.discard(self.folder, save.step)
            raise

    def _commit(self, save: _Save, written: Path, digests: dict[str, dict]) -> None:
        with open(written / STATE, "w") as file:
            file.write(save.text)
            file.flush()
            os.fsync(file.fileno())
        own = (checkpoint_shards.METADATA, STATE)
        files = digests | {name: checkpoint_index.digest(written / name) for name in own}
        path = checkpoint_index.commit(self.folder, save.step, files, save.roles, save.budget_gb, self.last)
        self.last = path.name
        now = time.perf_counter()
        self.events.write(
            "checkpoint",
            save.step,
            path=f"{CHECKPOINTS}/{path.name}",
            best="best" in save.roles,
            epoch_end="epoch" in save.roles,
            revision=save.revision,
            asynchronous=save.stall_s is not None,
            stall_s=round(now - save.started if save.stall_s is None else save.stall_s, 4),
            save_s=round(now - save.started, 4),
            size_mib=round(checkpoint_index.num_bytes(files) / 2**20, 3),
        )

    # -- signs of life ------------------------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        self.hashed += num_bytes

    @contextlib.contextmanager
    def _alive(self, written: Path) -> Iterator[None]:
        """Beat while bytes are written or hashed; a disk that hangs is silent and is found by the supervisor."""
        ended = threading.Event()

        def watch() -> None:
            before = None
            while not ended.wait(WATCH_INTERVAL_S):
                now = self.hashed, _bytes_below(written)
                if now != before:
                    self.beat()
                before = now

        watcher = threading.Thread(target=watch, name="checkpoint-heartbeat", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _bytes_below(folder: Path) -> int:
    """Size of all files that are there right now; others may come and go meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):  # passes over a folder that is gone by then
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


# -- loading -------------------------------------------------------------------------------------------------------


def whole(path: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Room for a tensor of a checkpoint on the host, in one piece."""
    return torch.empty(shape, dtype=dtype)


def load(
    folder: Path | str, which: str = "latest", ranks: Ranks | None = None, allocate: Allocate = whole
) -> dict | None:
    """The state of a checkpoint that is whole, nested as it was saved; None where there is no checkpoint at all.

    Added are `name`, which checkpoint it is, and `passed_over`, what is wrong with those that should have come first.

    Args:
        ranks: enter together, rank 0 chooses; None: this process reads for itself, whatever wrote the checkpoint.
    Raises:
        RunError: no checkpoint is whole, or one holds something else than tensors; nothing in it was executed.
    """
    ranks, chosen, problem = ranks or Ranks(), None, None
    if ranks.rank == 0:
        try:
            chosen = checkpoint_index.choose(folder, which, _fault)
        except RunError as error:
            problem = str(error)
    chosen, problem = parallel.all_gather_objects(ranks, (chosen, problem))[0]
    if problem is not None:
        raise RunError(problem)
    if chosen is None:
        return None
    alone = ranks.world_size == 1
    group = None if alone else ranks.control_group
    with as_saved(chosen.path):
        plain = read_json(chosen.path / STATE, None, _State)
        tensors = checkpoint_shards.read(chosen.path, chosen.files, allocate, group, alone)
        state = checkpoint_shards.merge(tensors, plain)
    return {**state, "name": chosen.path.name, "passed_over": list(chosen.passed_over)}


def doubts(state: Mapping, datasets: Mapping[str, Any]) -> Iterator[str]:
    """What whoever goes on from a loaded state should know: newer checkpoints that are damaged, data that are others.

    A file that has changed since has other means and vocabularies, which the weights were not trained with.
    """
    for damage in state["passed_over"]:
        yield f"checkpoint {damage} -> resuming from {state['name']}"
    for name in datasets.keys() & state["specs"].keys():
        saved, now = state["specs"][name], json.loads(json.dumps(vars(datasets[name].spec)))
        if changed := sorted(key for key in saved.keys() & now.keys() if not _alike(saved[key], now[key])):
            what = f"dataset {name}: {', '.join(changed)} changed since {state['name']} was saved"
            yield f"{what}, so its data did -> go on only if that is meant, else give the old data or start a new run"


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    numbers = isinstance(first, float) and isinstance(second, float)  # sums of other machines round otherwise
    return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-6) if numbers else first == second


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's plain part, though its checksum fits."""
    try:
        plain = read_json(path / STATE, None, _State)
        if "config" in plain:
            configs.parse(plain["config"], f"the config in {STATE}")
    except (RunError, ConfigError) as error:
        return " ".join(str(error).removeprefix(f"{path}/").split())
    return None


@contextlib.contextmanager
def as_saved(what: Path | str) -> Iterator[None]:
    """One sentence for whatever a state runs into that is not as it was saved, though its checksums fit."""
    try:
        yield
    except UpsError:
        raise
    except Exception as error:
        found = in_one_line(error)
        raise RunError(f"{what}: not what this version saves ({found}) -> do not trust this checkpoint") from error


def room_for(model: nn.Module) -> Allocate:
    """Where the tensors of a checkpoint are read to: sharded as the parameter that their path names, else whole.

    So weights, averages and moments arrive sharded where this model is, whatever they were when they were saved. Whole
    ones arrive on the host and move on one by one: a device need not hold offloaded moments even once.
    """
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}

    def allocate(path: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        for part in path:
            if part in sharded and sharded[part].shape == shape:
                return torch.empty_like(sharded[part], dtype=dtype, requires_grad=False)
        return whole(path, shape, dtype)

    return allocate

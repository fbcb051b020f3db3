"""Which pairs each rank trains on, in which order, and how they get to the device.

The order is a function of (seed, epoch) alone, and of the last validation where datasets are mixed by loss: any rank,
any restart and any number of ranks derive the same global microbatches and take their own slice. A pair is one (input
frames, output frames) of one sample.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext

import numpy as np
import torch
from torch.utils.data import DataLoader

from upsnb import hardware
from upsnb.config import OPERATOR, RunConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.data.datasets import Dataset
from upsnb.errors import DataError
from upsnb.spans import COPY, span

LEAST_SHARE = 0.25  # by loss: of an equal share, which no dataset gets less than, so that none is forgotten


class Schedule:
    """The microbatches of every epoch.

    Where datasets are mixed uniformly, an epoch visits every pair of the largest one once (but for an incomplete last
    microbatch, a different one each epoch) and as many microbatches of each other, reshuffled as often as needed. Any
    other mixture has the same number of microbatches, more of one dataset and fewer of another. Datasets take turns, as
    evenly as their shares allow.

    Order and random images belong to the pairs and not to the microbatches: a step that sees 32 pairs sees the same
    ones in the same images as 4 microbatches of 8 or 2 of 16, on any number of ranks. Arms of a comparison that share
    them out differently still train on the same data.
    """

    def __init__(
        self, datasets: dict[str, Dataset], config: RunConfig, rank: int, world_size: int, stage: str = OPERATOR
    ):
        training = config.training
        self.seed, self.rank, self.batch_size = training.seed, rank, training.batch_size
        self.mixing = config.data.mixing
        self.global_size = training.batch_size * world_size
        calls = config.calls(stage)
        self.pairs = {name: dataset.pairs("train", calls) for name, dataset in datasets.items()}
        for name, pairs in self.pairs.items():
            if len(pairs) < self.global_size:
                raise DataError(
                    f"dataset {name} has {len(pairs)} training pairs, one microbatch of all ranks takes "
                    f"{self.global_size} ({world_size} x training.batch_size {self.batch_size}) -> lower batch_size"
                )
        self.per_dataset = max(len(pairs) // self.global_size for pairs in self.pairs.values())
        self.num_microbatches = self.per_dataset * len(self.pairs)
        if self.num_microbatches < training.accum_steps:
            raise DataError(
                f"one optimizer step takes training.accum_steps {training.accum_steps} microbatches and an epoch has "
                f"{self.num_microbatches} microbatches of {self.global_size} pairs -> lower accum_steps or batch_size"
            )

    def epoch(self, epoch: int, start: int = 0, losses: Mapping[str, float] | None = None) -> list[Microbatch]:
        """This rank's microbatches of an epoch from position `start` on.

        Args:
            losses: as of `shares`.
        """
        shares = self.shares(epoch, losses or {})
        counts = _apportioned(np.array(list(shares.values())), self.num_microbatches)
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        names = np.repeat(list(shares), counts)[np.argsort(due, kind="stable")]
        return self.microbatches(names.tolist(), epoch, start)

    def shares(self, epoch: int, losses: Mapping[str, float]) -> dict[str, float]:
        """Which part of an epoch's microbatches is of each dataset; 0 for those that join later.

        Args:
            losses: validation nRMSE by dataset; unknown, infinite and larger ones count as 1, which is no skill at all.
        """
        weights = {
            "uniform": lambda name: 1.0,
            "size": lambda name: float(len(self.pairs[name])),
            "loss": lambda name: max(1e-6, min(1.0, losses.get(name, 1.0))),  # in this order NaN counts as 1
        }[self.mixing.by]
        joined = [name for name in self.pairs if self.mixing.from_epoch.get(name, 0) <= epoch]
        total = sum(map(weights, joined))
        least = LEAST_SHARE if self.mixing.by == "loss" else 0.0
        shares = {name: least / len(joined) + (1 - least) * weights(name) / total for name in joined}
        return dict.fromkeys(self.pairs, 0.0) | shares

    def microbatches(self, names: Sequence[str], epoch: int, start: int = 0) -> list[Microbatch]:
        """This rank's microbatches of these datasets, one after the other, from position `start` on."""
        needed = {name: count * self.global_size for name, count in Counter(names).items()}
        orders = {name: self._order(name, epoch, count) for name, count in needed.items()}
        draws = {name: self._draws(name, epoch, count) for name, count in needed.items()}
        found, done = [], dict.fromkeys(needed, 0)
        for position, name in enumerate(names):
            first = done[name] * self.global_size + self.rank * self.batch_size
            turn, done[name] = epoch * self.per_dataset + done[name], done[name] + 1
            if position >= start:
                chosen, drawn = (part[first : first + self.batch_size] for part in (orders[name], draws[name]))
                seed = int(np.random.SeedSequence((self.seed, epoch, position)).generate_state(1)[0])
                found.append(Microbatch(name, self.pairs[name][chosen], drawn, seed, turn))
        return found

    def _order(self, name: str, epoch: int, needed: int) -> np.ndarray:
        """So many indices of pairs: as many passes over the dataset as that takes."""
        count = len(self.pairs[name])
        key = sorted(self.pairs).index(name)
        passes = [
            np.random.default_rng((self.seed, epoch, key, number)).permutation(count)
            for number in range(-(-needed // count))
        ]
        return np.concatenate(passes)[:needed]

    def _draws(self, name: str, epoch: int, needed: int) -> np.ndarray:
        """Two numbers in [0, 1) for each index of `_order`."""
        key = sorted(self.pairs).index(name)
        # A spawn key: numpy takes seeds (seed, epoch, key) and (seed, epoch, key, 0) for the same, `_order`'s.
        own = np.random.SeedSequence((self.seed, epoch, key), spawn_key=(1,))
        return np.random.default_rng(own).random((needed, 2))


def _apportioned(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to shares, which add up to `total`: the largest remainders are rounded up."""
    exact = shares * total
    counts = np.floor(exact + 1e-9).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


class PairReader(torch.utils.data.Dataset):
    """Microbatches by their schedule: from files in loader processes, as CPU tensors; or gathered on the device."""

    def __init__(self, datasets: dict[str, Dataset], calls: int, fields: dict | None = None):
        """`fields`: of all samples on the device, by dataset; None: they are read."""
        self.datasets, self.calls, self.fields = datasets, calls, fields

    def __getitem__(self, microbatch: Microbatch) -> TensorBatch:
        name = microbatch.dataset
        return self.datasets[name].read(microbatch, self.calls, self.fields[name] if self.fields else None)


def residency(datasets: dict[str, Dataset], config: RunConfig) -> str:
    """Where batches come from, "device" or "workers": what the config says, or what fits."""
    if config.data.residency != "auto":
        return config.data.residency
    total = sum(dataset.num_bytes for dataset in datasets.values())
    return "device" if total <= config.data.max_resident_gib * 2**30 else "workers"


class Loader:
    """Batches of one epoch after another, on the device, augmented; remembers where it is."""

    def __init__(
        self,
        datasets: dict[str, Dataset],
        config: RunConfig,
        rank: int,
        world_size: int,
        device,
        before: Loader | None = None,
        stage: str = OPERATOR,
    ):
        """`before`: a loader of the same datasets, whose resident data is taken over."""
        self.datasets, self.config, self.device = datasets, config, torch.device(device)
        self.schedule = Schedule(datasets, config, rank, world_size, stage)
        self.shares = self.schedule.shares(0, {})  # of the epoch that was asked for last
        self.calls = config.calls(stage)
        self.residency = residency(datasets, config)
        resident = self.residency == "device"
        size = sum(dataset.num_bytes for dataset in datasets.values()) / 2**30
        room = hardware.detect().device_memory_gib if self.device.type == "cuda" else hardware.host_memory_gib()
        if resident and size > room > 0:
            found = f"all data on the device takes {size:,.1f} GiB, and {room:,.1f} GiB are there"
            raise DataError(f"data.residency: {found} -> set it to workers, or read fewer samples")
        kept = before.reader.fields if before else None  # whole trajectories, whatever is made of them
        if resident and kept is None:
            kept = {name: dataset.resident(self.device) for name, dataset in datasets.items()}
        self.reader = PairReader(datasets, self.calls, kept if resident else None)
        self._pins = config.training.pin_memory and self.device.type == "cuda"
        self._coming: list[Microbatch] = []  # what the loader processes are to read next
        self._workers = None if resident else self._start_workers()

    def epoch(self, epoch: int, start: int = 0, losses: Mapping[str, float] | None = None) -> Iterator[TensorBatch]:
        """Batches from position `start` of an epoch; resuming there repeats and skips nothing.

        Args:
            losses: as of `Schedule.shares`.
        """
        self.shares = self.schedule.shares(epoch, losses or {})
        microbatches = self.schedule.epoch(epoch, start, losses)
        if self._workers is None:
            yield from map(self.reader.__getitem__, microbatches)
            return
        self._coming[:] = microbatches
        yield from self._workers if self.device.type != "cuda" else self._copied(self._workers)

    def peek(self) -> list[TensorBatch]:
        """One microbatch of each dataset, read here and now; an epoch that is under way does not notice."""
        first = self.schedule.microbatches(list(self.datasets), epoch=0)
        return [self.reader[microbatch].map(lambda x: x.to(self.device)) for microbatch in first]

    def _start_workers(self) -> DataLoader:
        training = self.config.training
        # num_workers is the machine's, for all ranks that are on it
        num_workers = training.num_workers and max(1, training.num_workers // training.ranks_per_node)
        return DataLoader(
            self.reader,
            sampler=self._coming,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=self._pins,
            prefetch_factor=training.prefetch_factor if num_workers else None,
            multiprocessing_context=_server_of_workers() if num_workers else None,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # else it draws from the state that drop-path uses, and resuming differs
        )

    def _copied(self, batches: Iterable[TensorBatch]) -> Iterator[TensorBatch]:
        """Batches on the GPU; while one is computed with, the next one is copied, in a stream of its own."""
        stream, before = torch.cuda.Stream(self.device), None
        for batch in batches:
            with span(COPY), torch.cuda.stream(stream):
                copied = batch.map(lambda x: x.to(self.device, non_blocking=self._pins))
                done = stream.record_event()
            if before is not None:
                yield _arrived(*before)
            before = copied, done
        if before is not None:
            yield _arrived(*before)


def _server_of_workers() -> BaseContext:
    """Where the processes that read are forked: one without threads, which a copy of this one may hang on.

    It imports torch and this package, once for all of them.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    return server


def _arrived(batch: TensorBatch, done: torch.cuda.Event) -> TensorBatch:
    """A batch that the stream of the step may use, because it waits for its copy; memory is kept until that is done."""
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(done)
    for x in batch.tensors().values():
        x.record_stream(current)
    return batch

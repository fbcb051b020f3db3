"""A ledger of tensor memory: every storage that comes and goes during a step, by kind and by module.

It works alike on real tensors and on fake ones, which have shapes and lifetimes but no bytes: so memory is predicted
without having it. Kernels may allocate for themselves, unseen; upsnb/memory/measure.py measures those too.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

KINDS = (
    "parameters",  # and the buffers beside them
    "optimizer",  # moments
    "average",  # exponential moving average of the weights
    "gradients",  # of parameters, over the whole life of their storage
    "data",  # fields on the device: resident datasets, and the step's batches
    "activations",  # made where gradients are recorded: the forward pass, and what checkpointing computes again
    "temporary",  # made where none are: the backward pass, the optimizer's step
)
OUTSIDE = "losses"  # tensors made in the forward pass outside of all modules
BACKWARD, OPTIMIZER = "backward pass", "optimizer step"
FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Account:
    """All storages of a step; times are counts of operations.

    Arrays are (N,), one entry a storage.
    """

    nbytes: np.ndarray  # int64
    born: np.ndarray  # int64; 0: before the step
    died: np.ndarray  # int64; FOREVER: not within the step
    kind: np.ndarray  # int64, index into KINDS
    module: np.ndarray  # int64, index into `modules`
    modules: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]  # (operation, what begins there)
    end: int  # operations until the end

    def timeline(self) -> tuple[np.ndarray, np.ndarray]:
        """Operations (M,) at which memory changes, and bytes of every kind from there on (M, len(KINDS))."""
        whole = self.born < self.died
        times = np.unique(np.concatenate((self.born[whole], self.died[whole & (self.died < FOREVER)])))
        changes = np.zeros((len(times) + 1, len(KINDS)), dtype=np.int64)
        np.add.at(changes, (np.searchsorted(times, self.born[whole]), self.kind[whole]), self.nbytes[whole])
        np.add.at(changes, (np.searchsorted(times, self.died[whole]), self.kind[whole]), -self.nbytes[whole])
        return times, changes[:-1].cumsum(axis=0)

    def peak(self) -> int:
        """Bytes at the step's fullest moment."""
        return int(self.timeline()[1].sum(axis=1).max())

    def at_peak(self) -> np.ndarray:
        """Which storages are alive at the fullest moment, the first of several, (N,) bool."""
        times, levels = self.timeline()
        when = times[levels.sum(axis=1).argmax()]
        return (self.born <= when) & (when < self.died)

    def by_kind(self) -> dict[str, int]:
        """Bytes of every kind at the peak."""
        alive = self.at_peak()
        sums = np.bincount(self.kind[alive], self.nbytes[alive], len(KINDS))
        return {kind: int(size) for kind, size in zip(KINDS, sums)}

    def by_module(self) -> dict[str, dict[str, int]]:
        """Bytes of every kind at the peak, by module, largest first; blocks are taken together."""
        table: dict[str, dict[str, int]] = {}
        for index in np.flatnonzero(self.at_peak()):
            row = table.setdefault(self.modules[self.module[index]], dict.fromkeys(KINDS, 0))
            row[KINDS[self.kind[index]]] += int(self.nbytes[index])
        return dict(sorted(table.items(), key=lambda item: -sum(item[1].values())))

    def scaled(self, kind: str, factor: float) -> Account:
        """The same step with all storages of a kind at `factor` times their size."""
        chosen = self.kind == KINDS.index(kind)
        return replace(self, nbytes=np.where(chosen, np.ceil(self.nbytes * factor), self.nbytes).astype(np.int64))

    def kept(self, kind: str) -> Account:
        """The same step with all storages of a kind alive throughout."""
        chosen = self.kind == KINDS.index(kind)
        return replace(self, born=np.where(chosen, 0, self.born), died=np.where(chosen, FOREVER, self.died))

    def rounded(self, granularity: int) -> Account:
        """The same step with sizes rounded up as an allocator does it [bytes]."""
        return replace(self, nbytes=-(-self.nbytes // granularity) * granularity)

    def plus(self, kind: str, module: str, nbytes: int) -> Account:
        """The same step with one more storage, alive throughout."""
        modules = self.modules if module in self.modules else (*self.modules, module)
        return replace(
            self,
            nbytes=np.append(self.nbytes, nbytes),
            born=np.append(self.born, 0),
            died=np.append(self.died, FOREVER),
            kind=np.append(self.kind, KINDS.index(kind)),
            module=np.append(self.module, modules.index(module)),
            modules=modules,
        )


@dataclass
class _Entry:
    nbytes: int
    kind: str
    module: str
    born: int
    died: int = FOREVER


class Ledger(TorchDispatchMode):
    """Writes down the storages that operations make on one device while it is entered.

    What is older must be named with `adopt`, or it counts from where it is first written to. Hooks on the model tell
    which module is at work.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__()
        self.model, self.device, self.operation = model, device, 0
        self.marks: list[tuple[int, str]] = []
        self._entries: list[_Entry] = []
        self._alive: dict[int, tuple[weakref.ref, _Entry]] = {}
        self._inside: list[str] = []
        self._in_optimizer = False
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Ledger:
        for name, module in self.model.named_modules():
            self._hooks += (
                module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)),
                # also where checkpointing leaves a module early, because it has all that it came for
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            )
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:  # of a model before, which is frozen
                continue
            owner = name.rpartition(".")[0]
            self._hooks.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, owner=owner: self.adopt([parameter.grad], "gradients", owner)
                )
            )
        return super().__enter__()

    def __exit__(self, *failure) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*failure)

    def _leave(self) -> None:
        self._inside.pop()

    def adopt(self, tensors: Iterable[Tensor], kind: str, module: str) -> None:
        """Say of what kind and of which module the storages of tensors are, known already or not."""
        for tensor in tensors:
            entry = self._entry(tensor, kind, module, born=0)
            entry.kind, entry.module = kind, module

    def disregard(self, tensors: Iterable[Tensor]) -> None:
        """Count these storages nowhere."""
        for tensor in tensors:
            self._entry(tensor, "temporary", OUTSIDE, born=0).nbytes = 0

    def mark(self, what: str) -> None:
        """Say what begins now; hooks of loss module and optimizers call this."""
        if not self.marks or self.marks[-1][1] != what:
            self.marks.append((self.operation, what))
        self._in_optimizer = what == OPTIMIZER

    def account(self) -> Account:
        """Everything written down so far."""
        entries = self._entries
        modules = tuple(dict.fromkeys(_short(entry.module) for entry in entries))
        rows = [
            (entry.nbytes, entry.born, entry.died, KINDS.index(entry.kind), modules.index(_short(entry.module)))
            for entry in entries
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return Account(*columns, modules=modules, marks=tuple(self.marks), end=self.operation)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operation += 1
        # Backward pass and optimizers record no gradients, what checkpointing repeats does: no need to ask who calls.
        recording = torch.is_grad_enabled()
        kind = "activations" if recording else "temporary"
        elsewhere = OPTIMIZER if self._in_optimizer else OUTSIDE if recording else BACKWARD
        module = self._inside[-1] if self._inside and self._inside[-1] else elsewhere
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                self._entry(tensor, kind, module, self.operation)
        return result

    def _entry(self, tensor: Tensor, kind: str, module: str, born: int) -> _Entry:
        storage = tensor.untyped_storage()
        address = storage._cdata  # of the storage itself: several tensors share one
        if address not in self._alive:
            entry = _Entry(storage.nbytes(), kind, module, born)
            self._entries.append(entry)
            self._alive[address] = weakref.ref(storage, lambda _: self._drop(address)), entry
        return self._alive[address][1]

    def _drop(self, address: int) -> None:
        entry = self._alive.pop(address)[1]
        self.operation += 1
        entry.died = self.operation


def _short(name: str) -> str:
    """A module's path without numbers, so that repeated blocks are told together, and no deeper than a reader looks."""
    if " " in name:
        return name
    parts = re.sub(r"\.\d+(?=\.|$)", "", name).split(".")
    return ".".join(parts[: 3 if "blocks" in parts else 2]) or "shared tables"

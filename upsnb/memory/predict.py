"""Memory of one optimizer step: predicted without having it, measured here, and the largest batch of other machines.

Predicted with fake tensors, which have shapes and lifetimes but no bytes: the config's own model, losses, backward pass
and optimizers run in seconds, on any machine, without data. What other ranks and devices do is arithmetic on top, and a
footprint's notes say so.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from upsnb import hardware, overlays, spans
from upsnb.config import RunConfig
from upsnb.data.batch import TensorBatch
from upsnb.data.batches import residency
from upsnb.memory.ledger import BACKWARD, OPTIMIZER, Account, Ledger
from upsnb.runs import runfolder
from upsnb.training import optimizers, stages, workload
from upsnb.training.losses import ESTABLISHED
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, build_optimizers

CUDA_GRANULARITY = 512  # bytes; CUDA's allocator rounds every request up to it
FUSED_KERNELS = ("flash", "efficient", "flex")  # keep no scores, as the one that torch chooses in their stead
MARKS = {spans.FORWARD: "forward pass", spans.BACKWARD: BACKWARD, spans.OPTIMIZER: OPTIMIZER}  # in the ledger


@dataclass(frozen=True)
class Footprint:
    """Memory of one optimizer step of one rank."""

    nbytes: int  # at the fullest moment
    account: Account  # every storage of the step
    how: str  # what the number is
    seconds: float  # that it took to find out
    notes: tuple[str, ...] = ()  # what was assumed
    history: dict | None = None  # CUDA's allocator, measured footprints only

    @property
    def gib(self) -> float:
        return self.nbytes / 2**30


# -- one step ----------------------------------------------------------------------------------------------------------


class Rehearsal:
    """A rank's model, losses and optimizers as a run builds them, and steps on batches of zeros.

    Under fake tensors or on real ones alike, in the stage with most forward passes. One small step comes first, because
    it creates the optimizers' state.
    """

    def __init__(self, config: RunConfig, root: Path, device: torch.device):
        self.config, self.device = config, device
        self.workload = workload.of(config)
        self.outlines = self.workload.outlines(root)
        training, stage = config.training, max(reversed(config.stages.planned), key=config.passes)
        self.calls = config.calls(stage)
        with device:  # fake tensors cannot be moved in place
            objective = stages.build(config, self.outlines, stage)
        objective.progress = 1.0
        objective.generator = generator = torch.Generator(device).manual_seed(training.seed)
        model = objective.model
        self.setup = Setup(
            config=config,
            ranks=Ranks(device=device),
            datasets=self.outlines,
            loader=None,
            model=model,
            loss=objective,
            optimizers=build_optimizers(model, config, stage),
            # float16's scaler holds two numbers; and a step that it skips, as it may the first, would make no state
            scaler=torch.amp.GradScaler(device.type, enabled=False),
            ema=optimizers.Ema(model, training.ema_decay) if training.ema_decay else None,
            plateau=optimizers.Plateau(stages.settings(config, stage).scheduler),
            generator=generator,
            stage=stage,
        )
        self.resident: list[Tensor] = []
        if residency(self.outlines, config) == "device":
            sizes = (outline.num_bytes for outline in self.outlines.values())
            self.resident = [torch.empty(size // 4, device=device) for size in sizes]
        self._ledger: Ledger | None = None  # of the steps being taken
        self._step([self._batch(name, 1) for name in self.outlines])

    def _step(self, batches: list[TensorBatch]) -> None:
        with warnings.catch_warnings():
            # QK norm in bfloat16: torch says that no fused kernel takes its float32 weights; it takes another one
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
            self.setup.step(batches, ESTABLISHED)

    def switch(self, name: str) -> None:
        """Take part in the step's spans, as a `spans.Recorder`."""
        if name in MARKS:
            self._ledger.mark(MARKS[name])

    def _batch(self, name: str, size: int, turn: int = 0) -> TensorBatch:
        batch = self.workload.zeros(name, self.outlines[name].spec, size, self.device, self.calls)
        return replace(batch, turn=turn)

    def steps(self, batch_size: int) -> None:
        """As many optimizer steps as show every dataset, and every loss with gradients of earlier microbatches there.

        From the third microbatch of a dataset on nothing new happens: those only wait on the device.
        """
        names, accumulated = list(self.outlines), self.config.training.accum_steps
        computed = min(accumulated, 2 * len(names))
        training = self.config.training
        every = math.lcm(training.inverse_loss_frequency, *training.loss_frequency.values())
        starts = list(range(0, len(names), computed))  # microbatches done before
        if computed > len(names) and every > 1:
            starts.append(len(names) * (every - 1))  # the second microbatch computes what the first did above
        for start in starts:
            places = [divmod(start + i, len(names)) for i in range(accumulated)]
            batches = [self._batch(names[place], batch_size, turn) for turn, place in places]
            if self._ledger is not None:
                for batch in batches:
                    self._ledger.adopt(batch.tensors().values(), "data", f"batches.{batch.dataset}")
            self._step(batches[:computed])

    def account(self, batch_size: int, offloaded: bool = False) -> Account:
        """Every storage of these steps on this device.

        Args:
            offloaded: take AdamW's moments to be elsewhere, though they are here.
        """
        setup, model = self.setup, self.setup.model
        self._ledger = ledger = Ledger(model, self.device)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            ledger.adopt([tensor], "parameters", _owner(name))
        names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in setup.optimizers:
            for parameter, state in optimizer.state.items():
                moments = [value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0]
                if offloaded and isinstance(optimizer, torch.optim.AdamW):
                    ledger.disregard(moments)
                elif self.device.type in {moment.device.type for moment in moments}:  # else really offloaded
                    ledger.adopt(moments, "optimizer", _owner(names[parameter]))
        if setup.ema is not None:
            for name, average in zip(setup.ema.names, setup.ema.average, strict=True):
                ledger.adopt([average], "average", _owner(name))
        ledger.adopt(self.resident, "data", "resident datasets")
        spans.record(self)
        try:
            with ledger:
                self.steps(batch_size)
        finally:
            spans.record(None)
            self._ledger = None
        return ledger.account()


def _owner(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0]


# -- predicted and measured ------------------------------------------------------------------------------------------


class Predictor:
    """Footprints of one config at any batch size; building it takes about as long as one prediction."""

    def __init__(self, config: RunConfig, root: Path | None = None, granularity: int | None = None):
        """
        Args:
            granularity: bytes to which the allocator rounds; None: this machine's.
        Raises:
            ConfigError: the model is larger than any machine, or has more blocks than this one can name.
        """
        self.config, self.root = config, root or runfolder.project_root()
        cuda = hardware.detect().device == "cuda" and config.training.device != "cpu"
        self.device = torch.device("cuda" if cuda else "cpu")
        self.granularity = granularity or (CUDA_GRANULARITY if cuda else 1)
        started = time.perf_counter()
        # Offload needs CUDA and guards read the loss, which has no value here: neither changes what else is allocated.
        changes = {"training.cpu_offload_optimizer": False, "guards.nonfinite": "off"}
        self._has_stand_in = config.operator.pdet.attention in FUSED_KERNELS  # on CUDA too: flex compiles for real
        changes |= {"operator.pdet.attention": "sdpa"} if self._has_stand_in else {}
        self._fake = FakeTensorMode()
        with torch.random.fork_rng(devices=[]), self._fake:
            self._rehearsal = Rehearsal(overlays.apply(config, changes), self.root, self.device)
        self.seen: dict[int, Footprint] = {}  # what was predicted so far, by batch size
        self._build_s = time.perf_counter() - started

    def at(self, batch_size: int | None = None) -> Footprint:
        """The footprint at a batch size; the config's own if none is given."""
        size = batch_size or self.config.training.batch_size
        if size not in self.seen:
            started = time.perf_counter()
            with torch.random.fork_rng(devices=[]), self._fake:
                account = self._rehearsal.account(size, self.config.training.cpu_offload_optimizer)
            account = self._of_one_rank(account).rounded(self.granularity)
            seconds = time.perf_counter() - started + self._build_s
            self.seen[size] = Footprint(account.peak(), account, "predicted", seconds, self._notes())
        return self.seen[size]

    def parameters_by_optimizer(self) -> tuple[int, int]:
        """How many parameters Muon trains, with one moment, and how many AdamW, with two."""
        counts = {True: 0, False: 0}
        for optimizer in self._rehearsal.setup.optimizers:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            counts[isinstance(optimizer, torch.optim.Muon)] += sum(parameter.numel() for parameter in parameters)
        return counts[True], counts[False]

    def _of_one_rank(self, account: Account) -> Account:
        """What several ranks change: arithmetic, because here is one."""
        training, ranks = self.config.training, self.config.training.num_gpus
        summed_up = training.no_sync and training.accum_steps > 1  # gradients, as a whole, before they are averaged
        if training.use_fsdp2:
            for kind in ("parameters", "optimizer", "average", *([] if summed_up else ["gradients"])):
                account = account.scaled(kind, 1 / ranks)
            return account.plus("parameters", "gathered blocks", self._gathered_bytes())
        if ranks > 1:
            account = account.kept("gradients")
            if summed_up:  # and laid into DDP's buckets at the end
                trained = (p for p in self._rehearsal.setup.model.parameters() if p.requires_grad)
                account = account.plus("gradients", "DDP's buckets", sum(p.nbytes for p in trained))
        return account

    def _gathered_bytes(self) -> int:
        """In float32: the unit at work, the one gathered ahead, and gradients on their way to other ranks."""
        largest, inside = 0, set()
        for unit in self._rehearsal.setup.model.units():  # inner before outer, which gathers what is left
            own = {*unit.parameters()} - inside
            largest, inside = max(largest, sum(parameter.nbytes for parameter in own)), inside | own
        return 3 * largest

    def _notes(self) -> tuple[str, ...]:
        training, notes = self.config.training, []
        if self._has_stand_in:
            kernel = self.config.operator.pdet.attention
            notes.append(f"{kernel} attention predicted as the fused kernel of sdpa, which keeps no scores either")
        if training.compile:
            notes.append("compiled code predicted as eager: fusion keeps less, how much less is not predicted")
        if training.cpu_offload_optimizer:
            notes.append("AdamW's moments in host memory, their gradients still on the device")
        if training.use_fsdp2:
            notes.append(
                f"parameters, gradients and moments divided by {training.num_gpus} ranks, gathered blocks added"
            )
        elif training.num_gpus > 1:
            notes.append("gradients there throughout: DDP keeps its buckets")
        return tuple(notes)


def predict(config: RunConfig, root: Path | None = None) -> Footprint:
    """One optimizer step of one rank, without data and without the memory."""
    return Predictor(config, root).at()

"""Everything that a step needs, built from a config in one fixed order."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.data.batch import TensorBatch
from upsnb.data.batches import Loader
from upsnb.data.datasets import Dataset
from upsnb.errors import ConfigError
from upsnb.models import surrogate
from upsnb.models.network import Network
from upsnb.models.ups import needs_inverse_heads
from upsnb.phases import HOT, LOADER, is_cold
from upsnb.spans import BACKWARD, FORWARD, OPTIMIZER, span
from upsnb.training import checkpoint, compiling, gates, optimizers, parallel, precision, preflight, stages, trained
from upsnb.training.kernels import rehearsal
from upsnb.training.losses import ESTABLISHED, Objective, turn
from upsnb.training.parallel import Ranks
from upsnb.training.timing import mark
from upsnb.training.workload import of as workload_of

COMPILED = (  # prefixes of settings that compiled code depends on
    "training.compile",
    "training.amp",
    "training.tf32",
    "training.batch_size",
    "training.query_sampling",
    "training.lambda_",
    "training.loss_frequency",
    "training.noise",
    "operator.pdet.",
    "stages.finetune.unroll",
    "stages.crps.unroll",
)


@dataclass
class Setup:
    """What a run trains with, and how one optimizer step is made of it."""

    config: RunConfig
    ranks: Ranks
    datasets: dict[str, Dataset]
    loader: Loader
    model: Network
    loss: nn.Module  # the stage's Objective, replicated or sharded where the config says so
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    ema: optimizers.Ema | None
    plateau: optimizers.Plateau
    generator: torch.Generator
    stage: str = stages.OPERATOR
    skipped: str = ""  # why the last step changed nothing: loss, gradient, overflow (float16's scaler), or not at all
    updating: bool = False  # weights are changing: a step that fails now cannot be taken again
    probed: RunConfig | None = None  # what compiled code was last tried out with
    build_s: dict[str, float] = field(default_factory=dict)  # seconds per part, for the start event
    tf32: precision.Tf32 = field(default_factory=precision.Tf32)
    optimizer_marks: tuple = (0.0, 0.0)  # begin and end of the optimizers' part of the last step, for its event

    @classmethod
    def build(
        cls,
        config: RunConfig,
        root: Path,
        ranks: Ranks,
        log: Callable[[str], None] = print,
        stage: str = stages.OPERATOR,
        weights: dict[str, Tensor] | None = None,
    ) -> Setup:
        """Build in one order: data shard -> model -> checkpointing flags -> compile -> DDP or FSDP2 -> optimizer.

        Compiling in place comes before wrapping, so that names stay; optimizers come last and own what is left.

        Args:
            weights: of the model of the stage before `stage`, whole.
        """
        training, device, build_s = config.training, ranks.device, {}
        started = time.perf_counter()

        def lap(part: str) -> None:
            build_s[part] = round(time.perf_counter() - started - sum(build_s.values()), 3)

        workload, log_once = workload_of(config), log if ranks.rank == 0 else lambda message: None
        if ranks.rank == 0:
            workload.prepare(root, log)
        parallel.barrier(ranks)
        datasets = workload.open(root, log_once)
        loader = Loader(datasets, config, ranks.rank, ranks.world_size, device, stage=stage)
        lap("data")
        objective = stages.build(config, datasets, stage, weights).to(device)
        model = objective.model
        if weights is not None:
            objective.begin(datasets, log_once)
        if device.type == "cuda" and config.model.build != RunConfig().model.build:  # the kernel has seen a CPU only
            for said in preflight.examine(objective, config).raise_errors(config):
                log(f"warning: {said}")
        torch.manual_seed(training.seed + 7919 * (ranks.rank + 1))  # drop-path differs between ranks, weights do not
        generator = torch.Generator(device).manual_seed(training.seed + 104729 * (ranks.rank + 1))
        loss = parallel.wrap(objective, config, generator, ranks)
        made = build_optimizers(model, config, stage)
        scaler = precision.build_scaler(config, device)
        ema = optimizers.Ema(model, training.ema_decay) if training.ema_decay else None
        lap("model")
        plateau = optimizers.Plateau(stages.settings(config, stage).scheduler)
        built = cls(
            config, ranks, datasets, loader, model, loss, made, scaler, ema, plateau, generator, stage, build_s=build_s
        )
        built.tf32.set(training.tf32)  # last: what fails before leaves nothing process-wide behind
        return built

    def update(self, new: RunConfig) -> None:
        """Make this the setup of another config, between two steps; only what depends on a changed setting is touched.

        Weights, moments, averages and random states stay. Undoing is an update to the old config.

        Raises:
            ConfigError: a changed setting cannot change while training runs; nothing was changed.
        """
        cold = cold_changes(self.config, new)
        if cold:
            raise ConfigError(
                [f"{path}: cannot change between two steps -> launch the workers again with it" for path in cold],
                "the update",
            )
        hardware.check_runnable(new, hardware.detect())
        stages.check(self.objective, new)
        old, changed = self.config, set(overlays.difference(self.config, new))
        kept = {name: getattr(self, name) for name in ("model", "loss", "optimizers", "scaler", "ema")}
        try:
            self._apply(new, changed)
        except Exception:
            vars(self).update(kept)  # what was being made in their place is not whole
            self._apply(old, changed)
            raise

    def _apply(self, new: RunConfig, changed: set[str]) -> None:
        """Bring every part that depends on a changed setting to the new config."""

        def touches(*prefixes: str) -> bool:
            return any(path.startswith(prefixes) for path in changed)

        training, ranks = new.training, self.ranks
        if touches(*LOADER):  # first, because it may refuse: too few pairs for a larger batch
            here = ranks.rank, ranks.world_size, ranks.device
            self.loader = Loader(self.datasets, new, *here, before=self.loader, stage=self.stage)
            self.objective.pairs_changed(self.loader.schedule.pairs)
        if touches("operator.pdet."):
            surrogate.set_checkpointing(self.model.blocks(), new.operator.pdet)
            surrogate.set_attention(self.model.blocks(), new.operator.pdet.attention)
        self.objective.config, self.objective.stage = training, stages.settings(new, self.stage)
        if touches("training.compile", f"stages.{self.stage}.unroll"):
            compiling.set_compile(self.objective, training)
        if precision.amp_dtype(new) != precision.amp_dtype(self.config):
            self.scaler = precision.build_scaler(new, ranks.device)
            if training.use_fsdp2:  # the dtype that weights are gathered in is fixed when they are sharded
                self._shard_again(new)
        self.tf32.set(training.tf32)
        if touches("optimizer", f"stages.{self.stage}.optimizer", "training.cpu_offload_optimizer"):
            made = build_optimizers(self.model, new, self.stage)
            optimizers.load_optimizer_state(self.model, made, optimizers.optimizer_state(self.model, self.optimizers))
            self.optimizers = made  # only now: these may fail
        self.plateau.config = self.objective.stage.scheduler
        self.config = new

    @property
    def objective(self) -> Objective:
        """What the step differentiates, without what is wrapped around it."""
        return parallel.unwrapped(self.loss)

    def _shard_again(self, new: RunConfig) -> None:
        """Shard the same weights, moments and averages anew under another config; all ranks enter.

        Over the same ranks they are cut as before, so each rank takes up its own part, and none gathers the whole.
        """
        weights, moments = self.model.state_dict(), optimizers.optimizer_state(self.model, self.optimizers)
        averages = self.ema.state_dict() if self.ema else None
        objective = stages.build(new, self.datasets, self.stage).to(self.ranks.device)
        self.model, self.loss = objective.model, parallel.wrap(objective, new, self.generator, self.ranks)
        self.optimizers = build_optimizers(self.model, new, self.stage)
        self._take(weights, moments, averages)

    def _take(self, weights: dict, moments: dict, averages: dict | None) -> None:
        """Continue with these, whole or sharded as the model's own."""
        optimizers.load_optimizer_state(self.model, self.optimizers, moments)
        own = self.model.state_dict()
        self.model.load_state_dict(
            {name: optimizers.shard_like(value, own[name]) if name in own else value for name, value in weights.items()}
        )
        optimizers.weights_changed(self.optimizers)
        if self.ema is not None:
            self.ema = optimizers.Ema(self.model, self.ema.decay)
            if averages is not None:
                self.ema.load_state_dict(averages)

    def begin(self, log: Callable[[str], None]) -> list[str]:
        """Take the weights that a new run is to begin with, if its config names any; averages begin with them.

        Returns:
            what is to be doubted of it, by rank 0.
        """
        if self.config.model.pretrained is None:
            return []
        own = self.model.state_dict()
        taken = trained.pretrained(self.config, own)
        self._take(own | taken, {}, None)
        log(trained.told(self.config, own, taken))
        return [*trained.seen_before(self.config, self.datasets)] if self.ranks.rank == 0 else []

    def set_learning_rate(self, progress: float) -> float:
        """Bring losses and all groups to where the stage stands, 0 to 1, and to what its steps hold; AdamW's rate."""
        training, self.objective.progress = self.config.training, progress
        batch = training.batch_size * training.accum_steps * self.ranks.world_size
        factor = optimizers.learning_rate_factor(stages.settings(self.config, self.stage).scheduler, progress)
        factor *= optimizers.batch_factor(stages.optimizer(self.config, self.stage), batch)
        return optimizers.set_learning_rate(self.optimizers, factor * self.plateau.factor)

    @compiling.step
    def step(self, batches: list[TensorBatch], step: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """One optimizer step over its microbatches.

        Args:
            step: optimizer steps done before, for loss warm-up.
        Returns:
            Mean loss, mean of each term over the microbatches that computed it, both over all ranks, and the gradient
            norm: tensors on the device; reading them synchronises, so the loop reads them later.
        """
        training, dtype = self.config.training, precision.amp_dtype(self.config)
        totals, terms, computed = [], {}, set()
        for number, batch in enumerate(batches):
            # By dataset: counted over all of them, "every second" might always be the same dataset's.
            weights = self.objective.weights(step, batch.turn)
            averages = number == len(batches) - 1 or not training.no_sync
            self.objective.touch_all = averages and self.ranks.world_size > 1 and not training.use_fsdp2
            with parallel.synchronising(self.loss, averages):
                total, values = self._forward_backward(batch, weights, dtype, len(batches))
            totals.append(total)
            for term, value in values.items():
                terms.setdefault(term, []).append(value)
                computed.add((batch.dataset, term))
        if self.ranks.world_size > 1 or training.use_fsdp2 or training.compile:  # optimizers must not step on zeros
            for unreached in self.objective.unreached(computed):
                unreached.zero_grad(set_to_none=True)
        means = torch.stack([torch.stack(v).mean() if len(v) > 1 else v[0] for v in (totals, *terms.values())])
        if self.ranks.world_size > 1:  # one small message, so that a curve does not depend on the number of ranks
            torch.distributed.all_reduce(means)
            means /= self.ranks.world_size
        loss, *values = means.unbind()
        with span(OPTIMIZER):
            norm = self._update(training.grad_clip, loss)
        return loss, dict(zip(terms, values)), norm

    def _forward_backward(self, batch: TensorBatch, weights: dict, dtype, num_microbatches: int) -> tuple[Tensor, dict]:
        with span(FORWARD):
            total, values = self.loss(batch, weights, dtype)
        if total.requires_grad:  # else no term acts on this microbatch
            is_alone = num_microbatches == self.ranks.world_size == 1 and not self.config.training.use_fsdp2
            with span(BACKWARD), optimizers.copying(self.optimizers) if is_alone else nullcontext():
                self.scaler.scale(total / num_microbatches).backward()
        return total.detach(), values

    def _update(self, grad_clip: float | None, loss: Tensor) -> Tensor:
        together = optimizers.JointOptimizer(self.optimizers)
        if all(parameter.grad is None for parameter in self.model.parameters()):  # no term acted; a scaler would assert
            self.skipped, self.optimizer_marks = "", (mark(self.ranks.device), mark(self.ranks.device))
            together.zero_grad()  # compiled, it was zeros that were copied ahead
            return torch.zeros_like(loss)
        norm = together.unscale_and_clip(self.scaler, self.model.parameters(), grad_clip)
        self.skipped = "" if self.config.guards.nonfinite == "off" else self._reason_to_skip(loss, norm)
        begin = mark(self.ranks.device)
        if not self.skipped:
            self.updating = True
            self.scaler.step(together)
        self.optimizer_marks = begin, mark(self.ranks.device)
        self.scaler.update()  # after a step without finite gradients this lowers the scale
        together.zero_grad()
        if self.ema is not None and not self.skipped:
            self.ema.update()
        self.updating = False
        return norm

    def _reason_to_skip(self, loss: Tensor, norm: Tensor) -> str:
        """Why the step must change nothing, or ""; the same on all ranks, because both numbers are of all ranks.

        float16's scaler finds its scale by overflows of the gradients while the loss is finite. Those steps are
        skipped as well, but only a scale below 1 is no search any more: the gradients themselves leave float16.
        """
        is_finite = torch.stack([loss, norm.to(loss.dtype)]).isfinite().tolist()  # waits for the device, once a step
        if all(is_finite):
            return ""
        if not is_finite[0]:
            return "loss"
        return "overflow" if self.scaler.is_enabled() and self.scaler.get_scale() >= 1 else "gradient"

    # -- outside of training: nothing is left behind ----------------------------------------------------------------

    def try_compile(self) -> None:
        """Compile what a step of the config needs: a microbatch of each dataset and set of terms, forward and backward.

        Compilation is lazy: without this its failure shows in the middle of a step, where ranks cannot agree on what to
        do, and each graph waits for the kernels of the one before. Weights, gradients and random states are left as
        found, and no gradient is averaged over ranks. Does nothing where nothing is compiled, or all is since the last
        call.
        """
        last, config = self.probed, self.config
        self.probed = None  # until it has gone well
        if not config.training.compile:
            return
        changed = overlays.difference(last, config) if last else COMPILED
        if any(path.startswith(COMPILED) for path in changed):
            self._rehearse()
        self.probed = config

    def _rehearse(self) -> None:
        """Probe with kernels that are not there yet; or, where that fails, again with all that were made by then."""
        if self.config.training.use_fsdp2 and self.ranks.world_size > 1:  # each probe gathers, on all ranks
            return self._probe()
        try:
            with rehearsal():
                self._probe()
        except Exception:  # maybe because of numbers without a meaning
            self._probe()

    def _probe(self) -> None:
        device, parameters = self.ranks.device, list(self.model.parameters())
        gradients, noise = [parameter.grad for parameter in parameters], self.generator.get_state()
        averages = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # batch norm's move with each forward
        # DDP keeps the gradients to this rank; FSDP2 would keep them gathered, where resetting `grad` does not reach
        alone = parallel.synchronising(self.loss, on=self.config.training.use_fsdp2)
        try:
            if device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.random.fork_rng([device] if device.type == "cuda" else []), alone, compiling.keep_graphs():
                count = turn(self.config.training)
                chosen = [self.objective.weights(ESTABLISHED, number) for number in range(count)]
                sets = {tuple(weights): weights for weights in chosen}.values()
                for batch, weights in itertools.product(self.loader.peek(), sets):
                    for parameter in parameters:
                        parameter.grad = None
                    total, _ = self.loss(batch, weights, precision.amp_dtype(self.config))
                    if total.requires_grad:
                        total.backward()
        except Exception:
            parallel.forget_iteration(self.loss)
            raise
        finally:
            self.generator.set_state(noise)
            for buffer, found in averages:
                buffer.copy_(found)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def discard_step(self) -> None:
        """Forget a step that failed before its update: its gradients, and what the scaler noted of them."""
        parallel.forget_iteration(self.loss)
        optimizers.JointOptimizer(self.optimizers).zero_grad()
        noted, self.scaler = self.scaler.state_dict(), precision.build_scaler(self.config, self.ranks.device)
        self.scaler.load_state_dict(noted)
        parallel.release(self.ranks.device)  # what the failure's frames held

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Model, optimizers, scaler, EMA, schedule and this rank's random state, by name; shares its tensors.

        What is sharded stays so: no rank gathers what the others hold.
        """
        random = {"torch": torch.get_rng_state(), "generator": self.generator.get_state().cpu()}
        if self.ranks.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        return {
            "model": self.model.state_dict(),
            "moments": optimizers.optimizer_state(self.model, self.optimizers),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "plateau": self.plateau.state_dict(),
            "drawn_on": [self.ranks.world_size, self.ranks.device.type],
            "random": {str(self.ranks.rank): random},
        }

    @checkpoint.as_saved("the checkpoint")
    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict`, under this config's settings even where they differ from the saved ones.

        Random state is taken up where the number of ranks and their kind of device are the same.

        Raises:
            RunError: it is another model's state, or none.
        """
        self._take(state["model"], state["moments"], state["ema"])
        if state["scaler"]:  # empty where the saved run needed none
            self.scaler.load_state_dict(state["scaler"])
        self.plateau.load_state_dict(state["plateau"])
        if state["drawn_on"] == [self.ranks.world_size, self.ranks.device.type]:
            random = state["random"][str(self.ranks.rank)]
            torch.set_rng_state(random["torch"].cpu())
            self.generator.set_state(random["generator"].cpu())
            if self.ranks.device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"].cpu(), self.ranks.device)


def build_optimizers(model: Network, config: RunConfig, stage: str = stages.OPERATOR) -> list[torch.optim.Optimizer]:
    """Fresh optimizers of the stage."""
    offload = config.training.cpu_offload_optimizer
    return optimizers.build(model, stages.optimizer(config, stage), offload=offload)


def cold_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Changed settings that need another launch of the workers; empty where `Setup.update` can do it.

    Raises:
        ConfigError: a changed setting that cannot change in a run at all, because weights depend on it.
    """
    changed = sorted(overlays.difference(old, new))
    fixed = [path for path in changed if not is_cold(path) and not path.startswith(HOT)]
    if needs_inverse_heads(new) != needs_inverse_heads(old):
        fixed = fixed or ["training.lambda_inv_enc, training.lambda_inv_dec"]
    if fixed:
        raise ConfigError(
            [f"{path}: cannot change while training runs -> start a run with it" for path in fixed], "the update"
        )
    # Where compiling fails on one rank, the others wait in collectives that cannot be taken back: another launch can.
    ranks_wait = new.training.use_fsdp2 and new.training.num_gpus > 1 and new.training.compile
    return [path for path in changed if is_cold(path) or (ranks_wait and path.startswith("training.compile"))]


def idle_settings(setup: Setup) -> list[str]:
    """What the config asks for and what changes nothing here, or costs more than it saves, a sentence each."""
    training, resident, said = setup.config.training, setup.loader.residency == "device", []
    queries = training.query_sampling
    for name, dataset in setup.datasets.items() if queries.num_queries else ():
        points = math.prod(dataset.spec.grid_shape)
        if queries.num_queries >= points and queries.jitter == 0:
            said.append(
                f"training.query_sampling.num_queries is {queries.num_queries} and {name} has {points} grid points "
                "-> every point is compared, nothing is sampled"
            )
    if resident and training.num_workers > 0:
        said.append(
            f"training.num_workers is {training.num_workers} and all data lives on the device -> it changes nothing; "
            "set data.residency: workers to read from the files instead"
        )
    if training.pin_memory and (resident or setup.ranks.device.type != "cuda"):
        said.append("training.pin_memory is on and no batch is copied from host to GPU -> it changes nothing")
    more = setup.stage == stages.OPERATOR and stages.following(setup.config, setup.stage)
    for name, dataset in setup.datasets.items() if more else ():
        if (count := len(dataset.splits["validation"])) < gates.FEWEST:
            said.append(
                f"{name} has {count} validation samples and a verdict on a stage needs {gates.FEWEST} -> none will be "
                "measurable and the operator answers; raise data.split.validation_fraction"
            )
    if why := hardware.slow_halves(setup.config, hardware.detect()):
        or_skip = ", or on_missing to skip" if training.amp_dtype == "bfloat16" else ""
        said.append(f"{why} -> set training.amp to false{or_skip}")
    return said

"""Before anything starts: what is wrong with a model that somebody brought, and what each phase would do to it.

A few random fields through the objective find in seconds what a run would find after its data were read. Everything is
left as it was: weights, gradients, running averages, random states.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from upsnb import hardware, overlays, phases
from upsnb.config import RunConfig
from upsnb.data.batch import Batch
from upsnb.errors import ConfigError, DataError, Problem, UpsError
from upsnb.hardware import Hardware
from upsnb.models.surrogate import Surrogate, count_parameters
from upsnb.phases import Phase, Verdict
from upsnb.training import compiling, precision, stages, trained, workload
from upsnb.training.losses import ESTABLISHED, Objective

BATCH, FEWEST = 2, 16  # fields of one trial; points that no axis of a thinned grid falls below
SECONDS = 5.0  # after which no other dataset is begun


@dataclass
class Findings:
    """What stands against a run, and what is only said."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def refuse(self, found: str, remedy: str, setting: str = "model.build") -> None:
        self.errors.append(Problem(setting, found, remedy))

    def raise_errors(self, config: RunConfig) -> list[str]:
        """The warnings.

        Raises:
            ConfigError: every error at once.
        """
        if self.errors:
            raise ConfigError(self.errors, f"the preflight of {config.model.build}")
        return self.warnings


def check(config: RunConfig) -> list[str]:
    """What is to be said of the model of a config before it is trained; nothing of UPS, which is tested here.

    Raises:
        ConfigError: it cannot be trained, every reason at once; or it cannot begin with the weights that it is to.
    """
    is_ours = config.model.build == RunConfig().model.build
    begins = config.model.pretrained is not None and not config.checkpoint.resume  # what goes on has its own
    if is_ours and not begins or (objective := untrained(config)) is None:
        return []
    if begins:
        trained.pretrained(config, objective.model.state_dict())
    return [] if is_ours else examine(objective, config).raise_errors(config)


def untrained(config: RunConfig) -> Objective | None:
    """What a config trains first; None where its data are not there yet.

    Raises:
        ConfigError: the model cannot be built.
    """
    try:
        shapes = workload.of(config).outlines(overlays.project_root())
    except (DataError, OSError):  # what is wrong with files is said where they are opened
        return None
    return stages.build(config, shapes)


def examine(objective: Objective, config: RunConfig) -> Findings:
    """Try a model where it is, on random fields of each dataset."""
    model, found, started = objective.model, Findings(), time.perf_counter()
    parameters = list(model.parameters())
    if not parameters or any(map(nn.parameter.is_lazy, parameters)):
        said = "parameters without a size (Lazy...)" if parameters else "no parameters"
        found.refuse(f"{model.called} has {said}", "give it layers of known sizes")
        return found
    state = dict(model.state_dict())
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        found.refuse(f"its state_dict holds {odd[0]}, which is no tensor", "keep what is no weight out of it")
        return found
    state = {name: value.clone() for name, value in state.items()}
    device, was, tried, first = parameters[0].device, objective.training, [], None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            for name in model.specs:
                if tried and time.perf_counter() - started > SECONDS:
                    found.warnings.append(f"{name}: was not tried, {SECONDS:g} s were over -> its first step will show")
                    continue
                grid = thinned(model, name)
                try:
                    answer = _examine_dataset(objective, config, name, grid, found)
                except Exception as error:  # whatever a network raises
                    said = error if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
                    places = " x ".join(map(str, grid))
                    found.refuse(f"fails on {name}, {places} points ({said})", "correct its forward")
                    continue
                tried.append(name)
                if first is None and answer is not None:
                    first = name, grid, answer
            _examine_gradients(model, config, tried, found)
            model.load_state_dict(state)
            if first and not torch.allclose(_predict(model, *first[:2]), first[2], rtol=1e-3, atol=1e-4):
                found.refuse("its state_dict loaded again gives another answer", "keep all of its state in buffers")
    finally:
        with contextlib.suppress(RuntimeError):
            model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        objective.train(was)
    _examine_kinds(model, config, found)
    return found


def thinned(model: Surrogate, name: str) -> tuple[int, ...]:
    """The smallest grid, by halves of the training one, that the model takes."""
    grid = model.specs[name].grid_shape
    while all(size % 2 == 0 and size // 2 >= FEWEST for size in grid):
        smaller = tuple(size // 2 for size in grid)
        if model.refuses(name, smaller):
            break
        grid = smaller
    return grid


def _fields(model: Surrogate, name: str, grid: tuple[int, ...], calls: int) -> Batch:
    spec, draws = model.specs[name], torch.Generator().manual_seed(0)
    shapes = (
        (BATCH, spec.input_frames, spec.input_channels, *grid),
        (BATCH, calls * spec.output_frames, spec.output_channels, *grid),
        (BATCH, spec.num_parameters),
    )
    device = next(model.parameters()).device
    return Batch(name, *(torch.randn(shape, generator=draws).to(device) for shape in shapes), seed=0)


@torch.no_grad()
def _predict(model: Surrogate, name: str, grid: tuple[int, ...]) -> Tensor:
    """In evaluation mode, normalised."""
    batch = _fields(model.eval(), name, grid, 1)
    return model.predict(
        name, batch.inputs, batch.parameters, model.relative_dt(name, batch.inputs, model.specs[name].dt)
    )


def _examine_dataset(objective: Objective, config: RunConfig, name: str, grid, found: Findings) -> Tensor | None:
    """Shapes, finite values, one answer to one question, which is returned; gradients are left in place."""
    model, spec = objective.model, objective.model.specs[name]
    answer, again = (_predict(model, name, grid) for _ in range(2))
    right = (BATCH, spec.output_frames, spec.output_channels, *grid)
    if tuple(answer.shape) != right:
        raise DataError(f"it gives {tuple(answer.shape)} -> give (B, T, C, *grid), {right}")
    is_one = torch.allclose(answer, again, rtol=1e-3, atol=1e-4)
    if not answer.isfinite().all():
        found.refuse(f"gives NaN or infinite values for normal fields of {name}", "start from smaller weights")
    elif not is_one:
        found.warnings.append(
            f"{model.called}: the same field of {name} gives two answers in evaluation mode -> draw random numbers "
            "only where self.training is set, or validation is noise"
        )
    batch = _fields(model, name, grid, config.calls())
    weights = objective.weights(ESTABLISHED, 0)
    objective.train()
    total, _ = objective(batch, weights, None)
    if total.requires_grad:
        total.backward()
    dtype, device = precision.amp_dtype(config), answer.device.type
    if dtype is not None and hardware.resolve_device(config, hardware.detect()) == device:
        try:
            with torch.no_grad():
                half, _ = objective(batch, weights, dtype)
            said = "" if half.isfinite() else "its loss is not finite"
        except RuntimeError as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
        if said:
            remedy = "compute that part under torch.autocast(..., enabled=False), or set training.amp to false"
            found.refuse(f"under autocast on {name}: {said}", remedy, "training.amp_dtype")
    return answer if is_one else None


def _examine_gradients(model: Surrogate, config: RunConfig, tried: list[str], found: Findings) -> None:
    """Parameters of what was tried that no loss reaches, and gradients that are not finite."""
    untried = {
        parameter
        for name, parts in model.parts().items()
        for part in parts
        for parameter in part.parameters()
        if name not in tried
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in untried]
    if not tried:
        return
    idle = [name for name, parameter in named if parameter.grad is None]
    if idle:
        said = f"no gradient reaches {idle[0]}" + (f" and {len(idle) - 1} more parameters" if len(idle) > 1 else "")
        if config.training.num_gpus > 1 or config.training.use_fsdp2:
            found.refuse(f"{said}, and ranks wait for one of each", "use or remove them, or requires_grad_(False)")
        else:
            found.warnings.append(f"{model.called}: {said} -> use or remove them, or requires_grad_(False)")
    if broken := [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]:
        found.refuse(f"the gradient of {broken[0]} is not finite", "look for divisions, roots and norms of zero")


def _examine_kinds(model: Surrogate, config: RunConfig, found: Findings) -> None:
    """What complex weights and batch norm mean for a run."""
    training = config.training
    count = sum(parameter.is_complex() for parameter in model.parameters())
    if count:
        said = f"{model.called}: {count} of its weights are complex"
        found.warnings.append(f"{said} -> AdamW trains them, in float32")
    norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    if norms and (training.accum_steps > 1 or training.num_gpus > 1):
        each = " of each rank, whose running averages differ and of which rank 0's are saved"
        found.warnings.append(
            f"{model.called}: batch norm takes its statistics of a microbatch of {training.batch_size}"
            f"{each * (training.num_gpus > 1)} -> nn.GroupNorm depends on neither"
        )


# -- phases --------------------------------------------------------------------------------------------------------


def verdicts(objective: Objective, config: RunConfig, machine: Hardware) -> dict[str, Verdict]:
    """What each phase and extra is to a model of a config, here, whether it is on or off now."""
    return {phase.name: _verdict(phase, objective, config, machine) for phase in phases.BY_NAME.values()}


def foreseen(config: RunConfig, machine: Hardware) -> dict[str, Verdict]:
    """`verdicts` before there is a run, of an untrained model; empty where the data are not there yet."""
    objective = untrained(config)
    return {} if objective is None else verdicts(objective, config, machine)


def _verdict(phase: Phase, objective: Objective, config: RunConfig, machine: Hardware) -> Verdict:
    model = objective.model
    without = config
    with contextlib.suppress(ConfigError):  # another setting needs the phase
        without = overlays.apply(config, phases.off_overlay(phase, config)) if phases.is_on(phase, config) else config
    if unmet := phases.unmet(phase, without, machine):
        return Verdict(phases.REFUSED, "; ".join(problem.found for problem in unmet))
    on = overlays.apply(without, phase.on)
    for kind, asked in ((phases.DOES_NOT_APPLY, model.lacks), (phases.REFUSED, model.forbids)):
        if new := [problem for problem in asked(on) if problem not in asked(without)]:
            return Verdict(kind, "; ".join(problem.found for problem in new))
    return _partly(phase.name, objective, on, hardware.resolve_device(on, machine))


def _partly(name: str, objective: Objective, on: RunConfig, device: str) -> Verdict:
    """Of a phase that may be switched on: what of the model it acts on."""
    model, training = objective.model, on.training
    if name == "no_sync" and (training.num_gpus == 1 or training.accum_steps == 1):
        return Verdict(phases.DOES_NOT_APPLY, "it is for several ranks and several microbatches a step")
    if name == "activation_checkpointing" or (
        name == "compile" and not compiling.as_a_whole(objective, training, device) and model.compiled()
    ):
        parts = model.compiled() if name == "compile" else model.blocks()
        counts = Counter(type(part).__name__.removeprefix("FSDP") for part in parts)
        return Verdict(phases.ON_PARTS, ", ".join(f"{count} x {kind}" for kind, count in counts.items()))
    muon = sum(matrix.numel() for matrix in model.matrices()) if on.optimizer.name == "muon_hybrid" else 0
    if name in ("fused", "foreach", "optimizer_offload") and muon:
        share = 1 - muon / count_parameters(model)
        return Verdict(phases.ON_PARTS, f"the {share:.0%} of the parameters that AdamW steps, not Muon's")
    return Verdict(phases.WORKS)

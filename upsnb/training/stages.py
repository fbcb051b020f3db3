"""The stages of a training, in one table: the operator, and what each later one makes of its model.

A stage is a function (config, datasets, before) that returns an Objective; `before` is the operator's model, None for
that stage itself. Its model is a Surrogate again, which holds `before` or is it, so that evaluation, checkpoints and
reports work on it unchanged. `datasets` may be Outlines, where only shapes matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from torch import Tensor

from upsnb.config import OPERATOR, OptimizerConfig, RunConfig, StageConfig
from upsnb.data.datasets import Dataset, Outline
from upsnb.errors import ConfigError, Problem
from upsnb.models import chosen
from upsnb.models.diffusion import Distilled, Refined, ResidualDiffusion
from upsnb.models.network import Network
from upsnb.models.surrogate import Surrogate, set_attention, set_checkpointing
from upsnb.models.ups import UPS
from upsnb.rules import LOSS_TERMS
from upsnb.training import workload
from upsnb.training.diffusion import ConsistencyObjective, DiffusionObjective, RefineObjective
from upsnb.training.losses import CrpsObjective, FieldObjective, Objective, UPSObjective

Datasets = Mapping[str, Dataset | Outline]
Stage = Callable[[RunConfig, Datasets, Surrogate | None], Objective]
NOISE = 8  # random numbers that each call of an ensemble draws


def operator(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """The surrogate that `model.build` names, trained on one call, and on its latents where it has any."""
    model = chosen.build(config, {name: dataset.spec for name, dataset in datasets.items()})
    return _of_fields(model, config)


def finetune(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """The same model trained on through several calls in a row, against the errors that a rollout feeds itself."""
    return _of_fields(before, config)


def crps(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """The same model, given random numbers as well, trained until its forecasts differ as much as they err."""
    if not before.take_noise(NOISE):
        raise ConfigError([Problem("stages.crps.epochs", f"{before.called} takes no random numbers", "set it to 0")])
    return CrpsObjective(before, config.training)


def refine(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """A second model of the same kind that refines the forecasts of the first, which is frozen, in a few calls."""
    return RefineObjective(Refined(before, config), config.training)


def diff_residual(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """A second model of the same kind that draws what is to be added to the forecasts of the first, which is frozen."""
    return DiffusionObjective(ResidualDiffusion(before, config), config.training)


def consistency_distill(config: RunConfig, datasets: Datasets, before: Surrogate | None) -> Objective:
    """A student of the diffusion model that draws its corrections in one call."""
    return ConsistencyObjective(Distilled(before, config), config.training)


def _of_fields(model: Surrogate, config: RunConfig) -> FieldObjective:
    return (UPSObjective if isinstance(model, UPS) else FieldObjective)(model, config.training)


# the settings of each, and their order: config.StagesConfig
STAGES: dict[str, Stage] = {
    OPERATOR: operator,
    "finetune": finetune,
    "crps": crps,
    "refine": refine,
    "diff_residual": diff_residual,
    "consistency_distill": consistency_distill,
}
TEACHERS = {"consistency_distill": "diff_residual"}  # stages that begin where another one ended than the operator


def build(
    config: RunConfig, datasets: Datasets, stage: str = OPERATOR, weights: Mapping[str, Tensor] | None = None
) -> Objective:
    """The untrained objective of a stage.

    Later stages begin where the operator ended, so that each has had the same time as the others, and not more; a
    student begins where its teacher did.

    Args:
        weights: of the model that a later stage begins with; without them they come with a checkpoint of this stage.
    Raises:
        ConfigError: the model lacks what the config asks for, or the objective knows no such loss term.
    """
    before = None
    if stage != OPERATOR:
        before = build(config, datasets, begins_with(stage)).model
        if weights is not None:
            before.load_state_dict(weights)
    with contextlib.nullcontext() if before else chosen.seeded(config):
        objective = workload.of(config).objective(datasets, stage, before)
    set_checkpointing(objective.model.blocks(), config.operator.pdet)
    set_attention(objective.model.blocks(), config.operator.pdet.attention)
    objective.stage = settings(config, stage)
    check(objective, config)
    return objective


def begins_with(stage: str) -> str:
    """The stage whose model a later one starts from."""
    return TEACHERS.get(stage, OPERATOR)


def saved_model(config: RunConfig, specs: Mapping[str, dict], stage: str) -> Network:
    """The untrained model of a stage, for weights that were saved.

    Args:
        specs: of its datasets, each as plain data.
    """
    spec_from = workload.of(config).spec_from
    outlines = {name: Outline(spec_from(values), 0) for name, values in specs.items()}
    model = build(config, outlines, stage).model
    model.stage = stage
    return model


def check(objective: Objective, config: RunConfig) -> None:
    """Refuse what a config asks for and a model does not have.

    Raises:
        ConfigError: every such setting at once, each with the remedy.
    """
    model, known = objective.model, ", ".join(objective.TERMS)
    problems = model.lacks(config) + model.forbids(config)
    for term in LOSS_TERMS:
        asked, default = (getattr(one.training, f"lambda_{term}") for one in (config, RunConfig()))
        if asked > 0 and asked != default and term not in objective.TERMS:
            problems.append(Problem(f"training.lambda_{term}", f"{model.called} knows {known} only", "set it to 0"))
    if problems:
        raise ConfigError(problems, f"the configuration for {config.model.build}")


def following(config: RunConfig, stage: str) -> str | None:
    """The stage after one; None after the last."""
    names = config.stages.planned
    return next(iter(names[names.index(stage) + 1 :]), None)


def settings(config: RunConfig, stage: str) -> StageConfig:
    """Epochs, optimizer and schedule of a stage."""
    return getattr(config.stages, stage)


def optimizer(config: RunConfig, stage: str) -> OptimizerConfig:
    """The stage's own optimizer, or the one of all; fused where the run says so, because phases act on all stages."""
    own = settings(config, stage).optimizer
    if own is None or not config.optimizer.fused:
        return own or config.optimizer
    return own.model_copy(update={"fused": True, "foreach": None})

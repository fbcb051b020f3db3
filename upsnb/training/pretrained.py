"""Weights of another run to begin with: what fits by name and shape is taken, the rest stays as it was drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.runs import handle
from upsnb.training import preflight
from upsnb.training.setup import Setup, load_model

SETTING = "model.pretrained"
MOST_NAMED = 8  # parts that are new


def check(config: RunConfig) -> None:
    """Refuse before anything starts what a new run could not begin with.

    Raises:
        ConfigError: there is no such run, it has no weights, or none of them fits.
    """
    if config.model.pretrained is None or config.checkpoint.resume:
        return
    weights, objective = _weights(config), preflight.untrained(config)
    if objective is not None:
        _fitting(config, objective.model.state_dict(), weights)


def begin(setup: Setup, log: Callable[[str], None]) -> None:
    """Let a new run begin with weights of the one that its config names, if it names one.

    Raises:
        ConfigError: as of `check`.
    """
    config = setup.config
    if config.model.pretrained is None:
        return
    own = setup.model.state_dict()
    taken = _fitting(config, own, _weights(config))
    setup.begin_with(taken)
    sizes = {name: value.numel() for name, value in own.items()}
    share = sum(sizes[name] for name in taken) / sum(sizes.values())
    new = dict.fromkeys(".".join(name.split(".")[:2]) for name in own if name not in taken)
    rest = f"; drawn anew: {', '.join([*new][:MOST_NAMED])}{', ...' * (len(new) > MOST_NAMED)}" if new else ""
    log(f"begins with weights of {config.model.pretrained}, {share:.1%} of all numbers{rest}")


def _weights(config: RunConfig) -> dict[str, Tensor]:
    """Of a run as it answers, averaged where it kept averages, or of a packed model."""
    try:
        return load_model(handle.find(config.model.pretrained)).state_dict()
    except RunError as error:
        raise ConfigError([f"{SETTING}: {error}"], "the configuration") from None


def _fitting(config: RunConfig, own: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fit = {name: value for name, value in known.items() if name in own and own[name].shape == value.shape}
    if not fit:
        found = f"{config.model.pretrained} has no weights of a name and shape that this model has"
        remedy = "build the same model: model, latent and operator as in its config.yaml"
        raise ConfigError([f"{SETTING}: {found} -> {remedy}"], "the configuration")
    return fit

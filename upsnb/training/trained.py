"""Models that were trained: the one of a run's folder, and its weights for another run to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upsnb import config as configs
from upsnb import hardware
from upsnb.config import RunConfig
from upsnb.data.datasets import Dataset, open_split
from upsnb.data.source import identities
from upsnb.errors import ConfigError, DataError, RunError
from upsnb.models.network import Network
from upsnb.runs import handle, runfolder
from upsnb.training import checkpoint, gates, packed, stages

SETTING = "model.pretrained"
MOST_NAMED = 8  # parts that are new


def load_model(
    folder: Path | str, which: str = "latest", device: torch.device | str = "cpu", stage: str | None = None
) -> Network:
    """The trained model of a run folder, in evaluation mode, with averaged weights where the run kept them.

    Or of a folder that `report.pack` wrote, which holds one model.

    Args:
        which: checkpoint, by its role: latest, previous, best or epoch.
        stage: one that has ended, with the weights it ended with; None: of a run of several the one that answers for
            it (`gates.answering`), where `which` is not said either.
    Raises:
        RunError: the folder has no such checkpoint or stage, or none that is whole; or this machine has no such device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        found = str(error).splitlines()[0]
        raise RunError(f"device {str(device)!r} cannot be used here ({found}) -> choose cpu, or another one") from None

    torch.set_num_threads(min(torch.get_num_threads(), hardware.num_cores()))  # torch sees cores that a container lacks
    if (Path(folder) / packed.WEIGHTS).exists():
        return packed.load(Path(folder), device)

    def weights_only(path: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if path[1] in ("model", "ema") else None

    state = checkpoint.load(folder, which, allocate=weights_only)
    if state is None:
        raise RunError(f"{folder}: has no checkpoint yet -> wait for its first one")
    with checkpoint.as_saved(f"{folder}/{state['name']}"):
        config = configs.parse(state["config"], f"the checkpoint in {folder}")
        trained = state["position"].get("stage", stages.OPERATOR)
        wanted = stage or (which == "latest" and gates.answering(Path(folder))) or trained
        model = stages.saved_model(config, state["specs"], wanted).to(device)
        if stage or wanted != trained:
            model.load_state_dict(gates.kept(Path(folder), wanted))
        else:
            weights, ema = state["setup"]["model"], state["setup"]["ema"]
            model.load_state_dict(weights if ema is None else weights | ema["average"])
    return model.eval()


# -- to begin with -------------------------------------------------------------------------------------------------


def pretrained(config: RunConfig, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the run or packed model that a config names which fit `own` by name and shape.

    They are those that it answers with, averaged where it kept averages. What speaks for a dataset may be of another
    size, because grids are; the rest may not.

    Raises:
        ConfigError: there is no such run, it has no weights, none of them fits, or what datasets share does not.
    """
    named = config.model.pretrained
    try:
        known = load_model(handle.find(named)).state_dict()
    except RunError as error:
        raise ConfigError([f"{SETTING}: {error}"], "the configuration") from None
    fit = {name: value for name, value in known.items() if name in own and own[name].shape == value.shape}
    datasets, unlike = config.data.datasets.keys(), known.keys() & own.keys() - fit.keys()
    others = [name for name in unlike if not datasets & set(name.split("."))]
    if fit and not others:
        return fit
    found = f"{named} has no weights of a name and shape that this model has"
    if others:
        then, now = (" x ".join(map(str, weights[min(others)].shape)) for weights in (known, own))
        found = f"{min(others)} is {then} in {named}, and {now} in this model"
    remedy = "build the same model: model, latent and operator as in its config.yaml"
    raise ConfigError([f"{SETTING}: {found} -> {remedy}"], "the configuration")


def told(config: RunConfig, own: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> str:
    """What a run begins with, and which parts of it were drawn."""
    sizes = {name: value.numel() for name, value in own.items()}
    share = sum(sizes[name] for name in taken) / sum(sizes.values())
    new = dict.fromkeys(".".join(name.split(".")[:2]) for name in own if name not in taken)
    rest = f"; drawn anew: {', '.join([*new][:MOST_NAMED])}{', ...' * (len(new) > MOST_NAMED)}" if new else ""
    return f"begins with weights of {config.model.pretrained}, {share:.1%} of all numbers{rest}"


def seen_before(config: RunConfig, own: Mapping) -> Iterator[str]:
    """Test samples that the run which a config begins with has trained or validated on, a sentence for each dataset.

    Args:
        own: datasets of the new run; only fields are compared, on the same grid, and where the other run's are here.
    """
    other, root = configs.load(handle.find(config.model.pretrained) / runfolder.CONFIG), runfolder.project_root()
    fields = {name: dataset for name, dataset in own.items() if isinstance(dataset, Dataset)}
    for known in other.data.datasets:
        with suppress(DataError):
            source, splits = open_split(known, other, root / other.data.root)
            alike = {
                name: dataset
                for name, dataset in fields.items()
                if (dataset.family.name, dataset.source.grid_shape) == (source.family.name, source.grid_shape)
            }
            seen = identities(source, np.concatenate([splits["train"], splits["validation"]])) if alike else []
            for name, dataset in alike.items():
                test = dataset.splits["test"]
                if count := np.isin(identities(dataset.source, test), seen).sum():
                    found = f"{count} of {len(test)} test samples were seen by {config.model.pretrained} in training"
                    yield f"{name}: {found} -> split both alike, or believe its test error less"

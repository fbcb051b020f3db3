"""What phases need to know of a network: which parts are compiled, recomputed, sharded, and given to Muon."""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterator

from torch import Tensor, nn

from upsnb.config import RunConfig, setting
from upsnb.errors import Problem


class Network(nn.Module, ABC):
    """A model of one or several datasets. Subclasses may write `blocks` and what else says so; the rest is final."""

    any_points = False  # whether it can be asked for other points than those of the grid

    def __init__(self, specs: dict):
        """`specs`: what it knows of each dataset, plain data."""
        super().__init__()
        self.specs, self.called = specs, type(self).__name__
        self.stage = ""  # whose weights these are, of a model that was saved

    def blocks(self) -> list[nn.Module]:
        """Repeated modules, each called as a whole: recomputed, sharded one by one, matrices given to Muon.

        May be written; where there are none, phases that need them are refused.
        """
        return []

    def matrices(self) -> list[Tensor]:
        """Hidden matrices, which Muon is for. May be written; those of the blocks, complex ones excepted."""
        named = {parameter: name for name, parameter in self.named_parameters()}
        inside = dict.fromkeys(parameter for block in self.blocks() for parameter in block.parameters())
        return [p for p in inside if p.ndim == 2 and not p.is_complex() and named[p].endswith(".weight")]

    def parts(self) -> dict[str, list[nn.Module]]:
        """By dataset, modules that no other one uses, each called as a whole. May be written; none: all is shared."""
        return {}

    def compiled(self) -> list[nn.Module]:
        """Modules that are compiled one by one where they are sharded, each called as a whole. May be written."""
        return self.blocks()

    def units(self) -> list[nn.Module]:
        """Modules that are sharded one by one, inner before outer: blocks, what holds them, parts of datasets."""
        blocks = self.blocks()
        own = [part for parts in self.parts().values() for part in parts if part not in blocks]
        taken = {parameter for module in (*blocks, *own) for parameter in module.parameters()}
        outer = [
            child
            for child in self.children()
            if not isinstance(child, nn.ModuleDict | nn.ModuleList) and set(child.parameters()) - taken
        ]
        return [*blocks, *outer, *own]

    def lacks(self, config: RunConfig) -> list[Problem]:
        """What a config asks for that there is nothing of in this model."""
        pdet, training, blocks, off = config.operator.pdet, config.training, self.blocks(), "set it to false"
        sampling = training.query_sampling
        unnamed = training.compile and training.use_fsdp2 and not self.compiled()
        recomputed = pdet.use_activation_checkpoint and not blocks
        in_parts = pdet.checkpoint_parts != "all" and not all(hasattr(block, "recompute") for block in blocks)
        attends = pdet.attention == "sdpa" or any(hasattr(block, "attention") for block in blocks)
        scattered = (sampling.num_queries or sampling.jitter) and not self.any_points
        walls = training.lambda_boundary > 0 and not self.any_points
        half = training.amp and training.amp_dtype != "float32" and self._is_complex()
        asked = (
            (unnamed, "training.compile", "names no blocks() to compile and is sharded", off),
            (recomputed, "operator.pdet.use_activation_checkpoint", "names no blocks() to recompute", off),
            (in_parts, "operator.pdet.checkpoint_parts", "has blocks that are recomputed as a whole", "set it to all"),
            (not attends, "operator.pdet.attention", "has no attention to choose a kernel for", "set it to sdpa"),
            (scattered, "training.query_sampling", "predicts on its grid only", "empty num_queries, set jitter to 0"),
            (walls, "training.lambda_boundary", "cannot be asked beyond its grid", "set it to 0"),
            (half, "training.amp", "has complex weights, which have no half precision", off),
        )
        return [Problem(path, f"{self.called} {what}", remedy) for missing, path, what, remedy in asked if missing]

    def forbids(self, config: RunConfig) -> list[Problem]:
        """What a config asks for that would go wrong with the weights and norms of this model."""
        training, found, off = config.training, [], "set it to false"
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in self.parameters()}
        if training.use_fsdp2 and len(dtypes) > 1 and not self._is_complex():
            why = f"weights of {self.called} are {' and '.join(sorted(dtypes))}, and FSDP2 shards those of one type"
            found.append(Problem("training.use_fsdp2", why, off))
        if self._is_complex():
            why = f"{self.called} has complex weights, and it takes real ones"
            where = "optimizer.fused", "training.cpu_offload_optimizer", "training.use_fsdp2"
            found += [Problem(path, why, off) for path in where if setting(config, path)]
        moving = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        inside = (module for block in self.blocks() for module in block.modules())
        if config.operator.pdet.use_activation_checkpoint and any(
            isinstance(module, moving) and module.track_running_stats for module in inside
        ):
            why = f"blocks of {self.called} hold running averages, which recomputing moves twice a step"
            found.append(
                Problem("operator.pdet.use_activation_checkpoint", why, "use nn.GroupNorm, or set it to false")
            )
        return found

    def _is_complex(self) -> bool:
        return any(parameter.is_complex() for parameter in self.parameters())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model is in evaluation mode, and afterwards as it was found."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)

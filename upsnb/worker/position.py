"""How far training is, and what one stage gives to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from upsnb.data.batches import Schedule
from upsnb.errors import shown
from upsnb.training import stages


@dataclass
class Position:
    """How far training is; travels with every checkpoint."""

    step: int = 0  # optimizer steps done, in all stages
    epoch: int = 0  # of the stage
    microbatch: int = 0  # microbatches done in this epoch
    elapsed_s: float = 0.0  # training time of earlier segments and stages
    stage: str = stages.OPERATOR
    stage_from_s: float = 0.0  # training time when the stage began
    stage_from_step: int = 0  # and steps done by then
    ended: str = ""  # why the stage did, once it has: epochs, time, patience
    best: float = math.inf  # lowest validation nRMSE so far
    best_step: int = -1
    waited: int = 0  # validations since then
    validated_fraction: float = 1.0  # share of the validation split that these were measured on
    losses: dict[str, float] = field(default_factory=dict)  # nRMSE of the last validation, by dataset

    @classmethod
    def of(cls, values: dict) -> Position:
        """As a checkpoint holds it; every number a number."""
        position = cls(**values)
        for name, default in vars(cls()).items():
            found = getattr(position, name)
            kind = type(default) if isinstance(default, (str, dict)) else (int, float)
            inner = found.values() if isinstance(found, dict) else ()
            if not isinstance(found, kind) or not all(isinstance(value, (int, float)) for value in inner):
                raise TypeError(f"{name} is {shown(found)}")
        return position

    def find(self, old_size: int, schedule: Schedule) -> None:
        """Find the place of an old schedule in this one: as many whole turns of all datasets as fit what was seen.

        The order of an epoch is the same whatever the batch, so no more than a part of one microbatch comes twice; or
        of one of each dataset, where they are not mixed uniformly.

        Args:
            old_size: pairs in a microbatch of all ranks.
        """
        if old_size != schedule.global_size:
            seen = self.microbatch // len(schedule.pairs) * old_size
            self.microbatch = min(seen // schedule.global_size * len(schedule.pairs), schedule.num_microbatches)


@dataclass(frozen=True)
class HandOver:
    """What a stage gives to the next one."""

    weights: dict[str, Tensor]  # of its model, whole and on the host; averaged ones where they are kept
    position: Position

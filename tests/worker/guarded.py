"""What tests of guards look at, and how they spoil losses."""

import torch

from upsnb.training.losses import UPSObjective
from upsnb.training.setup import Setup


def batches(setup: Setup, count: int = 2) -> list:
    epoch = setup.loader.epoch(0)
    return [next(epoch) for _ in range(count)]


def state_of(setup: Setup) -> dict[str, torch.Tensor]:
    """Copies of weights, moments and averages."""
    found = {f"weight {name}": p.detach().clone() for name, p in setup.model.named_parameters()}
    for number, optimizer in enumerate(setup.optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{index}.{key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    if setup.ema is not None:
        found |= {f"average {i}": average.clone() for i, average in enumerate(setup.ema.average)}
    return found


def change_losses(monkeypatch, change) -> None:
    """Let `change(batch, total loss)` say what every loss is."""
    real = UPSObjective.forward

    def forward(self, batch, weights, amp_dtype):
        total, terms = real(self, batch, weights, amp_dtype)
        return change(batch, total), terms

    monkeypatch.setattr(UPSObjective, "forward", forward)

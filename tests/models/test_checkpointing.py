"""Activation checkpointing: the same numbers from fewer saved bytes."""

import pytest
import torch

from upsnb.config import PdetConfig
from upsnb.models.surrogate import set_checkpointing
from upsnb.models.transformer import Operator

SHAPE = (3, 16, 32)


@pytest.fixture
def operator(perturb):
    torch.manual_seed(0)
    config = PdetConfig(hidden_dim=32, depth=4, num_heads=2, mlp_ratio=2.0, drop_path=0.3)
    return perturb(Operator(config, 32, 8)).train()


def backward(operator: Operator) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Bytes that autograd keeps for one backward, the loss, and the gradients."""
    generator = torch.Generator().manual_seed(1)
    z, condition = torch.randn(SHAPE, generator=generator), torch.randn(3, 8, generator=generator)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)  # drop-path draws
    operator.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = operator(z, condition, None).square().mean()
    loss.backward()
    return sum(kept.values()), loss.detach(), [p.grad.clone() for p in operator.parameters() if p.grad is not None]


def on(**changes) -> PdetConfig:
    return PdetConfig(use_activation_checkpoint=True, **changes)


@pytest.mark.parametrize("parts", ["all", "attention", "mlp"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_changes_no_number_and_keeps_fewer_bytes(operator, parts, every):
    plain_bytes, plain_loss, plain_gradients = backward(operator)
    set_checkpointing(operator.blocks, on(checkpoint_parts=parts, checkpoint_every=every))
    kept, loss, gradients = backward(operator)
    assert kept < plain_bytes
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))


def test_more_recomputation_keeps_fewer_bytes(operator):
    def kept(**changes) -> int:
        set_checkpointing(operator.blocks, on(**changes))
        return backward(operator)[0]

    assert kept() < kept(checkpoint_every=2) < kept(checkpoint_every=4)
    assert kept() < kept(checkpoint_parts="attention")
    assert kept() < kept(checkpoint_parts="mlp")


def test_switched_off_it_leaves_nothing_behind(operator):
    before = backward(operator)[0]
    set_checkpointing(operator.blocks, on())
    set_checkpointing(operator.blocks, PdetConfig())
    assert backward(operator)[0] == before

"""Batched Muon is torch's Muon."""

import pytest
import torch

from upsnb.training import muon
from upsnb.training.muon import Muon

SHAPES = [(96, 96), (192, 96), (96, 192), (96, 96), (64, 64), (192, 96), (7, 3)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}


def weights(seed: int = 0) -> list[torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draws)) for shape in SHAPES]


def give_gradients(*copies: list[torch.nn.Parameter], seed: int, without: int | None = None) -> None:
    draws = torch.Generator().manual_seed(seed)
    for number, alike in enumerate(zip(*copies)):
        gradient = torch.randn(alike[0].shape, generator=draws)
        for weight in alike:
            weight.grad = None if number == without else gradient.clone()


def test_it_trains_as_torch_does_to_the_rounding_of_its_bfloat16_products():
    ours, theirs = weights(), weights()
    batched = Muon(ours, **SETTINGS)
    single = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **SETTINGS)
    start = [weight.detach().clone() for weight in ours]
    for step in range(5):
        give_gradients(ours, theirs, seed=step, without=step)  # a weight that no loss reached stays as it is
        batched.step()
        single.step()
    for weight, expected, before in zip(ours, theirs, start):
        way = (expected - before).norm()
        assert (weight - expected).norm() < 2e-2 * way
    for weight, expected in zip(ours, theirs):  # moments are exchanged between both through checkpoints
        torch.testing.assert_close(
            batched.state[weight]["momentum_buffer"], single.state[expected]["momentum_buffer"], atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("elements", [1, 2 * 96 * 192])
def test_a_batch_is_cut_where_it_would_cost_too_much_memory(elements, monkeypatch):
    whole, cut = weights(), weights()
    give_gradients(whole, cut, seed=3)
    Muon(whole, **SETTINGS).step()
    sizes, chain = [], muon.orthogonal
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(muon, "orthogonal", lambda x, *rest: sizes.append(len(x)) or chain(x, *rest))
    Muon(cut, **SETTINGS).step()
    assert max(sizes) == (1 if elements == 1 else 2) and sum(sizes) == len(SHAPES)
    for one, other in zip(whole, cut):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)  # products of another size round otherwise


def test_a_weight_without_gradient_is_not_even_decayed():
    given = weights()
    before = [weight.detach().clone() for weight in given]
    give_gradients(given, seed=1, without=2)
    Muon(given, **SETTINGS).step()
    assert [torch.equal(weight, old) for weight, old in zip(given, before)] == [n == 2 for n in range(len(SHAPES))]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_update_has_a_size_that_no_gradient_changes(scale):
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    weight.grad = scale * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9).step()
    size = weight.square().mean().sqrt()
    assert 0.1 < size < 0.3  # AdamW's is about 0.2


@pytest.mark.parametrize("has_bf16", [True, False])
def test_products_are_in_the_format_that_the_cpu_has_instructions_for(monkeypatch, has_bf16):
    seen = []
    monkeypatch.setattr(muon.hardware, "cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(muon, "orthogonal", lambda x, *settings: seen.append(x.dtype) or x)
    weight = torch.nn.Parameter(torch.randn(8, 16))
    weight.grad = torch.randn(8, 16)
    Muon([weight], lr=0.1).step()
    assert seen == [torch.bfloat16 if has_bf16 else torch.float32]


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_so_they_are_on_a_gpu(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert muon.product_dtype(torch.device("cuda", 0)) == expected

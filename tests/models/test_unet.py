"""The U-Net: any grid, around rings and between walls."""

import pytest
import torch

from upsnb.models.unet import UNet, coarser

SETTINGS = {
    "model": {"build": "upsnb.models.unet:UNet", "settings": {"width": 8, "depth": 2}, "append_parameters": True},
    "optimizer.name": "adamw",
}


def unet(periodic, channels=1, depth=3) -> UNet:
    torch.manual_seed(0)
    return UNet(channels, 2, periodic, width=8, depth=depth).eval()


@pytest.mark.parametrize("grid", [(32,), (13,), (1,), (16, 16), (9, 14), (8, 8, 8), (6, 5, 3)], ids=str)
@pytest.mark.parametrize("wraps", [True, False], ids=["ring", "walls"])
def test_any_grid_is_given_back(grid, wraps):
    y = unet((wraps,) * len(grid))(torch.randn(2, 1, *grid))
    assert y.shape == (2, 2, *grid) and y.isfinite().all()


@torch.no_grad()
def test_on_a_ring_a_field_that_is_turned_gives_one_that_is_turned():
    """By whole cells of the coarsest grid, along the periodic axis alone."""
    model, x = unet((True, False)), torch.randn(1, 1, 32, 16)
    torch.testing.assert_close(model(x.roll(8, 2)), model(x).roll(8, 2))
    assert not torch.allclose(model(x.roll(8, 3)), model(x).roll(8, 3), atol=0.1)


@pytest.mark.parametrize("size", [16, 13])
@torch.no_grad()
def test_a_ring_of_one_value_has_no_ends_and_a_domain_with_walls_has(size):
    x = torch.ones(1, 1, size).double()  # norms of what is the same everywhere raise a machine's rounding errors
    around, between = unet((True,)).double()(x), unet((False,)).double()(x)
    assert around.std(-1).max() < 1e-5 and between.std(-1).min() > 1e-3


@pytest.mark.parametrize(("wraps", "expected"), [(True, [4.0, 2.0, 4.0]), (False, [4.0, 2.0, 0.0])])
def test_an_odd_axis_goes_on_as_its_boundary_asks(wraps, expected):
    assert coarser(torch.tensor([[[4.0, 3.0, 2.0, 1.0, 0.0]]]), (wraps,)).flatten().tolist() == expected


def test_a_shallow_one_is_a_block_and_a_projection():
    assert len(unet((True,), depth=0).blocks) == 1
    assert unet((True,), depth=0)(torch.randn(1, 1, 8)).shape == (1, 2, 8)


def test_every_parameter_learns_and_its_blocks_are_those_that_phases_act_on(tiny_setup):
    made = tiny_setup(**SETTINGS)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.step(made.loader.peek(), 0)
    assert all(not torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert len(made.model.blocks()) == 2 * 5

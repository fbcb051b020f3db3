"""Grids in unit coordinates: what blending, padding and resampling must keep, on rings and between walls."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from upsnb.models.geometry import grid_points, neighbours, pad, pad_axis, resample, sample_at

ring = pytest.mark.parametrize("shape, periodic", [((8,), (True,)), ((6, 8), (True, True)), ((6, 8), (True, False))])
any_boundary = pytest.mark.parametrize(
    "shape, periodic", [((8,), (True,)), ((8,), (False,)), ((6, 8), (False, False)), ((6, 8), (True, False))]
)


def test_grid_points_are_cell_centres_with_the_last_axis_fastest():
    points = grid_points((2, 4))
    assert points.shape == (8, 2)
    assert points[:4, 0].tolist() == [0.25] * 4
    assert points[:4, 1].tolist() == [0.125, 0.375, 0.625, 0.875]


def test_padding_wraps_on_a_ring_and_repeats_between_walls():
    x = torch.arange(4.0)
    assert pad_axis(x, 0, 2, 1, True).tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert pad_axis(x, 0, 2, 1, False).tolist() == [0, 0, 0, 1, 2, 3, 3]
    mixed = pad(torch.arange(4.0).view(2, 2), 1, 0, (True, False))
    assert mixed.tolist() == [[2, 2, 3], [0, 0, 1], [2, 2, 3]]


@any_boundary
def test_weights_of_neighbours_sum_to_one(shape, periodic):
    _, weight, offset = neighbours(torch.rand(50, len(shape)), shape, periodic)
    torch.testing.assert_close(weight.sum(1), torch.ones(50))
    assert (weight >= 0).all() and (offset.abs() <= 1).all()


@any_boundary
def test_sampling_at_cell_centres_gives_the_cells(shape, periodic):
    field = torch.randn(2, 3, *shape)
    torch.testing.assert_close(sample_at(field, grid_points(shape), periodic), field.flatten(2), atol=1e-5, rtol=1e-5)


def test_sampling_is_linear_between_centres():
    points = grid_points((8, 8))
    plane = (1 + 2 * points[:, 0] - 3 * points[:, 1]).view(8, 8)
    inside = torch.rand(40, 2) * 7 / 8 + 1 / 16
    torch.testing.assert_close(sample_at(plane, inside, (False, False)), 1 + 2 * inside[:, 0] - 3 * inside[:, 1])


def test_a_ring_has_no_seam():
    field = torch.randn(8)
    points = torch.rand(20, 1)
    once, again = (sample_at(field, points + turn, (True,)) for turn in (0.0, 1.0))
    torch.testing.assert_close(once, again, atol=1e-5, rtol=1e-5)
    left, right = (sample_at(field, torch.tensor([[x]]), (True,)) for x in (1e-6, 1 - 1e-6))
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_walls_do_not_leak_around():
    field = torch.zeros(8, 8)
    field[-1], field[:, -1] = 1e6, 1e6
    near = torch.rand(50, 2) * 0.8  # less than a cell from the far walls' cells only beyond 1 - 1.5 / 8
    near[:10, 0], near[10:20, 1] = 0.0, -0.06  # on the wall, and in the ghost cell behind it
    assert (sample_at(field, near, (False, False)) == 0).all()


def test_beyond_a_wall_the_offset_is_that_of_the_ghost():
    index, weight, offset = neighbours(torch.tensor([[-0.5 / 8]]), (8,), (False,))
    assert index.tolist() == [[0, 0]]
    torch.testing.assert_close(weight, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(offset[0, 0], torch.tensor([0.0]))


@any_boundary
def test_coarsening_keeps_the_mean(shape, periodic):
    fine = torch.randn(2, 1, *(2 * size for size in shape))
    coarse = resample(fine, shape, periodic)
    assert coarse.shape == (2, 1, *shape)
    torch.testing.assert_close(coarse.mean(), fine.mean(), atol=1e-6, rtol=1e-5)


@any_boundary
def test_coarsening_blocks_of_equal_cells_is_exact(shape, periodic):
    coarse = fine = torch.randn(2, 1, *shape)
    for axis in range(2, coarse.dim()):
        fine = fine.repeat_interleave(2, dim=axis)
    assert torch.equal(resample(fine, shape, periodic), coarse)


@any_boundary
def test_resampling_to_any_grid_keeps_a_constant(shape, periodic):
    field = torch.full((1, 2, *shape), 3.25)
    other = tuple(size + size // 2 for size in shape)
    torch.testing.assert_close(resample(field, other, periodic), torch.full((1, 2, *other), 3.25))


def test_resampling_to_the_same_grid_copies_nothing():
    field = torch.randn(1, 1, 8)
    assert resample(field, (8,), (True,)) is field


@pytest.mark.parametrize("periodic", [True, False])
def test_padding_wraps_around_or_repeats_the_edge_and_its_gradient_adds_up(periodic):
    x = torch.arange(12.0).reshape(1, 3, 4).requires_grad_()
    padded = pad(x, 2, 1, (periodic, periodic))
    mode = "wrap" if periodic else "edge"
    np.testing.assert_array_equal(padded.detach(), np.pad(x.detach(), ((0, 0), (2, 1), (2, 1)), mode=mode))
    padded.sum().backward()
    assert x.grad.sum() == padded.numel()


def test_generated_code_has_no_index_whose_gradient_threads_would_share(make_model, make_spec):
    """What torch 2.13 generates for it corrupts memory on the CPU, with two threads and large enough inputs."""
    model = make_model([make_spec("darcy2d")])
    decoder, z = model.decoders["darcy"], torch.randn(2, 16, 32, requires_grad=True)
    step = lambda z: torch.autograd.grad(decoder(z, (16, 16)).sum(), z)[0]  # noqa: E731
    graph = make_fx(step)(z)
    assert not [
        node for node in graph.graph.nodes if "index_add" in str(node.target) or "index_put" in str(node.target)
    ]

"""Encoders and decoders: one field whichever way it is asked for, and no more symmetry or leak than the domain has."""

import pytest
import torch

from upsnb.config import OperatorConfig
from upsnb.models.codec import PatchEncoder, build_decoder, build_encoder
from upsnb.models.geometry import grid_points
from upsnb.models.transformer import Attention, rotary_table

DECODERS = ("local_basis", "unpatchify", "cross_attention")
families = pytest.mark.parametrize("family", ("advection1d", "darcy2d"))
decoders = pytest.mark.parametrize("decoder", DECODERS)


@pytest.fixture
def make_decoder(perturb):
    def make(decoder, spec, num_channels=3):
        return perturb(build_decoder(OperatorConfig(decoder=decoder, basis_size=8), spec, 32, num_channels))

    return make


def tokens(spec, batch=2):
    return torch.randn(batch, torch.Size(spec.token_grid).numel(), 32)


@decoders
@families
@pytest.mark.parametrize("factor", (1, 1.5, 2))
def test_grid_and_points_give_the_same_field(make_spec, make_decoder, decoder, family, factor):
    spec = make_spec(family)
    net, z = make_decoder(decoder, spec), tokens(spec)
    shape = tuple(int(factor * size) for size in spec.grid_shape)
    grid = net(z, shape)
    assert grid.shape == (2, 3, *shape)
    torch.testing.assert_close(grid.flatten(2), net.at(z, grid_points(shape)), atol=2e-5, rtol=1e-4)


@families
@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify"))
def test_autocast_rounds_nothing_on_the_way_from_and_to_fields(make_spec, make_decoder, perturb, decoder, family):
    spec = make_spec(family)
    net, z, points = make_decoder(decoder, spec), tokens(spec), torch.rand(37, spec.num_dims)
    encoder = perturb(PatchEncoder(spec, 32))
    x = torch.randn(2, spec.input_frames, 1, *spec.grid_shape)
    exact = encoder(x), net(z, spec.grid_shape), net.at(z, points)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = encoder(x), net(z, spec.grid_shape), net.at(z, points)
    for found, wanted in zip(mixed, exact):
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@decoders
@families
def test_points_do_not_know_of_each_other(make_spec, make_decoder, decoder, family):
    spec = make_spec(family)
    net, z, points = make_decoder(decoder, spec), tokens(spec), torch.rand(37, spec.num_dims)
    some = torch.randperm(37)[:11]
    torch.testing.assert_close(net.at(z, points)[..., some], net.at(z, points[some]), atol=1e-5, rtol=1e-4)


@decoders
@families
def test_samples_do_not_know_of_each_other(make_spec, make_decoder, decoder, family):
    spec = make_spec(family)
    net, z = make_decoder(decoder, spec), tokens(spec, 3)
    torch.testing.assert_close(net(z, spec.grid_shape)[1:2], net(z[1:2], spec.grid_shape), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify"))
@pytest.mark.parametrize("periodic", ((True,), (True, False)))
def test_a_shift_of_tokens_shifts_the_field_along_a_ring(make_spec, make_decoder, decoder, periodic):
    grid = (32,) if len(periodic) == 1 else (16, 16)
    spec = make_spec("advection1d" if len(grid) == 1 else "darcy2d", grid_shape=grid, periodic=periodic)
    net, z = make_decoder(decoder, spec), tokens(spec)
    moved = z.unflatten(1, spec.token_grid).roll(3, dims=1).flatten(1, len(grid))
    for shape in (grid, tuple(2 * size for size in grid)):
        expected = net(z, shape).roll(3 * shape[0] // spec.token_grid[0], dims=2)
        torch.testing.assert_close(net(moved, shape), expected, atol=1e-5, rtol=1e-4)


@families
def test_a_shift_of_the_field_shifts_the_tokens_along_a_ring(make_spec, perturb, family):
    spec = make_spec(family, periodic=(True,) * len(make_spec(family).grid_shape))
    net = perturb(PatchEncoder(spec, 32))
    x = torch.randn(2, spec.input_frames, 1, *spec.grid_shape)
    expected = net(x).unflatten(1, spec.token_grid).roll(2, dims=1).flatten(1, spec.num_dims)
    torch.testing.assert_close(net(x.roll(2 * spec.patch, dims=3)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify"))
@pytest.mark.parametrize("axis", (0, 1))
def test_decoded_walls_do_not_leak_around(make_spec, make_decoder, decoder, axis):
    spec = make_spec("darcy2d")
    net, z = make_decoder(decoder, spec), tokens(spec).unflatten(1, spec.token_grid)
    changed = z.clone()
    changed.select(1 + axis, 0).add_(1.0)
    before, after = (net(x.flatten(1, 2), spec.grid_shape) for x in (z, changed))
    far = slice(2 * spec.patch, None)  # a token reaches into its own patch and half a patch beyond
    assert torch.equal(before.movedim(2 + axis, 0)[far], after.movedim(2 + axis, 0)[far])
    assert not torch.equal(before, after)
    ghosts = torch.rand(20, 2)
    ghosts[:, axis] = 1 + 0.5 / spec.grid_shape[axis]
    assert torch.equal(*(net.at(x.flatten(1, 2), ghosts) for x in (z, changed)))


@pytest.mark.parametrize("axis", (0, 1))
def test_encoded_walls_do_not_leak_around(make_spec, axis):
    spec = make_spec("darcy2d")
    net, x = PatchEncoder(spec, 32), torch.randn(1, 1, 1, 16, 16)
    changed = x.clone()
    changed.select(3 + axis, 0).add_(1.0)
    moved = (net(x) != net(changed)).any(-1).unflatten(1, spec.token_grid).movedim(1 + axis, 0)
    assert moved[0].any() and not moved[1:].any()


def test_an_encoded_ring_does_reach_around(make_spec):
    spec = make_spec()
    net, x = PatchEncoder(spec, 32), torch.randn(1, 2, 1, 32)
    changed = x.clone()
    changed[..., 0] += 1.0
    moved = (net(x) != net(changed)).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == [0, len(moved) - 1]  # kernels overlap by half a patch


@pytest.mark.parametrize("encoder", ("patch", "perceiver"))
@families
def test_block_constant_input_of_double_resolution_has_the_same_latent(make_spec, perturb, encoder, family):
    spec = make_spec(family)
    net = perturb(build_encoder(OperatorConfig(encoder=encoder, decoder="cross_attention"), spec, 32))
    fine = x = torch.randn(2, spec.input_frames, 1, *spec.grid_shape)
    for axis in range(3, x.dim()):
        fine = fine.repeat_interleave(2, dim=axis)
    assert torch.equal(net(x), net(fine))


@families
def test_the_perceiver_gives_the_budgeted_number_of_latents(make_spec, family):
    spec = make_spec(family, tokens=11, grid_shape=(32,) if family == "advection1d" else (32, 32))
    net = build_encoder(OperatorConfig(encoder="perceiver", decoder="cross_attention"), spec, 32)
    assert net(torch.randn(2, spec.input_frames, 1, *spec.grid_shape)).shape == (2, 11, 32)


@families
def test_the_local_basis_is_continuous_across_its_cells(make_spec, make_decoder, family):
    spec = make_spec(family)
    net, z = make_decoder("local_basis", spec), tokens(spec)
    edges = (torch.arange(1, spec.token_grid[0]) - 0.5) / spec.token_grid[0]  # where the nearest tokens change
    points = torch.rand(len(edges), spec.num_dims)
    values = []
    for side in (-1e-6, 1e-6):
        points[:, 0] = edges + side
        values.append(net.at(z, points))
    torch.testing.assert_close(*values, atol=1e-3, rtol=0)


@pytest.mark.parametrize("periodic", (True, False))
def test_rotary_scores_depend_on_distance_only(periodic):
    q, k = torch.randn(2, 16).double()
    places = torch.rand(30, 2, 1).double()
    shift = torch.rand(30, 1, 1).double() * (1.0 if periodic else 0.3)

    def scores(at):
        rotated = []
        for vector, place in ((q, at[:, 0]), (k, at[:, 1])):
            cos, sin = (part.double() for part in rotary_table(place, (periodic,), 16))
            first, second = vector.chunk(2)
            rotated.append(torch.cat((first * cos - second * sin, first * sin + second * cos), -1))
        return (rotated[0] * rotated[1]).sum(-1)

    moved = (places + shift) % 1.0 if periodic else places + shift
    torch.testing.assert_close(scores(places), scores(moved), atol=1e-4, rtol=1e-4)
    assert scores(places).std() > 0.1  # and they do depend on it


def test_rotary_scores_between_walls_tell_the_two_ends_apart():
    ends = rotary_table(torch.tensor([[0.0], [1.0]]), (False,), 16)
    assert (ends[0][0] - ends[0][1]).abs().max() > 0.5
    around = rotary_table(torch.tensor([[0.0], [1.0]]), (True,), 16)
    torch.testing.assert_close(around[0][0], around[0][1], atol=1e-4, rtol=0)


def test_every_axis_has_rotary_pairs():
    for num_dims in (1, 2, 3):
        places = torch.zeros(num_dims + 1, num_dims)
        places[range(1, num_dims + 1), range(num_dims)] = 0.3
        cos, _ = rotary_table(places, (False,) * num_dims, 16)
        assert all((cos[0] != cos[axis]).any() for axis in range(1, num_dims + 1))


def test_attention_backends_agree():
    fused, written = Attention(32, 2, qk_norm=True), Attention(32, 2, qk_norm=True, backend="math")
    written.load_state_dict(fused.state_dict())
    x, table = torch.randn(2, 9, 32), rotary_table(grid_points((9,)), (True,), 16)
    torch.testing.assert_close(fused(x, table), written(x, table), atol=1e-5, rtol=1e-4)


def test_attention_without_positions_does_not_know_the_order():
    net, x, order = Attention(32, 2, qk_norm=True), torch.randn(2, 9, 32), torch.randperm(9)
    torch.testing.assert_close(net(x, None)[:, order], net(x[:, order], None), atol=1e-5, rtol=1e-4)
    table = rotary_table(grid_points((9,)), (True,), 16)
    assert (net(x, table)[:, order] - net(x[:, order], table)).abs().max() > 1e-3

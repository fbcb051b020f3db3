"""The whole model: what it is equivariant to, what reaches its output, and how it is saved."""

import dataclasses

import numpy as np
import pytest
import torch

from upsnb import overlays
from upsnb.config import LatentConfig, OperatorConfig, PdetConfig, RunConfig, TrainingConfig
from upsnb.errors import ConfigError, DataError
from upsnb.models.geometry import grid_points
from upsnb.models.surrogate import count_parameters
from upsnb.models.transformer import Block, Operator
from upsnb.models.ups import UPS, wall_factor
from upsnb.solvers.darcy import solve_darcy
from upsnb.training import optimizers
from upsnb.training.compiling import set_compile

DECODERS = ("local_basis", "unpatchify", "cross_attention")
decoders = pytest.mark.parametrize("decoder", DECODERS)
families = pytest.mark.parametrize("family", ("advection1d", "darcy2d"))


def call(model, spec, fields, beta=0.4, dt=None, **options):
    parameters = torch.full((len(fields), 1), beta)
    with torch.no_grad():
        return model(spec.name, fields, parameters, spec.dt if dt is None else dt, **options)


def some_fields(spec, batch=2, factor=1):
    return torch.randn(batch, spec.input_frames, 1, *(factor * size for size in spec.grid_shape))


@decoders
@families
def test_grid_and_points_agree(make_spec, make_model, decoder, family):
    spec = make_spec(family)
    model, x = make_model([spec], decoder=decoder), some_fields(make_spec(family))
    y = call(model, spec, x)
    assert y.shape == (2, spec.output_frames, 1, *spec.grid_shape) and y.dtype == torch.float32
    at_points = call(model, spec, x, points=grid_points(spec.grid_shape))
    torch.testing.assert_close(y.flatten(3), at_points, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify"))
def test_a_shifted_ring_gives_the_shifted_forecast(make_spec, make_model, decoder):
    spec = make_spec()
    model, x = make_model([spec], decoder=decoder), some_fields(make_spec())
    shift = 3 * spec.patch
    torch.testing.assert_close(
        call(model, spec, x.roll(shift, -1)), call(model, spec, x).roll(shift, -1), atol=5e-5, rtol=1e-4
    )


def test_a_closed_box_is_not_shift_equivariant(make_spec, make_model):
    spec = make_spec("darcy2d")
    model, x = make_model([spec]), some_fields(make_spec("darcy2d"))
    assert (call(model, spec, x.roll(4, -1)) - call(model, spec, x).roll(4, -1)).abs().max() > 1e-2


@decoders
@families
def test_double_resolution_in_gives_double_resolution_out(make_spec, make_model, decoder, family):
    spec = make_spec(family)
    model, x = make_model([spec], decoder=decoder), some_fields(make_spec(family), factor=2)
    y = call(model, spec, x)
    assert y.shape == (2, spec.output_frames, 1, *x.shape[3:]) and y.isfinite().all()


@decoders
def test_scattered_points_give_finite_values_between_the_grids(make_spec, make_model, decoder):
    spec = make_spec("darcy2d")
    y = call(make_model([spec], decoder=decoder), spec, some_fields(spec), points=torch.rand(23, 2))
    assert y.shape == (2, 1, 1, 23) and y.isfinite().all()


@pytest.mark.parametrize("changed", ({"beta": 1.1}, {"dt": 0.1}))
def test_the_condition_reaches_the_output(make_spec, make_model, changed):
    spec = make_spec()
    model, x = make_model([spec]), some_fields(make_spec())
    assert (call(model, spec, x) - call(model, spec, x, **changed)).abs().max() > 1e-3


def test_the_dataset_reaches_the_output(make_spec, make_model):
    first = make_spec()
    second = dataclasses.replace(first, name="other")
    model, x = make_model([first, second]), some_fields(first)
    for part in (model.encoders, model.decoders):  # what is left is the condition's own vector
        part["other"].load_state_dict(part["advection"].state_dict())
    assert (call(model, first, x) - call(model, second, x)).abs().max() > 1e-3


def test_parameters_of_one_sample_do_not_reach_another(make_spec, make_model):
    spec = make_spec()
    model, x = make_model([spec]), some_fields(make_spec())
    one, two = (model(spec.name, x, torch.tensor([[0.4], [beta]]), spec.dt) for beta in (0.4, 3.0))
    assert torch.equal(one[0], two[0]) and not torch.equal(one[1], two[1])


def test_the_reference_operator_has_21_million_parameters(make_spec):
    latent, operator = LatentConfig(), OperatorConfig()
    assert (operator.pdet.hidden_dim, operator.pdet.depth, latent.dim) == (384, 12, 128)
    with torch.device("meta"):
        model = UPS(latent, operator, {}, False)
    assert count_parameters(model.operator) == pytest.approx(21.4e6, rel=0.02)


def test_a_new_block_is_the_identity():
    block, x = Block(32, 2, 2.0, True, 0.0, "sdpa"), torch.randn(2, 5, 32)
    assert torch.equal(block(x, torch.randn(2, 4, 32), None), x)


def test_a_dropped_block_is_the_identity_and_the_mean_is_kept(perturb):
    block, x = perturb(Block(32, 2, 2.0, True, 0.5, "sdpa")), torch.randn(1, 5, 32).expand(4000, -1, -1)
    block.mlp.down.weight.data.zero_(), block.mlp.down.bias.data.zero_()
    modulation = torch.zeros(1, 4, 32)
    dropped = (block(x, modulation, None) == x).flatten(1).all(1)
    assert 0.45 < dropped.float().mean() < 0.55
    expected = block.eval()(x[:1], modulation, None)
    torch.testing.assert_close(block.train()(x, modulation, None).mean(0), expected[0], atol=0.05, rtol=0)


@pytest.mark.parametrize("drop_path, graphs", ((0.0, 1), (0.3, 2)))
def test_blocks_share_their_compiled_code(drop_path, graphs):
    # One graph a block would reach the compiler's limit of 8, and all blocks beyond it run uncompiled.
    torch._dynamo.reset()
    blocks = Operator(PdetConfig(hidden_dim=32, depth=10, num_heads=2, drop_path=drop_path), 32, 8).train().blocks
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for block in blocks:
        block.compile(backend="eager", dynamic=False)
        block(torch.randn(2, 5, 32), torch.randn(2, 4, 32), None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == graphs
    torch._dynamo.reset()


def test_normalisation_goes_there_and_back(make_spec, make_model):
    spec = make_spec()
    model, x = make_model([spec]), some_fields(make_spec())
    torch.testing.assert_close(model.denormalise(spec.name, model.normalise(spec.name, x, "output")), x)


# -- rollout -----------------------------------------------------------------------------------------------------------


def test_a_reencoding_rollout_is_call_after_call(make_spec, make_model):
    # three frames in and two out: the last given frame is used twice
    spec = make_spec(input_frames=3, input_mean=(0.1,), output_mean=(0.1,), input_std=(1.3,), output_std=(1.3,))
    model, given = make_model([spec]), torch.randn(2, 5, 1, 32)
    with torch.no_grad():
        found = model.rollout(spec.name, given, torch.full((2, 1), 0.4), spec.dt, 5)
    frames = given
    for _ in range(3):
        frames = torch.cat((frames, call(model, spec, frames[:, -3:])), 1)
    torch.testing.assert_close(found, frames[:, 5:10], atol=1e-4, rtol=1e-4)


def test_a_latent_rollout_encodes_once(make_spec, make_model):
    spec = make_spec()
    given, beta = torch.randn(2, 4, 1, 32), torch.full((2, 1), 0.4)
    forecasts = {}
    for mode, encodings in (("latent", 1), ("reencode", 3)):
        model, count = make_model([spec], inverse=True, rollout=mode), []
        model.encoders[spec.name].register_forward_hook(lambda *_, count=count: count.append(1))
        with torch.no_grad():
            forecasts[mode] = model.rollout(spec.name, given, beta, spec.dt, 6)
        assert forecasts[mode].shape == (2, 6, 1, 32)
        assert len(count) == encodings
    assert not torch.allclose(forecasts["latent"], forecasts["reencode"])


def test_a_latent_rollout_starts_with_the_latent_call(make_spec, make_model):
    spec = make_spec()
    model, given = make_model([spec], inverse=True, rollout="latent"), torch.randn(2, 2, 1, 32)
    with torch.no_grad():
        rolled = model.rollout(spec.name, given, torch.full((2, 1), 0.4), spec.dt, 2)
    torch.testing.assert_close(rolled, call(model, spec, given))


def test_a_static_problem_rolls_out_in_one_call(make_spec, make_model):
    spec = make_spec("darcy2d")
    model, nu = make_model([spec]), some_fields(make_spec("darcy2d"))
    with torch.no_grad():
        rolled = model.rollout(spec.name, nu, torch.full((2, 1), 0.4), 0.0, 1)
    torch.testing.assert_close(rolled, call(model, spec, nu))


# -- settings that cannot work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify"))
def test_a_perceiver_needs_the_cross_attention_decoder(decoder):
    with pytest.raises(ConfigError, match=r"operator\.decoder"):
        overlays.resolve({"operator": {"encoder": "perceiver", "decoder": decoder}})
    overlays.resolve({"operator": {"encoder": "perceiver", "decoder": "cross_attention"}})


def test_a_perceiver_model_predicts_grids_and_points(make_spec, make_model):
    spec = make_spec("darcy2d")
    model, x = make_model([spec], encoder="perceiver", decoder="cross_attention"), some_fields(make_spec("darcy2d"))
    y = call(model, spec, x)
    torch.testing.assert_close(y.flatten(3), call(model, spec, x, points=grid_points((16, 16))), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "grid, tokens, patch", [((32,), 16, 2), ((32,), 15, 4), ((32,), 1, 32), ((16, 16), 16, 4), ((24, 36), 24, 6)]
)
def test_the_patch_is_the_smallest_even_one_within_budget(make_spec, grid, tokens, patch):
    spec = make_spec("advection1d" if len(grid) == 1 else "darcy2d", grid_shape=grid, tokens=tokens)
    assert spec.patch == patch
    assert torch.Size(spec.token_grid).numel() <= tokens
    assert all(count * patch == size for count, size in zip(spec.token_grid, grid))


@pytest.mark.parametrize("grid, tokens", [((33,), 33), ((34,), 1), ((16, 15), 300)])
def test_a_grid_without_an_even_patch_says_what_to_do(make_spec, grid, tokens):
    spec = make_spec("advection1d" if len(grid) == 1 else "darcy2d", grid_shape=grid, tokens=tokens)
    if grid == (34,):  # one patch of all cells is within any budget
        assert spec.patch == 34
        return
    with pytest.raises(DataError, match="no even patch.*raise latent.tokens"):
        _ = spec.patch


# -- names on disk -----------------------------------------------------------------------------------------------------


def test_weights_keep_their_names_under_compile(tiny_setup):
    plain = tiny_setup()
    names = set(plain.model.state_dict())
    for sharded in (False, True):  # as a whole, and in parts
        set_compile(plain.objective, TrainingConfig(compile=True, use_fsdp2=sharded))
    assert set(plain.model.state_dict()) == names
    assert not any(part in name for name in names for part in ("module.", "_orig_mod."))


def test_weights_keep_their_names_under_ddp(tiny_setup, tmp_path):
    setup = tiny_setup()
    names = set(setup.model.state_dict())
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(setup.loss)
        assert set(setup.model.state_dict()) == names
        assert any(name.startswith("module.") for name in wrapped.state_dict())  # what must not be saved
    finally:
        torch.distributed.destroy_process_group()
    assert set(optimizers.Ema(setup.model, 0.9).state_dict()["average"]) <= names


def test_statistics_are_not_weights(make_spec, make_model):
    assert not any("constant" in name for name in make_model([make_spec()]).state_dict())


def test_the_default_config_can_be_built(make_spec):
    config = RunConfig()
    with torch.device("meta"):
        UPS(config.latent, config.operator, {}, True)


def test_zero_walls_hold_in_the_ghost_cells_at_any_resolution(make_model, make_spec):
    spec = make_spec("darcy2d", zero_walls=True)
    model = make_model([spec])
    for size in (16, 32):
        fields = torch.rand(2, 1, 1, size, size)
        ghosts = torch.tensor([[-0.5 / size, 0.3], [0.3, 1 + 0.5 / size], [1 + 0.5 / size, 0.7], [0.2, -0.5 / size]])
        inside = torch.rand(6, 2)
        pressure = model(spec.name, fields, torch.ones(2, 1), 0.0, torch.cat((ghosts, inside)))
        assert pressure[..., :4].abs().max() < 1e-5
        assert pressure[..., 4:].abs().min() > 1e-5


EVERY_SECOND = {"zero_walls": True, "ghosts_before": (0.5, 0.5), "ghosts_after": (1.0, 1.0)}


def test_zero_walls_hold_where_every_second_cell_was_kept(make_model, make_spec):
    spec = make_spec("darcy2d", **EVERY_SECOND)
    model, size, fields = make_model([spec]), spec.grid_shape[0], torch.rand(2, 1, 1, *spec.grid_shape)
    ghosts = torch.tensor([[0.0, 0.3], [0.3, 1 + 0.5 / size], [1 + 0.5 / size, 0.7], [0.2, 0.0]])
    assert model(spec.name, fields, torch.ones(2, 1), 0.0, ghosts).abs().max() < 1e-5


def test_every_second_cell_and_all_of_them_are_one_problem_of_one_amplitude(make_model, make_spec):
    spec = make_spec("darcy2d", **EVERY_SECOND, output_mean=(0.0,), output_std=(1.0,))
    model, centre, one = make_model([spec]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 1, 1, 1)
    whole = tuple(2 * size for size in spec.grid_shape)
    assert spec.ghosts(whole) == [(1.0, 1.0)] * 2
    for shape in (spec.grid_shape, whole):
        held = model._hold_walls(spec.name, one, shape, centre)
        torch.testing.assert_close(held.flatten(), wall_factor(centre, shape, spec))


def test_pressure_grows_with_the_square_of_the_width_between_ghost_cells(make_model, make_spec):
    spec = make_spec("darcy2d", zero_walls=True, output_mean=(0.0,), output_std=(1.0,))
    model, centre, one = make_model([spec]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 1, 1, 1)
    shapes = (64, 64), (16, 16)
    held = [model._hold_walls(spec.name, one, shape, centre) / wall_factor(centre, shape, spec) for shape in shapes]
    solved = [solve_darcy(np.ones(shape), 1.0).max() for shape in shapes]
    assert (held[0] / held[1]).item() == pytest.approx(solved[0] / solved[1], rel=0.01)
    assert held[1].item() == 1.0  # the training grid's own amplitude is what was learned

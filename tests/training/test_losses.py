"""Each loss term reaches the parameters it is for, and means what its name says."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from upsnb.config import QuerySamplingConfig, TrainingConfig
from upsnb.data.batch import Batch
from upsnb.models.geometry import grid_points
from upsnb.rules import LOSS_TERMS
from upsnb.solvers.darcy import draw_permeability, solve_darcy
from upsnb.training import losses, metrics
from upsnb.training.losses import (
    FieldObjective,
    UPSObjective,
    relative_error,
    spectral_error,
    wall_points,
)

PREDICTING = {"encoders", "conditions", "operator", "decoders"}
# term: (dataset, modules with a gradient from it alone); the rest must have exactly none
REACH = {
    "relative": ("advection", PREDICTING),
    "field": ("darcy", PREDICTING),
    "forward": ("advection", {"encoders", "conditions", "operator"}),
    "inv_enc": ("darcy", {"encoders", "inverse_decoders"}),
    "inv_dec": ("advection", PREDICTING),
    "spectral": ("darcy", PREDICTING),
    "rollout": ("advection", PREDICTING),
    "boundary": ("darcy", PREDICTING),
    "conservation": ("advection", PREDICTING),
    "positivity": ("darcy", PREDICTING),
    "latent_norm": ("darcy", {"encoders", "conditions", "operator"}),
    "latent_diversity": ("darcy", {"encoders"}),
}
ACTS_ON_ONE = {"forward": "advection", "inv_dec": "advection", "rollout": "advection", "conservation": "advection"}
ACTS_ON_ONE |= {"boundary": "darcy", "positivity": "darcy"}


@pytest.fixture
def specs(make_spec):
    return {"advection": make_spec(), "darcy": make_spec("darcy2d")}


@pytest.fixture
def make_loss(make_model, specs):
    """`make_loss(relative=1.0, noise=0.1)`: a loss module of exactly these terms, and its model."""

    def make(mode="reencode", **settings) -> UPSObjective:
        weights = dict.fromkeys((f"lambda_{term}" for term in LOSS_TERMS), 0.0)
        weights |= {f"lambda_{key}" if key in LOSS_TERMS else key: value for key, value in settings.items()}
        model = make_model(specs.values(), inverse=True, rollout=mode)
        objective = UPSObjective(model, TrainingConfig(**weights))
        objective.generator = torch.Generator().manual_seed(1)
        return objective

    return make


def make_batch(spec, batch=4, seed=5, calls=2) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    shape = (1, *spec.grid_shape)
    frames = spec.output_frames * (calls if spec.time_dependent else 1)
    inputs = torch.randn(batch, spec.input_frames, *shape, generator=draws)
    targets = torch.randn(batch, frames, *shape, generator=draws)
    return Batch(spec.name, inputs, targets, torch.rand(batch, 1, generator=draws), seed)


def terms_of(loss, batch, amp_dtype=None, step=0, microbatch=0):
    return loss(batch, loss.weights(step, microbatch), amp_dtype)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_no_term_depends_on_the_unit_that_fields_are_given_in(make_model, make_spec, scale):
    """A pressure in Pascal or in MPa; custom files hold any."""
    found = {}
    for unit in (1.0, scale):
        changes = {
            key: tuple(unit * x for x in getattr(make_spec(), key))
            for key in ("input_mean", "input_std", "output_mean", "output_std")
        }
        torch.manual_seed(0)
        model = make_model([make_spec(**changes)])
        loss = FieldObjective(model, TrainingConfig(lambda_relative=1.0, lambda_rollout=1.0, lambda_field=1.0))
        batch = make_batch(make_spec())
        batch.inputs, batch.targets = batch.inputs * unit, batch.targets * unit
        found[unit] = {name: float(value) for name, value in terms_of(loss, batch)[1].items()}
    assert found[scale] == pytest.approx(found[1.0], rel=1e-4) and found[1.0]["rollout"] > 0.1


# -- lesson 1: every term reaches a trained parameter ------------------------------------------------------------------


def test_every_term_is_measured_here():
    assert set(REACH) == set(LOSS_TERMS)


@pytest.mark.parametrize("term", LOSS_TERMS)
def test_each_term_alone_reaches_the_modules_it_is_for_and_no_other(make_loss, specs, term):
    name, reached = REACH[term]
    loss = make_loss(**{term: 1.0})
    total, values = terms_of(loss, make_batch(specs[name]))
    assert set(values) == {term} and float(total.detach()) == pytest.approx(float(values[term]))
    total.backward()
    for key, parameter in loss.model.named_parameters():
        module, *path = key.split(".")
        is_for = module in reached and (module == "operator" or path[0] == name)
        norm = 0.0 if parameter.grad is None else float(parameter.grad.norm())
        assert (norm > 0) == is_for, f"{term}: gradient norm {norm} in {key}"


@pytest.mark.parametrize("term", ("relative", "field", "spectral", "conservation", "rollout"))
def test_in_latent_rollout_predictions_train_the_head_that_makes_them(make_loss, specs, term):
    loss = make_loss("latent", **{term: 1.0})
    terms_of(loss, make_batch(specs["advection"]))[0].backward()
    norms = {
        module: sum(float(p.grad.norm()) for p in getattr(loss.model, module).parameters() if p.grad is not None)
        for module in ("inverse_decoders", "decoders", "operator", "encoders")
    }
    assert norms["inverse_decoders"] > 0 and norms["operator"] > 0 and norms["encoders"] > 0
    assert norms["decoders"] == 0


@pytest.mark.parametrize("decoder", ("local_basis", "unpatchify", "cross_attention"))
def test_sampled_queries_train_every_decoder(make_model, specs, decoder):
    model = make_model(specs.values(), decoder=decoder)
    config = TrainingConfig(query_sampling=QuerySamplingConfig(num_queries=9, jitter=0.5))
    total, _ = UPSObjective(model, config)(make_batch(specs["darcy"]), {"relative": 1.0}, None)
    total.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.decoders["darcy"].parameters())


@pytest.mark.parametrize("term", sorted(ACTS_ON_ONE))
def test_a_term_is_absent_where_it_does_not_act(make_loss, specs, term):
    acting = ACTS_ON_ONE[term]
    other = {"advection": "darcy", "darcy": "advection"}[acting]
    loss = make_loss(relative=1.0, **{term: 1.0})
    assert set(terms_of(loss, make_batch(specs[acting]))[1]) == {"relative", term}
    assert set(terms_of(loss, make_batch(specs[other]))[1]) == {"relative"}


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_a_microbatch_without_any_term_costs_nothing_and_breaks_nothing(tiny_setup, dtype):
    half = {"training.amp": True, "training.amp_dtype": dtype} if dtype else {}
    setup = tiny_setup(**{"training.loss_frequency": {"relative": 2}, **half})
    batches = list(setup.loader.epoch(0))[:2]
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    total, terms, norm = setup.step([replace(batch, turn=1) for batch in batches], 0)  # the second of two
    assert (float(total), terms, float(norm)) == (0.0, {}, 0.0)
    assert all(torch.equal(value, before[key]) for key, value in setup.model.state_dict().items())
    total, terms, norm = setup.step(batches, 1)
    assert float(norm) > 0 and set(terms) == {"relative"}


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_rarer_term_weighs_more_so_that_its_mean_stays():
    rarer = {"inverse_loss_frequency": 4, "loss_frequency": {"field": 3}}
    objective = UPSObjective(None, TrainingConfig(lambda_inv_enc=0.3, lambda_field=0.5, **rarer))
    weights = [objective.weights(0, microbatch) for microbatch in range(12)]
    for term, value, every in (("relative", 1.0, 1), ("inv_enc", 0.3, 4), ("field", 0.5, 3)):
        found = [weight.get(term, 0.0) for weight in weights]
        assert np.mean(found) == pytest.approx(value)
        assert [number for number, weight in enumerate(found) if weight] == list(range(0, 12, every))


def test_a_warming_term_rises_to_its_weight_and_stays():
    objective = UPSObjective(None, TrainingConfig(lambda_spectral=0.8, loss_warmup_steps={"spectral": 4}))
    found = [objective.weights(step, 0)["spectral"] for step in range(6)]
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_weight_of_zero_computes_nothing():
    assert UPSObjective(None, TrainingConfig()).weights(0, 0) == {"relative": 1.0}


@pytest.mark.parametrize("frequency", (2, 4))
def test_a_rarer_term_reaches_every_dataset(tiny_setup, frequency):
    # Datasets take turns: counted over all of them, every second microbatch is always the same dataset's.
    setup = tiny_setup(**{"training.lambda_inv_enc": 0.1, "training.inverse_loss_frequency": frequency})
    seen, forward = [], setup.loss.forward

    def record(batch, weights, dtype):
        seen.append((batch.dataset, "inv_enc" in weights))
        return forward(batch, weights, dtype)

    setup.loss.forward = record
    for step, batch in enumerate(list(setup.loader.epoch(0))[: 4 * frequency]):
        setup.step([batch], step)
    for name in ("advection", "darcy"):
        assert sum(computed for dataset, computed in seen if dataset == name) == 2


# -- what the terms mean -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("advection", "darcy"))
def test_the_relative_loss_is_the_reported_nrmse(make_loss, specs, name):
    loss, batch = make_loss(relative=1.0), make_batch(specs[name], calls=1)
    with torch.no_grad():
        forecast = loss.model(name, batch.inputs, batch.parameters, specs[name].dt)
        _, values = terms_of(loss, batch)
    expected = metrics.nrmse(metrics.sample_statistics(forecast, batch.targets)).mean()
    assert float(values["relative"]) == pytest.approx(float(expected), rel=1e-4)


def test_spectral_error_is_over_space_and_not_over_channels_or_samples():
    target, prediction = torch.randn(2, 3, 5, 2, 16, 16).unbind()
    error = spectral_error(prediction, target, 2)
    for axis in (0, 1, 2):
        order = torch.randperm(target.shape[axis])
        same = spectral_error(prediction.index_select(axis, order), target.index_select(axis, order), 2)
        torch.testing.assert_close(same, error)
    order = torch.randperm(16)
    for axis in (3, 4):
        other = spectral_error(prediction.index_select(axis, order), target.index_select(axis, order), 2)
        assert abs(float(other - error)) > 1e-4


def test_spectral_error_is_zero_at_equality_and_sees_the_wavenumber():
    x = torch.arange(32) / 32
    waves = {k: torch.sin(2 * torch.pi * k * x).view(1, 1, 1, -1) for k in (1, 2, 8)}
    assert spectral_error(waves[2], waves[2], 1) == 0
    near, far = (spectral_error(waves[2] + 0.1 * waves[k], waves[2], 1) for k in (1, 8))
    assert far > 1.5 * near > 0  # the same energy weighs more at a higher wavenumber
    assert spectral_error(waves[2].roll(3, -1), waves[2], 1) < 1e-5  # amplitudes only


def test_spectral_error_counts_wavenumbers_alike_on_both_axes():
    prediction, target = torch.randn(2, 2, 1, 1, 16, 16).unbind()
    torch.testing.assert_close(spectral_error(prediction, target, 2), spectral_error(prediction.mT, target.mT, 2))


def test_gradients_are_finite_where_prediction_meets_target():
    for error in (relative_error, lambda a, b: spectral_error(a, b, 1)):
        prediction = torch.randn(2, 1, 1, 16, requires_grad=True)
        error(prediction, prediction.detach().clone()).backward()
        assert prediction.grad.isfinite().all()


def test_a_target_of_zeros_gives_a_finite_loss():
    assert relative_error(torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)).isfinite()


def test_walls_are_where_the_solver_puts_its_zeros():
    points = wall_points((16, 16), [(1.0, 1.0)] * 2, "cpu")
    assert len(points) == 4 * 16
    outside = (points < 0) | (points > 1)
    assert (outside.sum(1) == 1).all()
    torch.testing.assert_close(points[outside].abs().unique(), torch.tensor([0.5 / 16, 1 + 0.5 / 16]))
    # with nu = 1, 4 u - (its neighbours) = h^2: at a corner two neighbours are ghosts, and they are zero there
    u = solve_darcy(np.ones((16, 16)), beta=1.0)
    assert 4 * u[0, 0] - u[0, 1] - u[1, 0] == pytest.approx(1 / 16**2)


def test_walls_of_every_second_cell_are_where_they_were():
    cells = (2 * torch.arange(8) + 0.5) / 16  # of 16, in the unit coordinates that those have
    inside = (torch.arange(8) + 0.5) / 8  # the same points in the coordinates of a grid of their own
    points = wall_points((8, 8), [(0.5, 1.0)] * 2, "cpu")
    own = points[(points <= 0) | (points > 1)].unique()
    torch.testing.assert_close(own, torch.tensor([-0.5 / 16, 1 + 0.5 / 16]) + inside[0] - cells[0])


def test_the_boundary_term_is_zero_for_a_field_that_is_zero_at_the_ghosts(make_loss, specs, monkeypatch):
    loss, spec = make_loss(boundary=1.0), specs["darcy"]
    for offset, expected in ((0.0, 0.0), (0.6, (0.6 / spec.output_std[0]) ** 2)):

        def forecast(name, z, x, points=None, offset=offset):
            """A bump that is zero half a cell outside of the unit square, plus an offset, normalised."""
            h = 0.5 / 16
            at = grid_points((16, 16)) if points is None else points
            physical = ((at + h) * (1 + h - at)).prod(-1) + offset
            values = ((physical - spec.output_mean[0]) / spec.output_std[0]).expand(len(x), 1, 1, -1)
            return values.unflatten(-1, (16, 16)) if points is None else values

        monkeypatch.setattr(loss.model, "reconstruct_or_decode", forecast)
        _, values = terms_of(loss, make_batch(spec))
        assert float(values["boundary"]) == pytest.approx(expected, rel=1e-5, abs=1e-10)


def test_positivity_is_zero_for_a_solution_and_not_for_its_negative(make_loss, specs, monkeypatch):
    loss, spec = make_loss(positivity=1.0), specs["darcy"]
    pressure = torch.from_numpy(solve_darcy(draw_permeability(0, 0, 16), 1.0)).float().expand(4, 1, 1, 16, 16)
    for sign, is_zero in ((1, True), (-1, False)):
        fields = loss.model.normalise("darcy", sign * pressure, "output")
        monkeypatch.setattr(loss.model, "reconstruct_or_decode", lambda *_, fields=fields: fields)
        _, values = terms_of(loss, make_batch(spec))
        assert (float(values["positivity"]) < 1e-12) == is_zero


def test_conservation_is_zero_for_a_moved_wave_and_not_for_a_raised_one(make_loss, specs, monkeypatch):
    loss, batch = make_loss(conservation=1.0), make_batch(specs["advection"])
    batch.inputs[:, 0] += 1.0  # only the last frame's mean is the one to keep
    last = loss.model.normalise("advection", batch.inputs[:, -1:]).expand(-1, 2, -1, -1)
    for offset in (0.0, 0.5):
        moved = last.roll(5, -1) + offset
        monkeypatch.setattr(loss.model, "reconstruct_or_decode", lambda *_, moved=moved: moved)
        _, values = terms_of(loss, batch)
        assert float(values["conservation"]) == pytest.approx(offset**2, rel=1e-5, abs=1e-10)


def test_latent_diversity_is_high_for_equal_tokens_and_low_for_different_ones(make_loss, specs, monkeypatch):
    loss, batch = make_loss(latent_diversity=1.0), make_batch(specs["darcy"])
    found = {}
    for kind in ("spread", "collapsed"):
        z = torch.randn(4, 16, 32)
        if kind == "collapsed":
            z = z[:, :1] * torch.linspace(-1, 1, 16).view(1, -1, 1)
        monkeypatch.setattr(loss.model, "encode", lambda *_, z=z: z)
        found[kind] = float(terms_of(loss, batch)[1]["latent_diversity"])
    assert found["spread"] < 0.1 and found["collapsed"] > 0.9


def test_one_token_alone_is_as_diverse_as_it_can_be(make_loss):
    z = torch.randn(4, 1, 32, requires_grad=True)
    encoded = types.SimpleNamespace(latents=(z, None))
    loss = make_loss(latent_diversity=1.0)._latent_terms(encoded, ("latent_diversity",), None)["latent_diversity"]
    loss.backward()
    assert loss.item() == 0 and not z.grad.any()


@pytest.mark.parametrize("name", ("advection", "darcy"))
def test_losses_are_float32_whatever_the_networks_compute_in(make_loss, specs, name, monkeypatch):
    loss = make_loss(**dict.fromkeys(LOSS_TERMS, 1.0))
    model, spec = loss.model, specs[name]
    latents = [torch.randn(4, 16 if name == "darcy" else 8, 32) for _ in range(2)]
    fields = torch.randn(4, spec.output_frames, 1, *spec.grid_shape)

    def decode(name, z, x, points=None):
        return fields if points is None else fields.flatten(3)[..., :1].expand(-1, -1, -1, len(points))

    monkeypatch.setattr(model, "encode", lambda *_: latents[0])
    monkeypatch.setattr(model, "advance", lambda *_: latents[1])
    monkeypatch.setattr(model, "reconstruct_or_decode", decode)
    monkeypatch.setattr(model, "reconstruct", lambda *_: fields[:, : spec.input_frames])
    batch = make_batch(spec)
    (exact, wanted), (total, found) = (terms_of(loss, batch, dtype) for dtype in (None, torch.bfloat16))
    assert total.dtype == torch.float32 and set(found) == set(wanted)
    for term, value in found.items():
        assert value.dtype == torch.float32 and torch.equal(value, wanted[term]), term
    assert torch.equal(total, exact)


@pytest.mark.parametrize("term", LOSS_TERMS)
def test_each_term_under_autocast_is_near_its_float32_value(make_loss, specs, term):
    loss, batch = make_loss(**{term: 1.0}), make_batch(specs[REACH[term][0]])
    with torch.no_grad():
        exact, rounded = (terms_of(loss, batch, dtype)[0] for dtype in (None, torch.bfloat16))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=1e-3)


def test_noise_is_on_inputs_in_training_only(make_loss, specs):
    loss, batch = make_loss(relative=1.0, noise=0.3), make_batch(specs["advection"])
    with torch.no_grad():
        first, second = (float(terms_of(loss, batch)[0]) for _ in range(2))
        loss.eval()
        third, fourth = (float(terms_of(loss, batch)[0]) for _ in range(2))
    assert first != second and third == fourth


# -- query sampling ----------------------------------------------------------------------------------------------------


def queries(num_queries, jitter=0.0, seed=5, grid=(16, 16)):
    config = TrainingConfig(query_sampling=QuerySamplingConfig(num_queries=num_queries, jitter=jitter))
    batch = types.SimpleNamespace(inputs=torch.zeros(2, 1, 1, *grid), seed=seed)
    return FieldObjective._query_points(types.SimpleNamespace(config=config), batch, None)


def test_queries_are_distinct_grid_points():
    points = queries(60)
    assert points.shape == (60, 2) and len(points.unique(dim=0)) == 60
    cells = points * 16 - 0.5
    torch.testing.assert_close(cells, cells.round())


def test_a_few_queries_of_a_large_grid_cost_the_host_no_grid(monkeypatch):
    class Small(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            assert not torch.is_tensor(made) or made.numel() <= 3 * 60, function
            return made

    inputs = torch.zeros(1).expand(2, 1, 1, 512, 512, 512)
    config = types.SimpleNamespace(config=TrainingConfig(query_sampling=QuerySamplingConfig(num_queries=60)))
    with Small():
        points = FieldObjective._query_points(config, types.SimpleNamespace(inputs=inputs, seed=5), None)
    assert len(points.unique(dim=0)) == 60 and 0.3 < points.mean() < 0.7


def test_queries_depend_on_the_microbatch_alone():
    assert torch.equal(queries(60), queries(60))
    assert not torch.equal(queries(60), queries(60, seed=6))


def test_queries_are_the_same_on_all_ranks_and_new_each_microbatch(tiny_setup):
    from upsnb.data.batches import Schedule

    setup = tiny_setup(**{"training.batch_size": 4})
    ranks = [Schedule(setup.datasets, setup.config, rank, 4).epoch(0) for rank in range(4)]
    seeds = [{microbatch.seed for microbatch in same} for same in zip(*ranks)]
    assert all(len(seed) == 1 for seed in seeds)
    assert len(set.union(*seeds)) == len(seeds)


def test_sampled_queries_are_compared_and_the_rest_is_not(make_loss, specs):
    loss = make_loss(relative=1.0, query_sampling=QuerySamplingConfig(num_queries=40))
    batch = make_batch(specs["darcy"])
    chosen = (loss._query_points(batch, None) * 16 - 0.5).round().long()
    rest = torch.ones(16, 16, dtype=torch.bool)
    rest[tuple(chosen.T)] = False
    with torch.no_grad():
        before = float(terms_of(loss, batch)[0])
        batch.targets[..., rest] += 100.0
        # reading a value between cells of zero distance rounds: 1e-6 of a neighbour's 100
        assert float(terms_of(loss, batch)[0]) == pytest.approx(before, rel=1e-2)
        batch.targets[..., ~rest] += 5.0
        assert abs(float(terms_of(loss, batch)[0]) - before) > 0.02


def test_jitter_moves_queries_within_their_cells():
    exact, moved = queries(60), queries(60, jitter=0.8)
    cells = (moved - exact).abs() * 16
    assert 0.2 < cells.max() <= 0.4 + 1e-5 and (cells > 0.01).float().mean() > 0.9


def test_jitter_acts_on_the_whole_grid_too():
    assert queries(None) is None and queries(256) is None
    moved = queries(None, jitter=0.5)
    assert moved.shape == (256, 2)
    assert len((moved * 16).floor().unique(dim=0)) == 256  # one query in every cell


def test_losses_name_their_terms():
    assert losses.LOSS_TERMS == LOSS_TERMS

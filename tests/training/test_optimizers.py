"""Who owns which parameter, how the learning rate moves, and what an overflow may touch."""

import math

import pytest
import torch

from upsnb.config import OptimizerConfig, SchedulerConfig
from upsnb.training import optimizers
from upsnb.training.optimizers import Ema, Plateau, learning_rate_factor, set_learning_rate

names = pytest.mark.parametrize("name", ("muon_hybrid", "adamw"))


@pytest.fixture
def model(make_spec, make_model):
    """Every kind of part a model can have."""
    specs = [make_spec(), make_spec("darcy2d")]
    return make_model(specs, inverse=True, encoder="perceiver", decoder="cross_attention")


def owners(model, made):
    """{parameter name: [(optimizer, group)]}"""
    found = {name: [] for name, _ in model.named_parameters()}
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in made:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[by_id[id(parameter)]].append((optimizer, group))
    return found


@names
def test_every_trained_parameter_has_exactly_one_owner(model, name):
    frozen = model.encoders["darcy"].latents.requires_grad_(False)
    for key, owned in owners(model, optimizers.build(model, OptimizerConfig(name=name))).items():
        assert len(owned) == (0 if model.get_parameter(key) is frozen else 1), key


def test_muon_owns_the_hidden_matrices_of_blocks_and_nothing_else(model):
    for key, [(optimizer, _)] in owners(model, optimizers.build(model, OptimizerConfig())).items():
        parameter = model.get_parameter(key)
        hidden = key.startswith("operator.blocks.") and parameter.ndim == 2 and key.endswith(".weight")
        assert isinstance(optimizer, torch.optim.Muon) == hidden, key
    assert all(isinstance(o, torch.optim.AdamW) for o in optimizers.build(model, OptimizerConfig(name="adamw")))


@names
def test_norms_biases_and_offsets_are_not_decayed(model, name):
    made = optimizers.build(model, OptimizerConfig(name=name, weight_decay=0.1))
    modules = dict(model.named_modules())
    for key, [(_, group)] in owners(model, made).items():
        parent, _, leaf = key.rpartition(".")
        norm = isinstance(modules[parent], (torch.nn.LayerNorm, torch.nn.RMSNorm))
        plain = norm or leaf in ("bias", "latents", "position", "modulation_offset")
        assert group["weight_decay"] == (0.0 if plain else 0.1), key


@names
def test_a_step_without_gradient_pull_only_decays(model, name):
    made = optimizers.build(model, OptimizerConfig(name=name, weight_decay=0.1, lr=0.01))
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in made:
        optimizer.step()
    for key, [(_, group)] in owners(model, made).items():
        shrunk = before[key] * (1 - 0.01 * group["weight_decay"])
        torch.testing.assert_close(model.get_parameter(key).detach(), shrunk, msg=key)


# -- learning rate -----------------------------------------------------------------------------------------------------


def curve(num=1001, **settings):
    config = SchedulerConfig(**settings)
    return [learning_rate_factor(config, i / (num - 1)) for i in range(num)]


def test_cosine_warms_up_linearly_and_falls_to_zero():
    found = curve(name="cosine", warmup_fraction=0.1)
    assert found[50] == pytest.approx(0.5) and found[100] == pytest.approx(1.0) and max(found) == pytest.approx(1.0)
    assert found[550] == pytest.approx(0.5) and found[-1] == pytest.approx(0.0, abs=1e-12)
    assert found[:101] == sorted(found[:101]) and found[100:] == sorted(found[100:], reverse=True)


def test_the_first_step_is_taken_at_a_positive_rate():
    for name in ("cosine", "onecycle", "plateau", "constant"):
        for warmup in (0.0, 0.1):
            assert learning_rate_factor(SchedulerConfig(name=name, warmup_fraction=warmup), 0.0) > 0


def test_the_end_is_the_minimal_rate_and_beyond_it_nothing_moves():
    for name in ("cosine", "onecycle"):
        config = SchedulerConfig(name=name, min_lr_fraction=0.1)
        assert learning_rate_factor(config, 1.0) == learning_rate_factor(config, 1.7) == pytest.approx(0.1)


def test_onecycle_rises_for_as_long_as_it_is_told():
    assert curve(name="onecycle", warmup_fraction=0.02)[20] == pytest.approx(1.0)
    found = curve(name="onecycle", warmup_fraction=0.3)
    assert found.index(max(found)) == 300 and found[300] == pytest.approx(1.0) and found[-1] < 1e-9
    assert found[150] == pytest.approx(0.5)


def test_constant_and_plateau_only_warm_up():
    for name in ("constant", "plateau"):
        found = curve(name=name, warmup_fraction=0.1)
        assert set(found[101:]) == {1.0} and found[50] == pytest.approx(0.5)


def test_plateau_waits_for_its_patience_and_starts_again():
    plateau = Plateau(SchedulerConfig(name="plateau", plateau_factor=0.5, plateau_patience=2))
    factors = []
    for value in (1.0, 1.0, 1.0, 0.9, 0.95, math.nan, 0.95, 0.95):
        plateau.update(value)
        factors.append(plateau.factor)
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    other = Plateau(plateau.config)
    other.load_state_dict(plateau.state_dict())
    assert vars(other) == vars(plateau)


def test_other_schedules_have_no_plateau():
    plateau = Plateau(SchedulerConfig(plateau_patience=1))
    for _ in range(5):
        plateau.update(1.0)
    assert plateau.factor == 1.0


def test_each_group_keeps_its_own_peak(model):
    made = optimizers.build(model, OptimizerConfig(lr=1e-3, muon_lr=4e-3))
    assert set_learning_rate(made, 0.5) == pytest.approx(5e-4)
    set_learning_rate(made, 0.25)  # of the peak, not of the rate before
    assert {type(o).__name__: {g["lr"] for g in o.param_groups} for o in made} == {"Muon": {1e-3}, "AdamW": {2.5e-4}}


# -- averaged weights --------------------------------------------------------------------------------------------------


def test_swapping_the_average_twice_is_the_identity(model):
    ema = Ema(model, 0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    ema.update()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    average = [value.clone() for value in ema.average]
    ema.swap()
    assert all(torch.equal(p, a) for p, a in zip(model.parameters(), average))
    assert not any(torch.equal(p, weights[key]) for key, p in model.named_parameters())
    ema.swap()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(now, then) for now, then in zip(ema.average, average))


def test_the_average_forgets_its_start_and_follows_its_decay():
    model = torch.nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.9)
    model.weight.data.fill_(1.0)
    expected = float(ema.average[0])
    for update in range(1, 200):
        ema.update()
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay)
        assert float(ema.average[0]) == pytest.approx(expected, rel=1e-5)
    assert float(ema.average[0]) == pytest.approx(1.0, abs=1e-4)


def test_the_average_is_saved_by_name(model, make_spec, make_model):
    ema = Ema(model, 0.9)
    model.encoders["darcy"].latents.data += 1.0
    ema.update()
    other = Ema(model, 0.9)
    other.load_state_dict(ema.state_dict())
    assert other.updates == 1 and all(torch.equal(a, b) for a, b in zip(ema.average, other.average))


# -- steps of a setup --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ("encoders", "operator.blocks"))
@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_an_overflow_in_one_optimizer_skips_the_step_of_all(tiny_setup, where, bad):
    # AdamW and Muon are stepped apart: clipping by a norm that is NaN spreads one's bad gradient to the other's.
    setup = tiny_setup(**{"training.amp": True, "training.amp_dtype": "float16"})
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    scale = setup.scaler.get_scale()
    key, spoiled = next((k, p) for k, p in setup.model.named_parameters() if k.startswith(where) and p.ndim >= 2)
    for parameter in setup.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    spoiled.grad.view(-1)[0] = bad
    setup.scaler.scale(torch.zeros(()))  # as a backward pass would have
    setup._update(grad_clip=1.0, loss=torch.zeros(()))
    assert all(torch.equal(value, before[key]) for key, value in setup.model.state_dict().items())
    assert setup.scaler.get_scale() == scale / 2
    assert not any(optimizer.state for optimizer in setup.optimizers)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_a_step_changes_every_parameter_that_the_batches_use(tiny_setup, dtype):
    setup = tiny_setup(**{"training.amp": True, "training.amp_dtype": dtype, "training.lambda_inv_enc": 0.1})
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype == "float16")
    batches = list(setup.loader.epoch(0))[:8]
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    for step in range(4):  # zero-initialised outputs let gradients through from the second step on
        set_learning_rate(setup.optimizers, 1.0)
        loss, _, norm = setup.step(batches[2 * step : 2 * step + 2], step)
        assert loss.isfinite() and norm.isfinite()
    assert [key for key, value in setup.model.state_dict().items() if torch.equal(value, before[key])] == []


def test_gradients_are_clipped_as_one_vector(tiny_setup):
    setup = tiny_setup()
    batches = list(setup.loader.epoch(0))[:2]
    norms = []
    for optimizer in setup.optimizers:
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: norms.extend(
                float(p.grad.norm()) for g in optimizer.param_groups for p in g["params"] if p.grad is not None
            )
        )
    setup.config = setup.config.model_copy(
        update={"training": setup.config.training.model_copy(update={"grad_clip": 0.01})}
    )
    _, _, norm = setup.step(batches, 0)
    assert norm > 0.01 and math.hypot(*norms) == pytest.approx(0.01, rel=1e-3)


def test_microbatches_of_a_step_add_up_to_one_batch(tiny_setup):
    whole, parts = tiny_setup(("darcy",)), tiny_setup(("darcy",))
    batch = next(iter(whole.loader.epoch(0)))
    halves = [type(batch)("darcy", batch.inputs[i::2], batch.targets[i::2], batch.parameters[i::2], 0) for i in (0, 1)]
    first, second = whole.step([batch], 0), parts.step(halves, 0)
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[2], second[2])
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)

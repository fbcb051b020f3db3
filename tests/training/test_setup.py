"""One way from any config to any other: what a flip changes, what it must not, and that undoing undoes."""

import copy
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, DataError
from upsnb.models import chosen
from upsnb.phases import BY_NAME, EXTRAS, HOT, PHASES, is_on, unmet
from upsnb.training import compiling, optimizers, parallel
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, cold_changes

INVERSE = {"training.lambda_inv_enc": 0.5}  # so that the frequency of inverse losses has something to act on
NEEDS_GPU = ("optimizer_offload", "flex_attention", "tf32")
CPU_PHASES = [p for p in (*PHASES, *EXTRAS) if p.hot and p.name not in (*NEEDS_GPU, "compile")]
slow_compile = pytest.param(next(p for p in PHASES if p.name == "compile"), marks=pytest.mark.slow, id="compile")
phases = pytest.mark.parametrize("phase", [*(pytest.param(p, id=p.name) for p in CPU_PHASES), slow_compile])
TOLERANCE = {"identical": 0.0, "rounding": 0.05}


def process_state() -> dict:
    """What belongs to the process and no phase may leave changed."""
    return {
        # torch leaves its caches of kernels and an address there when it first compiles
        "environment": {k: v for k, v in os.environ.items() if "TORCHINDUCTOR_" not in k},
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "dynamo": torch._dynamo.config.save_config_portable(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "random": random.getstate(),
    }


def change(setup: Setup, overlay: dict) -> None:
    setup.update(overlays.apply(setup.config, overlay))


def batches(setup: Setup, count: int = 2, start: int = 0) -> list:
    epoch = setup.loader.epoch(0, start)
    return [next(epoch) for _ in range(count)]


def gradients(setup: Setup, chosen: list) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of fixed batches, the setup's own precision and losses; the setup stays as it was."""
    from upsnb.training.precision import amp_dtype

    generator = setup.generator.get_state()
    setup.model.zero_grad()
    loss = 0.0
    for batch in chosen:
        total, _ = setup.loss(batch, setup.objective.weights(0, 0), amp_dtype(setup.config))
        total.backward()
        loss += total.item()
    found = {name: p.grad.clone() for name, p in setup.model.named_parameters() if p.grad is not None}
    setup.model.zero_grad()
    setup.generator.set_state(generator)
    return loss, found


@phases
def test_a_phase_changes_numbers_as_it_says_and_undoing_it_undoes_all(tiny_setup, phase):
    names = ("darcy",) if phase.name == "compile" else ("advection", "darcy")  # kernels take their time
    setup = tiny_setup(names, **INVERSE, **{"training.amp": phase.name == "bf16", "training.num_workers": 0})
    change(setup, phase.off)
    chosen, weights = batches(setup), copy.deepcopy(setup.model.state_dict())
    before, process = gradients(setup, chosen), process_state()

    change(setup, phase.on)
    assert is_on(phase, setup.config)
    during = gradients(setup, chosen)
    assert list(setup.model.state_dict()) == list(weights)
    if phase.numerics in TOLERANCE:
        assert during[0] == pytest.approx(before[0], rel=TOLERANCE[phase.numerics])
        old, new = (torch.cat([found[1][name].flatten() for name in before[1]]) for found in (before, during))
        assert (new - old).norm() <= TOLERANCE[phase.numerics] * old.norm()

    change(setup, phase.off)
    after = gradients(setup, chosen)
    assert after[0] == before[0]
    assert all(torch.equal(after[1][name], gradient) for name, gradient in before[1].items())
    assert process_state() == process
    assert all(torch.equal(value, weights[name]) for name, value in setup.model.state_dict().items())


def test_a_config_reached_by_flips_trains_like_a_fresh_build_of_it(tiny_setup):
    path = [
        {"operator.pdet.use_activation_checkpoint": True},
        {"training.batch_size": 4, "training.noise": 0.01},
        {"operator.pdet.attention": "math", "optimizer.lr": 5e-4},
        {"training.batch_size": 6, "training.lambda_spectral": 0.1, "operator.pdet.use_activation_checkpoint": False},
        {"training.noise": None},
    ]
    flipped = tiny_setup()
    for overlay in path:
        change(flipped, overlay)
    fresh = Setup.build(flipped.config, Path(), flipped.ranks, lambda message: None)
    for step in range(3):
        losses = []
        for setup in (flipped, fresh):
            torch.manual_seed(step)
            losses.append(setup.step(batches(setup, start=2 * step), step)[0].item())
        assert losses[0] == losses[1]
    for (name, ours), (_, theirs) in zip(flipped.model.named_parameters(), fresh.model.named_parameters()):
        assert torch.equal(ours, theirs), name


class Operations(TorchDispatchMode):
    """Counts what is called inside, by name and by the types of float tensors that go in."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.types: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name.removeprefix("aten::")
        self.names.append(name)
        tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        self.types.setdefault(name, set()).update(x.dtype for x in tensors if x.is_floating_point() or x.is_complex())
        return function(*arguments, **(options or {}))

    def count(self, part: str) -> int:
        return sum(part in name for name in self.names)


def saved_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes that autograd keeps for backward over two microbatches: all, and those in 16 bits."""
    from upsnb.training.precision import amp_dtype

    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor.dtype.itemsize == 2)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for batch in batches(setup):
            setup.loss(batch, setup.objective.weights(0, 0), amp_dtype(setup.config))
    return sum(size for size, _ in kept.values()), sum(size for size, short in kept.values() if short)


def optimizer_operations(setup: Setup) -> Operations:
    for parameter in setup.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Operations() as found:
        setup.optimizers[-1].step()
    return found


def test_checkpointing_keeps_fewer_bytes(tiny_setup):
    setup = tiny_setup()
    before = saved_bytes(setup)[0]
    change(setup, BY_NAME["activation_checkpointing"].on)
    assert saved_bytes(setup)[0] < 0.8 * before


def test_loss_frequency_computes_a_quarter_of_the_inverse_losses_at_half_the_points(tiny_setup):
    setup = tiny_setup(**INVERSE, **{"training.accum_steps": 8, "training.query_sampling.num_queries": 16})

    def work() -> tuple[int, int]:
        inverse, points = [], []
        for decoder in setup.model.inverse_decoders.values():
            decoder.register_forward_hook(lambda *_: inverse.append(1))
        sample = setup.objective._query_points
        setup.objective._query_points = lambda *given: points.append(sample(*given)) or points[-1]
        epoch = setup.loader.epoch(0)
        setup.step([next(epoch) for _ in range(8)], 0)
        setup.objective._query_points = sample
        for decoder in setup.model.inverse_decoders.values():
            decoder._forward_hooks.clear()
        return len(inverse), sum(len(chosen) for chosen in points)

    before = work()
    change(setup, {**BY_NAME["loss_frequency"].on, "training.query_sampling.num_queries": 8})
    assert (4 * work()[0], 2 * work()[1]) == before


def test_bf16_keeps_activations_in_16_bits_and_needs_no_scaler(tiny_setup):
    setup = tiny_setup()
    whole, short = saved_bytes(setup)
    assert short == 0
    change(setup, BY_NAME["bf16"].off)
    assert setup.scaler.is_enabled()
    change(setup, BY_NAME["bf16"].on)
    assert not setup.scaler.is_enabled()
    mixed, short = saved_bytes(setup)
    assert short > 0.2 * mixed and mixed < whole


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_under_autocast_transforms_norms_and_losses_stay_in_float32(tiny_setup, backend):
    settings = {"training.amp": True, "training.amp_dtype": "bfloat16", "operator.pdet.attention": backend}
    settings["optimizer.name"] = "adamw"  # Muon's own iteration is in bfloat16 by design
    setup = tiny_setup(**INVERSE, **settings, **{"training.lambda_spectral": 0.1, "training.lambda_rollout": 0.1})
    with Operations() as found:
        setup.step(batches(setup), 0)
    assert torch.bfloat16 in found.types["mm"]  # products are what autocast is for
    for name in {"_fft_r2c", "linalg_vector_norm", "_foreach_norm", "mean"} & found.types.keys():
        assert found.types[name] <= {torch.float32, torch.complex64}, name
    assert {"_fft_r2c", "linalg_vector_norm"} <= found.types.keys()
    assert {p.dtype for p in setup.model.parameters()} == {torch.float32}


def test_fused_and_foreach_change_the_optimizer_s_kernels(tiny_setup):
    setup = tiny_setup(**{"optimizer.name": "adamw", "optimizer.foreach": False})
    for overlay, counts in (
        ({}, (False, False)),
        ({"optimizer.foreach": True}, (False, True)),
        ({"optimizer.foreach": None, "optimizer.fused": True}, (True, False)),
        ({"optimizer.fused": False, "optimizer.foreach": False}, (False, False)),
    ):
        change(setup, overlay)
        found = optimizer_operations(setup)
        assert (found.count("_fused_adamw") > 0, found.count("_foreach_lerp") > 0) == counts, overlay
        assert setup.optimizers[-1].param_groups[0]["fused"] == (counts[0] or None)


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_a_phase_that_needs_a_gpu_says_so_on_the_cpu(name):
    config = RunConfig.model_validate({"training": {"device": "cpu", "grad_clip": None}})
    problems = unmet(BY_NAME[name], config, hardware.detect())
    assert problems and all(problem.remedy for problem in problems)


def test_tensorfloat32_is_put_back_as_it_was_found(tiny_setup, monkeypatch):
    monkeypatch.setattr(hardware, "problems", lambda config, machine: [])
    setup, before = tiny_setup(), process_state()
    change(setup, {"training.tf32": True})
    change(setup, {"training.batch_size": 4})
    assert torch.get_float32_matmul_precision() == "high"
    change(setup, {"training.tf32": False})
    assert process_state() == before


def test_building_a_model_leaves_the_gpu_s_random_numbers_alone(tiny_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("reseeded CUDA"))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: pytest.fail("reseeded CUDA"))
    chosen.build(tiny_config(), {})


def test_gradients_are_touched_where_they_are_averaged_and_nowhere_else(tiny_setup, monkeypatch):
    setup, touched = tiny_setup(**{"training.accum_steps": 3}), []
    setup.ranks = Ranks(world_size=2)  # what it would send goes nowhere
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    setup.loss.register_forward_pre_hook(lambda objective, _: touched.append(objective.touch_all))
    for no_sync, expected in ((True, [False, False, True]), (False, [True] * 3)):
        setup.config = overlays.apply(setup.config, {"training.no_sync": no_sync})
        setup.step(batches(setup, 3), 0)
        assert touched == expected
        touched.clear()


def test_compiling_is_another_launch_where_ranks_that_wait_for_a_failed_one_cannot_be_freed(tiny_config):
    sharded = tiny_config(**{"training.use_fsdp2": True, "training.num_gpus": 2})
    for config, cold in (
        (sharded, ["training.compile"]),
        (overlays.apply(sharded, {"training.num_gpus": 1}), []),
        (overlays.apply(sharded, {"training.use_fsdp2": False}), []),
    ):
        compiled = overlays.apply(config, {"training.compile": True})
        assert cold_changes(config, compiled) == cold
        assert cold_changes(compiled, config) == []  # switching off fails nowhere


POOL = {
    "training.batch_size": (4, 6, 8),
    "data.mixing.by": ("uniform", "size", "loss"),
    "training.amp": (False, True),
    "training.amp_dtype": ("bfloat16", "float16", "float32"),
    "operator.pdet.use_activation_checkpoint": (False, True),
    "operator.pdet.checkpoint_every": (1, 2),
    "operator.pdet.checkpoint_parts": ("all", "attention", "mlp"),
    "operator.pdet.attention": ("sdpa", "flash", "math"),
    "training.inverse_loss_frequency": (1, 4),
    "training.query_sampling.num_queries": (None, 8),
    "training.query_sampling.jitter": (0.0, 0.3),
    "training.lambda_spectral": (0.0, 0.1),
    "training.lambda_rollout": (0.0, 0.1),
    "training.loss_frequency": ({}, {"spectral": 2}),
    "training.loss_warmup_steps": ({}, {"spectral": 5}),
    "training.noise": (0.0, 0.05),
    "training.grad_clip": (None, 1.0),
    "training.no_sync": (True, False),
    "data.residency": ("device", "workers"),
    "optimizer.lr": (1e-3, 5e-4),
    "optimizer.muon_lr": (None, 2e-3),
    "optimizer.weight_decay": (0.03, 0.0),
    "optimizer.betas": ([0.9, 0.99], [0.8, 0.95]),
    "optimizer.momentum": (0.95, 0.9),
    "optimizer.fused": (False, True),
    "optimizer.foreach": (None, False, True),
}


def wander(setup: Setup, draws: random.Random, pool: dict, flips: int) -> None:
    """Take a step, flip some settings at random, and so on; combinations that contradict are drawn again."""
    done = 0
    while done < flips:
        overlay = {path: draws.choice(pool[path]) for path in draws.sample(sorted(pool), draws.randint(1, 4))}
        try:
            change(setup, overlay)
        except ConfigError:
            continue
        setup.step(batches(setup, start=2 * done), done)
        done += 1


def assert_trains_like_a_fresh_build(flipped: Setup) -> None:
    fresh = Setup.build(flipped.config, Path(), flipped.ranks, lambda message: None)
    fresh.load_state_dict(copy.deepcopy(flipped.state_dict()))
    for step in range(3):
        losses = []
        for setup in (flipped, fresh):
            torch.manual_seed(step), setup.generator.manual_seed(step)
            losses.append(setup.step(batches(setup, start=2 * step), 20 + step)[0])
        assert torch.equal(losses[0], losses[1]), flipped.config
    for (name, ours), theirs in zip(flipped.model.named_parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), (name, flipped.config)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_flips_training_goes_on_like_a_fresh_build_with_its_state(tiny_setup, seed):
    assert all(path.startswith(HOT) for path in POOL)
    setup = tiny_setup(**INVERSE, **{"operator.pdet.drop_path": 0.2})
    wander(setup, random.Random(seed), POOL, flips=8)
    assert_trains_like_a_fresh_build(setup)


@pytest.mark.slow
def test_flips_of_compiled_code_too_lead_to_a_fresh_build(tiny_setup, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")  # all of the compiler but its code generation
    torch._dynamo.reset()
    pool = {key: POOL[key] for key in ("training.batch_size", "operator.pdet.attention", "optimizer.fused")}
    setup = tiny_setup(**INVERSE, **{"training.compile": True})
    wander(setup, random.Random(0), pool | {"training.compile": (True, False)}, flips=5)
    change(setup, {"training.compile": True})
    assert_trains_like_a_fresh_build(setup)
    torch._dynamo.reset()


def test_moments_survive_another_learning_rate(tiny_setup):
    setup = tiny_setup()
    setup.step(batches(setup), 0)
    before = [optimizer.state_dict()["state"] for optimizer in setup.optimizers]
    change(setup, {"optimizer.lr": 1e-5})
    for optimizer, state in zip(setup.optimizers, before):
        for key, entry in optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[key][name]))
    assert {group["peak_lr"] for optimizer in setup.optimizers for group in optimizer.param_groups} == {1e-5}


@pytest.mark.parametrize(("scaling", "of_16_over_4"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_both_learning_rates_follow_the_pairs_of_a_step(tiny_setup, scaling, of_16_over_4):
    def rates():
        setup.set_learning_rate(0.5)
        return [group["lr"] for optimizer in setup.optimizers for group in optimizer.param_groups]

    setup = tiny_setup(
        ("darcy",),
        optimizer={"lr": 1e-3, "muon_lr": 2e-3, "lr_scaling": scaling, "lr_reference_batch": 4},
        **{"training.batch_size": 2, "training.accum_steps": 4, "stages.operator.scheduler.name": "constant"},
    )
    setup.ranks = replace(setup.ranks, world_size=2)
    peak = [2e-3, 1e-3, 1e-3]  # Muon's, and AdamW's two groups
    assert rates() == pytest.approx([of_16_over_4 * rate for rate in peak], rel=1e-12)
    setup.ranks = Ranks()
    change(setup, {"training.batch_size": 4, "training.accum_steps": 1})
    assert rates() == peak, "hot: at the reference batch they are what was written"
    change(setup, {"optimizer.lr_reference_batch": 1, "optimizer.lr_scaling": "linear"})
    assert rates() == [4 * rate for rate in peak]


def test_resident_data_is_read_once(tiny_setup):
    setup = tiny_setup()
    fields = setup.loader.reader.fields
    change(setup, {"training.batch_size": 4})
    assert setup.loader.reader.fields is fields
    assert len(batches(setup)[0].inputs) == 4


def test_an_update_that_fails_halfway_leaves_what_was_there(tiny_setup, monkeypatch):
    setup = tiny_setup(**{"training.amp": True, "training.amp_dtype": "float16"})
    parts = ("config", "model", "loss", "optimizers", "scaler", "ema")
    before = {name: getattr(setup, name) for name in parts}

    def fail(*_):
        raise RuntimeError("no memory to pin")

    new = overlays.apply(setup.config, {"training.amp": False, "optimizer.fused": True})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory to pin"):
        patch.setattr(optimizers, "load_optimizer_state", fail)
        setup.update(new)
    assert {name: getattr(setup, name) for name in parts} == before and setup.scaler.is_enabled()
    setup.update(new)
    assert not setup.scaler.is_enabled() and setup.config == new


def test_a_step_that_failed_after_its_first_microbatch_leaves_no_gradient_on_a_sharded_rank(tiny_config):
    config = tiny_config(**{"training.use_fsdp2": True, "training.accum_steps": 2, "optimizer.name": "adamw"})
    ranks = parallel.initialise(config)
    try:
        setups = [Setup.build(config, Path(), ranks, lambda message: None) for _ in range(2)]
        batches = setups[0].loader.peek()
        with parallel.synchronising(setups[0].loss, on=False):
            setups[0].loss(batches[0], setups[0].objective.weights(0, 0), None)[0].backward()
        setups[0].discard_step()
        norms = [float(setup.step(batches, 0)[2]) for setup in setups]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    finally:
        parallel.shutdown(ranks)


@pytest.mark.parametrize(
    ("overlay", "error", "said"),
    [
        ({"latent.dim": 64}, ConfigError, "latent.dim: cannot change while training runs"),
        ({"training.num_gpus": 2}, ConfigError, "training.num_gpus: cannot change"),
        ({"training.lambda_inv_enc": 0.5}, ConfigError, "training.lambda_inv_enc"),
        ({"training.batch_size": 10**6}, DataError, "lower batch_size"),
    ],
)
def test_what_cannot_change_is_refused_and_changes_nothing(tiny_setup, overlay, error, said):
    setup = tiny_setup()
    config, loader = setup.config, setup.loader
    with pytest.raises(error, match=said):
        change(setup, overlay)
    assert setup.config == config
    assert setup.loader.schedule.global_size == loader.schedule.global_size
    setup.step(batches(setup), 0)

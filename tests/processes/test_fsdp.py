"""FSDP2 on 1, 2 and 4 real ranks: the run that DDP makes, with a share of its weights and moments on each rank.

Run by torchrun as a script, this file trains the cases both ways in every rank and writes down what rank 0 found.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.runs import runfolder
from upsnb.runs.events import last_events
from upsnb.training import checkpoint, optimizers, parallel
from upsnb.training.muon import Muon
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker import loop, requests

COMMON = {
    "training.accum_steps": 3,  # of two datasets: a step's last microbatch is not every encoder's last
    "training.grad_clip": 0.5,
    "training.ema_decay": 0.9,
    "training.lambda_inv_enc": 0.1,
    "training.inverse_loss_frequency": 2,
    "training.lambda_spectral": 0.1,  # with queries: a decoder is called twice, on the grid and at points
    "training.query_sampling.num_queries": 24,
    "operator.fourier_modes": 4,
    "operator.means": "kept",
}
LATENT = {
    "optimizer.name": "adamw",
    "operator.rollout": "latent",
    "operator.fourier_modes": 0,
    "operator.means": "free",
    "training.lambda_forward": 0.5,
    "training.lambda_inv_dec": 0.1,  # an encoder is called three times, once without gradients
    "training.accum_steps": 2,
}
EVERY = {"training.no_sync": False, "optimizer.fused": True}
NOTHING_LAST = {"training.loss_frequency": {"relative": 2, "spectral": 2}}  # no term acts in a last microbatch
FLIPS = {
    2: {"operator.pdet.use_activation_checkpoint": True},
    4: {"training.inverse_loss_frequency": 4, "training.no_sync": False},
    6: {"operator.pdet.attention": "math", "training.batch_size": 2},
    8: {"training.amp": True, "training.amp_dtype": "bfloat16"},
    10: {"training.amp": False, "operator.pdet.use_activation_checkpoint": False},
}
CASES = {  # name: (settings, steps, {step: flip})
    "adamw": ({"optimizer.name": "adamw"}, 6, {}),
    "muon": ({"optimizer.name": "muon_hybrid"}, 6, {}),
    "every microbatch": ({"optimizer.name": "adamw", **EVERY}, 6, {}),
    "latent": (LATENT, 6, {}),
    "nothing in the last microbatch": ({"optimizer.name": "adamw", **NOTHING_LAST}, 6, {}),
    "flips": ({"optimizer.name": "adamw"}, 12, FLIPS),
    "bfloat16": ({"optimizer.name": "adamw", "training.amp": True, "training.amp_dtype": "bfloat16"}, 6, {}),
}
ON_FOUR_RANKS = ("muon",)
KINDS = ("checkpoint", "restored", "step", "end")
ROUGH = (
    "muon",
    "flips",
    "bfloat16",
)  # bfloat16 in Muon's products or in the step; the others differ by summation order


def train(setup: Setup, num_steps: int, flips: dict) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    curve, epoch = [], 0
    batches = iter(())
    for step in range(num_steps):
        if step in flips:
            with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("a flip gathered a tensor")):
                setup.update(overlays.apply(setup.config, flips[step]))
            batches = iter(())
        chosen = []
        while len(chosen) < setup.config.training.accum_steps:
            batch = next(batches, None)
            if batch is None:
                batches, epoch = setup.loader.epoch(epoch), epoch + 1
                continue
            chosen.append(batch)
        loss, _, norm = setup.step(chosen, step)
        curve.append((loss.item(), norm.item()))
    return curve


def local_bytes(setup: Setup) -> int:
    """What this rank holds of parameters and optimizer state."""
    moments = optimizers.optimizer_state(setup.model, setup.optimizers).values()
    held = [*setup.model.parameters(), *(value for state in moments for value in state.values() if value.dim())]
    return sum(optimizers.local(tensor).nbytes for tensor in held)


def distance(one: dict, other: dict, start: dict) -> float:
    """How far two sets of weights are from each other, over how far training moved them."""
    assert one.keys() == other.keys() == start.keys()
    square = lambda a, b: sum((a[name] - b[name]).double().square().sum().item() for name in a)  # noqa: E731
    return math.sqrt(square(one, other) / square(one, start))


def weights_of(setup: Setup) -> dict:
    return {name: value.clone() for name, value in parallel.gather_full(dict(setup.model.state_dict())).items()}


def compare(case: str, config: RunConfig, ranks: Ranks) -> dict:
    """A case under DDP, or plain on one rank, and under FSDP2."""
    settings, num_steps, flips = CASES[case]
    found = []
    for sharded in (False, True):
        both = overlays.apply(config, {**COMMON, **settings, "training.use_fsdp2": sharded})
        setup = Setup.build(both, Path(), ranks, lambda message: None)
        start, names = weights_of(setup), [name for name, _ in setup.model.named_parameters()]
        curve = train(setup, num_steps, flips)
        state = setup.state_dict()
        found.append((curve, weights_of(setup), parallel.gather_full(state), names))
    # saved, and taken up again by a fresh one
    again = Setup.build(setup.config, Path(), ranks, lambda message: None)
    again.load_state_dict(state)
    restored, own = parallel.gather_full(again.state_dict()), parallel.gather_full(setup.state_dict())
    (plain, one, before, names), (sharded, other, after, sharded_names) = found
    return {
        "curves": [plain, sharded],
        "weights": distance(one, other, start),
        "averages": distance(before["ema"]["average"], after["ema"]["average"], start),
        "averaged": distance(one, before["ema"]["average"], start),
        "stepped": [sorted(before["moments"]), sorted(after["moments"])],
        "names": [names, sharded_names],
        "bytes": parallel.all_gather_objects(ranks, local_bytes(setup)),
        "all_bytes": whole_bytes(after),
        "restored": all(same(restored[part], own[part]) for part in ("model", "moments", "ema")),
    }


def whole_bytes(state: dict) -> int:
    held = [*state["model"].values(), *(v for state in state["moments"].values() for v in state.values() if v.dim())]
    return sum(value.nbytes for value in held)


def same(one, other) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def overflow(config: RunConfig, ranks: Ranks) -> dict:
    """float16: a gradient that is infinite in the last rank's shard alone must stop the step of every rank."""
    half = {"training.amp": True, "training.amp_dtype": "float16", "training.use_fsdp2": True}
    setup = Setup.build(overlays.apply(config, {**COMMON, **half}), Path(), ranks, lambda message: None)
    before = weights_of(setup)
    scale = setup.scaler.get_scale()
    batches, real = setup.loader.epoch(0), setup._update

    def update(*arguments):
        if ranks.rank == ranks.world_size - 1:
            setup.model.operator.output.weight.grad.to_local()[0, 0] = math.inf
        return real(*arguments)

    setup._update = update
    setup.step([next(batches)], 0)
    unchanged = same(weights_of(setup), before)
    scales = parallel.all_gather_objects(ranks, setup.scaler.get_scale() / scale)
    setup._update = real
    setup.step([next(batches)], 1)
    return {"unchanged": unchanged, "scales": scales, "next_changes": not same(weights_of(setup), before)}


SHAPES = [(96, 96), (192, 96), (96, 192), (96, 96), (7, 3), (1, 5)]  # the last ones leave ranks without rows


def muon_apart(ranks: Ranks) -> float:
    """Three steps of Muon on sharded matrices: how far they end from those of whole ones, over the way they went."""
    draws = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draws) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=draws) for shape in SHAPES] for _ in range(3)]
    mesh, ended = init_device_mesh("cpu", (ranks.world_size,)), []
    for share in (lambda x: x.clone(), lambda x: distribute_tensor(x, mesh, [Shard(0)])):
        weights = [torch.nn.Parameter(share(weight)) for weight in start]
        optimizer = Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.9)
        for number, step in enumerate(gradients):
            for weight, gradient in zip(weights, step):
                weight.grad = share(gradient)
            weights[number].grad = None
            optimizer.step()
        ended.append(parallel.gather_full({str(number): w.detach() for number, w in enumerate(weights)}))
    return distance(*ended, {str(number): weight for number, weight in enumerate(start)})


def collectives(config: RunConfig, ranks: Ranks) -> dict[str, int]:
    """Messages of one step at reference width: of its optimizers, and all but those that gather parts."""
    wide = {"latent.dim": 384, "operator.pdet.hidden_dim": 384, "operator.pdet.num_heads": 6, "training.accum_steps": 1}
    config = overlays.apply(config, {**wide, "operator.pdet.depth": 3, "training.use_fsdp2": True})
    setup = Setup.build(config, Path(), ranks, lambda message: None)
    batches, counts = setup.loader.epoch(0), {}
    update = setup._update

    def counted(*arguments):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as inside:
            norm = update(*arguments)
        counts["optimizers"] = messages(inside)
        return norm

    setup.step([next(batches)], 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as whole:
        setup.step([next(batches)], 1)
    setup._update = counted
    setup.step([next(batches)], 2)
    gathering = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    return {
        **counts,
        "beside gathering": messages(whole, gathering),
        "gathering": messages(whole) - messages(whole, gathering),
    }


def back_to_best(config: RunConfig, ranks: Ranks, folder: Path, sharded: bool) -> dict:
    """A whole run that is asked for its best weights a step after they were saved; what came of it on all ranks."""
    settings = {"training.accum_steps": 10, "stages.operator.epochs": 2, "evaluation.every_epochs": 1}
    config = overlays.apply(config, {**COMMON, **settings, "optimizer.lr": 0.02, "training.use_fsdp2": sharded})
    folder, taken, real = folder / f"best-{sharded}", [], requests.Requests.restore
    if ranks.rank == 0:
        runfolder.create(config, folder)
    parallel.barrier(ranks)

    class Beat(runfolder.Heartbeat):
        def beat(self, step):
            super().beat(step)
            best = last_events(folder, ("checkpoint",)).get("checkpoint", {"step": math.inf})["step"]
            if ranks.rank == 0 and step > best and not runfolder.read_control(folder).revision:
                runfolder.write_control(folder, None, runfolder.RESTORE)

    def restore(self, step, revision):
        setup = self.flips.setup
        before = weights_of(setup)
        real(self, step, revision)
        kept, now = checkpoint.load(folder, "best"), parallel.gather_full(setup.state_dict())
        parts = {part: same(now[part], kept["setup"][part]) for part in ("model", "moments", "ema")}
        taken.append({"step": step, "changed": not same(now["model"], before), **parts})

    requests.Requests.restore = restore
    events = runfolder.EventWriter(folder, ranks.rank)
    loop.train(config, folder, ranks, events, Beat(folder, ranks.rank))
    requests.Requests.restore = real
    said = runfolder.read_events(folder, KINDS)
    return {"taken": parallel.all_gather_objects(ranks, taken), "said": said}


def messages(profile, without: tuple[str, ...] = ()) -> int:
    found = {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
    return sum(count for name, count in found.items() if name not in without)


def script(config_file: Path, results: Path) -> None:
    config = configs.load(config_file)
    ranks = parallel.initialise(config)
    cases = CASES if ranks.world_size < 4 else ON_FOUR_RANKS
    found = {case: compare(case, config, ranks) for case in cases}
    found["overflow"] = overflow(config, ranks)
    found["muon apart"], found["collectives"] = muon_apart(ranks), collectives(config, ranks)
    found["back to best"] = [back_to_best(config, ranks, results.parent, sharded) for sharded in (False, True)]
    if ranks.rank == 0:
        results.write_text(json.dumps(found))
    parallel.barrier(ranks)
    os._exit(0)  # as upsnb.worker ends


@pytest.fixture
def found(cache, tiny_config, tmp_path_factory):
    """`found(2)`: what the script found on two ranks."""

    def launch(num_ranks: int) -> dict:
        if num_ranks not in cache:
            folder = tmp_path_factory.mktemp("fsdp")
            settings = {"training.num_gpus": num_ranks, "training.batch_size": 8 // num_ranks}
            config = tiny_config(**settings, **{"training.use_fsdp2": True})
            configs.save(config, folder / "config.yaml")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            root = str(Path(__file__).resolve().parents[2])
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
            done = subprocess.run(
                [*command, __file__, str(folder / "config.yaml"), str(folder / "results.json")],
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert "FSDP2-wrapped" not in done.stderr
            cache[num_ranks] = json.loads((folder / "results.json").read_text())
        return cache[num_ranks]

    return launch


FOUR = pytest.param(4, marks=pytest.mark.long)
CASES_BY_RANKS = [(2, case) for case in CASES] + [pytest.param(4, case, marks=FOUR.marks) for case in ON_FOUR_RANKS]
several = pytest.mark.parametrize("num_ranks", (2, FOUR))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "case"), CASES_BY_RANKS, ids=str)
def test_sharding_changes_neither_curve_nor_weights_nor_averages(found, num_ranks, case):
    result = found(num_ranks)[case]
    plain, sharded = (np.array(curve) for curve in result["curves"])  # (steps, 2): loss, gradient norm
    assert len(plain) == CASES[case][1] and plain[:, 1].max() > COMMON["training.grad_clip"]
    loss, norm, weights = (0.02, 0.1, 0.1) if case in ROUGH else (1e-5, 1e-4, 1e-3)
    np.testing.assert_allclose(sharded[:, 0], plain[:, 0], rtol=loss)
    np.testing.assert_allclose(sharded[:, 1], plain[:, 1], rtol=norm)
    assert result["averaged"] > 0.05  # or the average could as well be the weights
    assert result["weights"] < weights and result["averages"] < weights
    assert result["stepped"][0] == result["stepped"][1] and result["names"][0] == result["names"][1]


@pytest.mark.slow
@several
def test_each_rank_holds_its_share_of_weights_and_moments(found, num_ranks):
    for case in ON_FOUR_RANKS:
        result = found(num_ranks)[case]
        assert sum(result["bytes"]) == result["all_bytes"]
        assert max(result["bytes"]) < 1.05 * result["all_bytes"] / num_ranks


@pytest.mark.slow
@several
def test_a_sharded_state_is_taken_up_as_it_was(found, num_ranks):
    assert all(result["restored"] for name, result in found(num_ranks).items() if name in CASES)


def alone(config: RunConfig, folder: Path, train_here) -> list[dict]:
    """Events of a whole run on one rank of this process."""
    ranks = parallel.initialise(config)
    try:
        return train_here(config, folder, ranks=ranks)
    finally:
        parallel.shutdown(ranks)


FNO = {"model": {"build": "upsnb.models.fno:FNO", "settings": {"width": 8, "modes": 4, "depth": 2}}}
FNO |= {"training.lambda_inv_enc": 0.0, "training.query_sampling.num_queries": None}


@pytest.mark.parametrize("model", [{}, FNO], ids=["ups", "weights in another order"])
def test_one_sharded_rank_is_a_whole_run(tiny_config, train_here, tmp_path, model):
    found = {}
    for sharded in (False, True):
        settings = {**COMMON, "optimizer.name": "adamw", "operator.pdet.depth": 1, **model}
        settings["training.use_fsdp2"] = sharded
        folder = tmp_path / str(sharded)
        events = alone(tiny_config(**settings), folder, train_here)
        assert not torch.distributed.is_initialized()
        assert events[-1]["kind"] == "end" and events[-1]["reason"] == "epochs"
        results = json.loads((folder / runfolder.EVALUATION).read_text())["datasets"]
        assert (folder / runfolder.EXAMPLES).exists()
        found[sharded] = (
            [event["loss"] for event in events if event["kind"] == "step"],
            [result["test"]["nrmse_mean"] for result in results.values()],
        )
    assert len(found[True][0]) > 5
    for plain, sharded in zip(found[False], found[True]):
        np.testing.assert_allclose(sharded, plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.long  # a reference file for 4 GPUs does it on every rank
def test_compiled_blocks_compute_the_same_sharded(tiny_config, train_here, tmp_path):
    found = {}
    for compiled in (False, True):
        settings = {"optimizer.name": "adamw", "training.use_fsdp2": True, "operator.pdet.depth": 2}
        config = tiny_config(("darcy",), **settings, **{"training.compile": compiled})
        events = alone(config, tmp_path / str(compiled), train_here)
        found[compiled] = [event["loss"] for event in events if event["kind"] == "step"]
        compilations = [(e["step"], e["graphs"], e["graph_breaks"]) for e in events if e["kind"] == "compile"]
    np.testing.assert_allclose(found[True], found[False], rtol=1e-4)
    # Hooks that gather weights run around the compiled code, not inside it.
    assert [(step, breaks) for step, _, breaks in compilations] == [(1, 0)]


@pytest.mark.slow
@several
def test_an_overflow_in_one_shard_stops_the_step_of_all_ranks(found, num_ranks):
    result = found(num_ranks)["overflow"]
    assert result == {"unchanged": True, "scales": [0.5] * num_ranks, "next_changes": True}


@pytest.mark.slow
@several
def test_muon_steps_shards_as_it_steps_whole_matrices(found, num_ranks):
    assert found(num_ranks)["muon apart"] < 1e-2  # products of other batches round otherwise


@pytest.mark.slow
@several
def test_a_step_of_muon_sends_few_messages_whatever_the_number_of_matrices(found, num_ranks):
    counts = found(num_ranks)["collectives"]
    assert counts["gathering"] >= 6 and counts["optimizers"] >= 2  # something was counted
    assert counts["optimizers"] <= 6 and counts["beside gathering"] <= 6


@pytest.mark.slow
@several
def test_all_ranks_go_back_to_the_best_weights_and_moments_at_one_step(found, num_ranks):
    for run in found(num_ranks)["back to best"]:
        saved, (restored,), steps, end = ([e for e in run["said"] if e["kind"] == kind] for kind in KINDS)
        assert restored["applied"] and restored["from_step"] == saved[0]["step"] < restored["step"]
        expected = {"step": restored["step"], "changed": True, "model": True, "moments": True, "ema": True}
        assert run["taken"] == [[expected]] * num_ranks
        assert steps[-1]["step"] > restored["step"] and end[0]["reason"] == "epochs", "training went on"


if __name__ == "__main__":
    script(Path(sys.argv[1]), Path(sys.argv[2]))

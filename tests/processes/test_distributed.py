"""Real ranks under torchrun: they train on different pairs, end with the same weights, and change no curve.

Run by torchrun as a script, this file is `upsnb.worker` that also writes down what each rank trained and ended with.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from upsnb import config as configs
from upsnb import overlays
from upsnb.data.batches import Schedule
from upsnb.runs import runfolder
from upsnb.runs.events import events_path
from upsnb.training import checkpoint, parallel
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker import __main__ as real_worker
from upsnb.worker import loop

pytestmark = pytest.mark.slow


def worker(folder: Path) -> None:
    """Train as upsnb.worker does, and leave `seen.rank<k>.json`: pairs, and the weights' checksum."""
    seen, finish, epoch = [], loop.Loop.finish, Schedule.epoch

    def recorded_epoch(self, number, *arguments):
        microbatches = epoch(self, number, *arguments)
        seen.extend((number, m.dataset, m.pairs.tolist()) for m in microbatches)
        return microbatches

    def recorded_finish(self, reason):
        finish(self, reason)
        record = {"pairs": seen, "weights": checksum(self.setup.model), "rng": noise(self.setup.generator)}
        (folder / f"seen.rank{self.ranks.rank}.json").write_text(json.dumps(record))
        parallel.barrier(self.ranks)

    Schedule.epoch, loop.Loop.finish = recorded_epoch, recorded_finish
    real_worker.main(folder)


def checksum(model) -> str:
    """SHA-256 over all weights, gathered where they are sharded, bit for bit."""
    digest = hashlib.sha256()
    for name, value in sorted(parallel.gather_full(dict(model.state_dict())).items()):
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def noise(generator) -> list[float]:
    """What the next noise of a rank would be."""
    return torch.randn(3, generator=generator).tolist()


GLOBAL_BATCH = 16
COMMON = {
    "data.datasets.advection.augment": True,
    "data.datasets.darcy.augment": True,
    "training.query_sampling.num_queries": 24,
    "training.lambda_spectral": 0.1,
    "training.lambda_conservation": 0.1,
    "operator.walls": "free",  # else the boundary term has nothing to act on
    "training.lambda_boundary": 0.1,
    "training.lambda_inv_enc": 0.1,
    "training.inverse_loss_frequency": 2,
    "evaluation.every_epochs": 1,
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "stages.operator.epochs": 1,
}
LATENT = {
    "operator.rollout": "latent",
    "training.lambda_forward": 0.5,
    "training.lambda_inv_dec": 0.1,
    "training.accum_steps": 3,
    "optimizer": {"name": "muon_hybrid", "lr": 1e-3},
}
CASES = {  # name: (ranks, settings)
    "four ranks": (4, {}),
    "two ranks, two microbatches a step": (2, {"training.accum_steps": 2}),
    "two ranks, latent rollout, Muon": (2, LATENT),
    "four ranks, sharded": (4, {"training.use_fsdp2": True, "training.ema_decay": 0.9}),
}


def launch(config, folder: Path, num_ranks: int) -> None:
    """Run to the end under torchrun; its log is the message where that fails."""
    runfolder.create(config, folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run([*command, __file__, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


LONG = list(CASES)[:2]  # the others do what these do, sharded or with more losses


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def pair(request, cache, tiny_config, tmp_path_factory):
    """(folder of one rank in this process, folder of several ranks, their number), both trained to the end."""
    if request.param not in cache:
        num_ranks, settings = CASES[request.param]
        folders = []
        for ranks in (1, num_ranks):
            own = {"training.num_gpus": ranks, "training.batch_size": GLOBAL_BATCH // ranks}
            config = tiny_config(
                **{**COMMON, **settings, **own, **({"training.use_fsdp2": False} if ranks == 1 else {})}
            )
            folder = tmp_path_factory.mktemp("run") / "run"
            if ranks == 1:
                runfolder.create(config, folder)
                events, heartbeat = runfolder.EventWriter(folder), runfolder.Heartbeat(folder, 0)
                loop.train(config, folder, Ranks(), events, heartbeat)
                events.close()
            else:
                launch(config, folder, ranks)
            folders.append(folder)
        cache[request.param] = (*folders, num_ranks)
    return cache[request.param]


def curve(folder, key):
    return np.array([event[key] for event in runfolder.read_events(folder, ("step",))])


def seen(folder, num_ranks):
    return [json.loads((folder / f"seen.rank{rank}.json").read_text()) for rank in range(num_ranks)]


def test_the_number_of_ranks_does_not_change_the_loss_curve(pair):
    alone, together, _ = pair
    assert len(curve(alone, "step")) >= 6
    np.testing.assert_allclose(curve(together, "loss"), curve(alone, "loss"), rtol=1e-4)
    np.testing.assert_allclose(curve(together, "gradient_norm"), curve(alone, "gradient_norm"), rtol=1e-3)
    for one, other in zip(runfolder.read_events(alone, ("step",)), runfolder.read_events(together, ("step",))):
        assert one["losses"].keys() == other["losses"].keys()
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-3, abs=1e-6)
        assert (one["learning_rate"], one["datasets"]) == (other["learning_rate"], other["datasets"])


def test_the_number_of_ranks_does_not_change_the_evaluation(pair):
    alone, together, _ = pair
    results = [json.loads((folder / runfolder.EVALUATION).read_text())["datasets"] for folder in (alone, together)]
    for name in ("advection", "darcy"):
        first, second = (result[name]["test"] for result in results)
        assert first["per_sample"]["samples"] == second["per_sample"]["samples"]
        for key in ("nrmse_mean", "nrmse_median", "rmse", "max_error"):
            assert first[key] == pytest.approx(second[key], rel=1e-3)
    scores = [runfolder.read_events(folder, ("eval",))[-1]["val_nrmse"] for folder in (alone, together)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)


def test_the_number_of_ranks_does_not_change_the_weights(pair):
    states = [checkpoint.load(folder)["setup"]["model"] for folder in pair[:2]]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], atol=1e-3, rtol=1e-2, msg=key)  # Muon rounds to bfloat16


def test_ranks_end_with_identical_weights(pair):
    _, folder, num_ranks = pair
    assert len({record["weights"] for record in seen(folder, num_ranks)}) == 1


def test_ranks_train_on_different_pairs_and_on_all(pair):
    _, folder, num_ranks = pair
    pairs = [
        {(epoch, tuple(p)) for epoch, name, rows in record["pairs"] if name == "advection" for p in rows}
        for record in seen(folder, num_ranks)
    ]
    assert all(pairs) and len(set.union(*pairs)) == sum(map(len, pairs))
    assert len(set.union(*pairs)) == 16 * 10  # samples x starts


def test_ranks_draw_different_noise(pair):
    _, folder, num_ranks = pair
    assert len({tuple(record["rng"]) for record in seen(folder, num_ranks)}) == num_ranks


def test_only_rank_zero_writes_the_curve(pair):
    _, folder, num_ranks = pair
    for rank in range(1, num_ranks):
        told = [json.loads(line) for line in events_path(folder, rank).read_text().splitlines()]
        assert not [event for event in told if event["kind"] in ("step", "end")]
    assert [event["reason"] for event in runfolder.read_events(folder, ("end",))] == ["epochs"]
    assert len(runfolder.read_events(folder, ("end",))[0]["peak_memory_gib"]) == num_ranks


def test_a_checkpoint_of_several_ranks_continues_on_one(pair):
    _, folder, num_ranks = pair
    state = checkpoint.load(folder)
    assert len(state["setup"]["random"]) == num_ranks
    assert not any(part in name for name in state["setup"]["model"] for part in ("module.", "_orig_mod."))
    config = overlays.apply(configs.parse(state["config"]), {"training.use_fsdp2": False})
    setup = Setup.build(config, Path(), Ranks(), lambda message: None)
    setup.load_state_dict(state["setup"])
    assert checksum(setup.model) == seen(folder, num_ranks)[0]["weights"]


RANK = """
import sys
import torch
from upsnb.training import parallel

rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(f"{folder}/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
layer = torch.nn.Linear(8, 4)
wrapped = parallel.wrap_ddp(layer, parallel.Ranks(rank, 2), bf16_gradients=True)
wrapped(torch.load(f"{folder}/inputs.pt")[rank]).sum().backward()
torch.save(layer.weight.grad, f"{folder}/{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # else a thread of it may outlive Python, which aborts
"""


def test_gradients_that_are_sent_in_bfloat16_are_the_rounded_mean_on_every_rank(tmp_path):
    """Of a layer whose outputs are added up: the gradient of its weight is its input, in every row."""
    inputs = torch.randn(2, 1, 8)
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path)] for rank in range(2)]
    started = [subprocess.Popen(command, env=environment) for command in commands]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    mean = (inputs.bfloat16() / 2).sum(0).float()
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), mean.expand(4, 8))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))

"""Checkpoints between real processes: saved sharded, loaded whole and back; killed in the middle of one, continued.

Run by torchrun as a script, this file is `upsnb.worker` that is killed at certain moments.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from upsnb.runs import checkpoint_index, handle, runfolder
from upsnb.training import checkpoint, checkpoint_shards, optimizers
from upsnb.training import setup as setups
from upsnb.training.parallel import Ranks
from upsnb.worker import __main__ as real_worker

pytestmark = pytest.mark.slow


# -- layouts -----------------------------------------------------------------------------------------------------------


class Quiet:
    """Stands for an event writer."""

    def write(self, kind, step, **fields):
        pass


def build(config, ranks, sharded):
    """A setup whose parameters are whole on every rank, or sharded over all."""
    setup = setups.Setup.build(config, Path(), Ranks(), lambda message: None)
    if sharded:
        for block in setup.model.operator.blocks:
            fully_shard(block)
        fully_shard(setup.model)
        setup.optimizers = optimizers.build(setup.model, config.optimizer)
        setup.ema = optimizers.Ema(setup.model, config.training.ema_decay)
    setup.ranks = replace(ranks, device=setup.ranks.device)
    return setup


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def step(setup):
    """Move every parameter towards zero through its optimizer; returns the sum of squares before."""
    loss = sum(whole((p * p).sum()) for p in setup.model.parameters())
    for parameter in setup.model.parameters():
        parameter.grad = 2 * parameter.detach()
    for optimizer in setup.optimizers:
        optimizer.step()
    for p, average in zip(setup.ema.parameters, setup.ema.average, strict=True):
        average.lerp_(p, 0.5)
    return loss.item()


def go_on(config, folder, ranks, sharded, num_steps, asynchronous=False):
    """Continue the folder's checkpoint for some steps and save; returns the losses and what this rank read."""
    setup = build(config, ranks, sharded)
    read, done, allocate = [], 0, checkpoint.room_for(setup.model)

    def counted(path, shape, dtype):
        tensor = allocate(path, shape, dtype)
        read.append((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)
        return tensor

    state = checkpoint.load(folder, ranks=ranks, allocate=counted)
    if state is not None:
        setup.load_state_dict(state["setup"])
        done = state["step"]
    losses = [step(setup) for _ in range(num_steps)]
    saver = checkpoint.Saver(folder, ranks, Quiet())
    saver.save({"step": done + num_steps, "setup": setup.state_dict()}, (), asynchronous)
    saver.close()
    return losses, sum(read)


def on_ranks(num_ranks, config, folder, *arguments):
    """`go_on` in so many processes with a gloo group; what each returned, in the order of ranks."""
    store, children = folder / f"store{time.monotonic_ns()}", []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
                )
                result = go_on(config, folder, Ranks(rank, num_ranks), *arguments)
                (folder / f"result{rank}.json").write_text(json.dumps(result))
                dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * num_ranks
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(num_ranks)]


def test_one_format_whatever_was_on(tiny_config, tmp_path):
    """FSDP2 on four ranks, replicas on two, one process, FSDP2 on three: the curve goes on as if never interrupted."""
    config = tiny_config(("darcy",), **{"optimizer.lr": 1e-2, "training.ema_decay": 0.9})
    assert config.optimizer.name == "muon_hybrid"
    for folder in (tmp_path / "alone", tmp_path / "chain"):
        (folder / "checkpoints").mkdir(parents=True)
    expected, _ = go_on(config, tmp_path / "alone", Ranks(), False, 8)
    folder, losses = tmp_path / "chain", []
    for num_ranks, sharded, asynchronous in ((4, True, True), (2, False, True), (1, False, False), (3, True, False)):
        if num_ranks == 1:
            results = [go_on(config, folder, Ranks(), sharded, 2, asynchronous)]
        else:
            results = on_ranks(num_ranks, config, folder, sharded, 2, asynchronous)
        losses += results[0][0]
        files = json.loads((folder / "checkpoints" / checkpoint_index.INDEX).read_text())["checkpoints"]
        shards = [digest["bytes"] for file, digest in files[f"step-{len(losses):08d}"]["files"].items() if "__" in file]
        assert len(shards) == num_ranks
        if num_ranks > 1:
            assert max(shards) < 2 * sum(shards) / num_ranks, "each rank writes its share"
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # Muon rounds to bfloat16
    read_by_three = results[0][1]
    assert read_by_three < 0.6 * sum(t.nbytes for t in tensors_of(checkpoint.load(folder))), "and reads no more than it"
    for first, second in zip(*map(tensors_of, map(checkpoint.load, (tmp_path / "alone", folder))), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-3)


def tensors_of(state):
    tensors, _ = checkpoint_shards.split({**state, "setup": {**state["setup"], "random": {}}})
    return [tensor for _, tensor in sorted(tensors.items())]


def test_another_optimizer_starts_with_what_it_can_use(tiny_config, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    muon = tiny_config(("darcy",), **{"optimizer": {"name": "muon_hybrid"}, "training.ema_decay": 0.9})
    adamw = tiny_config(("darcy",), **{"optimizer": {"name": "adamw"}, "training.ema_decay": 0.9})
    on_ranks(2, muon, tmp_path, True, 2)
    setup = build(adamw, Ranks(), False)
    setup.load_state_dict(checkpoint.load(tmp_path, allocate=checkpoint.room_for(setup.model))["setup"])
    hidden, others, plain = optimizers.split_parameters(setup.model)
    (optimizer,) = setup.optimizers
    assert set(optimizer.state) == {*others, *plain} and hidden
    before = step(setup)
    assert step(setup) < before


# -- killed runs -------------------------------------------------------------------------------------------------------

INTERVAL = 10


def worker(folder: Path) -> None:
    """upsnb.worker, killed in the first launch while it puts step 20 in its place and in the second at step 26."""
    segment, beat, commit = int(os.environ["UPSNB_SEGMENT"]), runfolder.Heartbeat.beat, checkpoint_index.commit

    def die_in_commit(folder, step, *arguments):
        if segment == 0 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(folder, step, *arguments)

    def die_in_step(self, step):
        if segment == 1 and step == 26 and os.environ["RANK"] == "1":
            while not checkpoint_index.is_there(folder, 20):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        beat(self, step)

    checkpoint_index.commit, runfolder.Heartbeat.beat = die_in_commit, die_in_step
    real_worker.main(folder)


@pytest.mark.long  # much like the kills of tests/abuse
def test_a_run_killed_in_a_save_and_in_a_step_goes_on_by_itself(tiny_config, train_here, tmp_path):
    settings = {"optimizer": {"name": "adamw", "lr": 1e-3}, "stages.operator.epochs": 2}
    alone = train_here(tiny_config(**settings), tmp_path / "alone")
    ranks = {"training.num_gpus": 2, "training.batch_size": 4, "training.max_restarts": 2}
    saving = {"checkpoint.interval": INTERVAL, "checkpoint.async_save": True}
    run = handle.start(tiny_config(**settings, **ranks, **saving), tmp_path / "run", attached=True, worker=__file__)
    try:
        assert run.wait() == "finished", run.log_tail()
    finally:
        run._process.kill()
    said = [event["message"] for event in run.events(("progress",))]
    assert [text for text in said if "resumed" in text] == ["resumed at step 10", "resumed at step 20"]
    assert [segment["status"] for segment in run.manifest["segments"]] == ["failed", "failed", "finished"]
    curves = [{e["step"]: e["loss"] for e in events if e["kind"] == "step"} for events in (alone, run.events())]
    assert curves[0].keys() == curves[1].keys()
    np.testing.assert_allclose([curves[1][step] for step in curves[0]], list(curves[0].values()), rtol=1e-4)
    assert not [path for path in (run.folder / "checkpoints").iterdir() if path.name.startswith(".")]
    assert run.load_model().training is False


if __name__ == "__main__":
    worker(Path(sys.argv[1]))

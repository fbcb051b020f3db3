"""Kills at random moments: no run is lost, and it ends with the very tensors of a run that nobody killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from share import share
from waiting import LONGEST_S, until

from upsnb import config as configs
from upsnb import overlays
from upsnb.runs import checkpoint_index, handle, processes, runfolder
from upsnb.training import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")]
WORKER = Path(__file__).with_name("slow_worker.py")
TARGETS = ("rank", "torchrun", "supervisor", "kernel", "save")
NUM_STEPS = 30
KERNEL = """
import sys, time
from upsnb import config
from upsnb.runs import handle
handle.start(config.load(sys.argv[1]), sys.argv[2], attached=True, worker=sys.argv[3])
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cache():
    return {}


@pytest.fixture
def config(tiny_config):
    """`config(seed, num_ranks)`: one dataset, two steps an epoch of one rank, all that draws at random or remembers."""

    def make(seed, num_ranks):
        settings = {
            "training.noise": 0.1, "training.ema_decay": 0.9, "operator.pdet.drop_path": 0.3,
            "data.datasets.darcy.augment": True, "stages.operator.epochs": NUM_STEPS // 2 * num_ranks,
            "evaluation.every_epochs": 5, "checkpoint.interval": 3, "checkpoint.async_save": bool(seed % 2),
            "training.max_restarts": 10, "checkpoint.resume": True, "training.num_gpus": num_ranks,
        }  # fmt: skip
        return tiny_config(("darcy",), **settings)

    return make


@pytest.fixture
def unharmed(cache, config, tmp_path_factory):
    """`unharmed(num_ranks)`: checkpoint and losses of a run that nobody killed."""

    def train(num_ranks):
        if num_ranks not in cache:
            folder = tmp_path_factory.mktemp("unharmed") / "run"
            handle.start(config(0, num_ranks), folder, attached=True, worker=WORKER).wait()
            cache[num_ranks] = checkpoint.load(folder)["setup"], losses(folder)
            assert len(cache[num_ranks][1]) == NUM_STEPS
        return cache[num_ranks]

    return train


def losses(folder):
    """{step: loss}; a step that was repeated after a kill must give the same again."""
    found = {}
    for event in runfolder.read_events(folder, ("step",)):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"], event["step"]
    return found


def torchrun_of(folder):
    for pid in processes.marked(runfolder.read_manifest(folder)["supervisor"]):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"torch.distributed.run" in command:
            return pid
    return None


class Attempt:
    """One start of a run by a process of its own, which may be killed."""

    def __init__(self, folder, config_file):
        self.folder, before = folder, 0
        if (folder / runfolder.MANIFEST).exists():
            before = runfolder.read_manifest(folder)["created"]
        root = str(Path(__file__).resolve().parents[2])
        self.kernel = subprocess.Popen(
            [sys.executable, "-c", KERNEL, config_file, folder, WORKER],
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
        until(lambda: self._created() > before and runfolder.read_manifest(folder)["supervisor"], "it never started")

    def _created(self):
        return runfolder.read_manifest(self.folder)["created"] if (self.folder / runfolder.MANIFEST).exists() else -1

    def alive(self):
        return runfolder.state(self.folder)[0] in runfolder.ALIVE

    def kill(self, target, step, delay_s):
        """Kill once the step has come; whether there was anything to kill."""
        place = checkpoint_index.home(self.folder)

        def has_come():
            if not self.alive():
                return True
            beat = runfolder.read_heartbeats(self.folder).get(0)
            return beat and beat["beats"] and beat["step"] >= step and (target != "save" or any(place.glob(".step-*")))

        until(has_come)
        time.sleep(delay_s)
        supervisor = int(runfolder.read_manifest(self.folder)["supervisor"].partition(":")[0])
        beat = runfolder.read_heartbeats(self.folder).get(0, {"pid": None})
        pids = {"torchrun": torchrun_of(self.folder), "supervisor": supervisor, "kernel": self.kernel.pid}
        pid = pids.get(target, beat["pid"])
        if not self.alive() or pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def end(self):
        """Wait until nothing of it is left."""
        identity = runfolder.read_manifest(self.folder)["supervisor"]
        until(lambda: not self.alive() and not processes.is_alive(identity) and not processes.marked(identity))
        self.kernel.kill()
        self.kernel.wait(LONGEST_S)


@pytest.mark.parametrize("seed", share(100, least=1))
def test_no_kill_loses_a_run_or_changes_a_tensor(unharmed, config, tmp_path, seed, record_property):
    draw, folder, kills = random.Random(seed), tmp_path / "run", 0
    file = tmp_path / "config.yaml"
    targets = [TARGETS[seed % len(TARGETS)], *draw.sample(TARGETS, draw.randint(0, 2))]
    num_ranks = 2 if "torchrun" in targets else 1  # a single rank has none
    configs.save(overlays.apply(config(seed, num_ranks), {}), file)
    steps = sorted(draw.randrange(NUM_STEPS) for _ in targets)
    attempt = Attempt(folder, file)
    try:
        for target, step in zip(targets, steps):
            if not attempt.alive():
                attempt.end()
                attempt = Attempt(folder, file)
            kills += attempt.kill(target, step, draw.uniform(0, 0.05))
            if target in ("supervisor", "kernel"):
                until(lambda: not attempt.alive())  # noqa: B023
        until(lambda: not attempt.alive())
        if runfolder.state(folder)[0] != "finished":
            attempt.end()
            attempt = Attempt(folder, file)
            until(lambda: not attempt.alive())
    finally:
        attempt.kernel.kill()
        attempt.end()
    record_property("kills", kills)
    assert runfolder.state(folder) == ("finished", None), targets
    state, curve = unharmed(num_ranks)
    assert losses(folder) == curve, targets
    expect_same(checkpoint.load(folder)["setup"], state)
    print(f"{kills} kills: {', '.join(targets)}")


def expect_same(one, other, path=""):
    """Equal bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            expect_same(one[key], other[key], f"{path}/{key}")
    else:
        assert one == other, path

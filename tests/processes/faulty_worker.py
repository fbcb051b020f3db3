"""A rank that trains nothing and misbehaves on request: `UPSNB_FAULT=<kind>:<rank>:<step>[:<segment>]`.

Everything but the training loop is the real worker, so a test sees the real failure files, heartbeats and watchdog.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import time
import types

NUM_STEPS, SAVE_EVERY = 12, 4
STEP = dict.fromkeys(("epoch", "time_s", "samples_per_s", "data_wait_ms", "peak_memory_gib"), 0)
STEP |= {"step_time_ms": 20.0, "losses": {}, "datasets": [], "steady": True}
END = {"train_time_s": 0.0, "epochs": 0, "peak_memory_gib": [0.0], "memory_kind": "none"}


def train(config, folder, ranks, events, heartbeat, launch):
    import torch
    import torch.distributed as dist

    from upsnb.runs import checkpoint_index, runfolder
    from upsnb.training import parallel

    kind, rank, at, *segment = os.environ.get("UPSNB_FAULT", "none:0:0").split(":")
    armed = int(rank) == ranks.rank and segment in ([], [os.environ.get("UPSNB_SEGMENT")])
    num_steps = 10**6 if kind in ("endless", "slow_end") else NUM_STEPS
    saved = checkpoint_index.choose(folder) if config.checkpoint.resume else None
    first = int(saved.path.name.removeprefix("step-")) if saved else 0
    if ranks.rank == 0:
        checkpoint_index.prepare(folder)
    reason = "epochs"
    for step in range(first, num_steps):
        heartbeat.beat(step)
        if armed and step == int(at):
            misbehave(kind, folder)
        stop = torch.tensor([runfolder.read_control(folder).command == runfolder.STOP], dtype=torch.int64)
        total = torch.ones(1)
        if ranks.world_size > 1:
            dist.all_reduce(total)
        if ranks.rank == 0:
            events.write("step", step + 1, loss=total.item(), **STEP)
        if parallel.broadcast_control(ranks, stop).item():
            reason = "stopped"
            break
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, ranks, events, step + 1)
        time.sleep(0.02)
    if kind == "slow_end":  # as an evaluation of long trajectories, which says of each that it goes on
        for _ in range(40):
            time.sleep(0.2)
            heartbeat.beat(step)
    save(folder, ranks, events, step + 1)
    if kind == "no_checkpoint":
        for path in (folder / "checkpoints").glob("step-*"):
            shutil.rmtree(path)
    if ranks.rank == 0 and kind != "no_end":
        events.write("end", step + 1, reason=reason, **END)
    if armed and kind == "late":
        time.sleep(1)
        os.kill(runfolder.read_heartbeats(folder)[0]["pid"], 0)  # an error where rank 0 has left before
        atexit.register(lambda: print("its group stands:", dist.is_initialized()))


def save(folder, ranks, events, step):
    from upsnb.runs import checkpoint_index

    if ranks.rank == 0:
        written = checkpoint_index.temporary(folder, step)
        written.mkdir()
        (written / "state").write_bytes(os.urandom(20_000))
        path = checkpoint_index.commit(folder, step, {"state": checkpoint_index.digest(written / "state")})
        events.write("checkpoint", step, path=f"checkpoints/{path.name}")


def misbehave(kind, folder):
    if kind == "raise":
        raise ValueError("the loss is\nnot finite")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "exit":
        sys.exit(0)
    if kind == "fill":  # leave no room; the next checkpoint meets the full disk
        with contextlib.suppress(OSError), open(folder / "junk", "wb", buffering=0) as junk:
            while True:
                junk.write(os.urandom(4096))
    if kind == "dev_full":  # a device that is always full, where no small disk can be mounted
        open("/dev/full", "wb", buffering=0).write(b"state")


if __name__ == "__main__":
    loop = sys.modules["upsnb.worker.loop"] = types.ModuleType("upsnb.worker.loop")
    loop.train = train
    from upsnb.worker import __main__ as worker

    worker.main(sys.argv[1])

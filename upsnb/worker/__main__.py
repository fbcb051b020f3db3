"""One rank of a run, as the supervisor or torchrun starts it: `python -m upsnb.worker <folder>`."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.runs import recovery, runfolder
from upsnb.runs.files import NO_SPACE, is_full
from upsnb.runs.processes import MARK, NODE, SEGMENT, is_alive, kill_marked

RANK, SIZE = "RANK", "WORLD_SIZE"  # environment variables by which torchrun and torch.distributed say it
WATCH_INTERVAL_S = 1.0


def main(folder: Path | str) -> None:
    """Train as the run folder's config says; leave a failure file and exit code 1 if that does not go well."""
    folder = Path(folder).absolute()
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks a hung rank where it stands
    watch_supervisor()  # before torch is imported: from here on no rank outlives its supervisor
    heartbeat = None
    try:
        config = configs.load(folder / runfolder.CONFIG)
        launch = runfolder.read_launch(folder, int(os.environ.get(SEGMENT, 0)))
        if launch.number > 0:  # a relaunch continues, whatever the first launch did
            config = overlays.apply(config, {"checkpoint.resume": True})
        rank = number_among_machines(config.training.num_nodes)
        heartbeat, events = runfolder.Heartbeat(folder, rank), runfolder.EventWriter(folder, rank)
        from upsnb.training import parallel
        from upsnb.worker import loop
        from upsnb.worker.telemetry import telemetry

        # torch.distributed.checkpoint says so at each save of a single rank, which needs no process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        ranks = parallel.initialise(overlays.apply(config, launch.overlay))
        with telemetry(ranks, events, lambda: heartbeat.step):
            loop.train(config, folder, ranks, events, heartbeat, launch)
        heartbeat.done()
        events.close()
        parallel.barrier(ranks)  # what a rank sends to one that has left is an error of the sender's
        if ranks.device.type == "cuda":  # gloo's groups die with the process: taking them down has aborted ranks
            parallel.shutdown(ranks)
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # an exit in the middle of training is a failure too
        _record_failure(folder, error, heartbeat)
        # Not sys.exit: threads, loaders and process groups of a broken rank can keep it from ending, and the other
        # ranks wait in a collective until it is gone.
        os._exit(1)
    # All went well, and what follows must not change that: 1 of 4 gloo runs aborted ("terminate called without an
    # active exception") when the interpreter tore down objects that still held the destroyed process group.
    os._exit(0)


def number_among_machines(num_nodes: int) -> int:
    """This rank's number in the whole run; torchrun counts those of its own machine, and is put right here."""
    rank, size, node = (int(os.environ.get(name, default)) for name, default in ((RANK, 0), (SIZE, 1), (NODE, 0)))
    if num_nodes > 1:
        rank += node * size
        os.environ |= {RANK: str(rank), SIZE: str(num_nodes * size)}
    return rank


def watch_supervisor() -> None:
    """End this process, and all that belong to its run, once the supervisor is gone; without one do nothing."""
    identity = os.environ.get(MARK)
    if not identity:
        return

    def watch() -> None:
        while is_alive(identity):
            time.sleep(WATCH_INTERVAL_S)
        with contextlib.suppress(OSError):
            os.write(2, b"the supervisor of this run is gone, so its workers end\n")
        kill_marked(identity)
        os._exit(70)

    threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()


def _record_failure(folder: Path, error: BaseException, heartbeat: runfolder.Heartbeat | None) -> None:
    """Write `failure.rank<k>.json` for the supervisor and the traceback for the log."""
    rank = int(os.environ.get(RANK, 0))
    failure = {
        "format": runfolder.FORMAT,
        "rank": rank,
        "time": time.time(),
        "step": heartbeat.step if heartbeat else None,  # last one this rank began; None before the first
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "disk_full": is_disk_full(error, folder),
        "out_of_memory": recovery.is_out_of_memory(error),
    }
    try:
        runfolder.write_json(folder / f"failure.rank{rank}.json", failure, last_words=True)
    except OSError as second:
        failure["traceback"] += f"\nand the failure file could not be written: {second}\n"
    with contextlib.suppress(OSError, ValueError):  # the log may be on the full disk, or its reader gone
        sys.stderr.write(failure["traceback"])
        sys.stdout.flush()
        sys.stderr.flush()


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether an error comes from a disk without space, however deep in its chain of causes."""
    for cause in recovery.chain(error):
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            return True
        if os.strerror(errno.ENOSPC) in str(cause):  # wrapped as text, as distributed checkpoints do
            return True
    return isinstance(error, (OSError, RuntimeError)) and is_full(folder)


if __name__ == "__main__":
    main(sys.argv[1])

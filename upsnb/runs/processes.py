"""Which processes still live, and how to end all that belong to a run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil

MARK = "UPSNB_SUPERVISOR"  # environment variable of every process of a run: the identity of its supervisor
SEGMENT = "UPSNB_SEGMENT"  # environment variable of the ranks: how often they were launched before
NODE = "UPSNB_NODE"  # environment variable of the ranks: number of their machine among the run's
MEETING = "UPSNB_MEETING"  # of several machines: the file that says where rank 0 is found
STORE = "UPSNB_STORE"  # environment variable of the ranks of one machine: the file by which they find each other


def process_identity(pid: int) -> str | None:
    """`pid:start time` of a live process, so that a reused pid is another process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        state, *fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
        started = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()[:8]}-{fields[18]}"
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
        command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]  # no /proc on macOS
        state, _, started = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
        started = "-".join(started.split())
    return f"{pid}:{started}" if state and state[0] not in "ZX" else None


def is_alive(identity: str) -> bool:
    """Whether that very process still runs."""
    return process_identity(int(identity.partition(":")[0])) == identity


def marked(identity: str) -> list[int]:
    """Processes that a supervisor's launch left behind: torchrun, ranks, loaders; by the mark in their environment.

    Not by parent, group or session: torchrun gives each rank a session of its own, and orphans change parents.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            if process.pid != os.getpid() and process.environ().get(MARK) == identity:
                found.append(process.pid)
    return found


def kill_marked(identity: str) -> None:
    """Kill every process of a supervisor's launch except the caller."""
    for pid in marked(identity):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""A run of one machine cannot be reached from another: nothing of it listens outside loopback."""

import contextlib
import ipaddress
import os
import time
from pathlib import Path

import pytest
from waiting import until

from upsnb.runs import handle, processes, runfolder
from upsnb.runs.events import last_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net"),
]
OPEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # states of those that anybody may send something to
CHILDREN = {"training.compile": True, "training.num_workers": 2, "data.residency": "workers"}


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`0100007F` of /proc/net/tcp, `0000000000000000FFFF00000100007F` of tcp6: words of 4 bytes, the last first."""
    data = bytes.fromhex(text)
    found = ipaddress.ip_address(b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4)))
    return getattr(found, "ipv4_mapped", None) or found


def listening(pids) -> dict[int, list]:
    """Addresses that each process accepts connections at."""
    found = {}
    for pid in pids:
        inodes = set()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(path)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
        for table, state in OPEN.items():
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and fields[9] in inodes:
                    host, port = fields[1].split(":")
                    found.setdefault(pid, []).append((address(host), int(port, 16)))
    return found


def family(run) -> dict[int, str]:
    """Commands of a run's processes: its supervisor, all that carry its mark, and all that any of them started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found, before = {run._process.pid, *processes.marked(run.manifest["supervisor"] or "none yet")}, set()
    while found != before:
        before, found = found, found | {pid for pid, parent in parents.items() if parent in found}
    commands = {}
    for pid in found:
        with contextlib.suppress(OSError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return commands


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(2, {"training.use_fsdp2": True}), pytest.param(1, CHILDREN, marks=pytest.mark.long)],
    ids=("sharded", "compiled, with loaders"),
)
def test_nothing_of_a_run_listens_outside_loopback(tiny_config, tmp_path, num_ranks, settings):
    sizes = {"training.num_gpus": num_ranks, "training.batch_size": 2, "stages.operator.epochs": 100000}
    run = handle.start(tiny_config(("darcy",), **sizes, **settings), tmp_path / "run", attached=True)
    try:
        members, found = {}, {}

        def look():
            assert run.status() in runfolder.ALIVE, run.cause()
            last = last_events(run.folder, ("step",)).get("step", {"step": 0})["step"]
            members.update(now := family(run))
            for pid, places in listening(now).items():
                found.setdefault(pid, set()).update(places)
            time.sleep(0.1)
            return last >= 20

        until(look)  # from the start on, because a compiler is there for a moment only
        least = 1 + num_ranks + (num_ranks > 1) + 2 * (settings is CHILDREN)
        assert len(members) >= least, "supervisor, ranks, the torchrun of several, their children"
        assert found or num_ranks == 1, "ranks reach each other somewhere"
        assert not [
            (members[pid], str(host), port)
            for pid, places in found.items()
            for host, port in places
            if not host.is_loopback
        ]
    finally:
        run.stop()
        run.wait()

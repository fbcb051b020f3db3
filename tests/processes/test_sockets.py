"""A run of one machine cannot be reached from another: nothing of it listens outside loopback."""

import ipaddress
import os
from pathlib import Path

import pytest

from upsnb.runs import handle, processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net"),
]
LISTENING = "0A"


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
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(path)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    host, port = fields[1].split(":")
                    found.setdefault(pid, []).append((address(host), int(port, 16)))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(1, {}), (2, {}), (2, {"training.use_fsdp2": True}), (1, {"training.compile": True})],
    ids=("one rank", "two ranks", "sharded", "compiled"),
)
def test_nothing_of_a_run_listens_outside_loopback(tiny_config, tmp_path, num_ranks, settings):
    sizes = {"training.num_gpus": num_ranks, "training.batch_size": 2, "stages.operator.epochs": 100000}
    run = handle.start(tiny_config(("darcy",), **sizes, **settings), tmp_path / "run", attached=True)
    try:
        run.wait_for("step", step=20)
        pids = [run._process.pid, *processes.marked(run.manifest["supervisor"])]
        assert len(pids) >= num_ranks + 2, "supervisor, torchrun and the ranks"
        found = listening(pids)
        assert found or num_ranks == 1, "ranks reach each other somewhere"
        outside = [
            (Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(), str(host), port)
            for pid, places in found.items()
            for host, port in places
            if not host.is_loopback
        ]
        assert not outside
    finally:
        run.stop()
        run.wait()

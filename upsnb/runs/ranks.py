"""How the ranks of one machine are started: their command, and the environment in which they find the others."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.malloc import MALLOC
from upsnb.runs import runfolder
from upsnb.runs.processes import MARK, MEETING, NODE, SEGMENT, STORE

TORCHRUN = ".torchrun"  # where ranks find each other, and their output before it is copied to worker.log by name
NCCL_TUNING = {  # training.nccl_tuning; read by NCCL when the ranks' communicator is made, so only a launch can set it
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
}
# torchrun says it to several; what this process was started with may be another launcher's.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what ranks speak over; the user's own wins
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the ranks of one machine talk to each other over it
# Images of containers forbid Python to keep what it compiles of modules: each process would compile thousands, for 5 s.
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
# read by CUDA's allocator when it starts; the second is the older name
ALLOCATOR, EXPANDABLE = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments"


def start(
    folder: Path,
    config: RunConfig,
    place: Path,
    segment: int,
    identity: str,
    node: int = 0,
    worker: Path | None = None,
) -> tuple[subprocess.Popen, int]:
    """The process of this machine's one rank, or the torchrun of its several, and where its log begins; at once.

    Args:
        config: of this launch.
        place: folder for torchrun's own files.
        segment: number of the launch.
        identity: of the process that watches over them, and whose end is theirs.
        node: number of this machine among the run's.
        worker: script to run instead of `upsnb.worker`.
    """
    with open(folder / log_name(node), "ab") as log:
        begin = log.tell()  # of a launch before, the log goes on
        process = subprocess.Popen(
            command(folder, config, place, worker),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment(folder, config, place, segment, identity, node)},
            cwd=runfolder.project_root(),  # data are relative to it
            start_new_session=True,  # a SIGTERM for the watcher's group must leave the ranks time to save
        )
    return process, begin


def log_name(node: int) -> str:
    """What a machine's ranks print goes to this file of the run folder."""
    return runfolder.LOG if node == 0 else f"worker.node{node}.log"


def command(folder: Path, config: RunConfig, place: Path, worker: Path | None = None) -> list[str]:
    """What starts them; arguments as of `start`."""
    target = ["-m", "upsnb.worker"] if worker is None else [str(worker)]
    ranks = config.training.ranks_per_node
    if ranks == 1:  # has nobody beside it, and torchrun would import torch first: seconds a start
        return [sys.executable, *target, str(folder)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        # By files: its TCP store listens on every interface, and unpickles what anybody sends. It appends a sign of
        # life every 5 s, which for one machine means nothing.
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(place / "rendezvous"), "--local-addr", "localhost"),
        *("--rdzv-conf", "store_type=file,keep_alive_interval=3600"),
        *("--tee", "3", "--redirects", "0", "--log-dir", str(place)),
        *target,
        str(folder),
    ]


def environment(
    folder: Path, config: RunConfig, place: Path, segment: int, identity: str, node: int = 0
) -> dict[str, str]:
    """Variables over this process's own; arguments as of `start`."""
    training, cache = config.training, runfolder.COMPILE_CACHE
    several = training.num_nodes > 1
    if node:  # machines of one cluster may differ, and what is compiled for one's instructions ends the other's
        cache = f"{cache}-{socket.gethostname()}"
    meeting = {MEETING: str(folder / TORCHRUN / "meeting.json")} if several else {STORE: str(place / "ranks")}
    return {
        **{name: os.environ.get(name) or (outward_interface() if several else LOOPBACK) for name in INTERFACES},
        **nccl_environment(config)[0],
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **meeting,
        MARK: identity,
        NODE: str(node),
        **(ALONE if training.ranks_per_node == 1 else {}),
        SEGMENT: str(segment),
        "PYTHONUNBUFFERED": "1",  # the last words of a dying rank must reach the log
        **KEEP_BYTECODE,
        # Spares the log torchrun's advice about it; parallel.initialise sets the number of threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **{name: os.environ.get(name, value) for name, value in MALLOC.items()},
        **allocator_environment(config),
        # Beside the runs, because torch's own place is gone with /tmp: the second run compiles nothing anew.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / cache)),
    }


def nccl_environment(config: RunConfig) -> tuple[dict[str, str], list[str]]:
    """NCCL's variables as the workers get them, and those in which the user's own won over training.nccl_tuning."""
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if not config.training.nccl_tuning:
        return own, []
    return {**NCCL_TUNING, **own}, sorted(own.keys() & NCCL_TUNING.keys())


def allocator_environment(config: RunConfig) -> dict[str, str]:
    """What to start a process with for training.expandable_segments, beside what the user told the allocator."""
    own = next((os.environ[name] for name in ALLOCATOR if name in os.environ), "")
    if not config.training.expandable_segments or EXPANDABLE in own:
        return {}
    return {ALLOCATOR[0]: ",".join(filter(None, (own, f"{EXPANDABLE}:True")))}


# -- the network ---------------------------------------------------------------------------------------------------


def outward_interface() -> str:
    """The network interface that leads out of this machine, by its default route.

    Raises:
        RunError: there is none, or this system does not say.
    """
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        routes = []
    for interface, destination, *_ in routes:
        if destination == "00000000":
            return interface
    raise RunError(f"no default route says which network the ranks speak over -> set {INTERFACES[0]} to its interface")


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        RunError: there is no such interface here, or it has no address.
    """
    ask_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, ask_address, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise RunError(
                f"{INTERFACES[0]}: {interface} has no IPv4 address ({error.strerror}) -> this machine has {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])

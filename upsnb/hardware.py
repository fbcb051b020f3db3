"""What this machine has, and whether a config can run on it."""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from upsnb.config import RunConfig
from upsnb.errors import ConfigError, Problem

CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = ("max", "-1")  # as versions 2 and 1 say it
NVIDIA_DRIVER = "/proc/driver/nvidia/version"  # there while one is loaded


@dataclass(frozen=True)
class Hardware:
    """The devices a run may use."""

    device: str  # "cuda" where there is one, else "cpu"
    num_devices: int  # GPUs, or 1
    device_name: str
    device_memory_gib: float  # of one device; of the host on a CPU
    num_cores: int
    compute_capability: tuple[int, int] | None = None  # of a CUDA device
    unusable: str = ""  # why the GPU that is there cannot be used
    cpu_has_bf16: bool = True  # instructions for products of bfloat16; without them torch computes one by one
    cpu_has_fp16: bool = True  # and for those of float16

    def as_dict(self) -> dict:
        return asdict(self)


def detect() -> Hardware:
    """This machine's hardware; asks the driver only and creates no CUDA context."""
    cores = num_cores()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory, capability = properties.total_memory / 2**30, (properties.major, properties.minor)
        count, name = torch.cuda.device_count(), properties.name
        return Hardware("cuda", count, name, memory, cores, capability, "", cpu_has_bf16(), cpu_has_fp16())
    found = _why_no_cuda(), cpu_has_bf16(), cpu_has_fp16()
    return Hardware("cpu", 1, _processor_name(), host_memory_gib(), cores, None, *found)


def num_cores() -> int:
    """Cores that this process may use: those that it may run on, or the processor time that its container gets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = [*(text.split() for (text,) in _control_group("cpu", "cpu.max"))]
    times += _control_group("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = [math.ceil(int(quota) / int(period)) for quota, period in times if quota not in UNLIMITED]
    return max(1, min([cores, *quotas]))


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether oneDNN, which computes torch's products on a CPU, has instructions for those of bfloat16 here."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


@functools.cache
def cpu_has_fp16() -> bool:
    """Whether it has instructions for those of float16, as few CPUs do."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


def versions() -> dict[str, str]:
    """Versions that a measurement depends on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""}


def resolve_device(config: RunConfig, hardware: Hardware) -> str:
    """The device type a run uses: what the config says, or what there is."""
    return hardware.device if config.training.device == "auto" else config.training.device


def check_runnable(config: RunConfig, hardware: Hardware) -> None:
    """Refuse what the machine or this version cannot do, before anything starts.

    Raises:
        ConfigError: every such setting at once, each with the remedy.
    """
    if found := problems(config, hardware):
        raise ConfigError(found, "the configuration for this machine")


def problems(config: RunConfig, hardware: Hardware) -> list[Problem]:
    """What the machine or this version cannot do of a config."""
    device = resolve_device(config, hardware)
    found = [*_devices(config, hardware, device), *_of_cuda(config, device), *_formats(config, hardware, device)]
    return found + _too_large(config, hardware, device) + _not_yet(config)


def _devices(config: RunConfig, hardware: Hardware, device: str) -> Iterator[Problem]:
    """As many devices as are asked for, and what several of them say to each other."""
    training = config.training
    if training.device != "cpu" and hardware.unusable:
        remedy = "install a driver that fits, or the torch of an older CUDA, or set it to cpu"
        yield Problem("training.device", f"the GPU here cannot be used: {hardware.unusable}", remedy)
    elif device == "cuda" and hardware.device != "cuda":
        yield Problem("training.device", "cuda was asked for and there is no CUDA device", "set it to cpu or auto")
    elif training.device != "cpu" and training.ranks_per_node > hardware.num_devices:
        there = f"{hardware.num_devices} x {hardware.device_name}" if hardware.device == "cuda" else "no GPU"
        why = f"{training.ranks_per_node} were asked for and this machine has {there}"
        remedy = f"lower it, or set training.device: cpu to rehearse with {training.num_gpus} CPU processes"
        yield Problem("training.num_gpus", why, remedy)
    if training.nccl_tuning and (device == "cpu" or training.num_gpus == 1):
        ranks = "on the CPU" if device == "cpu" else "on a single device"
        why = f"NCCL speaks between CUDA devices and this run is {ranks}"
        yield Problem("training.nccl_tuning", why, "set it to false")
    if training.bf16_gradients and training.num_gpus == 1:
        yield Problem("training.bf16_gradients", "a single rank sends its gradients to nobody", "set it to false")


def _of_cuda(config: RunConfig, device: str) -> Iterator[Problem]:
    """What only CUDA has, asked for on the CPU."""
    training, attention, off = config.training, config.operator.pdet.attention, "set it to false"
    if device == "cuda":
        return
    if training.expandable_segments:
        yield Problem("training.expandable_segments", "CUDA's allocator has them and this run is on the CPU", off)
    if training.compile and training.compile_mode == "reduce-overhead":
        why = "reduce-overhead records CUDA graphs and this run is on the CPU"
        yield Problem("training.compile_mode", why, "set it to default")
    if training.cpu_offload_optimizer:
        why = "AdamW already steps in host memory, because this run is on the CPU"
        yield Problem("training.cpu_offload_optimizer", why, off)
    if training.tf32:
        why = "TensorFloat-32 is a format of CUDA's tensor cores and this run is on the CPU"
        yield Problem("training.tf32", why, off)
    if attention == "flex":
        why = "FlexAttention has no backward pass on the CPU"
        yield Problem("operator.pdet.attention", why, "set it to sdpa or math")
    if attention == "efficient":
        why = "the memory-efficient kernel is CUDA's and this run is on the CPU"
        yield Problem("operator.pdet.attention", why, "set it to sdpa or flash")


def _formats(config: RunConfig, hardware: Hardware, device: str) -> Iterator[Problem]:
    """Number formats that a device has no instructions for, and kernels that want one of them."""
    training = config.training
    capability = hardware.compute_capability or (8, 0)  # unknown: as if it had what training wants
    old = f"{hardware.device_name} has compute capability {'.'.join(map(str, capability))}"
    is_old = device == "cuda" and capability < (8, 0)
    if is_old and training.tf32:
        yield Problem("training.tf32", f"TensorFloat-32 needs 8.0 and {old}", "set it to false")
    if is_old and training.amp and training.amp_dtype == "bfloat16":
        why = f"bfloat16 is computed by tensor cores from 8.0 on, far slower than float32 before, and {old}"
        yield Problem("training.amp_dtype", why, "set it to float16")
    # float16 is no phase that could be skipped, and refusing it would end what runs
    if training.on_missing == "skip" and training.amp_dtype == "bfloat16" and (why := slow_halves(config, hardware)):
        yield Problem("training.amp", why, "set it to false")
    if device == "cuda" and config.operator.pdet.attention == "flash":
        if not training.amp or training.amp_dtype == "float32":
            why = "flash attention on CUDA takes float16 or bfloat16 and this run computes in float32"
            remedy = "set training.amp to true with one of them, or choose efficient"
            yield Problem("operator.pdet.attention", why, remedy)
        elif is_old:
            yield Problem("operator.pdet.attention", f"flash attention needs 8.0 and {old}", "choose efficient")


def slow_halves(config: RunConfig, hardware: Hardware) -> str:
    """Why a run that computes in half precision on a CPU is slower that way, or ""; it can, so that refuses nothing."""
    dtype = config.training.amp_dtype if config.training.amp else "float32"
    fast = {"bfloat16": hardware.cpu_has_bf16, "float16": hardware.cpu_has_fp16, "float32": True}
    if fast[dtype] or resolve_device(config, hardware) != "cpu":
        return ""
    why = f"has no instructions for products of {dtype}, which take at least ten times as long as in float32"
    return f"{hardware.device_name} {why}"


BLOCK_BYTES = 32 * 2**10  # of the Python objects that make one block of the operator, on the host; 35 KiB measured
PROCESS_BYTES = 100 * 2**20  # of a rank on the CPU or a reader of data, at the least
LARGEST_BYTES = 2.0**50  # more than any machine that a prediction is made for has
MOST_THREADS = 1024  # of one rank


def _too_large(config: RunConfig, hardware: Hardware, device: str) -> list[Problem]:
    """What cannot fit into this machine by a lower bound of its size, found without building anything."""
    host, training = host_memory_gib() * 2**30, config.training
    room, ranks = (hardware.device_memory_gib * 2**30, 1) if device == "cuda" else (host, training.ranks_per_node)
    found, token = unbuildable(config, room, ranks), 4 * max(config.latent.dim, config.operator.pdet.hidden_dim)
    if training.threads_per_rank and training.threads_per_rank > MOST_THREADS:
        remedy = f"lower it, this machine has {hardware.num_cores} cores"
        found.append(Problem("training.threads_per_rank", f"is {training.threads_per_rank}", remedy))
    for path, nbytes, there, what in (
        ("training.num_gpus", ranks * PROCESS_BYTES, host, f"{ranks} processes take"),
        ("training.num_workers", training.num_workers * PROCESS_BYTES, host, f"{training.num_workers} processes take"),
        ("training.batch_size", ranks * training.batch_size * token, room, "one token of each pair takes"),
    ):
        found += _beyond(path, nbytes, there, what, "lower it")
    return found


def unbuildable(config: RunConfig, room: float = LARGEST_BYTES, ranks: int = 1) -> list[Problem]:
    """What is too large of a UPS to be built at all; other models know their own sizes.

    Args:
        room: for weights of all ranks, and where they are not sharded for gradients [bytes].
    """
    if config.model.build != type(config.model)().build:
        return []
    depth, count = config.operator.pdet.depth, least_parameters(config)
    remedy = "lower operator.pdet.depth, hidden_dim or mlp_ratio, latent.dim or operator.basis_size"
    state = ranks * count * (4 if config.training.use_fsdp2 else 8)
    host = host_memory_gib() * 2**30
    blocks = _beyond("operator.pdet.depth", depth * BLOCK_BYTES, host, f"{depth} blocks take", "lower it")
    return blocks + _beyond("operator", state, room, f"{count:.3g} parameters take", remedy)


def least_parameters(config: RunConfig) -> int:
    """No more than a UPS of this config has on any data: its largest matrices in closed form."""
    pdet, dim, datasets = config.operator.pdet, config.latent.dim, len(config.data.datasets)
    block = 4 * pdet.hidden_dim**2 + 2 * pdet.hidden_dim * int(pdet.hidden_dim * pdet.mlp_ratio)
    basis = config.operator.basis_size if config.operator.decoder == "local_basis" else 0
    return pdet.depth * block + 2 * dim * pdet.hidden_dim + datasets * dim * (1 + basis)


def _beyond(path: str, nbytes: float, there: float, what: str, remedy: str) -> list[Problem]:
    found = f"{what} at least {nbytes / 2**30:,.1f} GiB, and {there / 2**30:,.1f} GiB are there"
    return [Problem(path, found, remedy)] if nbytes > there > 0 else []


def _not_yet(config: RunConfig) -> list[Problem]:
    """Settings of what this version does not have that are not as they come."""
    if config.diffusion.hidden_dim == RunConfig().diffusion.hidden_dim:
        return []
    return [Problem("diffusion.hidden_dim", "the denoiser is as wide as the operator", "leave it out")]


def _why_no_cuda() -> str:
    """Why torch, built for CUDA, cannot use the GPU whose driver is loaded; empty where none is or it is hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or not os.path.exists(NVIDIA_DRIVER):
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return ""


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_memory_gib() -> float:
    """The host's memory, or what this process's container may have of it; 0 where the system does not say."""
    try:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0.0
    limits = [*_control_group("memory", "memory.max"), *_control_group("memory", "memory.limit_in_bytes")]
    return min([host, *(int(limit) for (limit,) in limits if limit not in UNLIMITED)]) / 2**30


def _control_group(controller: str, *names: str) -> Iterator[list[str]]:
    """What these files say in this process's control group, and in each above it, where they are.

    Linux gives each controller a tree in version 1, and all the same one in version 2. In a container the tree's root
    is the container's own group, whatever the path to it says.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        tree = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS
        group = tree / path.lstrip("/")
        for place in (group, *group.parents):
            with suppress(OSError):
                yield [(place / name).read_text().strip() for name in names]
            if place == tree:
                break

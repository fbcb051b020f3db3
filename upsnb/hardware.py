"""What this machine has, and whether a config can run on it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass

import torch

from upsnb.config import RunConfig
from upsnb.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """The devices a run may use."""

    device: str  # "cuda" where there is one, else "cpu"
    num_devices: int  # GPUs, or 1
    device_name: str
    device_memory_gib: float  # of one device; of the host on a CPU
    num_cores: int
    compute_capability: tuple[int, int] | None = None  # of a CUDA device

    def as_dict(self) -> dict:
        return asdict(self)


def detect() -> Hardware:
    """This machine's hardware; asks the driver only and creates no CUDA context."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory, capability = properties.total_memory / 2**30, (properties.major, properties.minor)
        return Hardware("cuda", torch.cuda.device_count(), properties.name, memory, cores, capability)
    return Hardware("cpu", 1, _processor_name(), _host_memory_gib(), cores)


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
    found = problems(config, hardware)
    if found:
        raise ConfigError(found, "the configuration for this machine")


def problems(config: RunConfig, hardware: Hardware) -> list[str]:
    """What the machine or this version cannot do of a config, each with the remedy."""
    sentences = []
    training = config.training
    device = resolve_device(config, hardware)
    if device == "cuda" and hardware.device != "cuda":
        sentences.append("training.device: cuda was asked for and there is no CUDA device -> set it to cpu or auto")
    elif training.device != "cpu" and training.num_gpus > hardware.num_devices:
        found = f"{hardware.num_devices} x {hardware.device_name}" if hardware.device == "cuda" else "no GPU"
        sentences.append(
            f"training.num_gpus: {training.num_gpus} were asked for and this machine has {found} -> lower it, or set "
            f"training.device: cpu to rehearse with {training.num_gpus} CPU processes"
        )
    if training.nccl_tuning and (device == "cpu" or training.num_gpus == 1):
        ranks = "on the CPU" if device == "cpu" else "on a single device"
        sentences.append(
            f"training.nccl_tuning: NCCL speaks between CUDA devices and this run is {ranks} -> set it to false"
        )
    if device == "cpu" and training.compile and training.compile_mode == "reduce-overhead":
        sentences.append(
            "training.compile_mode: reduce-overhead records CUDA graphs and this run is on the CPU -> set it to default"
        )
    if device == "cpu" and training.cpu_offload_optimizer:
        sentences.append(
            "training.cpu_offload_optimizer: AdamW already steps in host memory, because this run is on the CPU -> set "
            "it to false"
        )
    if device == "cpu" and training.tf32:
        sentences.append(
            "training.tf32: TensorFloat-32 is a format of CUDA's tensor cores and this run is on the CPU -> set it to "
            "false"
        )
    sentences += _attention_problems(config, device, hardware)
    sentences += [f"{path}: {sentence}" for path, sentence in _NOT_YET.items() if _is_on(config, path)]
    return sentences


def _attention_problems(config: RunConfig, device: str, hardware: Hardware) -> list[str]:
    backend, training = config.operator.pdet.attention, config.training
    if backend == "flex" and device == "cpu":
        why = "FlexAttention has no backward pass on the CPU -> set it to sdpa or math"
    elif backend == "efficient" and device == "cpu":
        why = "the memory-efficient kernel is CUDA's and this run is on the CPU -> set it to sdpa or flash"
    elif backend == "flash" and device == "cuda" and not (training.amp and training.amp_dtype != "float32"):
        why = (
            "flash attention on CUDA takes float16 or bfloat16 and this run computes in float32 -> set training.amp to "
            "true with one of them, or choose efficient"
        )
    elif (
        backend == "flash" and device == "cuda" and hardware.compute_capability and hardware.compute_capability < (8, 0)
    ):
        found = ".".join(map(str, hardware.compute_capability))
        why = f"flash attention needs compute capability 8.0 and {hardware.device_name} has {found} -> choose efficient"
    else:
        return []
    return [f"operator.pdet.attention: {backend} cannot run here: {why}"]


_NOT_YET = {
    "stages.diff_residual.epochs": "the diffusion stage is not in this version -> set it to 0",
    "stages.consistency_distill.epochs": "the distillation stage is not in this version -> set it to 0",
}


def _is_on(config: RunConfig, path: str) -> bool:
    value = config
    for key in path.split("."):
        value = getattr(value, key)
    return bool(value)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _host_memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0

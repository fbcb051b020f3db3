"""The ranks of a run: device, process groups, and the few messages that ranks exchange beside gradients."""

from __future__ import annotations

import gc
import inspect
import os
import secrets
import socket
import time
import warnings
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from upsnb import hardware
from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.runs.files import Shape, read_json, write_json
from upsnb.runs.processes import MEETING, SEGMENT, STORE
from upsnb.runs.ranks import address_of
from upsnb.training import compiling, precision

if TYPE_CHECKING:
    from upsnb.training.losses import Objective


@dataclass(frozen=True)
class Ranks:
    """Which of the run's processes this one is, and how it reaches the others."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control_group: dist.ProcessGroup | None = None  # gloo, for CPU tensors and objects; None: the default group is one
    previous_threads: int | None = None  # CPU threads before `initialise`, put back by `shutdown`


def initialise(config: RunConfig) -> Ranks:
    """Choose this rank's device and join its process group; a single rank needs one for FSDP2 only.

    Raises:
        RunError: torchrun started another number of ranks than the config asks for.
    """
    rank, world_size, local_rank, local_world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if world_size != config.training.num_gpus:
        raise RunError(
            f"training.num_gpus: is {config.training.num_gpus} but {world_size} ranks were started -> make them equal"
        )
    machine = hardware.detect()
    device = torch.device("cpu")
    if hardware.resolve_device(config, machine) == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # before the first collective, or every rank opens a context on GPU 0
    previous_threads = torch.get_num_threads()
    # On purpose: torchrun's own choice is 1 for many ranks and every core for a single one.
    torch.set_num_threads(config.training.threads_per_rank or max(1, machine.num_cores // local_world_size))

    control_group = None
    if world_size > 1:
        # Far above the supervisor's stall timeout: it names the hung rank, a timeout here names one that waits for it.
        timeout = timedelta(seconds=runfolder.STARTUP_ALLOWANCE_S + 2 * config.training.stall_timeout_s)
        store = None
        if MEETING in os.environ:
            store = _meet(Path(os.environ[MEETING]), rank, timeout)
        elif STORE in os.environ:  # by a file, which nobody can send anything to
            store = dist.FileStore(os.environ[STORE], world_size)
            store.set_timeout(timeout)
        meeting: dict = {"timeout": timeout}  # by torchrun's own store, where nobody says how
        if store is not None:
            meeting |= {"store": store, "rank": rank, "world_size": world_size}
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, **meeting)
            control_group = dist.new_group(backend="gloo", timeout=timeout)  # small messages without a GPU sync
        else:
            dist.init_process_group("gloo", **meeting)
    elif config.training.use_fsdp2:  # a group of one, which nobody has to be found for
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(rank, world_size, device, control_group, previous_threads)


def _meet(path: Path, rank: int, timeout: timedelta) -> dist.Store:
    """A store that the ranks of all machines reach; rank 0 listens on the network that they speak over, and no other.

    Torchrun's own would listen on every one. The name of this launch, which nobody guesses, is part of all keys.

    Args:
        path: file of the run's folder in which rank 0 says where it listens.
    """
    launch = os.environ[SEGMENT]
    if rank == 0:
        listener = socket.create_server((address_of(os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]), 0))
        host, port = listener.getsockname()
        place = {"launch": launch, "name": secrets.token_hex(16), "host": host, "port": port}
        listening = {"is_master": True, "master_listen_fd": listener.detach()}
    else:
        listening, place, deadline = {"is_master": False}, {}, time.monotonic() + timeout.total_seconds()
        while place.get("launch") != launch:
            if time.monotonic() > deadline:
                raise RunError(f"{path}: rank 0 has not said where it is -> look into the first machine's worker.log")
            time.sleep(0.1)
            with suppress(FileNotFoundError):
                place = read_json(path, None, _Place)
    address = place["host"], place["port"]
    store = dist.TCPStore(*address, timeout=timeout, wait_for_workers=False, **listening)
    if rank == 0:
        write_json(path, place)
    return dist.PrefixStore(place["name"], store)


class _Place(Shape):
    launch: str
    name: str
    host: str
    port: int


def broadcast_control(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Give every rank the values that rank 0 holds.

    Args:
        tensor: small CPU tensor, int64 or float64, of the same shape on all ranks; overwritten.
    """
    assert tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.float64), (tensor.device, tensor.dtype)
    if ranks.world_size > 1:
        dist.broadcast(tensor, src=0, group=ranks.control_group)
    return tensor


def all_gather_objects(ranks: Ranks, value, group: dist.ProcessGroup | None = None) -> list:
    """The values of all ranks, in the order of ranks, on every rank; by the control group, unless another is named."""
    if ranks.world_size == 1:
        return [value]
    values = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=group or ranks.control_group)
    return values


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks; on the CPU, so that queued GPU work is not waited for."""
    if ranks.world_size > 1:
        dist.barrier(group=ranks.control_group)


def new_gloo_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Another group of all ranks for CPU messages, to be used from another thread; None where there is no group."""
    if not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


_SYNC_BUFFERS = (  # torch 2.13 renamed it and warns about the old name
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def wrap_ddp(module: nn.Module, ranks: Ranks, bf16_gradients: bool = False) -> nn.Module:
    """`module` with gradients averaged over ranks; unchanged for a single rank.

    Every parameter has to have a gradient in every backward pass that averages (`Objective.touch_all`): looking for
    those without one would walk the graph each time.

    Args:
        bf16_gradients: send them in bfloat16; what is left in each rank's float32 gradients is the rounded mean.
    """
    if ranks.world_size == 1:
        return module
    wrapped = DistributedDataParallel(
        module,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        **{_SYNC_BUFFERS: False},  # buffers here are constants; sending them costs a message a forward
        gradient_as_bucket_view=True,  # saves one copy of all gradients
    )
    if bf16_gradients:
        # By another name: torch refuses its own hook without NCCL, and gloo adds bfloat16 as well.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def shard(
    module: nn.Module, parts: Iterable[nn.Module], blocks: Container[nn.Module], ranks: Ranks, dtype: torch.dtype | None
) -> nn.Module:
    """`module` with the parameters, gradients and optimizer state of its parts sharded over the ranks (FSDP2).

    Each part is gathered before it runs and again before its backward, and let go after both; `module` itself must own
    no parameter outside the parts and is what has to be called. Names of parameters stay; they become DTensors.

    Gathering casts weights of blocks, nearly all there are, to the autocast dtype, which halves what is sent. Autocast
    still chooses the dtype of every operation and casts its inputs: as in DDP it multiplies in that dtype, from the
    same rounded weights. What differs is the rounding of norms and offsets inside blocks, which autocast leaves in
    float32. Around the blocks some products are to be float32 under autocast too, so nothing is cast there, nor, by
    FSDP2 itself, on the way into a part. Gradients are averaged in float32, and the sharded weights that optimizers
    step stay in float32.

    Args:
        parts: submodules, inner before outer; a part's `at`, where it has one, is a way into it beside `forward`.
        blocks: those of the parts whose weights may be cast.
        dtype: the autocast dtype; None gathers float32.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for parameter in module.parameters():  # it takes no others, and some lie in memory as they are multiplied
        parameter.data = parameter.data.contiguous()
    # Nothing here writes into what a part returned, and encoders and decoders return views.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False)
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=cast if part in blocks else whole)
        if hasattr(part, "at"):
            register_fsdp_forward_method(part, "at")
        # Keeping gradients back, torch 2.13 looks into the gathered weights of every part, run so far or not
        # ("'FSDPParam' object has no attribute '_unsharded_param'"): let there be some, of all datasets.
        part.unshard()
        part.reshard()
    return fully_shard(module, mesh=mesh, mp_policy=whole)


def synchronising(module: nn.Module, on: bool) -> AbstractContextManager:
    """Within it, backward passes of a wrapped module average gradients over ranks, or keep this rank's to themselves.

    What was kept is averaged with the next backward that does. FSDP2 keeps it unsharded: one float32 copy of all
    gradients on every rank, until then.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on)
        return nullcontext()
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not on else nullcontext()


def release(device: torch.device) -> None:
    """Free what nothing refers to any more but itself, as whole setups do, and give a GPU its pages back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def forget_iteration(module: nn.Module) -> None:
    """After a forward or backward pass that failed on a single rank: what FSDP2 gathered and awaited is let go."""
    if not isinstance(module, FSDPModule):
        return
    if hasattr(module, "reset_iter_state"):  # torch 2.13 has it
        module.reset_iter_state()
    # It promises to drop what earlier microbatches left too, and leaves that in the gradients of gathered weights.
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    for state in states:
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for parameter in (parameter for group in groups if group for parameter in group.fsdp_params):
            if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.14
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def wrap(objective: Objective, config: RunConfig, generator: torch.Generator, ranks: Ranks) -> nn.Module:
    """The module that a step calls: the objective, its model compiled in place, then replicated or sharded."""
    training = config.training
    compiling.set_compile(objective, training)
    objective.generator = generator
    if training.use_fsdp2:
        objective.touch_any = True
        model = objective.model
        return shard(objective, model.units(), model.blocks(), ranks, precision.amp_dtype(config))
    return wrap_ddp(objective, ranks, training.bf16_gradients)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without DDP around it; FSDP2 puts nothing around."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def gather_full(values):
    """The same nested dicts with every sharded tensor gathered; all ranks enter, with keys in the same order."""
    if isinstance(values, dict):
        return {key: gather_full(value) for key, value in values.items()}
    return values.full_tensor() if isinstance(values, DTensor) else values


def shutdown(ranks: Ranks) -> None:
    """Leave the process group and put the number of CPU threads back; for a run that went well.

    A failing rank must not come here: destroying a group can wait for ranks that wait for it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if ranks.previous_threads is not None:
        torch.set_num_threads(ranks.previous_threads)

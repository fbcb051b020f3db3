"""Tensors of all ranks in torch.distributed.checkpoint's files, written by every rank and read without running code.

Each rank writes what it holds: its shards of DTensors, and its share of what all ranks hold alike. Reading fits any
other layout, because a reader asks for regions of tensors and not for files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from upsnb.errors import RunError
from upsnb.runs.files import is_full

METADATA = ".metadata"  # DCP's table of contents
# (path in the nest, shape, dtype) to the tensor that is filled, plain or DTensor; None leaves it out
Allocate = Callable[[tuple[str, ...], torch.Size, torch.dtype], "Tensor | None"]

# The table of contents is a pickle. These names are all that it needs, and none of them does anything but hold data.
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


# -- tensors apart from plain data ---------------------------------------------------------------------------------


def split(state: dict) -> tuple[dict[str, Tensor], dict]:
    """Nested state as tensors by path, such as `setup/model/operator.norm.weight`, and the same nest without them."""
    tensors: dict[str, Tensor] = {}

    def walk(value, path: tuple[str, ...]):
        if not isinstance(value, dict):
            return _plain(value)
        kept = {}
        for key, inner in value.items():
            assert isinstance(key, str), f"{path}: {key!r} would come back as a text"
            if isinstance(inner, Tensor):
                tensors[_join((*path, key))] = inner
            else:
                kept[key] = walk(inner, (*path, key))
        return kept

    return tensors, walk(state, ())


def merge(tensors: dict[str, Tensor], plain: dict) -> dict:
    """The nested state that `split` took apart."""
    state = _unplain(plain)
    for name, tensor in tensors.items():
        *path, last = parts(name)
        place = state
        for key in path:
            place = place.setdefault(key, {})
        place[last] = tensor
    return state


def _join(path: tuple[str, ...]) -> str:
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in path)


def parts(name: str) -> tuple[str, ...]:
    """The path that `split` made a name of."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in name.split("/"))


def _plain(value):
    """As JSON knows it: infinite and NaN numbers become `{"$float": "inf"}`."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def _unplain(value):
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: _unplain(inner) for key, inner in value.items()}
    return [_unplain(inner) for inner in value] if isinstance(value, list) else value


# -- writing -------------------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """DCP's writer, which names a full disk and leaves the machine's paths out of the file."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            if is_full(self.path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            raise


def write(tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Write tensors and wait until they are on the disk; all ranks of the group enter, within `first_failure`.

    Args:
        tensors: plain ones or DTensors; a plain tensor of one name is the same on all ranks that have it.
        group: gloo; None for a single process.
    Raises:
        OSError: the disk is full or not writable, on any rank.
    """
    with warnings.catch_warnings():
        _hush()
        dcp.save(tensors, storage_writer=_Writer(folder), planner=_save_planner(), process_group=group)


def write_later(tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None, stager):
    """Copy tensors to host memory and return; the future is done once they are on the disk.

    The copies are what is written, whatever happens to the tensors after the call.
    """
    # nothing copied ahead: everything is on the host, and a CUDA stream in that thread would open a context on GPU 0
    writer = _Writer(folder, per_thread_copy_ahead=0)
    return dcp.async_save(
        tensors, storage_writer=writer, planner=_save_planner(), process_group=group, async_stager=stager
    )


class _Stager(dcp.staging.DefaultStager):
    """Keeps its host memory until it is closed; torch 2.11 lets go of it after every save, and fails in the next."""

    def stage(self, state_dict: dict, **options):
        copies = self._state_dict_stager
        copies.close = lambda: None
        try:
            return super().stage(state_dict, **options)
        finally:
            del copies.close


def make_stager(device: torch.device):
    """Host memory for `write_later`, kept from one save to the next; page-locked where a GPU fills it."""
    on_gpu = device.type == "cuda"
    options = dcp.staging.StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )
    return _Stager(options)


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """Raises what went wrong on the first rank that failed, instead of DCP's collection of them."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        if not error.failures:
            raise
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        cause.add_note(f"on rank {rank}, of a checkpoint")
        raise cause from error


def _save_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _hush() -> None:
    """A single process needs no process group, and DCP warns about it each time."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# -- reading -------------------------------------------------------------------------------------------------------


class _Unpickler(pickle._Unpickler):
    """Builds a table of contents and refuses everything else.

    In Python, because pickle's own sets attributes of the classes themselves where a file asks for it.
    """

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self):
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2].__name__} itself")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str):
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of contents needs")


def read_metadata(folder: Path, files: tuple[str, ...]) -> Metadata:
    """The table of contents, read without running anything it names.

    Args:
        files: names of the checkpoint's files; shards elsewhere are refused.
    Raises:
        RunError: it is no table of contents of tensors in these files.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        assert type(metadata) is Metadata, f"it is a {type(metadata).__name__}"
        stored = 0
        for info in metadata.storage_data.values():
            assert info.relative_path in files, f"it names the file {info.relative_path!r}"
            assert not info.transform_descriptors, "it asks for transformations"
            stored += info.length
        needed = 0
        for key, entry in metadata.state_dict_metadata.items():
            # Anything else would be unpickled by DCP without a restriction.
            assert type(key) is str and type(entry) is TensorStorageMetadata, f"{key} is no tensor"
            assert type(entry.size) is torch.Size and type(entry.properties.dtype) is torch.dtype, f"{key} has no size"
            needed += math.prod(entry.size) * entry.properties.dtype.itemsize
        there = sum((folder / name).stat().st_size for name in files)
        assert needed <= stored <= there, f"tensors of {needed} bytes in {stored} of {there}"
    except Exception as error:  # whatever a damaged or malicious pickle runs into
        found = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"{path}: not a table of contents ({found}) -> do not trust this checkpoint") from error
    return metadata


class _Reader(FileSystemReader):
    """DCP's reader with a table of contents that was read safely, and errors that name the file."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata

    def read_data(self, plan, planner):
        files: dict[str, list] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = torch.futures.Future()
        done.set_result(None)
        for name, items in sorted(files.items()):
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except Exception as error:
                text = str(error).strip().splitlines()[:1]
                found = f"not a shard of tensors ({''.join(text)[:200]})"
                raise RunError(f"{self.path / name}: {found} -> do not trust this checkpoint") from error
        return done


def read(
    folder: Path, files: tuple[str, ...], allocate: Allocate, group: ProcessGroup | None, alone: bool
) -> dict[str, Tensor]:
    """Tensors by name, each rank reading only the regions that it holds; all ranks of the group enter.

    Args:
        alone: this process reads by itself, whatever groups it is in.
    Raises:
        RunError: a file is not what it should be; nothing in it was executed.
    """
    metadata = read_metadata(folder, files)
    targets: dict[str, Tensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        target = allocate(parts(name), entry.size, entry.properties.dtype)
        if target is not None:
            targets[name] = target
    reader, planner = _Reader(folder, metadata), DefaultLoadPlanner(False, False)
    with warnings.catch_warnings(), first_failure():
        _hush()
        dcp.load(targets, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    return targets

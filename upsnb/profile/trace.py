"""What a trace of torch.profiler says about the parts of a step: busy, communicating, or waiting for work.

Read from the Chrome trace format, which both CPU and CUDA write and a person can open (ui.perfetto.dev).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PREFIX = "upsnb/"  # of the ranges that name the parts of a measured step
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories
# Operations that compute. Others hold these (autograd's nodes, DDP's and FSDP2's ranges) or wait for a collective.
HOST_WORK = ("aten::", "fsdp::", "torch::distributed::reducer::", "torch.distributed.ddp.reducer::")
COMPILED = "CompiledFxGraph"  # in the name of the range around compiled code
NODE = "autograd::engine::evaluate_function"


def union(intervals: Iterable[tuple[float, float]]) -> np.ndarray:
    """Disjoint intervals in order, (N, 2), that cover the same."""
    rows = np.array(sorted(intervals), dtype=float).reshape(-1, 2)
    if not len(rows):
        return rows
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate(([True], rows[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((rows[first, 0], reach[last]), axis=1)


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What two unions have in common, as a union."""
    rows, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if low < high:
            rows.append((low, high))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(rows, dtype=float).reshape(-1, 2)


def length(intervals: np.ndarray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def read(path: Path | str, num_steps: int) -> dict:
    """Numbers of the measured steps in a trace, in milliseconds per step.

    Returns:
        `parts`: {part: {"range_ms", "busy_ms", "communication_ms"}}; busy: some operation computes (a kernel on CUDA,
        an operator on the CPU); communication: a collective runs and nothing computes.
        `inverse_backward_ms`: of backward's busy time, what differentiates the inverse losses.
        `communication_ms`: collectives, whether or not something computes meanwhile; `collectives`: by kind.
        `operations`: the ten that take longest; `num_launches`: kernels, or operators that no other one holds.
    """
    with gzip.open(path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)]
    if not ranges:
        raise ValueError(f"{path}: holds no range named {PREFIX}* -> it is no trace of a run")
    begin, end = min(e["ts"] for e in ranges), max(e["ts"] + e["dur"] for e in ranges)
    events = [e for e in events if begin <= e["ts"] < end]
    parts = defaultdict(list)
    for event in ranges:
        parts[event["name"].removeprefix(PREFIX)].append(_span(event))
    parts = {name: union(spans) for name, spans in parts.items()}
    work, sent = _device_work(events)
    on_device = bool(work)
    if not on_device:
        work, sent = _host_work(events)
    # An operator inside another counts for the outer one alone; kernels hold no others.
    calls, collectives = (work, sent) if on_device else (_outermost(work), _outermost(sent))
    busy, sending = union(map(_span, work)), union(map(_span, sent))
    per_step = 1e-3 / num_steps  # times in a trace are microseconds
    numbers = {}
    for name, inside in parts.items():
        alone = length(intersection(sending, inside)) - length(intersection(intersection(sending, busy), inside))
        numbers[name] = {
            "range_ms": length(inside) * per_step,
            "busy_ms": length(intersection(busy, inside)) * per_step,
            "communication_ms": alone * per_step,
        }
    inverse = _differentiating(events, ranges, parts.get("inverse losses", union([])), work, on_device)
    return {
        "parts": numbers,
        "inverse_backward_ms": length(intersection(inverse, parts.get("backward", union([])))) * per_step,
        "communication_ms": length(sending) * per_step,
        "collectives": _table(collectives, num_steps, key=_collective),
        "operations": dict(list(_table(calls, num_steps).items())[:10]),
        "num_launches": round(len(calls) / num_steps),
    }


def _span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _device_work(events: list[dict]) -> tuple[list[dict], list[dict]]:
    """Kernels that compute or copy, and those of collectives."""
    work = [e for e in events if e.get("cat") in DEVICE_WORK]
    sent = [e for e in work if "nccl" in e["name"].lower()]
    return [e for e in work if "nccl" not in e["name"].lower()], sent


def _host_work(events: list[dict]) -> tuple[list[dict], list[dict]]:
    """Operators that compute, and gloo's collectives, which run on threads of their own.

    An operator on sharded tensors may hold a collective, for which it waits: only what is inside of it counts.
    """
    calls = defaultdict(list)
    for event in events:
        if "c10d::" in event["name"] or "c10d_functional::" in event["name"]:
            calls[event["tid"]].append(event["ts"])
    calls = {tid: np.sort(times) for tid, times in calls.items()}
    work = [
        event
        for event in events
        if (event["name"].startswith(HOST_WORK) or COMPILED in event["name"])
        and not (event["tid"] in calls and np.diff(np.searchsorted(calls[event["tid"]], _span(event)))[0])
    ]
    return work, [e for e in events if e["name"].startswith("gloo:")]


def _differentiating(
    events: list[dict], ranges: list[dict], inside: np.ndarray, work: list[dict], on_device: bool
) -> np.ndarray:
    """When the device differentiates what was computed within some ranges.

    Autograd gives each operation of the forward pass a number, which the node that differentiates it carries.
    """
    thread = ranges[0]["tid"]
    numbers = {
        e["args"]["Sequence number"]
        for e in events
        if e.get("tid") == thread and "Sequence number" in e.get("args", {}) and not e["name"].startswith(NODE)
        # its middle: clocks of a range and of the operation that follows it can agree
        if _within(inside, e["ts"] + e["dur"] / 2)
    }
    nodes = [e for e in events if e["name"].startswith(NODE) and e["args"].get("Sequence number") in numbers]
    if not on_device:
        return intersection(union(map(_span, work)), union(map(_span, nodes)))
    spans = {tid: union(_span(e) for e in nodes if e["tid"] == tid) for tid in {e["tid"] for e in nodes}}
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = []
    for kernel in work:
        launch = launches.get(kernel["args"].get("correlation"))
        if launch and launch["tid"] in spans and _within(spans[launch["tid"]], launch["ts"]):
            kernels.append(_span(kernel))
    return union(kernels)


def _within(intervals: np.ndarray, moment: float) -> bool:
    place = int(np.searchsorted(intervals[:, 0], moment, side="right")) - 1
    return place >= 0 and moment < intervals[place, 1]


def _collective(name: str) -> str:
    """`gloo:all_reduce` and `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` by what they do."""
    return name.removeprefix("gloo:").removeprefix("ncclDevKernel_").partition("(")[0]


def _outermost(work: list[dict]) -> list[dict]:
    """Operators that are not part of another one."""
    kept, reach = [], defaultdict(float)
    for event in sorted(work, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= reach[event["tid"]]:
            kept.append(event)
            reach[event["tid"]] = event["ts"] + event["dur"]
    return kept


def _table(events: list[dict], num_steps: int, key=str) -> dict[str, dict]:
    """{name: {"calls", "ms"}} a step, longest first."""
    found = defaultdict(list)
    for event in events:
        found[key(event["name"])].append(event["dur"])
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {name: {"calls": len(us) / num_steps, "ms": sum(us) * 1e-3 / num_steps} for name, us in rows}

"""What each phase does to memory, whether claims about it can hold, and the largest batch of each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.memory.measure import MeasuringProcess
from upsnb.memory.predict import CUDA_GRANULARITY, Footprint, Predictor
from upsnb.phases import BY_NAME, is_on
from upsnb.report.file import finish, number
from upsnb.widgets.progress import rewrite

FORMAT, KIND = 1, "memory"
GPUS_GIB = {  # what CUDA reports as a device's total memory; less than the name says
    "T4": 14.56,
    "L4": 22.03,
    "A100-40": 39.39,
    "A100-80": 79.14,
    "H100": 79.11,
    "H200": 139.72,
}
THIS_MACHINE = "here"
RESERVE_GIB = 1.0  # CUDA context, libraries' workspaces, NCCL's buffers
FRAGMENTATION = 0.05  # of allocated memory, lost between the allocator's blocks
NOTICEABLE = 0.01  # relative change of the peak
MEASURABLE = 0.5  # of this machine's memory: what is predicted to take more is not tried
AS_CONFIGURED, ALL_PHASES = "as configured", "all phases"
PHASES = ("activation_checkpointing", "loss_frequency", "optimizer_offload", "bf16", "fsdp2", "fused")
ALONG = {  # what else must change for a phase to be allowed, none of it matters to memory
    "optimizer_offload": {"training.grad_clip": None, "training.amp_dtype": "bfloat16"},
}
CLAIMED_GB = {"optimizer_offload": 8.0, "fsdp2": 3.0}  # freed on each GPU, says the published recipe


def variants(config: RunConfig) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """A config, the same with each phase flipped, and with all phases on; and why some cannot be.

    Compile and data loading are not among them: the one is not predicted, the other takes host memory only.
    """
    made, impossible = {AS_CONFIGURED: config}, {}
    wanted = {}
    for name in PHASES:
        on = is_on(BY_NAME[name], config)
        wanted[f"without {name}" if on else name] = BY_NAME[name].off if on else _with(name, config)
    wanted[ALL_PHASES] = {key: value for name in PHASES for key, value in _with(name, config).items()}
    for name, overlay in wanted.items():
        try:
            made[name] = overlays.apply(config, overlay)
        except ConfigError as error:
            impossible[name] = "; ".join(map(str, error.problems))
    return made, impossible


def _with(name: str, config: RunConfig) -> dict:
    sharded = {"training.num_gpus": max(2, config.training.num_gpus)} if name == "fsdp2" else {}
    return {**BY_NAME[name].on, **ALONG.get(name, {}), **sharded}


# -- predicted beside measured ---------------------------------------------------------------------------------------


def compare(config: RunConfig) -> list[dict]:
    """Predicted and measured footprint of every variant, the measured one where a rank of this machine can run it.

    Returns:
        rows {"config", "predicted", "measured": Footprint or None, "reason": why not measured}.
    """
    rows = []
    with MeasuringProcess() as bench:
        for name, variant in variants(config)[0].items():
            one_rank = variant
            if not variant.training.use_fsdp2:
                one_rank = overlays.apply(variant, {"training.num_gpus": 1})
            predicted = Predictor(one_rank).at()
            measured, reason = None, _unmeasurable(one_rank, predicted)
            if not reason:
                try:
                    measured = bench.measure(one_rank)
                except (RunError, torch.OutOfMemoryError) as error:
                    reason = str(error)
            rows.append({"config": name, "predicted": predicted, "measured": measured, "reason": reason})
            print(_line(rows[-1]))
    return rows


def _unmeasurable(config: RunConfig, predicted: Footprint) -> str:
    """Why one rank of this machine cannot take the step; empty when it can."""
    machine = hardware.detect()
    if config.training.use_fsdp2:
        return "sharded over several ranks, and one measures"
    if predicted.gib > MEASURABLE * machine.device_memory_gib:
        return f"predicted to take more than {MEASURABLE:.0%} of this machine's {machine.device_memory_gib:.1f} GiB"
    return "; ".join(map(str, hardware.problems(config, machine)))


def _line(row: dict) -> str:
    text = f"{row['config']}: predicted {row['predicted'].gib:.4f} GiB in {row['predicted'].seconds:.1f} s"
    if row["measured"] is None:
        return f"{text}, not measured ({row['reason']})"
    return f"{text}, measured {row['measured'].gib:.4f} GiB in {row['measured'].seconds:.1f} s"


def error_percent(row: dict) -> float:
    """How far above the measurement the prediction lies, in a row that has one."""
    return 100 * (row["predicted"].nbytes / row["measured"].nbytes - 1)


# -- claims ------------------------------------------------------------------------------------------------------------


def claims(predictor: Predictor) -> list[dict]:
    """The most that offload and sharding can free on one GPU, beside what was promised, in GB of 10^9 bytes.

    Args:
        predictor: of a config without either.
    """
    kinds, ranks = predictor.at().account.by_kind(), max(2, predictor.config.training.num_gpus)
    hidden, others = predictor.parameters_by_optimizer()
    count, batch = hidden + others, predictor.config.training.batch_size
    moments = f"AdamW on {others:,} parameters x 2 moments x 4 bytes"
    state = 4 * count + (4 * hidden + 8 * others) + 4 * count
    share = 1 - 1 / ranks
    return [
        _claim("optimizer_offload", moments, 8 * others),
        _claim("optimizer_offload", f"were AdamW to train all {count:,}: x 2 moments x 4 bytes", 8 * count),
        _claim(
            "fsdp2",
            f"weights, gradients and moments, {state / 1e9:.3f} GB, less the 1/{ranks} that stays",
            share * state,
        ),
        _claim("", f"activations of {batch} pairs, for comparison: what fills the memory", kinds["activations"]),
    ]


def _claim(phase: str, arithmetic: str, nbytes: float) -> dict:
    return {
        "phase": phase,
        "promised_gb": CLAIMED_GB.get(phase),
        "arithmetic": arithmetic,
        "at_most_gb": round(nbytes / 1e9, 4),
    }


# -- will it fit -------------------------------------------------------------------------------------------------------


def usable_bytes(total_gib: float) -> int:
    """What is left for tensors of a device's memory."""
    return int(max(total_gib - RESERVE_GIB, 0) / (1 + FRAGMENTATION) * 2**30)


def largest_batches(predictor: Predictor, capacities: Mapping[str, int]) -> dict[str, int]:
    """The largest batch per capacity in bytes; 0 where not even one pair fits.

    Memory is the largest of several straight lines in the batch, so no chord lies below it: a batch between two that
    were predicted is safe. For the largest and the smallest capacity the batch itself is predicted.
    """
    start = predictor.config.training.batch_size
    predictor.at(start), predictor.at(2 * start)
    order = sorted(capacities, key=capacities.get, reverse=True)
    ends = order[:1] + order[-1:]
    found = {name: _largest(predictor, capacities[name], name in ends) for name in dict.fromkeys(ends + order)}
    return {name: found[name] for name in capacities}


def _largest(predictor: Predictor, capacity: int, exact: bool) -> int:
    while True:
        sizes = {batch: footprint.nbytes for batch, footprint in predictor.seen.items()}
        fitting, above = ([b for b, size in sizes.items() if (size <= capacity) == fits] for fits in (True, False))
        if not fitting:
            if 1 in sizes:
                return 0
            predictor.at(1)
            continue
        low = max(fitting)
        left, right = (low, min(above)) if above else sorted(sizes)[-2:]
        slope = (sizes[right] - sizes[left]) / (right - left)
        if slope == 0:  # so small that the optimizer's step is the fullest moment
            predictor.at(2 * right)
            continue
        guess = low + int((capacity - sizes[low]) / slope)
        if guess == low or (above and not exact):
            return guess
        if predictor.at(guess).nbytes <= capacity and not above:
            return guess  # the line it was found on, and with it everything beyond, lies below the truth


def changing(rows: list[dict]) -> list[str]:
    """The config and its variants that move the peak by more than 1 %."""
    base = rows[0]["predicted"].nbytes
    return [row["config"] for row in rows if row is rows[0] or abs(row["predicted"].nbytes / base - 1) > NOTICEABLE]


def fits(config: RunConfig, names: list[str]) -> list[dict]:
    """The largest batch for every phase set and GPU, by memory alone: a dataset with fewer pairs allows less.

    Args:
        names: which variants.
    """
    totals = {**GPUS_GIB, THIS_MACHINE: hardware.detect().device_memory_gib}
    capacities = {name: usable_bytes(total) for name, total in totals.items()}
    rows = []
    for name, variant in variants(config)[0].items():
        if name not in names:
            continue
        predictor, training = Predictor(variant, granularity=CUDA_GRANULARITY), variant.training
        batches = largest_batches(predictor, capacities)
        for gpu, batch in batches.items():
            known = predictor.seen.get(batch)
            rows.append(
                {
                    "phases": name,
                    "gpu": gpu,
                    "batch_size": batch,
                    "effective_batch": batch * training.accum_steps * training.num_gpus,
                    "num_gpus": training.num_gpus,
                    "usable_gib": round(capacities[gpu] / 2**30, 2),
                    "predicted_gib": round(known.gib, 4) if known else None,  # None: between two predicted batches
                }
            )
        rewrite(f"predicted the largest batches: {name}")
    return rows


# -- report ------------------------------------------------------------------------------------------------------------


def report(folder: Path, config: RunConfig, rows: list[dict], claimed: list[dict], fitting: list[dict]) -> dict:
    """All numbers of a plan as plain data; also written to `report.json`."""
    machine = hardware.detect()
    made = {
        "format": FORMAT,
        "kind": KIND,
        "device": hardware.resolve_device(config, machine),
        "measured_by": next((row["measured"].how for row in rows if row["measured"]), None),
        "rows": [_plain(row) for row in rows],
        "impossible": variants(config)[1],
        "modules": {name: mib(row) for name, row in rows[0]["predicted"].account.by_module().items()},
        "claims": claimed,
        "fits": fitting,
        "reserve_gib": RESERVE_GIB,
        "fragmentation": FRAGMENTATION,
        "settings": overlays.difference(RunConfig(), config),
    }
    return finish(made, folder)


def _plain(row: dict) -> dict:
    predicted, measured = row["predicted"], row["measured"]
    return {
        "config": row["config"],
        "predicted_gib": round(predicted.gib, 6),
        "measured_gib": round(measured.gib, 6) if measured else None,
        "error_percent": None if measured is None else round(error_percent(row), 4),
        "not_measured": row["reason"] or None,
        "predicted_mib": mib(predicted.account.by_kind()),
        "measured_mib": mib(measured.account.by_kind()) if measured else None,
        "notes": list(predicted.notes),
    }


def mib(kinds: Mapping[str, int]) -> dict[str, float]:
    """Bytes by kind in MiB."""
    return {kind: round(nbytes / 2**20, 3) for kind, nbytes in kinds.items()}


def table(made: dict) -> pd.DataFrame:
    """Predicted beside measured, a row per config."""
    return pd.DataFrame(
        {
            "config": row["config"],
            "predicted [GiB]": number(row["predicted_gib"]),
            "measured [GiB]": number(row["measured_gib"]),
            "error [%]": "-" if row["error_percent"] is None else f"{round(row['error_percent'], 2) + 0.0:+.2f}",
            "not measured, because": row["not_measured"] or "-",
        }
        for row in made["rows"]
    )


def fits_table(fitting: list[dict]) -> pd.DataFrame:
    """Largest batch, phase sets down and GPUs across, to two digits and never rounded up: what is held back for CUDA
    and lost between blocks is not known more closely."""
    frame = pd.DataFrame(fitting)
    wide = frame.pivot(index="phases", columns="gpu", values="batch_size")
    wide = wide.map(lambda batch: batch // 10 ** max(len(str(batch)) - 2, 0) * 10 ** max(len(str(batch)) - 2, 0))
    return wide.loc[frame["phases"].unique(), frame["gpu"].unique()]


def worst(made: dict) -> str:
    """How far off the predictions are."""
    errors = [abs(row["error_percent"]) for row in made["rows"] if row["error_percent"] is not None]
    said = f"largest error {max(errors):.2g} % of {len(errors)}" if errors else "none measured"
    return f"{said}, {made['measured_by'] or 'on this machine'}"


def summary(made: dict) -> str:
    """A plan in a few lines."""
    return "\n".join((table(made).to_string(index=False), worst(made), fits_table(made["fits"]).to_string()))

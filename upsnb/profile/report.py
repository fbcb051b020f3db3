"""A profile of a run in shares of a step, sentences that name the phase for each, and answers to five questions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from upsnb import overlays, phases
from upsnb.config import OPERATOR, RunConfig
from upsnb.errors import RunError, RunTimeout
from upsnb.hardware import Hardware, resolve_device
from upsnb.memory import plan, predict
from upsnb.phases import Verdict
from upsnb.profile.recorder import profile_name
from upsnb.report.file import finish
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.runs.throughput import steady_throughput
from upsnb.spans import BACKWARD, COPY, DATA, FORWARD, INVERSE, OPTIMIZER, OTHER

FORMAT, KIND = 1, "profile"
PARAMETERS = ("live_run", "warm_up_s")  # of the notebook, beside the sections
COMMUNICATION, GAPS = "communication", "launch gaps"
SHARES = (DATA, COPY, FORWARD, INVERSE, BACKWARD, OPTIMIZER, COMMUNICATION, GAPS, OTHER)
COMPUTED = (FORWARD, INVERSE, BACKWARD, OPTIMIZER)
LEAST_SHARE = 0.05  # below it a finding is not worth a phase
LOW_MFU = 0.3
FULL = 0.8  # of the device's memory
MEANINGS = {
    DATA: "until batches are there: reading, or gathering what is resident, and augmentation",
    COPY: "host memory to device memory, as far as the step waits for it",
    FORWARD: "encoder, operator, decoder and all losses but the inverse ones",
    INVERSE: "inverse losses, forward and backward",
    BACKWARD: "everything else that is differentiated",
    OPTIMIZER: "clipping, Muon and AdamW, averaged weights",
    COMMUNICATION: "collectives that no computation hides, waiting for slower ranks included",
    GAPS: "no operation runs, because the host has not launched the next one yet",
    OTHER: "between steps: learning rate, events, requests",
}


def take(run: Run) -> dict:
    """Ask a live run for a profile and wait for its `profile` event.

    Raises:
        RunError: the run is paused, ended before, or its ranks could not be profiled; says why.
    """
    if runfolder.read_control(run.folder).paused:
        raise RunError(f"{run.folder}: is paused and takes no steps -> run.resume() first")
    try:
        taken = run.wait_for("profile", run.profile())
    except RunTimeout:
        raise
    except RunError as error:
        raise RunError(f"{error} -> profile a longer run") from None
    if taken["reason"]:
        raise RunError(f"{run.folder}: could not be profiled: {taken['reason']}")
    return taken


def read(folder: Path | str, num_ranks: int) -> list[dict]:
    """The latest profile of each rank."""
    return [json.loads((Path(folder) / profile_name(rank)).read_text()) for rank in range(num_ranks)]


def partition(record: Mapping) -> dict[str, float]:
    """Milliseconds of a rank's mean step by SHARES; they add up to the step.

    Times of parts are those of undisturbed steps. How much of a part computes, communicates or waits comes from traced
    ones: on CUDA in milliseconds, because a trace leaves kernels as they are; on the CPU, where it slows operators down
    as well, in proportion. Gaps on the CPU are an estimate from above, because a trace slows down what is between two
    operators the most.
    """
    totals = dict.fromkeys(SHARES, 0.0)
    nothing = {"range_ms": 0.0, "busy_ms": 0.0, "communication_ms": 0.0}
    for name, time_ms in record["parts_ms"].items():
        traced = record["trace"]["parts"].get(name, nothing)
        scale = time_ms / traced["range_ms"] if record["device"] == "cpu" and traced["range_ms"] else 1.0
        busy, sent = scale * traced["busy_ms"], scale * traced["communication_ms"]
        scale *= min(1.0, time_ms / (busy + sent)) if busy + sent else 1.0
        busy, sent = scale * traced["busy_ms"], scale * traced["communication_ms"]
        totals[COMMUNICATION] += sent
        if name in COMPUTED:
            totals[name] += busy
            totals[GAPS] += time_ms - busy - sent
        else:
            totals[name] += time_ms - sent
        if name == BACKWARD:
            inverse = min(scale * record["trace"]["inverse_backward_ms"], busy)
            totals[BACKWARD] -= inverse
            totals[INVERSE] += inverse
    return totals


def mean_parts(ranks: list[Mapping]) -> dict[str, float]:
    """Milliseconds of a mean step by SHARES, mean over ranks."""
    partitions = [partition(rank) for rank in ranks]
    return {name: float(np.mean([parts[name] for parts in partitions])) for name in SHARES}


def bytes_per_step(parameters: Mapping, config: RunConfig, num_ranks: int, stage: str = OPERATOR) -> float:
    """Bytes that each rank sends in one optimizer step, computed from parameter counts.

    DDP: ring all-reduce of gradients, 2 (n - 1) / n of them, once a step (`no_sync`) or after every microbatch.
    FSDP2: all-gather of the weights for forward and again for backward, (n - 1) / n of them, blocks in the autocast
    dtype, for every call of every microbatch, as many in a row as the stage may take, of the parts its dataset uses;
    reduce-scatter of float32 gradients, (n - 1) / n, once for all calls. Muon's products of sharded matrices, which
    exchange more, are not in it; a profile's collectives are.

    Args:
        parameters: `parameters` of a profile.
    """
    training, codecs = config.training, parameters["codecs"]
    everything = parameters["operator"] + sum(codecs.values())
    averages = 1 if training.no_sync else training.accum_steps
    part = (num_ranks - 1) / num_ranks
    if not training.use_fsdp2:
        return 2 * part * (2 if training.bf16_gradients else 4) * everything * averages
    used = parameters["operator"] + sum(codecs.values()) / len(codecs)
    width = 2 if training.amp and training.amp_dtype != "float32" else 4
    blocks = parameters.get("blocks", parameters["operator"])  # profiles of before 2026-11-27 do not count them
    gathered = 2 * (width * blocks + 4 * (used - blocks)) * training.accum_steps * config.calls(stage)
    return part * (gathered + 4 * (everything if training.no_sync else used * averages))


# -- the report --------------------------------------------------------------------------------------------------------


def report(run: Run, folder: Path | str | None = None) -> dict:
    """The report of a run's latest profile; also written to `report.json` of the folder, if one is given.

    Raises:
        RunError: the run has no profile.
    """
    events, machine = run.events(), Hardware(**run.manifest["hardware"])
    taken = [event for event in events if event["kind"] == "profile" and event["files"]]
    if not taken:
        raise RunError(f"{run.folder}: has no profile -> profiling.take(run) while it trains")
    config, ranks = run.current_config, read(run.folder, len(taken[-1]["files"]))
    stage = taken[-1].get("stage") or OPERATOR
    parts = mean_parts(ranks)
    step_ms = sum(parts.values())
    timed = range(ranks[0]["first_step"] + 1, ranks[0]["first_step"] + 1 + ranks[0]["num_steps"]["timed"])
    times_ms = [event["step_time_ms"] for event in events if event["kind"] == "step" and event["step"] in timed]
    shares = {name: value / step_ms for name, value in parts.items()}
    peak = float(np.mean([rank["matrix_peak"]["tflops"] for rank in ranks]))
    marked = {name: sum(rank["parts_ms"][name] for rank in ranks) for name in (FORWARD, INVERSE)}
    report = {
        "format": FORMAT,
        "kind": KIND,
        "device": ranks[0]["device"],
        "num_ranks": len(ranks),
        "step_ms": step_ms,
        "median_step_ms": float(np.median(times_ms)),  # of those that were timed
        "samples_per_s": steady_throughput(events),
        "parts_ms": parts,
        "shares": shares,
        "shares_by_rank": [{name: ms / sum(own.values()) for name, ms in own.items()} for own in map(partition, ranks)],
        "inverse_share_of_forward": marked[INVERSE] / sum(marked.values()),
        "flops_per_step": ranks[0]["flops_per_step"],  # of one rank, matrix products of forward and backward
        "matrix_peak_tflops": peak,
        "matrix_peak": ranks[0]["matrix_peak"],
        "floor": floor(ranks, peak),
        "mfu": ranks[0]["flops_per_step"] / (step_ms / 1e3) / (peak * 1e12),
        "communication_ms": float(np.mean([rank["trace"]["communication_ms"] for rank in ranks])),
        "collectives": ranks[0]["trace"]["collectives"],
        "bytes_per_step": bytes_per_step(ranks[0]["parameters"], config, len(ranks), stage),
        "operations": ranks[0]["trace"]["operations"],
        "num_launches": ranks[0]["trace"]["num_launches"],
        "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
        "device_memory_gib": ranks[0]["device_memory_gib"],
        "start_up_s": start_up(run, events),
        "num_steps": ranks[0]["num_steps"],
        "batch_size": config.training.batch_size,
        "phases_on": phases.names_on(config),
        "settings": overlays.difference(RunConfig(), config),
    }
    verdicts = {name: Verdict(*said) for name, said in run.manifest.get("verdicts", {}).items()}
    report["findings"] = findings(report, config, machine, verdicts)
    report["questions"] = questions(report, ranks, config, stage)
    return finish(report, folder, run.manifest)


def floor(ranks: list[Mapping], peak_tflops: float) -> dict[str, float]:
    """The time that no step of this work takes less than: its products at the peak, then its bytes at the bandwidth.

    Bytes are those that matrix products read and write, and the optimizer's: state (parameters, moments, averages)
    read and written once, gradients read.

    Returns:
        {"ms", "products_ms", "bytes_ms", "nbytes", "bandwidth_gb_per_s"}, of one rank.
    """
    first, bandwidth = ranks[0], float(np.mean([rank["bandwidth_gb_per_s"] for rank in ranks]))
    nbytes = first["product_bytes_per_step"] + (2 * first["state_gib"] + first["gradients_gib"]) * 2**30
    parts = {"products_ms": first["flops_per_step"] / peak_tflops / 1e9, "bytes_ms": nbytes / bandwidth / 1e6}
    return {"ms": sum(parts.values()), **parts, "nbytes": nbytes, "bandwidth_gb_per_s": bandwidth}


def start_up(run: Run, events: list[dict]) -> dict[str, float]:
    """Seconds from the launch of the latest ranks to their first step, by what took them.

    Compiling is in "first steps"; where it goes on later, compile events say so.
    """
    rest = events[max((index for index, event in enumerate(events) if event["kind"] == "start"), default=len(events)) :]
    if not rest:  # its line is damaged
        return {}
    start = rest[0]
    launched = run.manifest["segments"][-1]["started"]
    built = dict(start["build_s"])
    first = next((event for event in rest if event["kind"] == "first_step"), None)
    compiled = sum(event["duration_s"] for event in rest if event["kind"] == "compile")
    parts = {"processes": max(start["time"] - launched - sum(built.values()), 0.0), **built}
    if first is not None:
        parts["first step"] = max(first["since_launch_s"] - sum(built.values()), 0.0)
    return {**parts, **({"compiling, all steps": compiled} if compiled else {})}


# -- findings ----------------------------------------------------------------------------------------------------------


def findings(
    report: Mapping, config: RunConfig, machine: Hardware, verdicts: Mapping[str, Verdict] | None = None
) -> list[dict]:
    """What stands out, largest first: a sentence, its share, and the phase or extra that addresses it.

    Where all that would is on already, cannot run here or does not apply to the model, the sentence says so and `phase`
    is None.

    Args:
        verdicts: what phases are to the model, as far as it is known.
    """
    shares, rows = report["shares"], []

    def add(share: float, sentence: str, *names: str) -> None:
        """`names`: what addresses it, the first choice first."""
        if share < LEAST_SHARE:
            return
        hindered = []
        for phase in (phases.BY_NAME[name] for name in names):
            called = f"phase {phase.number}, {phase.name}" if phase.number else f"extra {phase.name}"
            verdict, why = (verdicts or {}).get(phase.name), ""
            if phases.is_on(phase, config):
                why = "on already"
            elif unmet := phases.unmet(phase, config, machine):
                why = unmet[0].found
            elif verdict and verdict.stands_against:
                why = str(verdict)
            if not why:
                rows.append({"sentence": f"{sentence} -> {called}", "share": share, "phase": phase.name})
                return
            hindered.append(f"{called} ({why})")
        rows.append({"sentence": f"{sentence}; {', '.join(hindered)}", "share": share, "phase": None})

    add(
        shares[INVERSE],
        f"{report['inverse_share_of_forward']:.0%} of the forward pass and {shares[INVERSE]:.0%} of a step are inverse "
        "losses",
        "loss_frequency",
    )
    said = f"in {shares[GAPS]:.0%} of a step no operation runs: the host launches too slowly"
    training = config.training
    on_gpu = resolve_device(config, machine) == "cuda"
    if on_gpu and training.compile and training.compile_mode == "default" and not training.use_fsdp2:
        said += ", which CUDA graphs do at once (training.compile_mode: reduce-overhead)"
    add(shares[GAPS], said, "compile")
    waiting = shares[DATA] + shares[COPY]
    add(waiting, f"{waiting:.0%} of a step waits for data or its copy to the device", "data_loading")
    add(shares[OPTIMIZER], f"{shares[OPTIMIZER]:.0%} of a step is the optimizer", "fused", "foreach")
    sent = shares[COMMUNICATION]
    said = f"{sent:.0%} of a step is communication that no computation hides"
    add(sent, said, "no_sync", "bf16_gradients", "nccl")
    passes = shares[FORWARD] + shares[INVERSE] + shares[BACKWARD]
    if report["mfu"] < LOW_MFU:
        said = f"{passes:.0%} of a step computes at {report['mfu']:.0%} of the matrix peak"
        add(passes, said, "bf16" if report["matrix_peak"]["dtype"] == "float32" else "compile")
    full = report["peak_memory_gib"] / report["device_memory_gib"] if report["device_memory_gib"] else 0.0
    if full > FULL:
        add(full, f"{full:.0%} of the device's memory is in use at the fullest moment", "activation_checkpointing")
    return sorted(rows, key=lambda row: -row["share"])


# -- five questions ----------------------------------------------------------------------------------------------------


def questions(report: Mapping, ranks: list[dict], config: RunConfig, stage: str) -> dict[str, dict]:
    """Five questions, each with a number and an answer in a sentence or two."""
    shares, step_s = report["shares"], report["step_ms"] / 1e3
    busy = sum(shares[name] for name in COMPUTED)
    waiting = shares[DATA] + shares[COPY]
    start_s = sum(value for name, value in report["start_up_s"].items() if not name.startswith("compiling"))
    compiled = report["start_up_s"].get("compiling, all steps", 0.0)
    return {
        "is the device busy": {
            "value": busy,
            "answer": f"It computes in {busy:.0%} of a step, at {report['mfu']:.1%} of its matrix peak of "
            f"{report['matrix_peak_tflops']:.3g} TFLOP/s ({report['matrix_peak']['dtype']}).",
        },
        "how much batch headroom": _headroom(report, config),
        "is it data or compute": {
            "value": waiting,
            "answer": f"{'Data' if waiting > busy else 'Compute'}: {waiting:.1%} of a step waits for data, "
            f"{busy:.0%} computes.",
        },
        "what does start-up cost": {
            "value": start_s,
            "answer": f"{start_s:.1f} s from launch to the first step, the time of {start_s / step_s:,.0f} steps"
            + (f"; compiling took {compiled:.1f} s in all." if compiled else "."),
        },
        "would more GPUs help": _more_ranks(report, ranks, config, stage),
    }


def _headroom(report: Mapping, config: RunConfig) -> dict:
    """How many times larger a microbatch may be, as predicted for the memory of this device."""
    sharing = report["num_ranks"] if report["device"] == "cpu" else 1  # CPU ranks share the memory of the host
    usable = plan.usable_bytes(report["device_memory_gib"] / sharing)
    predictor, batch = predict.Predictor(config), config.training.batch_size
    largest = plan.largest_batches(predictor, {plan.THIS_MACHINE: usable})[plan.THIS_MACHINE]
    return {
        "value": largest / batch,
        "answer": f"A microbatch of {batch} pairs is predicted to take {predictor.at(batch).gib:.2f} of "
        f"{usable / 2**30:.1f} GiB {'a rank' if sharing > 1 else 'here'}, and {largest:,} pairs would fit.",
    }


def _more_ranks(report: Mapping, ranks: list[dict], config: RunConfig, stage: str) -> dict:
    """The largest speedup of twice as many ranks or, with several, of these, and what the step says of more."""
    shares, step_s, count = report["shares"], report["step_ms"] / 1e3, len(ranks)
    host = " These ranks are CPU processes, which share cores." if report["device"] == "cpu" else ""
    if count == 1:
        sent = bytes_per_step(ranks[0]["parameters"], config, 2, stage)
        needed = sent / (LEAST_SHARE * step_s) / 1e9
        return {
            "value": 2 * (1 - shares[DATA]),
            "answer": f"On 2 ranks each would send {sent / 1e6:.3g} MB a step (computed); a link of {needed:.2g} GB/s "
            f"keeps that below {LEAST_SHARE:.0%} of a step even if nothing hides it. notebooks/05_scaling.ipynb "
            f"measures it.{host}",
        }
    speedup = count * (1 - shares[COMMUNICATION])
    return {
        "value": speedup,
        "answer": f"Communication that nothing hides takes {shares[COMMUNICATION]:.0%} of a step on {count} ranks: "
        f"they are at most {speedup:.2f} times as fast as one.{host}",
    }


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in report["shares"].items() if share >= 0.005)
    lines = [f"a step of {report['step_ms']:.4g} ms on {report['num_ranks']} x {report['device']}: {shares}"]
    lines += [f"{question}? {found['answer']}" for question, found in report["questions"].items()]
    return "\n".join([*lines, *(row["sentence"] for row in report["findings"])])

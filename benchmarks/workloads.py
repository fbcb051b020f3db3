"""Trainings that are not PDEs: what each reaches in five minutes, and what the phases gain there at equal quality.

    python benchmarks/workloads.py    # 95 quiet minutes; writes outputs/reference/workloads/

First each example trains as its params/cpu.yaml says. Then, with each of three seeds, two arms take turns on the
machine until both have trained for as many epochs: that file without any phase and with the kernel that torch chooses,
and with the phases of FAST, which are the same for all, and the file's own kernel. Both arms of the pictures draw a
thousand captions more. Last the memory of a step, predicted and measured.
"""

import gc
import json
import time
from pathlib import Path

import numpy as np
from keep import ROOT, arguments, save

from upsnb import hardware, overlays, phases
from upsnb.compare import arms
from upsnb.config import RunConfig
from upsnb.memory.measure import measure
from upsnb.memory.predict import predict
from upsnb.report import style
from upsnb.report.figures import RunFigures
from upsnb.report.file import finish
from upsnb.report.results import train_report
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT
from upsnb.training import workload
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

EPOCHS = {"long_context": 1, "mmdit": 3, "affinity": 4}  # of both arms: three minutes or so of the slower one
SEEDS = (42, 43, 44)  # of both arms
FAST = {"training.compile": True, "training.amp": True, "training.amp_dtype": "bfloat16", "optimizer.fused": True}
ENOUGH = {"training.time_limit_s": None, "checkpoint.interval": 100_000}
# The 96 captions of a size that pictures are judged by tell an error of 0.3 to within a sixth, these to a twentieth.
MORE = {"data.workload_settings.pictures": 1000, "data.workload_settings.seed": 1}
MORE |= {"data.split.test_fraction": 0.98, "data.split.validation_fraction": 0.0}
NUMBERS = ("samples_per_s", "parameters", "steps", "train_time_s", "time_to_first_step_s", "peak_memory_gib")


def of_example(name: str, **changes) -> RunConfig:
    """What its params/cpu.yaml says."""
    return overlays.load(ROOT / f"examples/{name}/params/cpu.yaml", overrides=changes)


def trained(name: str, folder: Path, output: Path) -> dict:
    """What one training reached on the test split, and its figures."""
    run = handle.start(of_example(name), folder)
    run.wait()
    report, unit = train_report(run), run.events(("start",))[0]
    for figure, draw in RunFigures.of(run).all().items():
        if figure not in ("loss", "throughput"):
            style.save(draw(), output, f"{name}_{figure}")
    known = {key: report[key] for key in NUMBERS}
    reached = {dataset: next(iter(splits.values())) for dataset, splits in report["datasets"].items()}
    named = {"unit": unit["unit"], "metric": unit["metric"], "cores": hardware.detect().num_cores}
    return {**named, **known, "reached": reached}


def compared(name: str, folder: Path) -> dict:
    """Throughput of FAST over that of no phase, taking turns, and the ratio of their errors."""
    base = of_example(name, **ENOUGH, **{"stages.operator.epochs": EPOCHS[name]})
    base = overlays.apply(base, phases.baseline_overlay(base))
    fast = overlays.apply(base, FAST)  # with the attention kernel of its file
    base = overlays.apply(base, {"operator.pdet.attention": "sdpa"})
    arms.compare(base, fast, folder, seeds=SEEDS, noise_floor=False, block_s=8.0)
    report = arms.compare_report(folder)
    first, second = (report["arms"][report[key]] for key in ("baseline", "optimized"))
    return {
        "speedup": report["speedup"],
        "error_ratio": report["nrmse_ratio"],
        "error_ratio_range": report["nrmse_ratio_range"],
        "errors": [[run["nrmse"] for run in arm] for arm in (first, second)],
        "seconds": [[run["train_time_s"] for run in arm] for arm in (first, second)],
        "compile_s": [run["compile_s"] for run in second],
    }


def judged_again(folder: Path) -> dict:
    """Errors of both arms of the pictures on MORE captions, which none of them has seen, over each other."""
    unseen = workload.of(of_example("mmdit", **MORE))
    captions, found = unseen.open(ROOT, print), []
    for arm in ("baseline", "optimized"):
        runs = [handle.Run(folder / f"runs/{arm}-seed{seed}") for seed in SEEDS]
        judged = [unseen.evaluate(run.load_model(), captions, "test", Ranks(), lambda: None) for run in runs]
        found.append([{size: result["error"] for size, result in sizes.items()} for sizes in judged])
    baseline, optimized = np.array([[list(sizes.values()) for sizes in arm] for arm in found])  # (seeds, sizes) each
    by_seed = optimized / baseline
    return {
        "captions": len(next(iter(captions.values())).splits["test"]),
        "error_ratio": dict(zip(captions, (optimized.mean(0) / baseline.mean(0)).tolist())),
        "error_ratio_range": dict(zip(captions, np.stack((by_seed.min(0), by_seed.max(0)), axis=1).tolist())),
        "error_ratio_of_all": float(optimized.mean() / baseline.mean()),
        "errors": found,
    }


def collecting_ms(name: str) -> float:
    """What one `gc.collect()` takes beside all that a training of this example holds, median of nine."""
    setup = Setup.build(of_example(name), ROOT, Ranks(), print)
    setup.step(setup.loader.peek(), 0)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        gc.collect()
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times))


def memory_mib(name: str) -> dict[str, float]:
    """The memory of one step as its file says, predicted and measured [MiB]."""
    config = of_example(name)
    return {"predicted": predict(config).nbytes / 2**20, "measured": measure(config).nbytes / 2**20}


def main() -> None:
    parser = arguments(__doc__, "workloads")
    parser.add_argument("--only", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    args = parser.parse_args()
    kept = args.output / REPORT
    work, found = runfolder.new_folder("workloads"), json.loads(kept.read_text())["examples"] if kept.exists() else {}
    hardware.check_runnable(overlays.apply(of_example(args.only[0]), FAST), hardware.detect())
    for name in args.only:
        found[name] = {"trained": trained(name, work / f"{name}-trained", args.output)}
        found[name] |= {"compared": compared(name, work / name), "collecting_ms": collecting_ms(name)}
        if name == "mmdit":
            found[name]["judged_again"] = judged_again(work / name)
        found[name]["memory_mib"] = memory_mib(name)
        found[name] = finish(found[name], None)  # the others may be of another machine
        save({"format": 1, "kind": "workloads", "examples": found}, kept)


if __name__ == "__main__":
    main()

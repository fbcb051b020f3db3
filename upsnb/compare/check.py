"""What this machine can do: its hardware, a few steps of every phase and params file, and three short measurements.

Steps are of the reference model at its full width, on little generated data: which ones run, which are refused or do
not apply to the model and why, which fail and how. Each is a process of its own, and so are the notebooks that follow
and measure, of the same model: they show that measuring works here, and first numbers, which a longer run may correct.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import yaml

from upsnb import config as configs
from upsnb import hardware, overlays, phases
from upsnb.config import RunConfig
from upsnb.data import datasets
from upsnb.errors import ConfigError
from upsnb.hardware import NVIDIA_DRIVER, Hardware
from upsnb.phases import DOES_NOT_APPLY, REFUSED, Verdict
from upsnb.report.file import factor, finish, number
from upsnb.runs import runfolder
from upsnb.runs.ranks import KEEP_BYTECODE, allocator_environment
from upsnb.training import parallel, preflight
from upsnb.training.setup import Setup
from upsnb.training.timing import peak_memory_gib

FORMAT, KIND = 1, "check"
PARAMETERS = ("chosen", "num_steps", "limit_s", "short")  # of the notebook, beside the sections
EAGER = "no phase"
RESULT = "result.json"
PARTIAL = (  # no recipes, or whose first stage says little
    *("rehearse", "pdebench_files", "pdebench_full", "smoke", "minute", "memory_reference"),
    *("pipeline_ks", "pipeline_kolmogorov", "pipeline_darcy", "pipeline_diffusion"),
)
ON_TOP = ("conservative", "aggressive")  # of a whole config
SMALL = {"training.batch_size": 2, "training.accum_steps": 1, "operator.pdet.depth": 2}  # where there is no GPU
RAN, FAILED = "ran", "failed"
NO_STEP = dict.fromkeys(("step_ms", "first_step_s", "memory_gib"))
SHORT = {  # notebooks that measure, cut to a minute or so
    "08_profile": {"warm_up_s": 5.0},
    "04_phases": {"rounds": 3, "block_s": 2.0, "search_minutes": 0.0},
    "02_compare": {"seeds": [42], "block_s": 2.0, "noise_floor": False},
}
SHORT_PHASES = {"cpu": ("fused",), "cuda": ("compile", "bf16", "fused")}  # compiling takes a CPU minutes
SHORT_EPOCHS = {"cpu": 1, "cuda": 20}  # of the comparison


@dataclass(frozen=True)
class Trial:
    """One config to take a few steps of."""

    name: str
    kind: str  # phase, or params
    config: RunConfig
    refused: str = ""  # why it is not even tried
    verdict: str = REFUSED  # on it then
    without: str = ""  # phases that were left out, and why


def facts(machine: Hardware) -> dict[str, str]:
    """The machine in words, as far as training cares."""
    driver, disk = Path(NVIDIA_DRIVER), shutil.disk_usage(runfolder.project_root())
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", driver.read_text()) if driver.exists() else None
    compiler = shutil.which("g++") or shutil.which("clang++")
    told = {
        "device": f"{machine.num_devices} x {machine.device_name}, {machine.device_memory_gib:.1f} GiB each",
        "host": f"{machine.num_cores} cores",
        "free on disk": f"{disk.free / 2**30:.0f} GiB",
        "torch": f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}",
        "NVIDIA driver": machine.unusable or (found[1] if found else "none"),
        "bfloat16": "by instructions" if machine.cpu_has_bf16 else "without, ten times slower than float32",
        "C++ compiler": Path(compiler).name if compiler else "none, so torch.compile does not work on the CPU",
    }
    if machine.device == "cuda":
        pairs = [(a, b) for a in range(machine.num_devices) for b in range(machine.num_devices) if a != b]
        direct = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        told["compute capability"] = ".".join(map(str, machine.compute_capability))
        told["bfloat16"] = "by tensor cores" if machine.compute_capability >= (8, 0) else "emulated, slow"
        told["between GPUs"] = "one GPU" if not pairs else "direct access" if direct else "through the host"
    return told


def plan(base: RunConfig, machine: Hardware, chosen: Sequence[str] = ()) -> list[Trial]:
    """What to try on one rank of this machine: every phase alone, and every params file whole.

    Args:
        base: the model; its phases are switched off.
        chosen: names of phases and params files; empty: all.
    Raises:
        ConfigError: an unknown name, or a base that cannot run here at all.
    """
    off = _on_little_data(overlays.apply(base, phases.baseline_overlay(base)), machine)
    hardware.check_runnable(off, machine)
    trials, verdicts = [Trial(EAGER, "phase", off)], preflight.foreseen(off, machine)
    for phase in phases.BY_NAME.values():
        if not any(path.startswith(("checkpoint.", "evaluation.")) for path in phase.on):  # those are of no step
            verdict = verdicts.get(phase.name, Verdict(phases.WORKS))
            if problems := phases.unmet(phase, off, machine):  # with remedies
                verdict = Verdict(REFUSED, "; ".join(map(str, problems)))
            against = verdict.stands_against
            config, why = (off, verdict.why) if against else (overlays.apply(off, phase.on), "")
            trials.append(Trial(phase.name, "phase", config, why, verdict.kind))
    for path in sorted((runfolder.project_root() / "params").glob("*.yaml")):
        if path.stem not in PARTIAL:
            trials.append(_of_file(path, base, machine))
    unknown = sorted({*chosen} - {trial.name for trial in trials})
    if unknown:
        known = ", ".join(trial.name for trial in trials)
        raise ConfigError([f"chosen: {name!r} is none -> choose from {known}" for name in unknown], "the check")
    return [trial for trial in trials if not chosen or trial.name in chosen]


def _of_file(path: Path, base: RunConfig, machine: Hardware) -> Trial:
    config = overlays.load(path)
    if any(dataset.custom for dataset in config.data.datasets.values()):
        why = "trains on files of one's own, and this check makes its data -> run it"
        return Trial(path.stem, "params", config, refused=why)
    if path.stem in ON_TOP:
        config = overlays.apply(base, phases.switchable(overlays.read(path)), path.stem)
    if machine.device == "cpu" and (config.training.num_gpus > 1 or path.stem in (*ON_TOP, "1gpu_fast")):
        why = "is for GPUs -> put params/rehearse.yaml on top to see it work here"
        return Trial(path.stem, "params", config, refused=why)
    config, left_out = phases.skip_missing(_on_little_data(config, machine), machine)
    without = "; ".join(f"{phases.label(name)}: {why}" for name, why in left_out.items())
    problems = hardware.problems(config, machine)
    return Trial(path.stem, "params", config, refused="; ".join(map(str, problems)), without=without)


def _on_little_data(config: RunConfig, machine: Hardware) -> RunConfig:
    """The same on one rank, on generated data of just enough samples.

    Without a GPU smaller: one dataset, two blocks, two pairs; compiling takes a minute for each dataset.
    """
    settings = {
        "training.num_gpus": 1,
        "training.nccl_tuning": False,
        "training.bf16_gradients": False,
        "training.device": "auto",
        "data.split.validation_fraction": 0.1,  # a file's own shares may be less than one of these few samples
        "data.split.test_fraction": 0.1,
    }
    settings |= SMALL if machine.device == "cpu" else {}
    batch_size = settings.get("training.batch_size", config.training.batch_size)
    for place, name in enumerate(config.data.datasets):
        if place and machine.device == "cpu":
            settings[f"data.datasets.{name}"] = None
            continue
        settings[f"data.datasets.{name}.files"] = []
        settings[f"data.datasets.{name}.generate.num_samples"] = 10 + 2 * batch_size * config.training.accum_steps
    return overlays.apply(config, settings)


def check(
    base: RunConfig,
    folder: Path | str,
    *,
    chosen: Sequence[str] = (),
    num_steps: int = 4,
    limit_s: float = 180.0,
    short: bool = False,
    log: Callable[[str], None] = print,
) -> dict:
    """Try everything of `plan`, one after the other; the report, also written to `report.json`.

    Args:
        num_steps: optimizer steps of each, the first of which compiles.
        limit_s: after which one of them counts as failed [s].
        short: then profile, measure and compare as well, by the notebooks that do.
    """
    machine, folder = hardware.detect(), Path(folder).absolute()
    told = facts(machine)
    for name, fact in told.items():
        log(f"{name}: {fact}")
    trials, rows = plan(base, machine, chosen), []
    for trial in trials:
        if not trial.refused:
            for dataset in trial.config.data.datasets.values():
                datasets.ensure_generated(dataset, folder / "data", log)
    for trial in trials:
        rows.append(_row(trial, folder, num_steps, limit_s))
        log(_line(rows[-1]))
    for name in SHORT if short else ():
        rows.append(_measured(name, base, machine, folder, limit_s))
        log(_line(rows[-1]))
    report = {"format": FORMAT, "kind": KIND, "facts": told, "rows": rows, "num_steps": num_steps}
    return finish(report, folder)


def _row(trial: Trial, folder: Path, num_steps: int, limit_s: float) -> dict:
    own = folder / "trials" / trial.name
    row = {"name": trial.name, "kind": trial.kind, "without": trial.without, **NO_STEP}
    if trial.refused:
        return {**row, "verdict": trial.verdict, "why": trial.refused}
    own.mkdir(parents=True, exist_ok=True)
    configs.save(trial.config, own / runfolder.CONFIG)
    arguments = ["upsnb.compare.check", str(own), str(folder / "data"), str(num_steps)]
    if failed := _failed(arguments, own / "log.txt", limit_s, allocator_environment(trial.config)):
        return {**row, "verdict": FAILED, "why": failed}
    return {**row, "verdict": RAN, "why": "", **json.loads((own / RESULT).read_text())}


def _failed(arguments: list[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> str:
    """Run a module of this project in a process; in words, why it failed, if it did."""
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, **KEEP_BYTECODE, **environment}
    options = {"capture_output": True, "text": True, "cwd": runfolder.project_root(), "env": environment}
    try:
        done = subprocess.run(command, timeout=limit_s, **options)
    except subprocess.TimeoutExpired as error:
        log.write_bytes((error.stdout or b"") + (error.stderr or b""))
        return f"not done after {limit_s:g} s"
    log.write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with code {done.returncode}"]
    return next((line for line in said if line.startswith("FAILED: ")), said[-1])  # a notebook's cause, or an error


def _measured(notebook: str, base: RunConfig, machine: Hardware, folder: Path, limit_s: float) -> dict:
    """What a notebook measures of the model, with everything in it cut short."""
    own, chosen = folder / "short" / notebook, SHORT_PHASES[machine.device]
    own.mkdir(parents=True, exist_ok=True)
    config = _on_little_data(overlays.apply(base, phases.baseline_overlay(base)), machine)
    more = {"data.root": str(folder / "data"), "stages.operator.epochs": SHORT_EPOCHS[machine.device]}
    if machine.device == "cpu":  # of all frames an epoch has 200 steps, which some CPUs take two minutes for
        more |= {f"data.datasets.{name}.reduced_resolution_t": 2 for name in config.data.datasets}
    settings = overlays.difference(RunConfig(), overlays.apply(config, more))
    file = own.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({"preset": "", **settings}, sort_keys=False))
    given = {**SHORT[notebook], ("baseline" if notebook == "02_compare" else "preset"): str(file)}
    given |= {"02_compare": {"isolate": chosen[0]}, "04_phases": {"chosen": [*chosen]}}.get(notebook, {})
    words = [word for key, value in given.items() for word in ("-p", f"{key}={json.dumps(value)}")]
    row = {"name": notebook, "kind": "notebook", "without": "", **NO_STEP}
    if find_spec("papermill") is None:  # on Colab, where notebooks are run by hand
        return {**row, "verdict": REFUSED, "why": "papermill is not installed -> pip install papermill"}
    command = ["upsnb", "run", f"notebooks/{notebook}.ipynb", "-o", str(own), *words]
    if failed := _failed(command, own.with_suffix(".log"), limit_s, {}):
        return {**row, "verdict": FAILED, "why": failed}
    return {**row, "verdict": RAN, "why": "", "measured": _told(json.loads((own / runfolder.REPORT).read_text()))}


def _told(report: Mapping) -> str:
    """What a notebook's report comes to, in a line."""
    if report["kind"] == "compare":
        changed = ", ".join(path for path in report["differences"] if path != "logging.name")
        return f"with {changed}: {factor(report['speedup'])} times the throughput"
    if report["kind"] == "profile":
        over = report["median_step_ms"] / report["floor"]["ms"]
        return f"{report['median_step_ms']:.3g} ms a step, {over:.1f} times its floor, MFU {report['mfu']:.0%}"
    rows = {row["phase"]: factor(row["ratio"]) if "ratio" in row else "failed" for row in report["alone"]}
    return "; ".join(f"{phase} {told}" for phase, told in rows.items())


def _line(row: Mapping) -> str:
    text = f"{row['name']}: {row['verdict']}"
    if "measured" in row:
        text += f", {row['measured']}"
    elif row["verdict"] == RAN:
        text += f", {number(row['step_ms'], 3)} ms a step, the first after {row['first_step_s']:.1f} s"
    text += f": {row['why']}" if row["why"] else ""
    return text + (f" (without {row['without']})" if row["without"] else "")


def summary(report: Mapping) -> str:
    """The report in a few lines: how many ran, then what did not."""
    found = [row["verdict"] for row in report["rows"]]
    counts = {"ran": RAN, "refused": REFUSED, "did not apply": DOES_NOT_APPLY, "failed": FAILED}
    lines = [", ".join(f"{found.count(verdict)} {said}" for said, verdict in counts.items())]
    return "\n".join([*lines, *(_line(row) for row in report["rows"] if row["verdict"] != RAN)])


def table(report: Mapping):
    """One row for each phase, params file and notebook."""
    import pandas as pd

    rows = [
        {
            "tried": row["name"],
            "verdict": row["verdict"],
            "first step [s]": number(row["first_step_s"], 3),
            "a step [ms]": number(row["step_ms"], 3),
            "memory [GiB]": number(row["memory_gib"], 3),
            "why, without what, or what was measured": row["why"] or row["without"] or row.get("measured", ""),
        }
        for row in report["rows"]
    ]
    return pd.DataFrame(rows).set_index("tried")


def take_steps(folder: Path, root: Path, num_steps: int) -> None:
    """Take the steps of one trial in this process, and write down what they took.

    Raises:
        AssertionError: a loss is not finite.
    """
    started, config = time.perf_counter(), configs.load(folder / runfolder.CONFIG)
    ranks = parallel.initialise(config)
    config = overlays.apply(config, {"data.root": str(root)})
    setup = Setup.build(config, root, ranks)
    setup.try_compile()
    ended, losses = [started], []
    batches = itertools.chain.from_iterable(map(setup.loader.epoch, itertools.count()))
    for step in range(num_steps):
        chosen = list(itertools.islice(batches, config.training.accum_steps))
        losses.append(setup.step(chosen, step)[0].item())  # waits for the device
        ended.append(time.perf_counter())
    assert all(map(math.isfinite, losses)), f"the loss is {losses[-1]}"
    first, *seconds = (after - before for before, after in itertools.pairwise(ended))
    found = {"first_step_s": first, "step_ms": 1e3 * median(seconds) if seconds else None}
    runfolder.write_json(folder / RESULT, {**found, "memory_gib": peak_memory_gib(ranks.device)})
    parallel.shutdown(ranks)


if __name__ == "__main__":
    take_steps(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

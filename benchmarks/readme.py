# ruff: noqa: E501  (a row of a table is one line here as there)
"""Write the measured tables of README.md and docs/ from the committed evidence in outputs/reference/.

python benchmarks/readme.py          # rewrite the parts between `<!-- name -->` and `<!-- /name -->`
python benchmarks/readme.py --check  # exit 1 where a document differs from the evidence (a test runs this)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median

import measurements
import minutes
from keep import REFERENCE
from measurements import where

from upsnb.rules import CONFLICTS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/model.md", "docs/phases.md", "docs/measurements.md")
TASKS = {"darcy": "Darcy, one call", "advection": "advection, 10 frames given, 31 predicted"}


def read(name: str) -> dict:
    return json.loads((REFERENCE / name).read_text())


def reports(name: str) -> list[dict]:
    """Committed reports of one notebook, one a machine or comparison."""
    return [json.loads(path.read_text()) for path in sorted(REFERENCE.glob(f"{name}*/report.json"))]


def key(task: str, statistic: str) -> str:
    return f"{'rollout_' if task == 'advection' else ''}nrmse_{statistic}"


def over_seeds(rows: list[dict], name: str) -> str:
    """Mean over seeds with the range, `0.0268 (0.0266 to 0.0270)`."""
    values = [row[name] for row in rows]
    mean = f"{sum(values) / len(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f} to {max(values):.4f})"


def accuracy() -> str:
    """Our recipe over seeds beside the peer."""
    report, peer = read("accuracy/seeds-5min.json"), {"rows": []}
    if (REFERENCE / "accuracy/peer-fno-5min.json").is_file():
        peer = read("accuracy/peer-fno-5min.json")
    lines = [
        f"{report['minutes']:g} minutes of training, compile time included, {where(report)}; the last 10 % of the samples",
        "are never trained on nor selected on; mean over seeds (smallest to largest).",
        "",
        "| nRMSE | seeds | mean over samples | median over samples | parameters | steps | data wait |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, title in TASKS.items():
        rows = [row for row in report["rows"] if row["task"] == task]
        lines.append(
            f"| {title} | {len(rows)} | {over_seeds(rows, key(task, 'mean'))} | {over_seeds(rows, key(task, 'median'))} | "
            f"{rows[0]['parameters']:,} | {min(row['steps'] for row in rows):,} to {max(row['steps'] for row in rows):,} | "
            f"{max(row['data_wait_share'] for row in rows):.1%} |"
        )
        if task == "darcy":
            for prefix, what in (
                ("symmetry_averaged", "the same, averaged over the square's 8 symmetries"),
                ("double_resolution", "the same models at 128 x 128 (16 other samples)"),
            ):
                mean, median = (over_seeds(rows, f"{prefix}_nrmse_{name}") for name in ("mean", "median"))
                lines.append(f"| {what} | {len(rows)} | {mean} | {median} | | | |")
        for row in (row for row in peer["rows"] if row["task"] == task):
            lines.append(
                f"| peer: neuraloperator {peer['versions']['neuraloperator']} FNO, {title} | 1 | {row[key(task, 'mean')]:.4f} | "
                f"{row[key(task, 'median')]:.4f} | {row['parameters']:,} | {row['steps']:,} | |"
            )
    return "\n".join(lines)


def variants() -> str:
    """The structure's variants side by side, best first, losers too."""
    (path,) = (REFERENCE / "accuracy").glob("variants-*.json")
    report = json.loads(path.read_text())
    lines = [f"{report['minutes']:g} minute(s) each, compile time included, one seed, {where(report)}."]
    for task, title in TASKS.items():
        rows = sorted((row for row in report["rows"] if row["task"] == task), key=lambda row: row[key(task, "mean")])
        lines += ["", f"| {title} | nRMSE mean | median | step ms | steps | parameters |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {row['variant']} | {row[key(task, 'mean')]:.4f} | {row[key(task, 'median')]:.4f} | {row['step_time_ms']:.0f} | "
            f"{row['steps']:,} | {row['parameters']:,} |"
            for row in rows
        ]
    return "\n".join(lines)


def quick() -> str:
    """What `make demo` reached."""
    report = read("quick/report.json")
    speed, memory = report["samples_per_s"], report["peak_memory_gib"]
    hardware = report["hardware"]
    lines = [
        f"`make demo`: one operator for both datasets, {report['parameters']:,} parameters, {report['train_time_s']:.0f} s of",
        f"training on {hardware['num_cores']} cores of an {hardware['device_name']} in float32, test split of generated data, one",
        "seed. nRMSE as PDEBench defines it, in physical units:",
        "",
        "| dataset | nRMSE mean | median | without a model | rollout to the end | without a model |",
        "|---|---|---|---|---|---|",
    ]
    for name, splits in report["datasets"].items():
        values = splits["test"]
        static = "rollout_nrmse_mean" not in values
        baseline = values["baseline_nrmse_mean" if static else "persistence_nrmse_mean"]
        rollout = (
            "| |"
            if static
            else f"{values['rollout_nrmse_mean']:.4f} | {values['rollout_persistence_nrmse_mean']:.2f} ({values['baseline']}) |"
        )
        lines.append(
            f"| {name} | {values['nrmse_mean']:.4f} | {values['nrmse_median']:.4f} | {baseline:.2f} ({values['baseline']}) | "
            f"{rollout}"
        )
    low, high = speed["ci95"]
    lines += [
        "",
        f"{speed['median']:.0f} samples/s while steady (bootstrap 95 % interval {low:.1f} to {high:.1f}), first step after",
        f"{report['time_to_first_step_s']:.1f} s, {report['memory_kind']} {memory:.2f} GiB. Training stops by the clock, so a "
        "machine that",
        "other programs share gets less far.",
    ]
    return "\n".join(lines)


def overheads() -> str:
    """What starting, saving and watching cost."""
    saves, panel = read("checkpoints/stall.json"), read("panel/panel.json")
    ratio, interval = panel["training"]["throughput_with_over_without"], panel["training"]["ci95"]
    low, high = saves["stall_ratio_range"]
    started = REFERENCE / "start/start.json"
    return "\n".join(
        (
            f"- Saving {saves['size_mib']:.0f} MiB in the background stops training for {saves['stall_ratio_median']:.1%} of the time that",
            f"  writing at once does ({low:.1%} to {high:.1%}; `benchmarks/checkpoints.py`).",
            f"- The panel opens a run of {panel['num_steps']:,} steps in {panel['open_s']:.1f} s; a redraw at {panel['points_per_curve']} points takes",
            f"  {panel['redraw_cpu_ms']:.1f} ms of the kernel and {panel['redraw_kilobytes']:.0f} kB; throughput with it over without:",
            f"  {ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}] (`benchmarks/panel.py`).",
            *starting(json.loads(started.read_text()) if started.is_file() else None),
        )
    )


def starting(report: dict | None) -> list[str]:
    """What comes before the first step, and around training, beside what it should be."""
    if report is None:
        return [
            "- Time to the first optimized step, and what a notebook takes beside training: not measured yet (`benchmarks/start.py`)."
        ]
    warm, cold, targets = report["warm"], report["cold"], report["targets"]
    first = [one["first_step_s"] for one in warm]
    parts = {
        name: median(one["parts_s"][name] for one in report["notebooks"]) for name in report["notebooks"][0]["parts_s"]
    }
    split = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    overheads = [one["overhead_s"] for one in report["notebooks"]]
    return [
        f"- The first step of `params/{report['params']}.yaml` ends {median(first):.1f} s after its start ({min(first):.1f} to {max(first):.1f}, {len(first)} starts)",
        f"  where its code was compiled before, with an empty cache {cold['first_step_s']:.0f} s; wanted warm: {targets['warm_first_step_s']:g} s.",
        f"  Compiling and loading take {median(one['compile_s'] for one in warm):.1f} s of a warm start, {cold['compile_s']:.0f} s of a cold one.",
        f"- `notebooks/01_train.ipynb`, headless, takes {median(overheads):.1f} s beside training ({min(overheads):.1f} to {max(overheads):.1f});",
        f"  wanted: under {targets['overhead_s']:g} s. Of these, in seconds: {split}",
        f"  (`benchmarks/start.py`; {where(report)}).",
    ]


def conflicts() -> str:
    """Settings that exclude each other, as a run refuses them."""
    return "\n".join(f"- **{' x '.join(names)}**: {sentence}" for names, _, sentence in CONFLICTS)


SECTIONS = {
    "notebooks": minutes.table,
    "phases": lambda: measurements.phase_table(reports("phases")),
    "gains": lambda: measurements.gains(reports("phases")),
    "conflicts": conflicts,
    "compare": lambda: measurements.comparisons(reports("compare")),
    "scaling": lambda: measurements.scalings(reports("scaling")),
    "profile": lambda: measurements.profiles(reports("profile")),
    "memory": lambda: measurements.memories(reports("memory")),
    "short": lambda: measurements.short(*map(reports, ("scaling", "profile", "memory"))),
    "overheads": overheads,
    "measured": accuracy,
    "variants": variants,
    "quick": quick,
}


def rewritten(text: str) -> str:
    """The document with every section made anew."""
    for name, make in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda match: f"{match[1]}{make()}\n{match[2]}", text)  # noqa: B023 (used at once)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on a difference")
    check, stale = parser.parse_args().check, []
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old)
        if new != old:
            stale.append(name)
            if not check:
                path.write_text(new)
    if check and stale:
        print(
            f"{', '.join(stale)}: not what outputs/reference says -> run python benchmarks/readme.py", file=sys.stderr
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

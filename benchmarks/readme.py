# ruff: noqa: E501  (a line of a document is one line here as there)
"""Write the measured parts of README.md and docs/ from the committed evidence in outputs/reference/.

python benchmarks/readme.py          # rewrite all that stands between `<!-- name -->` and `<!-- /name -->`
python benchmarks/readme.py --check  # exit 1 where a document differs from the evidence (a test runs this)

The tables are those of the notebooks: each study has one, made from its report.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import pandas as pd
import tables
from keep import NOTEBOOK, REFERENCE, ROOT, arguments
from tables import called, markdown, read, reports, where

from upsnb import overlays
from upsnb.compare import figures as compare_figures
from upsnb.compare import ladder, ladder_figures, scaling, scaling_figures
from upsnb.config import RunConfig
from upsnb.memory import plan
from upsnb.phases import EXTRAS, PHASES
from upsnb.profile import figures as profile_figures
from upsnb.profile import report as profiling
from upsnb.report import results
from upsnb.rules import CONFLICTS
from upsnb.runs.runfolder import REPORT

NOT_YET = "Not measured yet."
CORES = 2  # of the machine whose minutes the table of notebooks shows
MOST_SETTINGS = 4  # that are named where a kept notebook had others than its own
TASKS = {"darcy": "Darcy, one call", "advection": "advection, 10 frames given, 31 predicted"}
PREFIXES = {"darcy": "", "advection": "rollout_"}  # of the error that counts
MORE_OF_DARCY = {
    "the same, averaged over the square's 8 symmetries": "symmetry_averaged_",
    "the same models at 128 x 128 (16 other samples)": "double_resolution_",
}


# -- studies -----------------------------------------------------------------------------------------------------------


def facts() -> str:
    """What each phase and extra promises, is held to and needs."""
    rows = [
        {
            "#": phase.number or "-",
            "phase": phase.name,
            "hot?": "hot" if phase.hot else "cold",
            "numerics": phase.numerics,
            "needs": phase.needs or "-",
            "promised alone": f"{phase.expected.factor:.2f}" if phase.expected else "-",
            "promised so far": f"{phase.expected.cumulative:.2f}" if phase.expected else "-",
        }
        for phase in (*PHASES, *EXTRAS)
    ]
    return markdown(pd.DataFrame(rows))


def phases(report: Mapping) -> str:
    """One machine's and model's phases, and what to use there."""
    model = report["settings"].get("model.build", "UPS").rpartition(":")[2]
    head = f"{model}, {where(report)}; samples/s over the baseline's [95 % interval]:"
    return "\n\n".join(filter(None, (head, markdown(ladder_figures.table(report)), ladder.recommended(report))))


def compare(report: Mapping) -> str:
    """One comparison: what was required beside what was measured."""
    first, second = report["baseline"], report["optimized"]
    seeds, turns = len(report["arms"][first]), "interleaved" if report["interleaved"] else "one after the other"
    data = ", ".join(file for names in report["files"].values() for file in names) or "generated data"
    length = mean(run["train_time_s"] for run in report["arms"][first])
    head = f"{second} against {first}, which trains for {length:.0f} s, {data}, {where(report)}, {seeds} seed{'s' * (seeds > 1)}, {turns}:"
    return "\n\n".join((head, markdown(compare_figures.table(report))))


def scalings(report: Mapping) -> str:
    """One machine's ranks."""
    rehearsal = [f"**{scaling.REHEARSAL}**"] if report["rehearsal"] else []
    return "\n\n".join((f"{where(report)}.", *rehearsal, markdown(scaling_figures.table(report))))


def profile(report: Mapping) -> str:
    """Where one run's step goes, five answers, and what stands out."""
    head = f"{called(report)}, {where(report)}: {report['num_ranks']} rank{'s' * (report['num_ranks'] > 1)}, batch {report['batch_size']}, a mean step of {report['step_ms']:.1f} ms."
    parts = profile_figures.table(report).rename_axis("part of a step").reset_index()
    told = "\n".join(f"- {line}" for line in profiling.summary(report).splitlines()[1:])
    return "\n\n".join((head, markdown(parts), told))


def memory(report: Mapping) -> str:
    """One config's memory, and the largest batch of each device."""
    head = f"{called(report)}, {where(report)}; eager, one rank; {plan.worst(report)}."
    batches = plan.fits_table(report["fits"]).map("{:,}".format).reset_index()
    said = f"The largest batch, pairs a microbatch and GPU, by memory alone ({report['reserve_gib']:g} GiB held back):"
    return "\n\n".join((head, markdown(plan.table(report)), said, markdown(batches)))


def of_each(tell: Callable[[Mapping], str], name: str) -> str:
    return "\n\n".join(map(tell, reports(name))) or NOT_YET


# -- training ----------------------------------------------------------------------------------------------------------


def quick(report: Mapping) -> str:
    """What `make demo` reached."""
    head = f"`make demo`, {where(report)}: one operator for both datasets of generated data, float32, one seed; nRMSE as PDEBench defines it, in physical units."
    told = [f"- {line}" for line in results.costs(report).splitlines()]
    told.append("- Training stops by the clock, so a machine that other programs share gets less far.")
    return "\n\n".join((head, markdown(results.table(report)), "\n".join(told)))


def over_seeds(rows: Sequence[Mapping], name: str) -> str:
    """Mean over seeds with the range, `0.0268 (0.0266 to 0.0270)`."""
    values = [row[name] for row in rows]
    mean = f"{sum(values) / len(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f} to {max(values):.4f})"


def errors(rows: Sequence[Mapping], what: str, prefix: str) -> dict:
    means = {f"{name} over samples": over_seeds(rows, f"{prefix}nrmse_{name}") for name in ("mean", "median")}
    return {"nRMSE": what, "seeds": len(rows), **means}


def accuracy() -> str:
    """Our recipe over seeds beside the peer."""
    report, peer = read("accuracy/seeds-5min.json"), read("accuracy/peer-fno-5min.json")
    library, table = f"peer of {peer['date']}: neuraloperator {peer['versions']['neuraloperator']} FNO", []
    for task, title in TASKS.items():
        ours, theirs = ([row for row in one["rows"] if row["task"] == task] for one in (report, peer))
        steps = sorted(row["steps"] for row in ours)
        cost = {"parameters": f"{ours[0]['parameters']:,}", "steps": f"{steps[0]:,} to {steps[-1]:,}"}
        cost["data wait"] = f"{max(row['data_wait_share'] for row in ours):.1%}"
        table.append({**errors(ours, title, PREFIXES[task]), **cost})
        if task == "darcy":
            table += [errors(ours, what, prefix) for what, prefix in MORE_OF_DARCY.items()]
        table += [
            {**errors([row], f"{library}, {title}", PREFIXES[task]), "parameters": f"{row['parameters']:,}", "steps": f"{row['steps']:,}"}
            for row in theirs
        ]  # fmt: skip
    head = f"{report['minutes']:g} minutes of training, compile time included, {where(report)}; the last 10 % of the samples are never trained on, and no weights are selected on them; parts of the model were ([LOG.md](LOG.md)), so read gains of some per cent as none; mean over seeds (smallest to largest)."
    return f"{head}\n\n{markdown(pd.DataFrame(table).fillna(''))}"


def variants() -> str:
    """The structure's variants side by side, best first, losers too."""
    (path,) = (REFERENCE / "accuracy").glob("variants-*.json")
    report = json.loads(path.read_text())
    parts = [f"{report['minutes']:g} minute(s) each, compile time included, one seed, {where(report)}."]
    for task, title in TASKS.items():
        mean, middle = (f"{PREFIXES[task]}nrmse_{name}" for name in ("mean", "median"))
        rows = [
            {
                title: row["variant"],
                "nRMSE mean": f"{row[mean]:.4f}",
                "median": f"{row[middle]:.4f}",
                "step ms": f"{row['step_time_ms']:.0f}",
                "steps": f"{row['steps']:,}",
                "parameters": f"{row['parameters']:,}",
            }
            for row in sorted(report["rows"], key=lambda row: row.get(mean, 0))
            if row["task"] == task
        ]
        parts.append(markdown(pd.DataFrame(rows)))
    return "\n\n".join(parts)


# -- what else is there ------------------------------------------------------------------------------------------------


def overheads() -> str:
    """What starting, saving and watching cost."""
    saves, panel = read("checkpoints/stall.json"), read("panel/panel.json")
    started = [json.loads(path.read_text()) for path in sorted(REFERENCE.glob("start*/start.json"))]
    ratio, interval = panel["training"]["throughput_with_over_without"], panel["training"]["ci95"]
    spared = panel["training"].get("threads_per_rank", 1) == 1  # older reports were all so
    idle = " (training had one of the two cores, so this shows no cost where it has all)" if spared else ""
    low, high = saves["stall_ratio_range"]
    return "\n".join(
        (
            f"- Saving {saves['size_mib']:.0f} MiB in the background stops training for {saves['stall_ratio_median']:.1%} of the time that",
            f"  writing at once does ({low:.1%} to {high:.1%}; `benchmarks/checkpoints.py`).",
            f"- The panel opens a run of {panel['num_steps']:,} steps in {panel['open_s']:.1f} s; a redraw at {panel['points_per_curve']} points takes",
            f"  {panel['redraw_cpu_ms']:.1f} ms of the kernel and {panel['redraw_kilobytes']:.0f} kB; throughput with it over without: {ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]{idle} (`benchmarks/panel.py`).",
            *(line for report in started or [None] for line in starting(report)),
        )
    )


def starting(report: Mapping | None) -> list[str]:
    """What comes before the first step, and around training, beside what it should be."""
    if report is None:
        return [
            "- Time to the first optimized step, and what a notebook takes beside training: not measured yet (`benchmarks/start.py`)."
        ]
    warm, cold, targets, notebooks = report["warm"], report["cold"], report["targets"], report["notebooks"]
    first = [one["first_step_s"] for one in warm]
    parts = {name: median(one["parts_s"][name] for one in notebooks) for name in notebooks[0]["parts_s"]}
    split = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    beside = [one["overhead_s"] for one in notebooks]
    return [
        f"- The first step of `params/{report['params']}.yaml` ends {median(first):.1f} s after its start ({min(first):.1f} to {max(first):.1f}, {len(first)} starts)",
        f"  where its code was compiled before, with an empty cache {cold['first_step_s']:.0f} s;",
        f"  wanted: under {targets['warm_first_step_s']:g} s and {targets['cold_first_step_s']:g} s.",
        f"  Compiling and loading take {median(one['compile_s'] for one in warm):.1f} s of a warm start, {cold['compile_s']:.0f} s of a cold one.",
        f"- `notebooks/01_train.ipynb`, headless, takes {median(beside):.1f} s beside training ({min(beside):.1f} to {max(beside):.1f});",
        f"  wanted: under {targets['overhead_s']:g} s. Of these, in seconds: {split}",
        f"  (`benchmarks/start.py`; {where(report)}).",
    ]


def conflicts() -> str:
    """Settings that exclude each other, as a run refuses them."""
    return "\n".join(f"- **{' x '.join(names)}**: {sentence}" for names, _, sentence in CONFLICTS)


def notebooks(reference: Path = REFERENCE) -> str:
    """What each notebook asks, in its own first words, and how long it took where an executed one is kept."""
    rows = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title, _, promise = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition("\n\n")
        title = title.removeprefix("# ")
        question = f"{title}{'' if title.endswith('?') else '.'} {re.split(r'(?<=[.]) ', promise)[0]}"
        took = ", ".join(minutes(path.stem, reference)) or "not measured"
        rows.append({"notebook": f"`notebooks/{path.name}`", "question": question, "minutes on two cores": took})
    return markdown(pd.DataFrame(rows))


def minutes(name: str, reference: Path = REFERENCE) -> list[str]:
    """How long kept executions of one notebook took on a CPU with CORES cores, and with which settings.

    Their reports say on which machine, because papermill does not.
    """
    found = []
    for path in sorted(reference.glob(f"*/{NOTEBOOK}")):
        executed = json.loads(path.read_text())
        papermill, report = executed["metadata"]["papermill"], json.loads(path.with_name(REPORT).read_text())
        hardware = report["hardware"]
        if Path(papermill["input_path"]).stem == name and (hardware["device"], hardware["num_cores"]) == ("cpu", CORES):
            time_min, settings = papermill["duration"] / 60, given(executed)
            found.append(
                f"{time_min:.{1 if time_min < 9.95 else 0}f}" + (f" ({', '.join(settings)})" if settings else "")
            )
    return sorted(found, key=lambda said: "(" in said)  # with its own settings first


def flattened(folder: str) -> dict[str, dict]:
    """The settings of all params files in a folder, by name."""
    return {path.stem: overlays.flatten(overlays.read(path)) for path in sorted((ROOT / folder).glob("*.yaml"))}


def given(executed: Mapping) -> list[str]:
    """What an executed notebook was given: params files by name, but not the notebook's own, and the rest."""
    passed = {**executed["metadata"]["papermill"]["parameters"]}
    sections = overlays.flatten({key: passed.pop(key) for key in RunConfig.model_fields if key in passed})
    models = flattened("params/models")
    above = [name for name, flat in models.items() if all(sections.get(key, ...) == flat[key] for key in flat)]
    (cell,) = (cell for cell in executed["cells"] if "parameters" in cell["metadata"].get("tags", ()))
    own = re.search(r"^preset.*= \"(.*?)\"", "".join(cell["source"]), re.MULTILINE)[1]
    rest = {
        name: {
            key: value
            for key, value in sections.items()
            if flat.get(key, ...) != value and not any(key in models[model] for model in above)
        }
        for name, flat in ({"": {}} | flattened("params")).items()
        if flat.keys() <= sections.keys()
    }
    name = min(rest, key=lambda name: len(rest[name]))
    more = {key.rpartition(".")[2]: value for key, value in rest[name].items() if key != "logging.name"}
    more |= {key: value for key, value in passed.items() if key not in overlays.PARAMETERS}
    said = [f"{len(v)} {k[:-1] if len(v) == 1 else k}" if isinstance(v, list) else f"{k} {v}" for k, v in more.items()]
    return [name] * (name not in ("", own)) + above + (said if len(said) <= MOST_SETTINGS else ["other settings"])


# -- documents ---------------------------------------------------------------------------------------------------------


SECTIONS = {
    "notebooks": notebooks,
    "phases": lambda: f"{facts()}\n\n{of_each(phases, 'phases')}",
    "conflicts": conflicts,
    "compare": lambda: of_each(compare, "compare"),
    "search": lambda: of_each(tables.search, "search"),
    "scaling": lambda: of_each(scalings, "scaling"),
    "leaderboard": lambda: of_each(tables.leaderboard, "leaderboard"),
    "eleven": lambda: of_each(tables.eleven, "eleven"),
    "mixing": lambda: of_each(tables.mixing, "mixing"),
    "finetune": lambda: of_each(tables.finetune, "finetune"),
    "pretrained": lambda: of_each(tables.pretrained, "pretrained"),
    "worth": lambda: of_each(tables.worth, "worth"),
    "pipeline": lambda: of_each(tables.pipeline, "pipeline"),
    "steady_prior": lambda: of_each(tables.steady_prior, "steady_prior"),
    "workloads": lambda: of_each(tables.workloads, "workloads"),
    "attention": lambda: of_each(tables.attention, "attention"),
    "gpu": lambda: of_each(tables.gpu, "gpu"),
    "wrapper": lambda: tables.wrapper(read("wrapper/wrapper.json")),
    "profile": lambda: of_each(profile, "profile"),
    "memory": lambda: of_each(memory, "memory"),
    "overheads": overheads,
    "measured": accuracy,
    "variants": variants,
    "quick": lambda: of_each(quick, "quick"),
}


def rewritten(text: str) -> str:
    """The document with every section made anew.

    Raises:
        ValueError: a mark that no section has, or one without its end.
    """
    marks = re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE)
    wrong = [name for name in marks if name not in SECTIONS or f"\n<!-- /{name} -->" not in text]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: no such section, or no end of it -> choose from {', '.join(SECTIONS)}")
    for name in marks:
        pattern = re.compile(rf"^(<!-- {name} -->\n).*?^(<!-- /{name} -->)$", re.DOTALL | re.MULTILINE)
        text = pattern.sub(lambda match: f"{match[1]}{SECTIONS[name]()}\n{match[2]}", text)  # noqa: B023 (used at once)
    return text


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on a difference")
    check, stale = parser.parse_args().check, []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = path.read_text()
        new = rewritten(old)
        if new != old:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if check and stale:
        print(
            f"{', '.join(stale)}: not what outputs/reference says -> run python benchmarks/readme.py", file=sys.stderr
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

# ruff: noqa: E501  (a row of a table is one line here as there)
"""Tables of what the notebooks measured, from their reports: phases, comparisons, scaling, profiles, memory.

Every function takes the reports themselves, one a machine, and returns Markdown; what no report holds is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from upsnb.compare.scaling import AGAIN, REHEARSAL
from upsnb.phases import EXTRAS, PHASES
from upsnb.report.file import number

NOT_YET = "Not measured yet."
FEW_GPUS = ("T4", "A100-80", "H200")  # of the devices that 03_memory asks about, the ones that documents show
LEAST_SHOWN = 0.05  # of a step; what takes less is in the document, not in the README's line


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar inside a cell would end it."""
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def where(report: Mapping) -> str:
    """Machine, versions and date of a measurement."""
    hardware, versions = report["hardware"], report["versions"]
    device = report.get("settings", {}).get("training.device", hardware["device"])
    if device == "cpu" and hardware["device"] == "cpu":
        machine = f"{hardware['num_cores']} cores of an {hardware['device_name']}"
    elif device == "cpu":
        machine = f"{hardware['num_cores']} cores beside {hardware['num_devices']} x {hardware['device_name']}"
    else:
        machine = f"{report.get('num_ranks', hardware['num_devices'])} x {hardware['device_name']}"
    return ", ".join(filter(None, (machine, f"torch {versions['torch']}", report.get("date"))))


def factor(ratio: Mapping) -> str:
    """A ratio with its 95 % interval, and a word where all of it lies below 1."""
    if ratio["median"] is None:
        return "not measured"
    low, high = ratio["ci95"]
    if low is None:
        return f"{ratio['median']:.2f} (no interval)"
    return f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]" + (", slower" if round(high, 2) < 1 else "")


def why(problem: str) -> str:
    """What is wrong, without the setting before it and the remedy after it."""
    problem = problem.splitlines()[0] if problem else ""
    problem = re.sub(r"^[a-z0-9_.]+: ", "", problem).partition(" -> ")[0]
    return re.sub(r"^.* cannot run here: ", "", problem)


# -- phases ------------------------------------------------------------------------------------------------------------


def phase_cell(report: Mapping, kind: str, name: str) -> str:
    """What was measured of one phase ("alone") or of all up to it ("ladder"), or why nothing was."""
    if name in report["skipped"]:
        return f"cannot run here: {why(report['skipped'][name])}" if kind == "alone" else "cannot run here"
    row = next((row for row in report[kind] if row["phase"] == name), None)
    if row is None:
        return "not measured"
    return f"failed: {why(row['failed'])}" if "failed" in row else factor(row["ratio"])


def _marks(reports: Sequence[Mapping]) -> list[str]:
    """What tells the machines' columns apart, where there are several."""
    return [f" ({count})" for count in range(1, len(reports) + 1)] if len(reports) > 1 else [""] * len(reports)


def _machines(reports: Sequence[Mapping]) -> list[str]:
    said = "samples/s over the baseline's [95 % interval]."
    return [f"{mark} {where(report)}; {said}".strip() for mark, report in zip(_marks(reports), reports)]


def _promises(phase) -> tuple[str, str]:
    return (f"{phase.expected.factor:.2f}", f"{phase.expected.cumulative:.2f}") if phase.expected else ("-", "-")


def phase_table(reports: Sequence[Mapping]) -> str:
    """What each phase and extra promises, is held to and needs, and what was measured on every machine at hand."""
    marks = _marks(reports)
    head = ["#", "phase", "hot?", "numerics", "needs", "promised alone", *(f"measured alone{mark}" for mark in marks)]
    head += ["promised so far", *(f"added in order{mark}" for mark in marks)]
    rows = []
    for phase in (*PHASES, *EXTRAS):
        alone, so_far = _promises(phase)
        cells = [str(phase.number or "-"), phase.name, "hot" if phase.hot else "cold", phase.numerics]
        cells += [phase.needs or "-", alone, *(phase_cell(report, "alone", phase.name) for report in reports)]
        rows.append([*cells, so_far, *(phase_cell(report, "ladder", phase.name) for report in reports)])
    return "\n".join([*(_machines(reports) or [NOT_YET]), "", *table(head, rows), *_recommendations(reports)])


def gains(reports: Sequence[Mapping]) -> str:
    """The same for the README: the eight phases, their promises beside what was measured, and what to use."""
    if not reports:
        return NOT_YET
    marks = _marks(reports)
    head = ["phase", "promised alone", *(f"alone{mark}" for mark in marks)]
    head += ["promised so far", *(f"added in order{mark}" for mark in marks)]
    rows = []
    for phase in PHASES:
        alone, so_far = _promises(phase)
        rows.append([f"{phase.number} {phase.name}", alone, *(phase_cell(r, "alone", phase.name) for r in reports)])
        rows[-1] += [so_far, *(phase_cell(r, "ladder", phase.name) for r in reports)]
    return "\n".join([*_machines(reports), "", *table(head, rows), *_recommendations(reports)])


def _recommendations(reports: Sequence[Mapping]) -> list[str]:
    said = [f"{mark} {recommended(report)}".strip() for mark, report in zip(_marks(reports), reports)]
    return ["", *said] if said else []


def recommended(report: Mapping) -> str:
    """The set to use on a machine, in one sentence."""
    chosen = report["recommended"]
    if chosen["phase"] is None:
        return f"Recommended: the baseline, because {chosen['basis']}."
    if chosen["kind"] == "alone":
        names = [chosen["phase"]]
    elif chosen["kind"] == "ladder":
        rungs = [row["phase"] for row in report["ladder"]]
        names = rungs[: rungs.index(chosen["phase"]) + 1]
    else:  # all that gain alone
        names = [row["phase"] for row in report["alone"] if (row["ratio"]["ci95"][0] or 0) > 1]
    return (
        f"Recommended: {' + '.join(names)}, {factor(chosen['ratio'])} times the baseline; rests on {chosen['basis']}."
    )


# -- comparisons -------------------------------------------------------------------------------------------------------


def comparisons(reports: Sequence[Mapping]) -> str:
    """A against B with the criteria, one table a comparison."""
    return "\n\n".join(map(compared, reports)) if reports else NOT_YET


def compared(report: Mapping) -> str:
    """One comparison: what was required beside what was measured."""
    first, second = report["baseline"], report["optimized"]
    quality, aa = report["time_to_quality_speedup"], report["aa_ratio"]
    rows = [
        (
            f"samples/s, {second} over {first} [95 % interval]",
            _required(report, "speedup"),
            factor(report["speedup"]),
        ),
        ("samples/s of two equal arms (A/A)", "", factor(aa) if aa else "not measured"),
        (
            "time to the baseline's quality, compilation included",
            "",
            f"{quality:.2f} times as fast" if quality else "not reached",
        ),
        ("test nRMSE over the baseline's", _required(report, "nrmse_ratio"), _errors(report["nrmse_ratio"])),
        ("the same of equal arms (A/A)", "", _errors(report["aa_nrmse_ratio"])),
        ("validation nRMSE above the baseline's", _required(report, "loss_delta"), number(report["loss_delta"], 3)),
        ("verdict", "", report["verdict"]),
    ]
    seeds = len(report["arms"][first])
    turns = "interleaved" if report["interleaved"] else "one after the other"
    files = [file for names in report["files"].values() for file in names]
    data = ", ".join(files) or "generated data"
    head = f"{second} against {first}, {data}, {where(report)}, {seeds} seed{'s' * (seeds > 1)}, {turns}:"
    return "\n".join([head, "", *table(["", "required", "measured"], rows)])


def _errors(ratios: Mapping | None) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in ratios.items()) if ratios else "not measured"


def _required(report: Mapping, name: str) -> str:
    item = next((item for item in report["criteria"] if item["name"] == name), None)
    return f"{item['required']:g} ({'holds' if item['passed'] else 'does not hold'})" if item else ""


# -- scaling -----------------------------------------------------------------------------------------------------------


def scalings(reports: Sequence[Mapping]) -> str:
    """Throughput over one rank's beside the promised range, and what of a step communicates."""
    return "\n\n".join(map(scaled, reports)) if reports else NOT_YET


def scaled(report: Mapping) -> str:
    """One machine's scaling."""
    head = ["ranks", "wrapper", "mode", "promised", "samples/s over one rank's [95 % interval]"]
    head += ["of a step waits for communication", "MB a rank sends a step (computed)"]
    rows = []
    for row in report["rows"]:
        share, sent = row["communication_share"], row["bytes_per_step"]
        rows.append(
            (
                str(row["ranks"]),
                row["wrapper"],
                "one rank again" if row["mode"] == AGAIN else row["mode"],
                _promised(row),
                f"failed: {why(row['failed'])}" if "failed" in row else factor(row["ratio"]),
                "-" if share is None else f"{share:.0%}",
                "-" if sent is None else f"{sent / 1e6:.3g}",
            )
        )
    lines = [f"{where(report)}.", *(["", f"**{REHEARSAL}**"] if report["rehearsal"] else [])]
    left_out = [f"- {name} is left out: {why(reason)}" for name, reason in report["skipped"].items()]
    return "\n".join([*lines, "", *table(head, rows), *([""] if left_out else []), *left_out])


def _promised(row: Mapping) -> str:
    return " to ".join(f"{end:g}" for end in row["promised"] or ())


def scaling_line(report: Mapping) -> str:
    """One machine's scaling for the README."""
    rows = [row for row in report["rows"] if row["ranks"] > 1 and row["ratio"]["median"] is not None]
    counts = sorted({row["ranks"] for row in rows})
    if report["rehearsal"]:
        said = f"rehearsed with {' and '.join(map(str, counts)) or 'no'} ranks, more than there are devices: it says nothing of speed"
        return f"{said} ({where(report)})"
    best = [
        max((row for row in rows if row["ranks"] == count), key=lambda row: row["ratio"]["median"]) for count in counts
    ]
    said = [
        f"{row['ranks']} ranks {factor(row['ratio'])} times one ({row['wrapper']}, {row['mode']}"
        + (f"; promised {_promised(row)})" if row["promised"] else ")")
        for row in best
    ]
    return f"{', '.join(said) or 'no row was measured'} ({where(report)})"


# -- profiles ----------------------------------------------------------------------------------------------------------


def profiles(reports: Sequence[Mapping]) -> str:
    """Where a step goes, and what stands out."""
    return "\n\n".join(map(profiled, reports)) if reports else NOT_YET


def profiled(report: Mapping) -> str:
    """One run's profile."""
    rows = [(name, f"{report['parts_ms'][name]:.1f}", f"{share:.1%}") for name, share in report["shares"].items()]
    speed = f"{report['mfu']:.1%} of the {report['matrix_peak_tflops']:.3g} TFLOP/s"
    lines = [
        f"{_name(report)}, {where(report)}: {report['num_ranks']} rank{'s' * (report['num_ranks'] > 1)}, batch "
        f"{report['batch_size']}, a mean step of {report['step_ms']:.1f} ms.",
        f"Its matrix products reach {speed} that this machine's fastest one does ({report['matrix_peak']['dtype']}).",
        "",
        *table(["part of a step", "ms", "share"], rows),
    ]
    found = [f"- {row['sentence']}" for row in report["findings"]]
    return "\n".join([*lines, *(["", "What stands out:", "", *found] if found else [])])


def profile_line(report: Mapping) -> str:
    """One run's profile for the README."""
    shares = sorted(report["shares"].items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= LEAST_SHOWN)
    return (
        f"a step of {_name(report)} takes {report['step_ms']:.0f} ms: {said}; MFU {report['mfu']:.1%} ({where(report)})"
    )


def _name(report: Mapping) -> str:
    name = report["settings"].get("logging.name")
    return f"`{name}`" if name else "the default config"


# -- memory ------------------------------------------------------------------------------------------------------------


def memories(reports: Sequence[Mapping]) -> str:
    """Predicted beside measured memory, and the largest batch of a few devices."""
    return "\n\n".join(map(remembered, reports)) if reports else NOT_YET


def remembered(report: Mapping) -> str:
    """One config's memory."""
    rows = [
        (
            row["config"],
            f"{row['predicted_gib']:.3f}",
            f"not measured: {why(row['not_measured'])}"
            if row["measured_gib"] is None
            else f"{row['measured_gib']:.3f}",
            "-" if row["error_percent"] is None else f"{round(row['error_percent'], 2) + 0.0:+.2f} %",
        )
        for row in report["rows"]
    ]
    lines = [f"{_name(report)}, {where(report)}; {report['measured_by'] or 'not measured'}; eager, one rank.", ""]
    lines += table(["phases", "predicted GiB", "measured GiB", "error"], rows)
    gpus = _gpus(report)
    batches = {(row["phases"], row["gpu"]): row["batch_size"] for row in report["fits"]}
    names = dict.fromkeys(row["phases"] for row in report["fits"])
    lines += [
        "",
        f"The largest batch, pairs a microbatch and GPU, by memory alone ({report['reserve_gib']:g} GiB held back):",
        "",
    ]
    return "\n".join(
        [*lines, *table(["phases", *gpus], [[name, *(f"{batches[name, gpu]:,}" for gpu in gpus)] for name in names])]
    )


def _gpus(report: Mapping) -> list[str]:
    return [name for name in FEW_GPUS if any(row["gpu"] == name for row in report["fits"])]


def memory_line(report: Mapping) -> str:
    """One config's memory for the README."""
    errors = [abs(row["error_percent"]) for row in report["rows"] if row["error_percent"] is not None]
    first = report["rows"][0]["config"]
    fits = {row["gpu"]: row["batch_size"] for row in report["fits"] if row["phases"] == first}
    largest = ", ".join(f"{gpu} {fits[gpu]:,}" for gpu in _gpus(report))
    said = (
        f"predicted within {max(errors):.2g} % of {len(errors)} measurements" if errors else "predicted, not measured"
    )
    return f"{_name(report)} {said}; largest batch, predicted: {largest} ({where(report)})"


# -- for the README ----------------------------------------------------------------------------------------------------


def short(scaling: Sequence[Mapping], profile: Sequence[Mapping], memory: Sequence[Mapping]) -> str:
    """A line a notebook, with a link to its table."""
    made = []
    for title, anchor, reports, line in (
        ("Scaling", "scaling", scaling, scaling_line),
        ("Where a step goes", "where-a-step-goes", profile, profile_line),
        ("Memory", "memory", memory, memory_line),
    ):
        said = ". ".join(map(line, reports)) if reports else NOT_YET[:-1].lower()
        made.append(f"- [{title}](docs/measurements.md#{anchor}): {said}.")
    return "\n".join(made)

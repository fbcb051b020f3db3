# ruff: noqa: E501  (a line of a document is one line here as there)
"""Tables of what models reached, from the reports in outputs/reference/; what `readme.py` puts into the documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import pandas as pd
from keep import REFERENCE

from upsnb.compare import board_pages, ladder, ladder_figures
from upsnb.report import worth as weighing
from upsnb.report.file import factor, number
from upsnb.runs.runfolder import REPORT

ON_THE_BOARD = (
    "rank",
    "nRMSE",
    "95 % low",
    "95 % high",
    "median",
    "worst tenth",
    "VRMSE",
    "parameters",
    "training [s]",
    "memory [GiB]",
)
RIVALS = {"UPS": "ups", "FNO": "neuralop"}  # of the eleven families
ERRORS = {"mean": "mean", "median": "median", "worst tenth": "p90"}  # in words, and as reports have them


def read(name: str) -> dict:
    return json.loads((REFERENCE / name).read_text())


def reports(name: str) -> list[dict]:
    """Committed reports of one notebook, one a machine or comparison."""
    return [json.loads(path.read_text()) for path in sorted(REFERENCE.glob(f"{name}*/{REPORT}"))]


def by(rows: Sequence[Mapping], key: str) -> dict[str, list[Mapping]]:
    """Rows that have the same value of a key, in the order in which the values come."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def markdown(frame: pd.DataFrame) -> str:
    """A table without the columns that hold nothing; a bar inside a cell would end it."""
    frame = frame.loc[:, [not frame[name].isin(["", "-"]).all() for name in frame]]
    rows = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)


def where(report: Mapping) -> str:
    """Machine, versions and date of a measurement."""
    hardware, versions = report["hardware"], report["versions"]
    device = report.get("settings", {}).get("training.device", hardware["device"])
    cores = f"{hardware['num_cores']} core{'s' * (hardware['num_cores'] > 1)}"
    if device == "cpu" and hardware["device"] == "cpu":
        without = " without bfloat16 instructions" if hardware.get("cpu_has_bf16") is False else ""
        machine = f"{cores} of an {hardware['device_name']}{without}"
    elif device == "cpu":
        machine = f"{cores} beside {hardware['num_devices']} x {hardware['device_name']}"
    else:
        machine = f"{report.get('num_ranks', hardware['num_devices'])} x {hardware['device_name']}"
    return ", ".join(filter(None, (machine, f"torch {versions['torch']}", report.get("date"))))


def places(report: Mapping, entries: Sequence[Mapping]) -> tuple[str, list[str]]:
    """Where the entries of a report were measured that is added to over several calls: for its head, and for each row.

    Rows say it where they differ. Reports of before entries kept their own say where the last of them was measured.
    """
    own = [where(entry) if "hardware" in entry else "" for entry in entries]
    machines = {where({**entry, "date": None}) if place else "" for entry, place in zip(entries, own)}
    if len({*own}) > 1 and len(machines) == 1:
        return f"{machines.pop()}, on the day that each row says", [entry["date"] for entry in entries]
    if len({*own}) > 1:
        return "measured where each row says", [place or "before, not kept" for place in own]
    return own[0] or f"{where(report)} (some rows may be older)", [""] * len(own)


def called(report: Mapping) -> str:
    name = report["settings"].get("logging.name")
    return f"`{name}`" if name else "the default config"


# -- studies of models ------------------------------------------------------------------------------------------------


def leaderboard(report: Mapping) -> str:
    """Models beside each other, and the learning rates that validation chose for each."""
    tuned = read("leaderboard/trainings.json")["learning_rates"]
    rates = ", ".join(f"{name} {rate['chosen']:g}" for name, rate in tuned.items())
    (table,) = report["tables"]
    budget = table["protocol"]["budget"].partition(" on ")[0]
    head = f"{budget} for each training, both datasets at once, {where(report)}. Learning rates, as a multiple of what each model's file said then, by validation after a short training: {rates}."
    tables = board_pages.tables({"tables": [table]})
    told = []
    for name in table["datasets"]:
        ranking, costs = (frame for title, frame in tables.items() if title.startswith(f"{name}: "))
        both = ranking.join(costs, how="left").fillna("")
        shown = both[[column for column in ON_THE_BOARD if column in both]]
        told += [f"**{name}**", markdown(shown.rename_axis("model").reset_index())]
    return "\n\n".join((head, *told))


def wrapper(report: Mapping) -> str:
    """What a step through the wrapper and one of the workbench take beside one written by hand."""
    columns = {"wrapper": "through the wrapper, times", "workbench": "in the workbench, times"}
    rows = [
        {
            "model": model,
            "dataset": name,
            "step by hand [ms]": f"{1e3 / median(found['steps_per_s']['by hand']):.1f}",
            **{
                column: "{:.3f} [{:.3f}, {:.3f}]".format(found["cost"][side]["median"], *found["cost"][side]["ci95"])
                for side, column in columns.items()
            },
        }
        for model, each in report["models"].items()
        for name, found in each.items()
    ]
    return f"{where(report)}.\n\n{markdown(pd.DataFrame(rows))}"


def mixing(report: Mapping) -> str:
    """Errors of each mixture, and over those of equal turns."""
    rows, judged = [], report["over_uniform"]
    head, measured = places(report, report["rows"])
    trained = [{**row, "measured on": place} for row, place in zip(report["rows"], measured)]
    for arm, mine in by(trained, "arm").items():
        over = "{ratio:.3f} [{0:.3f}, {1:.3f}]".format(*judged[arm]["ci95"], **judged[arm]) if arm in judged else ""
        rows.append(
            {
                "turns": arm,
                **{name: number(median(row["nrmse"][name] for row in mine), 3) for name in mine[0]["nrmse"]},
                "over equal turns": over,
                "samples seen": ", ".join(f"{count:,}" for count in mine[0]["samples"].values()),
                "measured on": "; ".join(sorted({row["measured on"] for row in mine})),
            }
        )
    count = len({row["seed"] for row in report["rows"]})
    return f"{head}; nRMSE of the test split, median of {count} seeds.\n\n{markdown(pd.DataFrame(rows))}"


def finetune(report: Mapping) -> str:
    """What training through several calls reached, beside the same time on one call."""
    rows = [
        {
            "data": family,
            "training": arm,
            "rollout nRMSE, median": f"{median(rolled):.4g}",
            "of each seed": ", ".join(f"{value:.4g}" for value in rolled),
            "correlated for": f"{median(row['correlation_time'] for row in mine):.3g}",
            "one call": f"{median(row['nrmse'] for row in mine):.4g}",
            "steps": f"{median(row['steps'] for row in mine):,}",
        }
        for family, each in report["families"].items()
        for arm, mine in by(each, "arm").items()
        if (rolled := [row["rollout_nrmse"] for row in mine])
    ]
    return f"{report['time_s']:g} s for each training, {where(report)}.\n\n{markdown(pd.DataFrame(rows))}"


def pretrained(report: Mapping) -> str:
    """What trainings reached that began with another run's weights, beside those that did not."""
    rows = [
        {
            "problem": problem,
            "begins with": arm,
            "rollout nRMSE, median": number(median(rolled)),
            "of each seed": ", ".join(map(number, rolled)),
            "one call": number(median(row["nrmse_mean"] for row in mine)),
            "persistence, rollout": number(mine[0]["rollout_persistence_nrmse_mean"]),
            "steps": number(int(median(row["steps"] for row in mine))),
        }
        for problem, each in by(report["rows"], "problem").items()
        for arm, mine in by(each, "arm").items()
        if (rolled := [row["rollout_nrmse_mean"] for row in mine])
    ]
    told = f"{report['before_s']:g} s for the other run, {report['time_s']:g} s for each training"
    return f"{told}, {where(report)}.\n\n{markdown(pd.DataFrame(rows))}"


def pipeline(report: Mapping) -> str:
    """What each stage reached on the test split, and the verdicts of its gate."""
    rows = []
    for preset, each in report["presets"].items():
        for stage, mine in by(each, "stage").items():
            scores = [row["crps"] for row in mine]
            lasts = [row["correlation_time"] for row in mine if "correlation_time" in row]
            calls = [row["one_call"] for row in mine if "one_call" in row]
            gates = [row["gate"] for row in mine if row["gate"]]
            said = [f"{gate['verdict']} ({number(gate['ratio'], 3)})" for gate in gates]
            rows.append(
                {
                    "settings": preset,
                    "stage": stage,
                    "CRPS, median": f"{median(scores):.4g}",
                    "of each seed": ", ".join(f"{value:.4g}" for value in scores),
                    "nRMSE of the mean": f"{median(row['mean_nrmse'] for row in mine):.3g}",
                    "correlated for": f"{median(lasts):.3g}" if lasts else "",
                    "one call": f"{median(one['nrmse_mean'] for one in calls):.3g}" if calls else "",
                    "its waves above 12": f"{median(one['frmse_high'] for one in calls):.3g}" if calls else "",
                    "spread / skill": f"{median(row['spread_skill'] for row in mine):.2f}" * (mine[0]["members"] > 1),
                    "forecast [ms]": f"{1e3 * median(row['forecast_s'] for row in mine):.3g}",
                    "verdicts": ", ".join(said),
                }
            )
    whole = {preset: median(row["run_s"] for row in each) / 60 for preset, each in report["presets"].items()}
    took = ", ".join(f"{preset} {minutes:.1f} minutes" for preset, minutes in whole.items())
    return f"{where(report)}; from nothing to the last gate: {took}.\n\n{markdown(pd.DataFrame(rows))}"


def workloads(report: Mapping) -> str:
    """What each example reached, and what the phases gain there."""
    rows = []
    for name, found in report["examples"].items():
        own, compared = found["trained"], found.get("compared")  # None: not since the example changed
        judged = found.get("judged_again", compared)  # by more samples
        memory = found.get("memory_mib", {})
        for dataset, reached in own["reached"].items():
            row = {
                "example": name,
                "data": dataset,
                "error": own["metric"],
                "reached": number(reached["error"], 3),
                "without a model": f"{reached['baseline']} {number(reached['baseline_error'], 3)}",
                "trained [s]": number(own["train_time_s"], 3),
                "on cores": own.get("cores", found["hardware"]["num_cores"]),
                "speed": f"{own['samples_per_s']['median']:,.0f} {own['unit']}/s",
                "phases over none": factor(compared["speedup"]) if compared else "not measured",
                "their error over its": _of_seeds(judged, dataset) if judged else "",
                "a step's memory, predicted [MiB]": number(memory.get("predicted")),
                "the same, measured [MiB]": number(memory.get("measured")),
                "`gc.collect()` [ms]": number(found["collecting_ms"], 3),
                "measured on": where(found),
            }
            rows.append(row)
    return markdown(pd.DataFrame(rows))


def _of_seeds(compared: Mapping, dataset: str) -> str:
    """How the errors compare, mean over seeds, and from which seed to which where there were several."""
    mean, ends = compared["error_ratio"][dataset], compared.get("error_ratio_range", {}).get(dataset)
    return number(mean, 3) + (f" ({number(ends[0], 3)} to {number(ends[1], 3)})" if ends else "")


def attention(report: Mapping) -> str:
    """FlexAttention beside the kernel that torch chooses, on one GPU."""
    rows = [
        {
            "tokens": f"{row['context']:,}",
            "documents in them": row["documents"],
            "what": what,
            **{f"{kernel} [ms]": number(row[f"{part}_ms"][kernel], 3) for kernel in ("sdpa", "flex")},
            "flex is faster": number(row[f"{part}_ms"]["sdpa"] / row[f"{part}_ms"]["flex"], 3),
            **{f"{kernel} [GiB]": number(row[f"{part}_gib"][kernel], 3) for kernel in ("sdpa", "flex")},
        }
        for row in report["rows"]
        for part, what in (("alone", "attention, forward and backward"), ("step", "a whole step"))
    ]
    return f"{where(report)}:\n\n{markdown(pd.DataFrame(rows))}"


def gpu(report: Mapping) -> str:
    """What ran on a GPU, and how fast two arms were that took turns there."""
    tests, tried = report["tests"], report["tried"]
    ran = {kind: [row["name"] for row in tried if row["ran"] and row["kind"] == kind] for kind in ("phase", "params")}
    rest = [row["name"] for row in tried if not row["ran"]]
    rows = [
        {
            "settings": arm["params"],
            "a step [ms], quarter, median, three quarters": ", ".join(number(value, 3) for value in arm["step_ms"]),
            "samples/s": number(1e3 * arm["samples_per_step"] / arm["step_ms"][1], 4),
            "compiling [s]": number(arm["compile_s"], 3),
            "memory [GiB]": number(arm["memory_gib"], 3),
            "steps": f"{arm['steps']} of {arm['of_steps']}",
        }
        | {
            f"validation nRMSE after step {at['step']}": ", ".join(
                f"{dataset} {number(error, 3)}" for dataset, error in at["nrmse"].items()
            )
            for at in arm["validations"]
        }
        for arm in report["turns"]["arms"].values()
    ]
    lines = [
        f"{where(report)}.",
        f"- `tests/gpu`: {tests['passed']} passed, {len(tests['failed'])} failed, {len(tests['skipped'])} skipped for want of a second GPU.",
        f"- A few steps of phases, all ran: {', '.join(ran['phase'])}.",
        f"- A few steps of files in `params/`, on one GPU: {', '.join(ran['params'])}. Still compiling when their time was up: {', '.join(rest)}.",
    ]
    return "\n".join(lines) + f"\n\n{markdown(pd.DataFrame(rows).fillna('-'))}"


def search(report: Mapping) -> str:
    """What a search tried and found, and how that compares with the file that was written by hand."""
    baseline, by_hand = report["params"]
    compared = report["compared"]
    head = f"{report['minutes']:.0f} minutes from `{baseline}` on, {where(report)}. {ladder.recommended(report)}"
    ratios = ", ".join(f"{name} {number(ratio, 3)}" for name, ratio in compared["nrmse_ratio"].items())
    equal = ", ".join(f"{name} {number(ratio, 3)}" for name, ratio in compared["aa_nrmse_ratio"].items())
    told = (
        f"`{by_hand}` is {factor(compared['speedup'])} times as fast as what was found (two equal arms: "
        f"{factor(compared['aa_ratio'])}), at an nRMSE on the test split of {ratios} times its (two equal arms: {equal})."
    )
    return "\n\n".join((head, markdown(ladder_figures.tried(report)), told))


def steady_prior(report: Mapping) -> str:
    """Iterations of conjugate gradients from each guess, plain and preconditioned."""
    rows = []
    for guess, kinds in report["guesses"].items():
        plain, jacobi = kinds["plain"], kinds["jacobi"]
        off, _, length = guess.partition(" off, ")
        kind = f"exact, {100 * float(off):g} % off, smooth over {length}" if length else guess
        rows.append(
            {
                "guess": kind,
                "relative error": number(plain["off"], 2),
                "residual": number(plain["residual"], 3),
                "iterations": f"{plain['iterations']:.0f}",
                "saved": f"{100 * plain['saved']:.0f} %",
                "milliseconds": number(1e3 * plain["seconds"], 3),
                "with Jacobi's preconditioner": f"{jacobi['iterations']:.0f}",
                "saved there": f"{100 * jacobi['saved']:.0f} %",
            }
        )
    of = f"median of {report['samples']} permeabilities of {report['points']} x {report['points']} cells"
    return f"{where(report)}; {of}.\n\n{markdown(pd.DataFrame(rows))}"


def eleven(report: Mapping) -> str:
    """Each family's errors, of the whole rollout where there is a time, beside those of an FNO and of no model.

    Numbers are means over seeds; ratios have the smallest and the largest of single seeds in brackets.
    """
    parts = {"families": "Small files cut from PDEBench's", "generated": "Generated data"}
    return "\n\n".join(f"{title}: {_families(report, report[part])}" for part, title in parts.items() if part in report)


def _families(report: Mapping, families: Mapping[str, list[Mapping]]) -> str:
    every = [found for seeds in families.values() for found in seeds]
    rows, (place, told) = [], places(report, every)
    measured, ahead, in_each = iter(told), 0, 0
    for family, seeds in families.items():
        rolled = "rollout_" * ("rollout_nrmse_mean" in seeds[0]["ups"])
        errors = {
            f"{title}, {what}": [found[model][f"{rolled}nrmse_{key}"] for found in seeds]
            for title, model in RIVALS.items()
            for what, key in ERRORS.items()
        }
        means = {name: fmean(values) for name, values in errors.items()}
        ratios = [theirs / ours for theirs, ours in zip(errors["FNO, mean"], errors["UPS, mean"], strict=True)]
        ratio = means["FNO, mean"] / means["UPS, mean"]
        ahead, in_each = ahead + (ratio > 1), in_each + (min(ratios) > 1 and len(seeds) > 1)
        first = seeds[0]["ups"]
        rows.append(
            {
                "family": family,
                "samples, trained on / tested on": f"{first['num_trained']} / {first['num_samples']}",
                "seeds": len(seeds),
                **{name: f"{value:.4g}" for name, value in (means | first["references"]).items()},
                "FNO over UPS": f"{ratio:.2f}" + f" ({min(ratios):.2f} to {max(ratios):.2f})" * (len(seeds) > 1),
                "measured on": ", ".join(dict.fromkeys(next(measured) for _ in seeds)),
            }
        )
    seconds = " or ".join(f"{time_s:g}" for time_s in sorted({found["time_s"] for found in every}))
    apart = all(found.get("cores") == 1 for found in every)
    how = "one core for each model, both at the same time, " if apart else ""
    verdict = (
        f"UPS has the smaller mean error in {ahead} of {len(rows)} families, with each of several seeds in {in_each}."
    )
    return f"{seconds} s for each training, {how}{place}. {verdict}\n\n{markdown(pd.DataFrame(rows).fillna(''))}"


def worth(report: Mapping) -> str:
    """Each family's model beside the cheapest solver that errs no more."""
    rows = []
    for family, found in report["datasets"].items():
        model, solver = found["model"], found["as_good"]
        of_use = model["error"] is not None and model["error"] < weighing.OF_NO_USE
        own = next((one["ms"] for one in found["solver"] if one["exact"]), None)
        rows.append(
            {
                "family": family,
                "grid": " x ".join(map(str, found["grid"])),
                "frames": found["frames"],
                "nRMSE": number(model["error"], 3),
                "a trajectory takes the model [ms]": number(model["ms"], 3),
                "a solver that errs no more": weighing.named(solver) if of_use else "the model errs too much",
                "its nRMSE": number(solver["error"], 3) if of_use else "",
                "it takes [ms]": number(solver["ms"], 3) if of_use else "",
                "times as long as the model": weighing.rounded(solver["ms"] / model["ms"]) if of_use else "",
                "the solver that made the data takes [ms]": number(own, 3),
            }
        )
    faster = sum(float(row["times as long as the model"].replace(",", "") or 0) > 1 for row in rows)
    head = f"{where(report)}, one core for each, {report['datasets'][rows[0]['family']]['samples']} samples at once."
    head += f" The model is faster than a solver as exact in {faster} of {len(rows)} families."
    return f"{head}\n\n{markdown(pd.DataFrame(rows))}"

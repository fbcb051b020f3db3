"""Models beside each other on equal terms: a table for each protocol and dataset, ranked as far as seeds can tell.

Only run folders with their own events and evaluation stand on a board; a number that somebody has read elsewhere has no
way onto it. Runs are put together by what they were asked for but for the seed, and compared with those alone that were
judged by the same samples, given the same frames, trained on the same data with the same budget, and measured alike.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from upsnb import config as configs
from upsnb import overlays
from upsnb.compare.search import told
from upsnb.config import OPERATOR, RunConfig
from upsnb.data import audit
from upsnb.errors import MOST_LISTED, ConfigError, RunError
from upsnb.overlays import as_typed
from upsnb.report.figures import read_evaluation
from upsnb.report.file import finish, number
from upsnb.report.results import references, run_numbers
from upsnb.runs import cost, handle, runfolder
from upsnb.runs.events import NAMING, latest_start, naming
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import ALIVE
from upsnb.runs.table import find_root, folders
from upsnb.runs.throughput import median_with_interval

FORMAT, KIND = 1, "board"
FEWEST_SEEDS = 3  # for a rank
MOST_TOLD = 3  # differences of two protocols in an error
TEST, IMPORTED = "test", "imported"  # the split of a board; the tag of runs that were not executed here
NO_MATTER = (  # settings, or sections, in which runs of one model may differ
    *("training.seed", "training.stall_timeout_s", "training.max_restarts", "checkpoint", "cost", "logging"),
    *("data.root", "data.download", "evaluation.num_examples", "evaluation.samples_per_call"),
)
QUALITY = {  # column: metric, of the rollout where there is one
    "median": "nrmse_median",
    "worst tenth": "nrmse_p90",
    "pooled": "nrmse_pooled",
    "VRMSE": "vrmse",
    "correlated for": "correlation_time",
    "conservation": "crmse",
    "low band": "frmse_low",
    "middle band": "frmse_mid",
    "high band": "frmse_high",
}
WINDOWS = ("first third", "middle third", "last third")  # of a rollout's frames


# -- one run -------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict:
    """What a board has to know of a run; `why` says what keeps it off, and is empty where nothing does.

    Raises:
        RunError, ConfigError: its files are damaged.
    """
    run = Run(folder)
    (status, cause), manifest, config = runfolder.state(folder), run.manifest, run.config
    events = run.events(("segment", "start", "flip", "opened", "end"))
    evaluation = read_evaluation(folder, events) if status not in ALIVE else {}
    datasets = {name: splits.get(TEST, {}) for name, splits in evaluation.get("datasets", {}).items()}
    known = bool(datasets) and all("protocol" in result for result in datasets.values())
    terms, metric = budget(config, manifest), naming(latest_start(events))["metric"]
    opened = sum(event["kind"] == "opened" and event["split"] == TEST for event in events)
    here = manifest["host"] == socket.gethostname() and IMPORTED not in run.notes["tags"]
    return {
        "folder": folder,
        "why": _why_not(status, cause, manifest, events, evaluation, known),
        "failed": status in ("failed", "died"),
        "config": config,
        "key": json.dumps(settings(config), sort_keys=True),
        "budget": terms,
        "protocol": protocol(terms, datasets, metric) if known else None,
        "datasets": datasets,
        "opened": max(opened, int(evaluation.get("split") == TEST)),
        "stage": manifest.get("answers") or manifest.get("stage") or OPERATOR,
        "machine": machine(config, manifest),
        "revision": manifest["code_revision"],
        "origin": "here" if here else f"{IMPORTED} from {manifest['host']}",
        "created": manifest["created"],
    }


def _why_not(status: str, cause: str | None, manifest: dict, events: list[dict], evaluation: dict, known: bool) -> str:
    if status in ALIVE:
        return f"is still {status}"
    if status != "finished":
        return f"{status}: {cause}"
    if manifest["end_reason"] in runfolder.CUT_SHORT:
        return f"was cut short ({manifest['end_reason']})"
    if any(event["kind"] == "flip" and event["applied"] and event.get("changes") for event in events):
        return "was changed while it trained, so its settings do not say how it was made"
    if evaluation.get("split") != TEST:
        return f"has no errors of the {TEST} split"
    return "" if known else "does not say what it is judged by, as old runs do not"


def settings(config: RunConfig) -> dict:
    """What a model was asked for, beyond the defaults and but for NO_MATTER."""
    changes = overlays.difference(RunConfig(), config)
    no_matter = tuple(f"{path}." for path in NO_MATTER)
    return {path: value for path, value in changes.items() if not f"{path}.".startswith(no_matter)}


def machine(config: RunConfig, manifest: Mapping) -> str:
    """What a run trained on."""
    found = manifest["hardware"]
    if "cpu" not in (found["device"], config.training.device):
        return f"{config.training.num_gpus} x {found['device_name']}"
    return f"{found['num_cores']} cores of {found['device_name'] if found['device'] == 'cpu' else 'the host'}"


def budget(config: RunConfig, manifest: Mapping) -> str:
    """What a run was allowed to spend in all stages: passes over the data, and by the clock time on that machine."""
    epochs = " + ".join(f"{getattr(config.stages, name).epochs} epochs" for name in config.stages.planned)
    if config.model.pretrained is not None:  # whose training was spent as well
        epochs += f" after those of {config.model.pretrained}"
    limits = [config.limit_s(name) for name in config.stages.planned]
    return epochs if None in limits else f"{sum(limits):g} s on {machine(config, manifest)}, at most {epochs}"


def protocol(terms: str, datasets: Mapping[str, dict], metric: str = NAMING["metric"]) -> dict[str, str | int]:
    """Everything in which runs of one table agree, by what it is called; that fields have nRMSE goes without saying."""
    said = {f"{name}: {what}": value for name, one in datasets.items() for what, value in one["protocol"].items()}
    for name, one in datasets.items():
        if leak := one.get("leak"):
            count = leak["distinct"]["num_samples"] if leak["distinct"] else 0
            said[f"{name}: samples that training has not seen"] = count  # which judge, if there are any
    judged = {} if metric == NAMING["metric"] else {"metric": metric}
    return {"budget": terms, **judged, **dict(sorted(said.items()))}


def protocol_id(terms: Mapping) -> str:
    """A few letters that two protocols share only if they are equal."""
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()[:10]


def quality(result: Mapping) -> dict[str, float | None]:
    """The error that ranks, QUALITY and the rollout's WINDOWS of one dataset of one run."""
    judging = audit.judging(result)
    rolled = "rollout_" if "rollout_nrmse_mean" in judging else ""
    found = {"nRMSE": audit.headline(result), **{what: judging.get(rolled + key) for what, key in QUALITY.items()}}
    known = (result.get("per_time") or {}) if judging is result else {}  # leaked samples are in it
    frames = np.array(known.get("rollout_nrmse", ()), dtype=float)  # None becomes NaN
    thirds = np.array_split(frames, len(WINDOWS)) if len(frames) >= len(WINDOWS) else ()
    return {**found, **{window: float(third.mean()) for window, third in zip(WINDOWS, thirds)}}


# -- a table -------------------------------------------------------------------------------------------------------


def rank(rows: Sequence[dict], lookup: float | None) -> None:
    """Give rows a `rank`, or say in `no_rank` why they have none.

    A rank counts the models that are surely better, whose 95 % interval ends below where this one's begins: those whose
    intervals overlap share a rank.

    Args:
        lookup: nRMSE that a table of the training samples scores.
    """
    for row in rows:
        seeds, median = len(set(row["seeds"])), row["nrmse"]["median"]
        if median is None:
            row["no_rank"] = "diverged"
        elif seeds < FEWEST_SEEDS:
            row["no_rank"] = f"{seeds} of {FEWEST_SEEDS} seeds"
        elif lookup is not None and median >= lookup:
            row["no_rank"] = "no better than a look-up"
    ranked = [row for row in rows if not row["no_rank"]]
    for row in ranked:
        row["rank"] = 1 + sum(other["nrmse"]["ci95"][1] < row["nrmse"]["ci95"][0] for other in ranked)


def _row(name: str, dataset: str, done: list[dict], failed: int, price_per_hour: float) -> dict:
    """One model on one dataset: medians over its seeds."""
    scores = [quality(run["datasets"][dataset]) for run in done]
    finite = [score for score in scores if score["nRMSE"] is not None]
    seconds = _median(run["numbers"]["train_time_s"] for run in done)
    price = price_per_hour or _median(run["numbers"]["cost"]["price_per_hour"] for run in done)
    return {
        "entry": name,
        "runs": [as_typed(run["folder"]) for run in done],
        "seeds": [run["config"].training.seed for run, score in zip(done, scores) if score["nRMSE"] is not None],
        "failed": failed,
        "diverged": len(scores) - len(finite),
        "rank": None,
        "no_rank": "",
        "nrmse": median_with_interval([score["nRMSE"] for score in finite]),
        "quality": {what: _median(score.get(what) for score in finite) for what in (*WINDOWS, *QUALITY)},
        "parameters": done[0]["numbers"]["parameters"],
        "train_time_s": seconds,
        "peak_memory_gib": max(run["numbers"]["peak_memory_gib"] or 0.0 for run in done),
        "stages": _told(run["stage"] for run in done),
        "device": _told(run["machine"] for run in done),
        "energy_wh": _median(run["numbers"]["energy_wh"] for run in done),
        "cost_dollars": cost.dollars(price, seconds) if seconds and price else None,
        "opened": sum(run["opened"] for run in done),
        "origin": _told(run["origin"] for run in done),
        "revisions": sorted({run["revision"] for run in done}),
    }


def _told(words: Iterable[str]) -> str:
    return ", ".join(sorted({*words}))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _names(models: Mapping[str, list[dict]]) -> dict[str, str]:
    """A name for each model: `logging.name`, and where several share one, the settings that tell them apart."""
    asked = {key: json.loads(key) for key in models}
    called: dict[str, list[str]] = defaultdict(list)
    for key, runs in models.items():
        called[max(runs, key=lambda run: run["created"])["config"].logging.name].append(key)
    names = {}
    for name, keys in called.items():
        paths = sorted({path for key in keys for path in asked[key]})
        differ = [path for path in paths if len({json.dumps(asked[key].get(path)) for key in keys}) > 1]
        for key in keys:
            own = told({path: configs.setting(models[key][0]["config"], path) for path in differ})
            names[key] = f"{name}: {own}" if own else name
    return names


def _tables(protocol: Mapping, runs: list[dict], failures: list[dict], price_per_hour: float) -> dict:
    """All datasets of one protocol, which all of these runs have."""
    models: dict[str, list[dict]] = defaultdict(list)
    for run in runs:
        models[run["key"]].append(run)
    names = _names(models)
    lost = {key: sum(run["key"] == key and run["budget"] == protocol["budget"] for run in failures) for key in models}
    found = {}
    for dataset, result in runs[0]["datasets"].items():
        beside = references(result)
        if "floor_nrmse_mean" in result:
            beside["exact steady solution"] = result["floor_nrmse_mean"]
        rows = [_row(names[key], dataset, done, lost[key], price_per_hour) for key, done in models.items()]
        rank(rows, beside.get("look-up"))
        rows.sort(key=lambda row: (row["rank"] is None, row["rank"] or 0, row["nrmse"]["median"] or np.inf))
        found[dataset] = {"references": beside, "rows": rows}
    return found


# -- the board -----------------------------------------------------------------------------------------------------


def board(names: Sequence[Path | str] = (), price_per_hour: float = 0.0) -> dict:
    """The leaderboard of runs as a report: a table for each protocol, and what stands on none.

    Args:
        names: runs, or folders of runs; none: all that are where runs go. Runs that are named one by one are to stand
            in one table.
        price_per_hour: of the machine, for the cost [$]; 0: what the runs themselves say.
    Raises:
        RunError: there is no such run, or none that can stand on a board, each with its reason; or runs that were
            named one by one have not the same protocol.
    """
    runs, left_out = [], defaultdict(list)
    found, one_by_one = _find(names)
    for one in found:
        try:
            runs.append(read(one))
        except (RunError, ConfigError, OSError, ValueError, KeyError) as error:  # whatever somebody left there
            left_out[f"cannot be read: {str(error).splitlines()[0]}"].append(as_typed(one))
    failures = [run for run in runs if run["failed"]]
    judged: dict[str, list[dict]] = defaultdict(list)
    for run in runs:
        if run["why"]:
            left_out[run["why"]].append(as_typed(run["folder"]))
        else:
            judged[protocol_id(run["protocol"])].append({**run, "numbers": run_numbers(Run(run["folder"]))})
    if not judged:
        said = [f"{why}: {', '.join(those[:3])}" for why, those in left_out.items()]
        found = "; ".join(said[:MOST_LISTED]) or "there are none"
        raise RunError(f"no run can stand on a board: {found} -> train to the end with evaluation.split: {TEST}")
    if one_by_one and len(judged) > 1:
        one, other = (those[0] for those in [*judged.values()][:2])
        found = differences(one["protocol"], other["protocol"])
        unlike = [f"{what}: {a} and {b}" for what, (a, b) in found.items()]
        unlike[MOST_TOLD:] = [f"{len(unlike) - MOST_TOLD} more differences"] if len(unlike) > MOST_TOLD else []
        both = f"{as_typed(one['folder'])} and {as_typed(other['folder'])}"
        raise RunError(f"{both} cannot be ranked together: {'; '.join(unlike)} -> name their folder for a table each")
    tables = []
    for name, those in sorted(judged.items(), key=lambda item: (-len(item[1]), item[0])):
        terms = those[0]["protocol"]
        tables.append(
            {
                "id": name,
                "protocol": terms,
                "files": {name: list(data.files) for name, data in those[0]["config"].data.datasets.items()},
                "differs": differences(tables[0]["protocol"], terms) if tables else {},
                "opened": sum(run["opened"] for run in runs if run["protocol"] == terms),
                "datasets": _tables(terms, those, failures, price_per_hour),
            }
        )
    return finish({"format": FORMAT, "kind": KIND, "tables": tables, "left_out": dict(left_out)}, None)


def _find(names: Sequence[Path | str]) -> tuple[list[Path], bool]:
    """Run folders, each once, and whether each was named itself."""
    named = [handle.find(name) for name in names] or [find_root()]
    single = [(folder / runfolder.MANIFEST).exists() for folder in named]
    found = [path for folder, is_run in zip(named, single) for path in ([folder] if is_run else folders(folder))]
    return list(dict.fromkeys(path.absolute() for path in found)), all(single)


def differences(one: Mapping, other: Mapping) -> dict[str, list]:
    """In what two protocols differ: both values, None where one has none."""
    return {
        what: [one.get(what), other.get(what)]
        for what in dict.fromkeys((*one, *other))
        if one.get(what) != other.get(what)
    }


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    lines = []
    for table in report["tables"]:
        opened = f"looks at the test split: {table['opened']}"
        lines.append(f"protocol {table['id']}: {table['protocol']['budget']}; {opened}")
        if table["differs"]:
            lines.append(f"  a table of its own, because of {', '.join(table['differs'])}")
        for dataset, one in table["datasets"].items():
            beside = ", ".join(f"{name} {number(value)}" for name, value in one["references"].items())
            lines.append(f"  {dataset} ({naming(table['protocol'])['metric']} without a model: {beside})")
            lines += [f"    {_line(row)}" for row in one["rows"]]
    lines += [f"left out, {why}: {len(those)}, such as {those[0]}" for why, those in report["left_out"].items()]
    return "\n".join(lines)


def _line(row: Mapping) -> str:
    place = f"{row['rank']}." if row["rank"] else "-"
    low, high = row["nrmse"]["ci95"]
    interval = "" if low is None else f" [{number(low)}, {number(high)}]"
    rest = [row["no_rank"] or f"{len(set(row['seeds']))} seeds"]
    rest += [f"{row[what]} {what}" for what in ("failed", "diverged") if row[what]]
    return f"{place} {row['entry']}: {number(row['nrmse']['median'])}{interval} ({', '.join(rest)})"

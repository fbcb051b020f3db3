"""A leaderboard to look at: tables for a notebook, one CSV of all of them, and a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from upsnb.compare.board import FEWEST_SEEDS, QUALITY, WINDOWS
from upsnb.report.file import number
from upsnb.runs import runfolder
from upsnb.runs.events import NAMING, naming

HTML, CSV = "board.html", "board.csv"
RANKING = {  # columns of a dataset's first table, and what they mean, as the page says it
    "model": "name of its runs, and what tells models of one name apart",
    "rank": f"1 + the models that are surely better, whose interval ends below this one's; of {FEWEST_SEEDS} seeds on",
    "why no rank": "what stands against one",
    "seeds": "different seeds that trained to their ends",
    "failed": "runs with these settings that ended with an error",
    "diverged": "runs that reached the end, with an error that is no number",
    "nRMSE": "mean over samples, frames and channels, rolled out where there is a time; like all errors here, of the "
    "median seed",
    "95 % low": "where the interval of that median begins; of three seeds it is their range",
    "95 % high": "where it ends",
    "median": "nRMSE of the median sample",
    "worst tenth": "nRMSE that a tenth of the samples exceeds",
    "pooled": "the other way to average: squares of all samples and frames first, then the ratio",
    "VRMSE": "error over the spread of each frame, as The Well defines it",
    "correlated for": "time until the rollout's correlation with the truth falls below 0.8, or the whole rollout",
    **{window: f"nRMSE over the {window} of the forecast frames" for window in WINDOWS},
    "conservation": "error of the mean over space, PDEBench's cRMSE, in the field's unit",
    **{name: f"{name} of wavenumbers: PDEBench's fRMSE, in the field's unit" for name in QUALITY if "band" in name},
}
COSTS = {  # of its second table
    "model": RANKING["model"],
    "parameters": "that are trained",
    "training [s]": "wall-clock with compilation and validation, median over seeds",
    "memory [GiB]": "peak of the process that needed most",
    "energy [Wh]": "of the GPUs, by their own word; median over seeds",
    "price [$]": "of that time on this machine",
    "answered by": "the stage whose model was judged: the last one that has paid",
    "test opened": "how often runs of this model were evaluated on the test split",
    "trained on": "the device",
    "origin": "here: these runs were executed on this machine; imported: on another one",
    "code": "revision",
}
OF_FIELDS = (*QUALITY, *WINDOWS)  # columns that nothing else has
ALWAYS = ("model", "rank", "failed", "diverged")  # columns, even where they say nothing
NO_MODEL = "no model"
STYLE = """body{font:13px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1480px;padding:0 1.5em;color:#111}
h1{font-size:22px;margin-bottom:.2em}h2{font-size:17px;margin:2em 0 .2em}h3{font-size:15px;margin:1.6em 0 .4em}
p,ul{max-width:105ch;margin:.3em 0}.scroll{overflow-x:auto;margin-bottom:1em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 6px;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th{font-weight:600;white-space:normal;vertical-align:bottom;border-bottom:2px solid #999;cursor:help}
th.text,td.text{text-align:left}td.text{white-space:normal;min-width:7em}
tr.first td{font-weight:600;background:#f2f7fb}tr.reference td{color:#666;font-style:italic}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 1.2em;max-width:120ch}dt{font-weight:600}dd{margin:0}
summary{cursor:pointer}"""
TEXTS = ("model", "why no rank", "answered by", "trained on", "origin", "code")


def columns(table: Mapping) -> dict[str, dict[str, str]]:
    """Columns of a protocol's two tables, and what they mean; what is not fields has an error of its own name."""
    metric = naming(table["protocol"])["metric"]
    if metric == NAMING["metric"]:
        return {"ranking": RANKING, "costs": COSTS}
    own = {metric if name == "nRMSE" else name: what for name, what in RANKING.items() if name not in OF_FIELDS}
    return {"ranking": {**own, metric: "the error, like all here of the median seed"}, "costs": COSTS}


def tables(report: Mapping) -> dict[str, pd.DataFrame]:
    """Two tables for each protocol and dataset, by a title that says which; columns that say nothing are left out."""
    return {
        f"{dataset}: {part} (protocol {table['id']})": _shown(_frame(table, one), own)
        for table in report["tables"]
        for dataset, one in table["datasets"].items()
        for part, own in columns(table).items()
    }


def _frame(table: Mapping, one: Mapping) -> pd.DataFrame:
    """Models that have a rank, the others, and what is reached without any: numbers as they are."""
    metric = naming(table["protocol"])["metric"]
    rows = [_model(row, metric) for row in one["rows"]]
    rows += [{"model": name, metric: value, "why no rank": NO_MODEL} for name, value in one["references"].items()]
    return pd.DataFrame(rows, columns=list(_meanings([table])), dtype=object)


def _meanings(tables: Sequence[Mapping]) -> dict[str, str]:
    """All columns that these protocols have, and what they mean."""
    return {name: what for table in tables for part in columns(table).values() for name, what in part.items()}


def _model(row: Mapping, metric: str) -> dict:
    low, high = row["nrmse"]["ci95"]
    return {
        "model": row["entry"],
        "rank": row["rank"],
        "seeds": len(set(row["seeds"])),
        "failed": row["failed"],
        "diverged": row["diverged"],
        metric: row["nrmse"]["median"],
        "95 % low": low,
        "95 % high": high,
        **row["quality"],
        "why no rank": row["no_rank"] or None,
        "parameters": row["parameters"],
        "training [s]": row["train_time_s"],
        "memory [GiB]": row["peak_memory_gib"],
        "energy [Wh]": row["energy_wh"],
        "price [$]": row["cost_dollars"],
        "answered by": row.get("stages"),  # older reports have none
        "test opened": row["opened"],
        "trained on": row["device"],
        "origin": row["origin"],
        "code": ", ".join(revision[:8] + "-dirty" * revision.endswith("-dirty") for revision in row["revisions"]),
    }


def _shown(frame: pd.DataFrame, columns: Mapping) -> pd.DataFrame:
    """Some columns as they are read, of the rows that say anything in them; models are the index."""
    part = frame[list(columns)].set_index("model").dropna(how="all")
    part = part[[name for name in part if name in ALWAYS or part[name].notna().any()]]
    return part.map(lambda value: "" if pd.isna(value) else value if isinstance(value, str) else number(value, 3))


def terms(table: Mapping) -> list[str]:
    """What the runs of a table have in common, and in what it is not the first one's, a sentence each."""
    said = [f"{what}: {value}" for what, value in table["protocol"].items()]
    said += [f"{name}: files: {', '.join(files) or 'generated'}" for name, files in table["files"].items()]
    return [*said, *(f"another table, because {what} was {a}, now {b}" for what, (a, b) in table["differs"].items())]


def page(report: Mapping) -> str:
    """The board as one HTML file."""
    meanings = _meanings(report["tables"])
    parts = [f"<p>Written on {report['date']} by revision {escape(report['code_revision'][:8])}. Lower is better.</p>"]
    for table in report["tables"]:
        parts.append(f"<h2>Protocol {escape(table['id'])}: {escape(table['protocol']['budget'])}</h2>")
        parts.append(f"<p>Looks at the test split by runs of this protocol: {table['opened']}.</p>")
        parts.append(_listed("What all of them have in common", terms(table)))
        for title, frame in tables({"tables": [table]}).items():
            parts.append(f"<h3>{escape(title.partition(' (')[0])}</h3>{_table(frame, meanings)}")
    out = [f"{why}: {', '.join(those)}" for why, those in report["left_out"].items()]
    parts += [_listed(f"Runs that stand on no board: {sum(map(len, report['left_out'].values()))}", out)] if out else []
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(what)}</dd>" for name, what in meanings.items())
    parts.append(f"<h2>What the columns mean</h2><dl>{told}</dl>")
    head = f'<meta charset="utf-8"><title>Leaderboard</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>Leaderboard</h1>{''.join(parts)}</body></html>\n"


def _listed(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(title)}</summary><ul>{items}</ul></details>"


def _table(frame: pd.DataFrame, meanings: Mapping[str, str]) -> str:
    kinds = {name: ' class="text"' * (name in TEXTS) for name in ("model", *frame)}
    head = "".join(f'<th{kinds[name]} title="{escape(meanings[name])}">{escape(name)}</th>' for name in kinds)
    rows = []
    for model, row in frame.iterrows():
        look = "reference" if row.get("why no rank") == NO_MODEL else "first" if row.get("rank") == "1" else ""
        cells = "".join(f"<td{kinds[name]}>{escape(value)}</td>" for name, value in [("model", model), *row.items()])
        rows.append(f'<tr class="{look}">{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def write(report: Mapping, folder: Path | str) -> list[Path]:
    """Write the page, the CSV of all tables and the report into a folder; their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = [
        _frame(table, one).assign(dataset=dataset, protocol=table["id"])
        for table in report["tables"]
        for dataset, one in table["datasets"].items()
    ]
    (folder / HTML).write_text(page(report))
    pd.concat(whole).to_csv(folder / CSV, index=False)
    runfolder.write_json(folder / runfolder.REPORT, report)
    return [folder / HTML, folder / CSV, folder / runfolder.REPORT]

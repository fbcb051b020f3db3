"""What stands around a run's curves: header, switches and the table of flips, as HTML text; no widgets."""

from __future__ import annotations

import base64
import io
import math
import time
import zipfile
from html import escape
from pathlib import Path

from upsnb.config import StagesConfig
from upsnb.phases import Phase, label
from upsnb.report import figures
from upsnb.report.file import verdict
from upsnb.runs import cost
from upsnb.runs.runfolder import ALIVE
from upsnb.widgets.history import Flip, History, letter, plain
from upsnb.widgets.progress import duration

STYLE = """<style>
.ups-head{display:flex;flex-wrap:wrap;gap:2px 18px;align-items:baseline}.ups-head h4{margin:0;font-size:15px;
font-weight:600;color:var(--ink)}
.ups-pill{border:1px solid var(--line);border-radius:10px;padding:1px 9px;font-weight:600;white-space:nowrap}
.ups-bar{height:6px;border-radius:3px;background:var(--line);margin:7px 0 4px;overflow:hidden}
.ups-bar div{height:100%;background:#0072B2}
.ups-card{padding:3px 4px 5px 6px;min-height:34px}.ups-card em{font-style:normal;color:var(--dim);white-space:nowrap;
text-decoration:underline dotted;cursor:help}
.ups-card em{margin-right:6px}
.ups-note{border-left:3px solid #D55E00;padding:1px 0 1px 8px;margin:4px 0;overflow-wrap:anywhere}
.ups-note.calm{border-color:#0072B2}.ups-note.why{border-color:var(--line);color:var(--dim)}
.ups-toggle.mod-active,.ups-toggle.mod-active:hover{background:#0072B2!important;color:#fff!important}
.ups-panel button.mod-active:before{content:"\\2713";margin-right:5px}
.ups-toggle.ups-asked{outline:2px dashed #E69F00;outline-offset:-2px}
.ups-panel :is(button,input,select):focus-visible{
outline:2px solid var(--jp-brand-color1,#0072B2)!important;outline-offset:1px}
.ups-panel{max-width:1500px;overflow:hidden;padding:6px 10px 10px!important}
.ups-panel .widget-label{color:var(--jp-ui-font-color1,currentColor)}
.ups-notice{height:44px;margin:4px 0!important;overflow:auto;align-items:center}.ups-notice>.widget-html{flex:1 1 0}
.ups-fields{align-items:start;padding:2px 0 6px}.ups-fields>button{margin-top:20px}
.ups-field>.widget-text{flex-direction:column;align-items:stretch;width:auto;height:auto}
.ups-field>.widget-text .widget-label{width:auto!important;text-align:left;line-height:18px;height:18px}
.ups-field>.widget-text input{width:100%;flex:none;height:28px}
.ups-field .widget-html{height:30px;margin:0 2px;overflow:hidden}
.ups.ups-reason{font-size:11px;line-height:14px;color:var(--dim)}
.ups.ups-reason.wrong{color:#D55E00;font-weight:600}
</style>"""
NUMBER = ' class="num"'
SYMBOLS = {"starting": "\u25cc", "running": "\u25b6", "stopping": "\u25a0", "finished": "\u2713", "failed": "\u2717",
           "died": "\u2717", "paused": "\u2016", "relaunching": "\u21bb"}  # fmt: skip


def sample(folder: Path) -> str:
    """The figure of one validation sample of each dataset; empty where there is none."""
    try:
        figure = figures.glance(folder)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # of a run of before, or damaged
        return ""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    said = "truth, prediction and error of one validation sample of each dataset"
    return f'<img style="max-width:100%" alt="{said}" src="{source}">'


def header(
    history: History,
    name: str,
    status: str,
    cause: str | None,
    stages: StagesConfig,
    dollars_per_h: float,
    held_s: float,
    compiling_s: float | None,
) -> str:
    """Status, ranks, place, progress and price of a run.

    Args:
        held_s: for so long it has held its machine; pauses between two launches are free.
        compiling_s: for so long its processes have been compiling; None: they are not.
    """
    start = history.start
    shown = status
    if status == "running":
        shown = "relaunching" if history.relaunching else "paused" if history.paused else status
        shown = shown if compiling_s is None else f"compiling, {duration(compiling_s)}"
    facts = []
    if start:
        ranks, planned = start["num_ranks"], stages.planned
        stage = start["stage"] if start.get("stage") in planned else planned[0]
        epochs, place = getattr(stages, stage).epochs, planned.index(stage) + 1
        facts.append(f"<b>{escape(str(ranks))}</b> {'rank' if ranks == 1 else 'ranks'} on {escape(start['device'])}")
        if len(planned) > 1:
            facts.append(f"<b>{escape(stage)}</b>, stage {place} of {len(planned)}")
        facts.append(f"epoch <b>{min(history.epoch + 1, epochs):,}</b> of {epochs:,}")
        facts.append(f"step <b>{history.step:,}</b>")
    if history.num_launches > 1:
        facts.append(f"launch {history.num_launches}")
    facts += (f"{escape(stage)}: {escape(verdict(gate))}" for stage, gate in history.gates.items())
    facts.append(f"{duration(held_s)} elapsed")
    share, left_s = history.progress()
    if status in ALIVE and math.isfinite(left_s):
        facts.append(f"{duration(left_s)} left")
    if dollars_per_h > 0:
        facts.append(f"<b>${cost.dollars(dollars_per_h, held_s):,.2f}</b> so far")
    if history.evaluations:
        errors = ", ".join(f"{name} {error:.3g}" for name, error in history.evaluations[-1]["val_nrmse"].items()
                           if error is not None)  # fmt: skip
        facts.append(f"validation {escape(history.metric)} {escape(errors)}")
    percent, told = 100 * share, "".join(f"<span>{fact}</span>" for fact in facts)
    why = f'<div class="ups-note">{escape(cause)}</div>' if cause else ""
    return (
        f'<div class="ups"><div class="ups-head"><h4>{escape(name)}</h4>'
        f'<span class="ups-pill">{SYMBOLS.get(shown, SYMBOLS["starting"])} {escape(shown)}</span>{told}</div>'
        f'<div class="ups-bar" role="progressbar" aria-valuenow="{percent:.0f}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="share of training done"><div style="width:{percent:.2f}%"></div></div>'
        f"{why}</div>"
    )


def warning(history: History) -> str:
    """The last warning in words, for a minute."""
    event = history.warning
    if event is None or time.time() - event["time"] > 60:
        return ""
    if event["kind"] == "warning":
        return event["message"]
    return ", ".join(
        f"{key} {plain(value)}" for key, value in event.items() if key not in ("kind", "time") and value is not None
    )


def switch(phase: Phase, state: str, problem: str = "", whole: str = "", parts: str = "") -> str:
    """What stands below a phase's toggle: its state, what was promised, and what it costs in exactness.

    Args:
        problem: why it cannot be switched on, in a sentence.
        whole: the same in full, shown when the pointer rests on it.
        parts: of the model that it acts on, where these are not all.
    """
    hints = {"hot": "changes between two steps of the running processes",
             "cold": "takes a relaunch: the processes save, end, and start again from the checkpoint",
             "identical": "losses and gradients stay the same to the last bit",
             "rounding": "losses and gradients change by rounding, as with another order of sums",
             "different": "another computation on purpose: losses are not comparable"}  # fmt: skip
    badges = [(word, hints[word]) for word in ("hot" if phase.hot else "cold", phase.numerics)]
    badges += [("on parts", f"acts on {parts}")] if parts else []
    if claim := phase.expected:
        with_others = f"x{claim.factor:.2f} alone, x{claim.cumulative:.2f} with all phases before it"
        hint = f"{claim.source}: {with_others}; a claim, not measured here"
        badges.insert(0, (f"promised \u00d7{claim.factor:.2f}", hint))
    marks = " ".join(f'<em title="{escape(hint)}">{word}</em>' for word, hint in badges)
    note = f'<div class="ups-note why" title="{escape(whole)}">{escape(problem)}</div>' if problem else ""
    return f'<div class="ups ups-card"><div>{escape(state)}</div><div>{marks}</div>{note}</div>'


def last_flip(flips: list[Flip], phase: str, paths) -> Flip | None:
    """The latest applied flip that switched a phase, or changed one of its settings."""
    for flip in reversed(flips):
        if flip.applied and not flip.in_turns and (phase in flip.phases or set(paths) & flip.changes.keys()):
            return flip
    return None


def flips(history: History, promised: dict[str, float]) -> str:
    """Every flip so far, newest first, promise beside measurement."""
    if not history.flips:
        return (
            '<div class="ups dim">No flips yet. What a flip does to the throughput is measured and listed here.</div>'
        )
    rows = []
    for number, flip in reversed(list(enumerate(history.flips))):
        if not flip.applied:
            came = f"{'not measured' if flip.in_turns else 'refused'}: {escape(flip.why)}"
        elif not flip.changes and not flip.in_turns:
            came = escape("; ".join(f"{label(name)} left out: {reason}" for name, reason in flip.skipped.items()))
        elif flip.measured:
            came = escape(flip.measured)
        elif history.flips[-1] is flip and history.end is None:
            came = f'<span class="dim">{escape(flip.measuring)}</span>'
        else:
            came = '<span class="dim">too few steady steps on either side</span>'
        factors = [promised[name] for name, on in flip.phases.items() if on and name in promised]
        claim = f"\u00d7{math.prod(factors):.2f}" if factors else ""
        took = flip.duration_ms if flip.applied else None
        took = "" if took is None else f"{took:,.0f} ms" if took < 1e4 else f"{took / 1e3:,.1f} s"
        settings = escape(", ".join(f"{path} {plain(value)}" for path, value in flip.changes.items()))
        what = escape(flip.what) + (" (cold)" if flip.cold else "")
        rows.append(
            f'<tr><td{NUMBER}>{letter(number)}</td><td{NUMBER}>{flip.step:,}</td><td title="{settings}">{what}</td>'
            f"<td>{came}</td><td{NUMBER}>{claim}</td><td{NUMBER}>{took}</td></tr>"
        )
    head = (
        f"<th{NUMBER}></th><th{NUMBER}>step</th><th>flip</th><th>measured, 95 %</th>"
        f"<th{NUMBER}>promised</th><th{NUMBER}>took</th>"
    )
    return f'<div class="ups"><table class="ups-table"><tr>{head}</tr>{"".join(rows)}</table></div>'


def note(text: str, calm: bool = True) -> str:
    """A sentence that stands out; empty for no text."""
    kind = "ups-note calm" if calm else "ups-note"
    return f'<div class="ups" aria-live="polite"><div class="{kind}">{escape(text)}</div></div>' if text else ""


def reason(text: str, wrong: bool) -> str:
    """What stands below a field, in full where the pointer rests on it; empty for no text."""
    kind = ' class="ups ups-reason wrong" role="alert"' if wrong else ' class="ups ups-reason"'
    return f'<div{kind} title="{escape(text)}">{escape(text)}</div>' if text else ""

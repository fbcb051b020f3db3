"""A run's curves as HTML and SVG text, cheap enough to be drawn twice a second; no widgets.

The picture is as wide as its place: curves stretch with it, letters do not. Ink follows the page (JupyterLab's
variables, else `currentColor`), so light and dark themes both read well. Colours are those of every figure.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from html import escape

import numpy as np

from upsnb.report.style import BLUE, GREEN, ORANGE, PALETTE, PURPLE, SKY, VERMILLION
from upsnb.widgets.history import Flip, History, letter

WIDTH = 1000  # of a strip's own coordinates, whole numbers of about a pixel; its height is in pixels
NARROWEST = 440  # a strip in pixels; labels are placed for this width and have more room in any wider one
LETTER = 6.1  # pixels a letter of a label takes, on the safe side
LANES, ROW = 6, 18  # most rows of labels above the curves, and the height of one in pixels
COMPARABLE = 20  # steady steps that an effect is measured from at least, on either side
COLUMNS = 40  # of the strips' width: what stands below the pointer is said for each
STILL_COLD = {True: "warming up", False: "no steady step since the last flip"}
NOT_APPLIED = ' class="no"'
STYLE = """<style>
.ups{--ink:var(--jp-ui-font-color1,currentColor);--dim:var(--jp-ui-font-color2,currentColor);
--line:var(--jp-border-color2,rgba(128,128,128,.35));color:var(--ink);line-height:1.35;
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}
.ups b{font-weight:600}.ups .dim{color:var(--dim)}
.ups-plots{position:relative;padding:0 14px 20px 0;display:grid;grid-template-columns:58px minmax(0,1fr)}
.ups-name{grid-column:2;display:flex;justify-content:space-between;padding-top:9px;white-space:nowrap}
.ups-name span{position:relative;z-index:1;background:var(--jp-layout-color0,Canvas)}
.ups-name span+span{color:var(--dim)}.ups-name i{display:inline-block;width:14px;height:3px;border-radius:2px;
margin:0 5px 3px 12px;vertical-align:middle}
.ups-ticks{position:relative;grid-column:1}.ups-ticks span{position:absolute;right:7px;transform:translateY(50%);
color:var(--dim);font-size:11px;white-space:nowrap}
.ups-strip{grid-column:2;position:relative;border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
.ups-strip svg{display:block;width:100%;height:100%;overflow:hidden}
.ups-strip path{vector-effect:non-scaling-stroke;fill:none;stroke-width:1.6;stroke-linejoin:round;
stroke-linecap:round}
.ups-strip .grid{stroke:var(--line);stroke-width:1;opacity:.6}
.ups-strip .band{stroke:none;opacity:.22}.ups-strip .pale{opacity:.4;stroke-width:1.2}
.ups-over{grid-column:2/3;position:absolute;inset:0;pointer-events:none}
.ups-over i{position:absolute;bottom:20px;border-left:1px dashed var(--dim);opacity:.75}
.ups-over b{position:absolute;top:0;bottom:20px;background:var(--dim);opacity:.13}
.ups-over i.no{border-left-style:dotted;opacity:.5}
.ups-over u{position:absolute;text-decoration:none;white-space:nowrap;font-size:11px;line-height:16px;padding:0 5px;
border-radius:3px;pointer-events:auto;background:var(--jp-layout-color2,rgba(128,128,128,.15))}
.ups-over s{position:absolute;bottom:0;text-decoration:none;color:var(--dim);font-size:11px;white-space:nowrap}
.ups-hover{grid-column:2/3;position:absolute;inset:0 0 20px;display:flex}.ups-hover i{flex:1;position:relative;
font-style:normal}.ups-hover i:hover{box-shadow:inset 1px 0 var(--dim)}.ups-hover i:hover:after{content:attr(data-v);
position:absolute;top:8px;left:100%;z-index:9;white-space:pre;padding:3px 8px;border:1px solid var(--line);
border-radius:3px;background:var(--jp-layout-color1,Canvas);pointer-events:none}
.ups-hover i:nth-child(n+21):after{left:auto!important;right:100%}
.ups-table{border-collapse:collapse;margin:4px 0 8px;font-size:12px}.ups-table th{text-align:left;font-weight:600}
.ups-table td,.ups-table th{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;
text-align:left;background:none}.ups-table td.num,.ups-table th.num{text-align:right}
.ups-table tr{background:none!important}
</style>"""


@dataclass
class Curve:
    """One line of a strip, perhaps with the range of what it summarises behind it."""

    y: np.ndarray
    colour: str
    name: str = ""
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    pale: bool = False  # drawn, but no part of the figure
    joined: bool = False  # across gaps: a term that is computed now and then


@dataclass
class Strip:
    """One quantity over the shared axis."""

    title: str
    unit: str
    now: str  # the latest value in words
    x: np.ndarray
    curves: list[Curve] = field(default_factory=list)
    log: bool = False
    height: int = 64  # pixels
    least_top: float = 0.0  # the axis reaches at least so far, lest noise fill it

    def span(self) -> tuple[float, float]:
        """Lowest and highest value of the axis; of logarithms where it is logarithmic."""
        counted = [curve for curve in self.curves if not curve.pale] or self.curves
        lows = [curve.y if curve.low is None else curve.low for curve in counted]
        highs = [curve.y if curve.high is None else curve.high for curve in counted]
        low, high = np.concatenate([np.empty(0), *lows]), np.concatenate([np.empty(0), *highs])
        if self.log:
            low, high = low[low > 0], high[high > 0]
        low, high = low[np.isfinite(low)], high[np.isfinite(high)]
        if not len(high) or not len(low):
            return (-1.0, 0.0) if self.log else (0.0, max(self.least_top, 1.0))
        if self.log:
            bottom, top = math.log10(low.min()), math.log10(high.max())
            pad = max(0.04 * (top - bottom), 0.05)
            return bottom - pad, top + pad
        # One outlier, such as the step after a stalled disk, must not press the rest to the floor.
        top = min(high.max(), 1.6 * np.quantile(high, 0.95)) if len(high) > 20 else high.max()
        return 0.0, max(1.08 * float(top), self.least_top) or 1.0

    def ticks(self) -> list[tuple[float, str]]:
        """(share of the height, text) of up to four marks."""
        low, high = self.span()
        if not self.log:
            values = nice(high, 2 if self.height < 80 else 4)
            values = values if len(values) > 1 else nice(high, 4)
            return [(value / high, short(value)) for value in values]
        decades = range(math.ceil(low), math.floor(high) + 1)
        marks = [10.0**d for d in decades][:: max(1, len(decades) // 3)]
        if len(marks) < 2:
            marks = [m * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
            marks = [m for m in marks if low <= math.log10(m) <= high]
            marks = marks[:: max(1, len(marks) // 3)]
        return [((math.log10(m) - low) / (high - low), short(m)) for m in marks]


def strips(history: History, axis: str = "step", terms: bool = False) -> list[Strip]:
    """What is drawn of a run, from top to bottom.

    Args:
        axis: "step", or "time" for seconds of training.
        terms: every loss term by itself instead of their sum.
    """
    steps, cycle = history.steps, history.cycle
    if not steps.num_rows:
        return []

    def thin(name):
        return steps.thinned(name, cycle)

    x = thin("step" if axis == "step" else "time_s")[2]
    low, high, _ = thin("rate")
    with np.errstate(invalid="ignore"):
        rate = thin("samples")[2] / thin("seconds")[2]  # samples of a bucket over its seconds, not a mean of rates
    now, num_steady = history.rate(), history.num_comparable
    text = f"<b>{short(now)}</b> {escape(history.unit)}/s" if math.isfinite(now) else STILL_COLD[history.end is None]
    if num_steady < COMPARABLE and history.end is None:
        text += f", {num_steady} of {COMPARABLE} steady steps to measure a flip"
    curves = [Curve(thin("rate unsteady")[2], "var(--dim)", pale=True), Curve(rate, BLUE, "", low, high)]
    drawn = [Strip("throughput", f"{history.unit}/s", text, x, curves, height=132)]
    if terms:
        coloured = zip(history.terms, itertools.cycle(PALETTE))
        curves = [Curve(thin(f"term {term}")[2], colour, term, joined=True) for term, colour in coloured]
    else:
        low, high, mean = thin("loss")
        curves = [Curve(mean, VERMILLION, "", low, high)]
    last = steps["loss"][-cycle:]
    finite = last[np.isfinite(last)]
    loss_now = f"<b>{finite.mean():.3g}</b>" if len(finite) else "<b>not finite</b>"
    drawn.append(Strip("loss terms" if terms else "loss", "-", loss_now, x, curves, log=True, height=104))
    drawn += _validation_strip(history, axis)
    rate = thin("learning_rate")[2]
    if np.isfinite(rate).any():
        text = f"<b>{short(steps['learning_rate'][-1])}</b>"
        drawn.append(Strip("learning rate", "-", text, x, [Curve(rate, PURPLE)], height=44))
    memory = thin("peak_memory_gib")[1]
    kind = "allocated" if history.start.get("device") == "cuda" else "resident"
    drawn.append(Strip(f"peak memory, {kind}", "GiB", f"<b>{memory[-1]:.2f}</b> GiB", x, [Curve(memory, GREEN)]))
    low, high, mean = thin("wait")
    wait = np.nanmean(steps["wait"][-40 * cycle :])
    curves = [Curve(mean, ORANGE, "", low, high)]
    drawn.append(Strip("waiting for data", "%", f"<b>{wait:.1f}</b> % of a step", x, curves, least_top=5.0))
    return drawn + _device_strips(history, axis)


def _validation_strip(history: History, axis: str) -> list[Strip]:
    told = history.evaluations
    if not told:
        return []
    x = np.array([history.position(event["step"], axis) for event in told])
    names = sorted(told[-1]["val_nrmse"])
    values = {name: np.array([event["val_nrmse"].get(name) for event in told], float) for name in names}
    curves = [Curve(values[name], colour, name) for name, colour in zip(names, itertools.cycle(PALETTE))]
    now = ", ".join(f"<b>{short(values[name][-1])}</b>" for name in names)
    return [Strip(f"validation {history.metric}", "-", now, x, curves, log=True, height=84)]


def _device_strips(history: History, axis: str) -> list[Strip]:
    table, steps = history.telemetry, history.steps
    if not table.num_rows:
        return []
    along = "step" if axis == "step" else "time_s"
    x = np.interp(table.thinned("time")[2], steps["time"], steps[along])
    looks = (
        ("utilisation_percent", "GPU utilisation", "%", SKY, 100.0),
        ("power_w", "GPU power", "W", PURPLE, 50.0),
        ("clock_mhz", "GPU clock", "MHz", GREEN, 500.0),
    )
    drawn = []
    for name, title, unit, colour, least_top in looks:
        mean = table.thinned(name)[2]
        if np.isfinite(mean).any():
            now = f"<b>{table[name][-1]:.0f}</b> {unit}"
            drawn.append(Strip(title, unit, now, x, [Curve(mean, colour)], least_top=least_top))
    return drawn


def svg(history: History, axis: str = "step", terms: bool = False) -> str:
    """The run's curves over one axis, its flips marked and named with what they did; HTML text.

    Steps with a change that is only measured, in turns, are shaded.
    """
    drawn = strips(history, axis, terms)
    if not drawn:
        return f'<div class="ups dim">{escape(history.message or "waiting for the first step")}</div>'
    end = max(strip.x[-1] for strip in drawn)
    end = float(max(end, history.position(history.step, axis))) or 1.0
    labels, lanes = _labels(history.flips, [history.position(flip.step, axis) / end for flip in history.flips])
    curves = "".join(_strip(strip, end) for strip in drawn)
    shades = "".join(
        f'<b style="left:{100 * first / end:.2f}%;width:{100 * (last - first) / end:.2f}%"></b>'
        for first, last in history.turns(axis)
    )
    return (
        f'<div class="ups ups-plots" style="padding-top:{ROW * lanes}px">{curves}{_hover(drawn, end, axis)}'
        f'<div class="ups-over">{shades}{labels}{_axis(end, axis)}</div></div>'
    )


def _hover(drawn: list[Strip], end: float, axis: str) -> str:
    """What every curve is worth at the place of the pointer: by style sheet alone, so that it survives a redraw."""
    parts = []
    for place in end * (np.arange(COLUMNS) + 0.5) / COLUMNS:
        said = [f"step {place:,.0f}" if axis == "step" else f"{place:,.0f} s"]
        for strip in drawn:
            nearest = int(np.abs(strip.x - place).argmin())
            for curve in strip.curves:
                if not curve.pale and math.isfinite(curve.y[nearest]):
                    name, value = curve.name or strip.title, short(curve.y[nearest])
                    unit = {"-": "", "%": " %"}.get(strip.unit)  # of any other unit there is one strip
                    said.append(f"{value} {strip.unit}" if unit is None else f"{name} {value}{unit}")
        text = "&#10;".join(map(escape, said))
        parts.append(f'<i data-v="{text}"></i>')
    return f'<div class="ups-hover" aria-hidden="true">{"".join(parts)}</div>'


def _strip(strip: Strip, end: float) -> str:
    low, high = strip.span()
    x = np.rint(WIDTH * strip.x / end)

    def y(values: np.ndarray) -> np.ndarray:
        if strip.log:
            values = np.log10(np.where(values > 0, values, np.nan))
        return np.rint(strip.height * (1 - (np.clip(values, low, high) - low) / (high - low)))

    shapes = []
    for curve in strip.curves:
        if curve.low is not None and not np.array_equal(curve.low, curve.high, equal_nan=True):
            shapes.append(
                f'<path class="band" style="fill:{curve.colour}" d="{_area(x, y(curve.low), y(curve.high))}"/>'
            )
        pale = ' class="pale"' if curve.pale else ""
        shapes.append(f'<path{pale} style="stroke:{curve.colour}" d="{_line(x, y(curve.y), curve.joined)}"/>')
    ticks = strip.ticks()
    grid = "".join(f"M0 {strip.height * (1 - share):.0f}h{WIDTH}" for share, _ in ticks)
    names = "".join(
        f'<i style="background:{curve.colour}"></i>{escape(curve.name)}' for curve in strip.curves if curve.name
    )
    marks = "".join(f'<span style="bottom:{100 * share:.1f}%">{text}</span>' for share, text in ticks)
    return (
        f'<div class="ups-name"><span>{escape(strip.title)}{names}</span><span>{strip.now}</span></div>'
        f'<div class="ups-ticks">{marks}</div><div class="ups-strip" style="height:{strip.height}px">'
        f'<svg viewBox="0 0 {WIDTH} {strip.height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(strip.title)} [{strip.unit}]">'
        f'<path class="grid" d="{grid}"/>{"".join(shapes)}</svg></div>'
    )


def _line(x: np.ndarray, y: np.ndarray, joined: bool = False) -> str:
    """Path of whole numbers relative to the point before, which are the shortest; gaps stay gaps unless joined."""
    parts, before = [], None
    for px, py in zip(x.tolist(), y.tolist()):
        if py != py:
            before = before if joined else None
        elif before is None:
            parts.append(f"M{px:.0f} {py:.0f}h0")  # a lone point is a dot
            before = px, py
        else:
            dx, dy = int(px - before[0]), int(py - before[1])
            parts.append(f"l{dx} {dy}" if dy else f"h{dx}")
            before = px, py
    return "".join(parts)


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """One closed path for each stretch without a gap."""
    known = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
    parts = []
    for first, last in edges.reshape(-1, 2).tolist():
        if last - first > 1:
            there, back = slice(first, last), np.arange(last - 1, first - 1, -1)
            parts.append(_line(np.r_[x[there], x[back]], np.r_[high[there], low[back]]) + "z")
    return "".join(parts)


def _labels(flips: list[Flip], shares: list[float]) -> tuple[str, int]:
    """Marker and label of each flip, and the rows of labels taken; later flips first, for those are looked at.

    A label starts at its marker, or as far left of it as it must to end inside. What finds no room keeps its letter,
    which leads to its row in the table of flips.
    """
    rows: list[list[tuple[float, float]]] = []
    lines, labels = [], []
    for name, flip, share in reversed([(letter(k), *pair) for k, pair in enumerate(zip(flips, shares))]):
        came = ("" if flip.applied else ": refused") + f"  {flip.measured}".rstrip()
        for text in (f"{name}  {flip.what}{came}", f"{name}{came}", name):
            pixels = LETTER * len(text) + 12
            if pixels > NARROWEST:
                continue
            left = max(min(share, 1 - pixels / NARROWEST), 0.0)
            right = left + (pixels + 4) / NARROWEST
            free = (i for i, row in enumerate(rows) if all(right <= a or left >= b for a, b in row))
            row = next(free, len(rows))
            if row < LANES:
                break
        else:
            continue
        rows += [[]] if row == len(rows) else []
        rows[row].append((left, right))
        at = f"{100 * share:.2f}%"
        title = ": ".join(filter(None, (f"step {flip.step}", flip.what, flip.measured, flip.why)))
        lines.append(f'<i{"" if flip.applied else NOT_APPLIED} style="left:{at};top:{ROW * row}px"></i>')
        labels.append(
            f'<u style="top:{ROW * row}px;left:max(0px,min({at},calc(100% - {pixels:.0f}px)))" '
            f'title="{escape(title)}">{escape(text)}</u>'
        )
    return "".join(lines + labels), len(rows)


def _axis(end: float, axis: str) -> str:
    """Marks below the last strip; the last one turns inwards, so that it is not cut off, and none is in its way."""
    scale, unit = (1.0, "step") if axis == "step" else (3600.0, "h") if end > 7200 else (1.0, "s")
    last = f"step {end:,.0f}" if axis == "step" else f"{end / scale:,.3g} {unit} of training"
    parts = []
    for value in nice(end / scale, 5):
        share, mark = value * scale / end, f"{value:,g}"
        if share < 1 - LETTER * (len(last) + len(mark) / 2 + 1) / NARROWEST:
            shift = "" if value == 0 else "transform:translateX(-50%);"
            parts.append(f'<s style="{shift}left:{100 * share:.2f}%">{mark}</s>')
    return "".join(parts) + f'<s style="right:0">{last}</s>'


def nice(high: float, count: int) -> list[float]:
    """About `count` round values from 0 to `high`, which is larger."""
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [round(i * step, 12) for i in range(math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few letters: 0.05, 1.2, 340, 12,500, 2e-05."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e5 else f"{value / 1e3:,.3g}k" if abs(value) < 1e6 else f"{value:.2g}"
    return f"{value:.3g}"

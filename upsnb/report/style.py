"""How every figure looks: palette, style sheet, and the helpers that figure functions share; no global state touched.

Figures are built on `matplotlib.figure.Figure` directly. pyplot would keep every figure alive until closed and pick a
GUI backend; a worker without a display needs neither. Colours are Okabe and Ito's, which survive colour blindness;
the truth is always black and the forecast to beat always dashed, whatever else is drawn.
Every quantity is labelled `name [unit]`; a dimensionless one has the unit `-`.
"""

import json
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, wraps
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from upsnb.runs.runfolder import FIGURES, REPORT

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
BLACK, GREY, GAP = "#000000", "#6F6F6F", "#DDDDDD"  # GAP: where a field has no finite value
ROLES = {  # curves that look the same in every figure
    "truth": {"color": BLACK, "linewidth": 2.0},
    "persistence": {"color": GREY, "linestyle": "--"},
    "training mean": {"color": GREY, "linestyle": "-."},
}
LETTERS_PER_INCH = 12.5  # of a title
FIELD_COLOURS, ERROR_COLOURS, INPUT_COLOURS = "viridis", "RdBu_r", "cividis"
STYLE = {
    "figure.dpi": 110,
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "figure.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
}


class StillFigure(Figure):
    """A Figure that Jupyter draws without pyplot: IPython knows bare Figures only after pyplot was imported."""

    @cached_property
    def png(self) -> bytes:
        """The finished figure at 150 dpi, drawn once: shown, then saved."""
        buffer = BytesIO()
        with matplotlib.rc_context(STYLE):
            # No version stamp: the same data gives the same bytes.
            self.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        width, height = self.get_size_inches() * self.dpi
        return self.png, {"width": round(width), "height": round(height)}  # the smaller, the sharper on a dense screen


def save(figure: StillFigure, folder: str | Path, name: str) -> Path:
    """Write `folder/name.png` at 150 dpi and return its path."""
    path = Path(folder) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(figure.png)
    return path


def save_all(figures: Mapping[str, StillFigure], folder: str | Path) -> dict[str, Path]:
    """Write figures into a folder's `figures/`; figure name -> PNG."""
    return {name: save(figure, Path(folder) / FIGURES, name) for name, figure in figures.items()}


def writer(draw: Callable[[Mapping], Mapping[str, StillFigure]]) -> Callable[[str | Path], dict[str, Path]]:
    """A study's `write_figures`: draws the report in a folder into its `figures/`; figure name -> PNG."""
    return lambda folder: save_all(draw(json.loads((Path(folder) / REPORT).read_text())), folder)


def styled(draw):
    """Run a figure function under STYLE, leaving the caller's rcParams as they were."""

    @wraps(draw)
    def drawn(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"):
                _number(axis)
            return figure

    return drawn


def _number(axis: Axis) -> None:
    """Number a logarithmic axis: three places at least, however short it is, and 0.04 rather than 4 x 10^-2 where the
    whole axis can be written so."""
    low, high = axis.get_view_interval()
    if low <= 0:  # nothing on it that is positive
        axis.axes.set(**{f"{axis.axis_name}scale": "linear"})
        return
    if not isinstance(axis.get_major_locator(), FixedLocator):
        if high < 10 * low:  # evenly, as if it were linear: of 1, 2 and 5 two alone lie between 1.1 and 9
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        elif high < 1000 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1, 3)))
        if high < 1000 * low:
            axis.set_minor_locator(NullLocator())
    decimals = low >= 1e-4 and high < 1e5
    axis.set_major_formatter(FuncFormatter(lambda x, pos: f"{x:.6g}" if decimals else _power(x)))


def _power(x: float) -> str:
    """4 x 10^-2, in mathtext."""
    mantissa, exponent = f"{x:.2e}".split("e")
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if float(mantissa) == 1 else rf"${float(mantissa):g}\times{power}$"


def label(quantity: str, unit: str = "-") -> str:
    """Axis text `quantity [unit]`."""
    return f"{quantity} [{unit}]"


def empty_figure(width: float, height: float, title: str = "") -> StillFigure:
    """Empty figure, inches; 4.8 wide shrinks into a journal column, 7.2 spans the page. The title adds its own height.

    Args:
        title: what is to be seen, in a sentence with its numbers.
    """
    lines = textwrap.wrap(title, int(LETTERS_PER_INCH * width))
    figure = StillFigure(figsize=(width, height + 0.17 * len(lines)), layout="constrained")
    if lines:
        figure.suptitle("\n".join(lines), x=0.01, ha="left", parse_math=False)  # it may hold a folder's name
    return figure


def legend(ax: Axes, columns: int | None = None) -> None:
    """Name the curves above the axes, where no data can be hidden, in as many columns as fit."""
    names = ax.get_legend_handles_labels()[1]
    if not names:
        return
    if columns is None:
        spec = ax.get_subplotspec()
        width = 0.85 * ax.figure.get_figwidth() * len(spec.colspan) / spec.get_gridspec().ncols
        # About 0.055 inch a letter at 8 points. Too wide a legend would squeeze the axes, which layout counts as less.
        columns = min(max(int(width / (0.5 + 0.055 * max(map(len, names)))), 1), 4)
    made = ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3, ncols=columns, columnspacing=1.2)
    for text in made.texts:
        text.set_parse_math(False)


def shared_legend(figure: Figure, columns: int) -> None:
    """Name below all axes what has a name in any of them, each once."""
    named = {name: handle for ax in figure.axes for handle, name in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)


def name_rows(ax: Axes, names: Sequence[str], quantity: str) -> None:
    """Name rows of bars or dots, from the top down; `quantity` is what they are measured in."""
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlabel=quantity)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def note(ax: Axes, x: float, y: float, text: str, **how) -> None:
    """A few words or a number right of a place."""
    ax.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, **how)


def edges(centres: np.ndarray) -> tuple[float, float]:
    """Outer edges of evenly spaced cells; a lone cell is one wide."""
    half = (centres[-1] - centres[0]) / (len(centres) - 1) / 2 if len(centres) > 1 else 0.5
    return float(centres[0] - half), float(centres[-1] + half)


def draw_image(
    ax: Axes, values: ArrayLike, extent: Sequence[float], colours: str, norm: Normalize, bar_label: str = ""
) -> None:
    """Draw (rows, columns), first row at the bottom and gaps grey, with a colour bar if it has a label."""
    ax.grid(False)
    values = np.asarray(values, dtype=float)
    colours = matplotlib.colormaps[colours].with_extremes(bad=GAP)
    image = ax.imshow(values, origin="lower", aspect="auto", extent=tuple(extent), cmap=colours, norm=norm)
    if bar_label:
        # Inside the axes' own box: bars as separate axes would not follow an image of fixed aspect.
        bar = ax.figure.colorbar(image, cax=ax.inset_axes([1.05, 0, 0.06, 1]), extend=_extend(values, norm))
        bar.set_label(bar_label)
        bar.ax.locator_params(nbins=5)


def value_range(values: ArrayLike) -> Normalize:
    """Colour range of the finite values, never empty."""
    finite = np.asarray(values, dtype=float)[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant: give it the middle of a range of its own size
        pad = abs(low) or 1.0
        low, high = low - pad, high + pad
    return Normalize(low, high)


def symmetric_range(error: np.ndarray) -> Normalize:
    largest = float(np.max(np.abs(error[np.isfinite(error)]), initial=0.0)) or 1.0
    return Normalize(-largest, largest)


def _extend(values: ArrayLike, norm: Normalize) -> str:
    """Which ends of the colour bar need an arrow, beyond 1 % of its range."""
    finite = np.asarray(values, dtype=float)[np.isfinite(values)]
    slack = 0.01 * (norm.vmax - norm.vmin)
    below, above = bool((finite < norm.vmin - slack).any()), bool((finite > norm.vmax + slack).any())
    return {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")


def looks(names: Collection[str]) -> dict[str, dict]:
    """Line style of each curve: its role's, else the next colour; past the last colour the dashes change."""
    free = [name for name in names if name not in ROLES]
    dashes = ("-", "-.", ":")
    coloured = {
        name: {"color": PALETTE[i % len(PALETTE)], "linestyle": dashes[i // len(PALETTE) % len(dashes)]}
        for i, name in enumerate(free)
    }
    return {name: ROLES.get(name) or coloured[name] for name in names}


def point_size(count: int) -> float:
    """Of the points of a curve that has so many: small where large ones would hide each other and other curves."""
    return 3.5 if count <= 40 else 1.5


def positive(values: ArrayLike) -> np.ndarray:
    """As floats, with NaN where a logarithm has no place for the value."""
    values = np.asarray(values, dtype=float)
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def running_median(values: np.ndarray) -> np.ndarray:
    """Median over a centred window of about a twentieth of the curve, shorter at its ends."""
    half = len(values) // 40
    return np.array([np.median(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))])

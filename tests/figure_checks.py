"""What every figure owes its reader, whichever room draws it."""

import warnings

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D


def drawn(figure: Figure) -> Figure:
    """The figure, drawn, with every warning an error: a layout that gives up only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FigureCanvasAgg(figure).draw()
    return figure


def check(figure: Figure) -> None:
    """All that can be asked of a finished figure."""
    drawn(figure)
    assert says_what_is_seen(figure), figure.get_suptitle()
    assert not stray_swatches(figure)
    assert not bare_axes(figure)
    assert not outside(figure)


def says_what_is_seen(figure: Figure) -> bool:
    """Whether its title is some words with a number."""
    title = figure.get_suptitle()
    return len(title.split()) >= 4 and any(letter.isdigit() for letter in title)


def _look(artist) -> tuple:
    """Colour with its opacity and, of lines, dashes."""
    if isinstance(artist, Line2D):
        hollow = artist.get_linestyle() == "None" and artist.get_markerfacecolor() == "none"
        colour = artist.get_markeredgecolor() if hollow else artist.get_color()
        return (*to_rgba(colour, artist.get_alpha()), artist.get_linestyle())
    if isinstance(artist, Collection):
        faces, edges = artist.get_facecolor(), artist.get_edgecolor()
        return tuple(faces[0]) if len(faces) else (*edges[0], "-")
    return tuple(artist.get_facecolor())


def stray_swatches(figure: Figure) -> list[str]:
    """Names in legends whose swatch looks like nothing that is drawn."""
    lines = [line for ax in figure.axes for line in ax.lines if len(line.get_xdata())]
    others = [artist for ax in figure.axes for artist in (*ax.collections, *ax.patches)]
    looks = {_look(artist) for artist in (*lines, *others) if not isinstance(artist, Collection) or artist.get_paths()}
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    swatches = ((text.get_text(), hand) for one in legends for text, hand in zip(one.texts, one.legend_handles))
    return [name for name, handle in swatches if _look(handle) not in looks]


def bare_axes(figure: Figure) -> list[str]:
    """Logarithmic axes with fewer than three numbers on them."""
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"]
    found = []
    for axis in axes:
        low, high = axis.get_view_interval()
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels())
        texts = [label.get_text() for place, label in ticks if low <= place <= high and label.get_visible()]
        if len(list(filter(None, texts))) < 3 and axis.get_ticklabels() and axis.get_ticklabels()[0].get_visible():
            found.append(f"{axis.get_label().get_text()}: {texts}")
    return found


def outside(figure: Figure) -> list[str]:
    """Parts that the page cuts off."""
    renderer, page = figure.canvas.get_renderer(), figure.bbox
    parts = [*figure.axes, *figure.legends, *([figure._suptitle] if figure._suptitle else [])]
    boxes = {str(part): part.get_tightbbox(renderer) for part in parts}
    return [
        f"{part}: {box}"
        for part, box in boxes.items()
        if box.x0 < page.x0 - 1 or box.y0 < page.y0 - 1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1
    ]

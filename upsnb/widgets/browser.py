"""All runs of a folder in a list; the one that is chosen opens in its panel below."""

from __future__ import annotations

import threading
from pathlib import Path

import ipywidgets as widgets
import pandas as pd
from IPython.display import display

from upsnb.runs import handle
from upsnb.runs.table import UNREADABLE, find_root, table
from upsnb.widgets.panel import INTERVAL_S, Panel


class RunBrowser:
    """A list of runs, newest first, and the panel of the chosen one; `RunBrowser()` as a cell's last line shows it.

    Args:
        root: folder of run folders; empty: where runs go by default.
    """

    def __init__(self, root: Path | str | None = None):
        self.root = find_root(root)
        self.panel: Panel | None = None  # of the chosen run
        self._panels: dict[str, Panel] = {}  # opened so far; only the chosen one is kept up to date
        self._lock, self._closing, self._thread = threading.RLock(), threading.Event(), None
        self._list = widgets.Select(options=[], rows=8, layout=widgets.Layout(width="100%"))
        self._list.add_class("ups-runs")
        self._list.observe(lambda change: self._choose(change["new"]), "value")
        again = widgets.Button(description="Look again", tooltip="read the folder anew")
        again.on_click(lambda _: self.look())
        self._place = widgets.VBox()
        self.box = widgets.VBox([again, self._list, self._place])
        self.look()
        for widget in (self._list, again):  # as in the panel: a reply must not wait for a busy cell
            getattr(widget.comm, "__dict__", {}).pop("_reply_subshell_id", None)

    def look(self) -> None:
        """Read the folder anew; the chosen run stays chosen."""
        runs = table(self.root)
        with self._lock:
            chosen = self._list.value
            options = [(label(row), None if row["status"] == UNREADABLE else row["run"])
                       for _, row in runs.iterrows()]  # fmt: skip
            self._list.options = [("choose a run" if options else f"no runs in {self.root}", None), *options]
            self._list.value = chosen if chosen in [name for _, name in options] else None

    def _choose(self, name: str | None) -> None:
        with self._lock:
            if name is None:
                self.panel, self._place.children = None, ()
                return
            if name not in self._panels:
                self._panels[name] = Panel(handle.Run.attach(self.root / name))
            self.panel = self._panels[name]
            self.panel.refresh()
            self._place.children = (self.panel.box,)

    def _ipython_display_(self) -> None:
        if handle.is_headless():
            display(table(self.root))
            return
        display(self.box)
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_up, name="run-browser", daemon=True)
            self._thread.start()

    def _keep_up(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            panel = self.panel
            if panel is not None and not panel.is_fresh():  # its folder was deleted, say; others may be chosen next
                self.panel = None

    def close(self) -> None:
        """Stop keeping the panel up to date; the runs go on."""
        self._closing.set()


def label(row: pd.Series) -> str:
    """One run in one line: name, status, when, steps, speed and errors, as far as they are known."""
    errors = [f"{column.removeprefix('nrmse_')} {row[column]:.3g}" for column in row.index
              if column.startswith("nrmse_") and pd.notna(row[column])]  # fmt: skip
    facts = [
        row["run"],
        row["status"],
        f"{row['created']:%Y-%m-%d %H:%M}",
        f"{row['steps']:,} steps" if pd.notna(row["steps"]) else "",
        f"{row['samples_per_s']:.4g} {row['unit']}/s" if pd.notna(row["samples_per_s"]) else "",
        f"{row['metric']} {', '.join(errors)}" if errors else "",
        row["cause"] if pd.notna(row["cause"]) else "",
    ]
    return "  \u00b7  ".join(filter(None, facts))

"""A number as a text field: what was typed stays as it was typed, and what is wrong with it stands below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import ipywidgets as widgets

from upsnb.errors import ConfigError
from upsnb.widgets import html

PENDING = "not applied yet"  # stands below a text that is right, until it is in force


class Field:
    """One field. It follows what is in force until somebody writes something else into it.

    Args:
        check: what a text means; raises ConfigError where it is no value.
    """

    def __init__(self, name: str, tooltip: str, check: Callable[[str], object]):
        self.check, self._in_force = check, ""
        self.text = widgets.Text(
            description=name, continuous_update=False, style={"description_width": "initial"},
            layout=widgets.Layout(width="auto"),
        )  # fmt: skip
        with contextlib.suppress(Exception):
            self.text.tooltip = tooltip
        with contextlib.suppress(Exception):  # as it was called before ipywidgets 8
            self.text.description_tooltip = tooltip
        self._reason = widgets.HTML()
        self.text.observe(lambda change: self.explain(), "value")
        self.box = widgets.VBox([self.text, self._reason]).add_class("ups-field")

    @property
    def is_edited(self) -> bool:
        """Whether it holds something that is not in force."""
        return self.text.value.strip() != self._in_force

    def show(self, in_force: str) -> None:
        """Take what is in force; what somebody wrote instead stays."""
        edited, self._in_force = self.is_edited, in_force
        if not edited:
            self.text.value = in_force
        self.explain()

    def accept(self) -> None:
        """Follow again: what it holds was asked for."""
        self._in_force = self.text.value.strip()
        self.explain()

    def read(self):
        """What it means.

        Raises:
            ConfigError: nothing that can be applied.
        """
        return self.check(self.text.value)

    def explain(self) -> None:
        """Say below it why it cannot be applied, or that it was not."""
        said, wrong = "", False
        if self.is_edited:
            try:
                self.read()
                said = PENDING
            except ConfigError as error:
                problem, wrong = error.problems[0], True
                is_typed = problem.found.startswith("got ")  # that stands above
                said = problem.remedy if is_typed else f"{problem.found}: {problem.remedy}"
        self._reason.value = html.reason(said, wrong)

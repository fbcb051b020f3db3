"""The live panel: a run's switches, controls and curves as widgets. A view of its folder; it holds no truth itself.

Everything is rebuilt from the folder, so a panel survives page reloads, kernel restarts and a second viewer; a click
only writes control.json. Works with ipywidgets 7.7 and 8, and with callbacks on whatever thread the kernel chooses.
"""

from __future__ import annotations

import contextlib
import threading
import time

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import display

from upsnb import phases
from upsnb.config import RunConfig, setting
from upsnb.errors import ConfigError, UpsError
from upsnb.phases import BY_NAME, EXTRAS, PHASES, Phase
from upsnb.runs import runfolder
from upsnb.runs.handle import Run, is_headless
from upsnb.widgets import charts, html, snapshot
from upsnb.widgets.busy_kernel import serve_clicks
from upsnb.widgets.history import History, plain
from upsnb.widgets.progress import Progress
from upsnb.widgets.requests import AS_STARTED, PRESETS, PanelRequests

INTERVAL_S = 0.5  # between two redraws
CONTROLS = {  # setting: its short name and what is shown when the pointer rests on it
    "training.batch_size": ("batch size", "training pairs per rank and microbatch"),
    "training.accum_steps": ("accumulation", "microbatches per optimizer step"),
    "optimizer.lr": ("learning rate", "AdamW's peak learning rate"),
    "training.inverse_loss_frequency": ("inverse every", "inverse losses every k-th microbatch"),
    "training.query_sampling.num_queries": ("queries", "points compared per sample; 0: the whole grid"),
    "training.num_workers": ("workers", "processes that read ahead"),
}


class Panel:
    """The panel of one run: `Panel(run).start()`, or `.watch()` where updates from threads are not shown."""

    def __init__(self, run: Run):
        self.run = run
        self.history = History(run.folder)
        self.asking = PanelRequests(run, self.history)
        self.status, self.cause = run.status(), run.cause()
        self._lock = threading.RLock()
        self._ours = False  # widgets are being set by this object, not by a person
        self._shown_for = None  # (applied, desired) configs that the switches show
        self._awaited: tuple[int, str] | None = None  # revision of the last request, and what it asked for
        self._said = ""  # what a button had to say beyond that
        self._problems: dict[str, str] = {}  # phase: why its last click was not sent
        self._edited: set[str] = set()  # controls that a person has changed and not sent
        self._closing, self._thread, self._handle = threading.Event(), None, None
        self._build()

    # -- showing -----------------------------------------------------------------------------------------------------

    def start(self) -> Panel | None:
        """Show the panel here and keep it up to date from a thread until the run has ended; returns at once."""
        if is_headless():
            return
        self._show()
        if self._thread is None or not self._thread.is_alive():
            self._closing.clear()
            self._thread = threading.Thread(target=self._keep_up, name="panel", daemon=True)
            self._thread.start()

    def watch(self, seconds: float | None = None) -> str:
        """Keep the panel up to date from this cell; returns the run's status.

        When the run has ended the panel closes. Headless, it prints a line now and then and leaves the still figure.
        An interrupt ends the watching, not the run.

        Args:
            seconds: stop watching after so long; empty: until the run has ended.
        """
        headless = is_headless()
        log = Progress() if headless else None
        if not headless:
            self._show()
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            for event in self.refresh():
                if log is not None:
                    log(event)
            if self.status not in runfolder.ALIVE:
                self.close()
                return self.status
            if deadline is not None and time.monotonic() >= deadline:
                return self.status
            pause = time.monotonic() + INTERVAL_S
            while time.monotonic() < pause and self.run.status() in runfolder.ALIVE:
                if not headless:
                    serve_clicks(getattr(get_ipython(), "kernel", None))
                time.sleep(0.05)

    def close(self) -> None:
        """Stop updating and leave a still figure in the panel's place; the run goes on. Closing twice is harmless."""
        already, thread = self._closing.is_set(), self._thread
        self._closing.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10 * INTERVAL_S)
        if already and self._handle is None:
            return
        with self._lock:
            self.refresh()
            figure, handle, self._handle = self.figure(), self._handle, None
            if handle is not None:
                handle.update(figure)
            elif get_ipython() is not None:
                display(figure)
            for widget in self._widgets():
                widget.close()

    def figure(self):
        """What the panel shows now as a matplotlib Figure."""
        with self._lock:
            self.history.read()
            return snapshot.figure(self.history, f"{self.run.folder.name}, {self.status}", self._axis.value)

    def _ipython_display_(self) -> None:
        if is_headless():
            display(self.figure())
        else:
            self.start()

    def _show(self) -> None:
        self.refresh()
        data = {"text/plain": f"Panel({self.run!r})"}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        data["application/vnd.jupyter.widget-view+json"] = view
        self._handle = display(data, raw=True, display_id=True)

    def _keep_up(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            try:
                self.refresh()
            except Exception as error:  # shown where a person looks; a thread's own traceback is seen by nobody
                self._note.value = html.note(f"the panel stopped: {type(error).__name__}: {error}", calm=False)
                return
            if self.status not in runfolder.ALIVE:
                return

    # -- widgets -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        full = widgets.Layout(width="100%", margin="0")
        self._head, self._note, self._plots, self._table = (widgets.HTML(layout=full) for _ in range(4))
        self._toggles: dict[str, widgets.ToggleButton] = {}
        self._cards: dict[str, widgets.HTML] = {}
        ladder, extra = (self._grid([self._switch(phase) for phase in group]) for group in (PHASES, EXTRAS))
        self._fields = {path: self._field(path, *texts) for path, texts in CONTROLS.items()}
        actions = {
            "Pause": ("keep everything in memory and wait", lambda: self.run.pause()),
            "Resume": ("go on", lambda: self.run.resume()),
            "Checkpoint now": ("save the state after this step", lambda: self.run.checkpoint()),
            "Stop": ("finish the step, save, evaluate and end", lambda: self.run.stop()),
        }
        self._actions = {name: self._button(name, *action) for name, action in actions.items()}
        self._send = self._button("Apply settings", "ask for the numbers beside at once", self._send_fields)
        self._preset = widgets.Dropdown(options=PRESETS, layout=widgets.Layout(width="150px")).add_class("ups-preset")
        use = self._button("Apply preset", "ask for the preset's settings at once", self._send_preset)
        back = self._button("Back to baseline", "drop every change: the config the run was started with", self._back)
        self._askers = [self._send, use, back]
        self._price = widgets.BoundedFloatText(
            value=0.0, min=0.0, max=1e4, description="$ per hour", style={"description_width": "75px"},
            layout=widgets.Layout(width="170px"),
        )  # fmt: skip
        self._axis = widgets.ToggleButtons(
            options=["step", "time"], tooltips=["over optimizer steps", "over seconds of training"],
            style={"button_width": "70px"}, layout=widgets.Layout(width="auto"),
        )  # fmt: skip
        wide = widgets.Layout(width="130px")
        self._terms = widgets.ToggleButton(description="loss terms", tooltip="every term by itself", layout=wide)
        for chosen in (self._axis, self._terms, self._price):
            chosen.observe(lambda change: self.refresh(), "value")
        more = widgets.ToggleButton(description="more switches", tooltip="beside the published ladder", layout=wide)
        extra.layout.display = "none"  # by a button: an accordion cannot be opened from the keyboard
        more.observe(lambda change: setattr(extra.layout, "display", "grid" if change["new"] else "none"), "value")
        row = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center", width="100%")
        self.box = widgets.VBox(
            [
                widgets.HTML(charts.STYLE + html.STYLE, layout=widgets.Layout(display="none")),
                self._head,
                widgets.HBox([*self._actions.values(), self._preset, use, back, self._price], layout=row),
                self._note,
                ladder,
                more,
                extra,
                self._grid([*self._fields.values(), self._send], 140).add_class("ups-fields"),
                widgets.HBox([self._axis, self._terms], layout=row),
                self._plots,
                self._table,
            ]
        )
        self.box.add_class("ups-panel")

    def _grid(self, children: list, least: int = 225) -> widgets.GridBox:
        columns = f"repeat(auto-fill, minmax({least}px, 1fr))"
        return widgets.GridBox(children, layout=widgets.Layout(grid_template_columns=columns, grid_gap="4px 12px"))

    def _switch(self, phase: Phase) -> widgets.VBox:
        label = " ".join(filter(None, (str(phase.number or ""), phases.label(phase.name))))
        toggle = widgets.ToggleButton(description=label, tooltip=phase.sentence, layout=widgets.Layout(width="auto"))
        toggle.add_class("ups-toggle").add_class(f"ups-{phase.name}")
        toggle.observe(lambda change: self._clicked(phase, change["new"]), "value")
        self._toggles[phase.name], self._cards[phase.name] = toggle, widgets.HTML()
        return widgets.VBox([toggle, self._cards[phase.name]])

    def _field(self, path: str, name: str, tooltip: str):
        kind = widgets.BoundedFloatText if path == "optimizer.lr" else widgets.BoundedIntText
        least = 1 if path.endswith(("batch_size", "accum_steps", "frequency")) else 0
        field = kind(
            min=least, max=10**6, step=1e-4 if path == "optimizer.lr" else 1, description=name,
            style={"description_width": "initial"}, layout=widgets.Layout(width="auto"),
        )  # fmt: skip
        with contextlib.suppress(Exception):  # called description_tooltip before ipywidgets 8
            field.description_tooltip = tooltip
        field.observe(lambda change: self._ours or self._edited.add(path), "value")
        return field

    def _button(self, name: str, tooltip: str, act) -> widgets.Button:
        button = widgets.Button(description=name, tooltip=tooltip, layout=widgets.Layout(width="auto"))
        button.on_click(lambda _: self._try(act))
        return button

    def _widgets(self, top=None):
        top = top or self.box
        for child in getattr(top, "children", ()):
            yield from self._widgets(child)
        yield top

    # -- asking ------------------------------------------------------------------------------------------------------

    def _try(self, act) -> None:
        """Do what a button says; problems become sentences below the buttons."""
        with self._lock:
            try:
                self._said, self._awaited = "", None
                self._problems.clear()
                act()
            except (UpsError, OSError) as error:
                self._said = "not sent: " + "; ".join(map(str, getattr(error, "problems", [error])))
            self.refresh()

    def _clicked(self, phase: Phase, on: bool) -> None:
        with self._lock:
            if self._ours:
                return
            try:
                what = f"{phases.label(phase.name)} {'on' if on else 'off'}"
                self._said, self._awaited = "", (self.asking.flip(phase, on), what)
                self._problems.clear()
            except ConfigError as error:
                self._problems[phase.name] = "not sent: " + "; ".join(map(str, error.problems))
            self._shown_for = None  # the toggle shows what was clicked; now it shows what is
            self.refresh()

    def _send_fields(self) -> None:
        overlay = {path: self._read(path) for path in CONTROLS if path in self._edited}
        if overlay:
            self._await(
                self.run.update(overlay), ", ".join(f"{CONTROLS[path][0]} {plain(overlay[path])}" for path in overlay)
            )

    def _read(self, path: str):
        value = self._fields[path].value
        return None if path.endswith("num_queries") and value == 0 else value

    def _send_preset(self) -> None:
        name = self._preset.value
        if name == AS_STARTED:
            return self._back()
        asked, left_out = self.asking.preset(name)
        self._await(self.run.update(asked), name)
        self._said = "; ".join(f"left out {phases.label(phase)}: {reason}" for phase, reason in left_out.items())

    def _back(self) -> None:
        self._await(self.run.back_to_start(), "the config the run was started with")

    def _await(self, revision: int, what: str) -> None:
        self._awaited = revision, what
        self._edited.clear()

    # -- keeping up --------------------------------------------------------------------------------------------------

    def refresh(self) -> list[dict]:
        """Bring every widget up to date with the folder; returns the run's new events. Safe from any thread."""
        with self._lock:
            # before the events, so that none of a run's last ones is missed
            self.status, self.cause = runfolder.state(self.run.folder, self.run._process)
            events = self.history.read()
            self._ours = True
            try:
                self._draw()
            finally:
                self._ours = False
            for widget in self._widgets():
                # A reply goes to the thread that created the widget, which may be busy for hours, unless this is unset.
                getattr(widget.comm, "__dict__", {}).pop("_reply_subshell_id", None)
            return events

    def _draw(self) -> None:
        name, epochs = self.run.folder.name, self.asking.config.stages.operator.epochs
        self._head.value = html.header(self.history, name, self.status, self.cause, epochs, self._price.value)
        answer = self.history.answer(*self._awaited) if self._awaited else ""
        self._note.value = html.note(answer) + html.note(self._said, calm=False)
        self._plots.value = charts.svg(self.history, self._axis.value, self._terms.value)
        claims = {phase.name: phase.expected.factor for phase in PHASES if phase.expected}
        self._table.value = html.flips(self.history, claims)
        alive, paused = self.status in ("starting", "running"), self.history.paused
        for button, enabled in (("Pause", not paused), ("Resume", paused), ("Checkpoint now", True), ("Stop", True)):
            self._actions[button].disabled = not (alive and enabled)
        for button in self._askers:
            button.disabled = not alive
        applied, desired = self.asking.configs()
        happened = len(self.history.flips), self.history.relaunching
        shown_for = applied, desired, alive, *happened, tuple(self._problems.items())
        if shown_for != self._shown_for:
            self._shown_for = shown_for
            self._draw_switches(applied, desired, alive)
            self._draw_fields(desired, alive)

    def _draw_switches(self, applied: RunConfig, desired: RunConfig, alive: bool) -> None:
        for name, toggle in self._toggles.items():
            phase = BY_NAME[name]
            is_on, wanted = phases.is_on(phase, applied), phases.is_on(phase, desired)
            obstacle = None if wanted else self.asking.obstacle(phase, desired)
            flip = html.last_flip(self.history.flips, name, phase.on)
            state = ("on" if is_on else "off") + (f" since step {flip.step:,}" if flip else ", as started")
            if wanted != is_on:
                asked = "relaunching" if self.history.relaunching and not phase.hot else "requested"
                state = f"{'on' if wanted else 'off'}, {asked}; now {state}"
            problem = self._problems.get(name) or (obstacle.sentence if obstacle else "")
            whole = "; ".join(map(str, obstacle.problems)) if obstacle else ""
            toggle.value, toggle.disabled = wanted, not alive or bool(obstacle and obstacle.final)
            (toggle.add_class if wanted != is_on else toggle.remove_class)("ups-asked")
            self._cards[name].value = html.switch(phase, state, problem, whole)

    def _draw_fields(self, desired: RunConfig, alive: bool) -> None:
        for path, field in self._fields.items():
            field.disabled = not alive
            if path not in self._edited:
                field.value = setting(desired, path) or 0

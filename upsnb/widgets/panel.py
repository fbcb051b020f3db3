"""The live panel: a run's switches, controls and curves as widgets. A view of its folder; it holds no truth itself.

Everything is rebuilt from the folder, so a panel survives page reloads, kernel restarts and a second viewer; a click
only writes control.json. Works with ipywidgets 7.7 and 8, and with callbacks on whatever thread the kernel chooses.
"""

from __future__ import annotations

import asyncio
import threading
import time

import ipywidgets as widgets
import numpy as np
from IPython import get_ipython
from IPython.display import display

from upsnb import phases
from upsnb.config import OPERATOR, RunConfig, setting
from upsnb.errors import ConfigError, UpsError
from upsnb.phases import BY_NAME, EXTRAS, PHASES, Phase
from upsnb.runs import cost, runfolder
from upsnb.runs.handle import MOST_STEPS, NOTHING, WITHIN, Run, is_headless
from upsnb.widgets import charts, html, snapshot
from upsnb.widgets.busy_kernel import greeting, is_old, serve_clicks
from upsnb.widgets.fields import Field
from upsnb.widgets.history import History, plain
from upsnb.widgets.progress import Progress, duration
from upsnb.widgets.requests import AS_STARTED, PanelRequests

INTERVAL_S = 0.5  # between two redraws
CONTROLS = {  # setting: its short name and what is shown when the pointer rests on it
    "training.batch_size": ("batch size", "training pairs per rank and microbatch"),
    "training.accum_steps": ("accumulation", "microbatches per optimizer step"),
    "optimizer.lr": ("learning rate", "AdamW's peak learning rate"),
    "training.inverse_loss_frequency": ("inverse every", "inverse losses every k-th microbatch"),
    "training.query_sampling.num_queries": ("queries", "points compared per sample; 0: the whole grid"),
    "training.num_workers": ("workers", "processes that read ahead"),
    "cost.price_per_hour": ("$ per hour", "what the machine costs"),
}
BOLD_LR = 50.0  # times the running learning rate: so much is more often a slip than a wish


class Panel:
    """The panel of one run: `Panel(run).start()`, and `await panel.watch()` where a cell waits for the run's end."""

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
        self._question = None  # what is to be confirmed, and what is done then
        self._problems: dict[str, str] = {}  # phase: why its last click was not sent
        self._sampled = 0  # validations that there were when the sample was drawn
        self._closing, self._thread, self._handle = threading.Event(), None, None
        self._build()

    # -- showing -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Show the panel here and keep it up to date from a thread until the run has ended; returns at once.

        The kernel stays free, so a page that is reloaded finds the panel again, and other cells can run meanwhile.
        """
        if is_headless():
            return
        self._show()
        if self._thread is None or not self._thread.is_alive():
            self._closing.clear()
            self._thread = threading.Thread(target=self._keep_up, name="panel", daemon=True)
            self._thread.start()

    async def watch(self, seconds: float | None = None) -> str:
        """Keep the panel up to date while this cell waits, and close it when the run has ended; the run's status.

        The kernel goes on answering widgets, reloaded pages included. Headless, it prints a line now and then and
        leaves the still figure. An interrupt ends the watching, and a run that would end with this process.

        Args:
            seconds: stop watching after so long; empty: until the run has ended.
        """
        headless, kernel = is_headless(), getattr(get_ipython(), "kernel", None)
        log = Progress() if headless else None
        if not headless and self._handle is None:
            self._show()
        deadline = None if seconds is None else time.monotonic() + seconds
        with self.run.stopped_by_interrupts(), greeting(None if headless else kernel):
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
                    if not headless and is_old(kernel):
                        serve_clicks(kernel)
                        time.sleep(0.05)  # its loop must not run: it would queue the clicks behind this cell
                    else:
                        await asyncio.sleep(0.05)

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
            # A page that was reloaded cannot be given the figure, and goes on showing the widgets of an ended run.
            for widget in self._widgets() if self.status in runfolder.ALIVE else ():
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
            if not self.is_fresh() or self.status not in runfolder.ALIVE:
                return

    def is_fresh(self) -> bool:
        """Refresh; what goes wrong is shown where a person looks, since a thread's own traceback is seen by nobody."""
        try:
            self.refresh()
        except Exception as error:
            self._note.value = html.note(f"the panel stopped: {type(error).__name__}: {error}", calm=False)
            return False
        return True

    # -- widgets -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        full = widgets.Layout(width="100%", margin="0")
        self._head, self._note, self._plots, self._table, self._sample = (widgets.HTML(layout=full) for _ in range(5))
        self._toggles: dict[str, widgets.ToggleButton] = {}
        self._cards: dict[str, widgets.HTML] = {}
        ladder, extra = (self._grid([self._switch(phase) for phase in group]) for group in (PHASES, EXTRAS))
        self._fields = {path: self._field(path, *texts) for path, texts in CONTROLS.items()}
        actions = {
            "Pause": ("keep everything in memory and wait", self.run.pause),
            "Resume": ("go on", self.run.resume),
            "Checkpoint now": ("save the state after this step", self.run.checkpoint),
            "Back to best": ("bring back the weights with the lowest validation error so far", self._back_to_best),
            "Stop": ("finish the step, save, evaluate and end", self._stop),
        }
        self._actions = {name: self._button(name, *action) for name, action in actions.items()}
        send = self._button("Apply settings", "ask for the numbers beside, if all of them are right", self._send_fields)
        self._preset = self._choice("preset", self.asking.presets(), "45px", "200px").add_class("ups-preset")
        use = self._button("Apply preset", "ask for the preset's settings at once", self._send_preset)
        back = self._button("Back to baseline", "drop every change: the config the run was started with", self._back)
        self._askers = [send, use, back]
        self._yes = self._button("Yes", "do it", None)
        self._yes.on_click(lambda _: self._question and self._try(self._question[1]))
        self._confirm = widgets.HBox([self._yes, self._button("No", "leave everything as it is", lambda: None)])
        self._notice = widgets.HBox([self._note, self._confirm]).add_class("ups-notice")
        self._notes = {
            name: widgets.Text(description=name, placeholder=hint, continuous_update=False, layout=layout)
            for name, hint, layout in (
                ("tags", "with commas between", widgets.Layout(width="280px")),
                ("note", "what this run is for", widgets.Layout(flex="1 1 280px")),
            )
        }
        for text in self._notes.values():
            text.style.description_width = "40px"
            text.observe(lambda change: self._annotate(), "value")
        axes = [("optimizer steps", "step"), ("seconds of training", "time")]
        self._axis = self._choice("curves over", axes, "80px")
        wide = widgets.Layout(width="130px")
        self._terms = widgets.ToggleButton(description="loss terms", tooltip="every term by itself", layout=wide)
        for chosen in (self._axis, self._terms):
            chosen.observe(lambda change: self.refresh(), "value")
        chosen = [phase.name for phase in BY_NAME.values() if phase.hot and not all(map(phases.is_idle, phase.on))]
        what = [("two equal arms", NOTHING), *((phases.label(name), name) for name in chosen)]
        self._measured = self._choice("effect of", what, "60px")
        self._measured.value = chosen[0]
        tooltip = "steps with and without it take turns, and the run goes on as it was"
        self._measure_button = self._button("Measure", tooltip, self._measure)
        self._askers.append(self._measure_button)
        more = widgets.ToggleButton(description="more switches", tooltip="beside the published ladder", layout=wide)
        extra.layout.display = "none"  # by a button: an accordion cannot be opened from the keyboard
        more.observe(lambda change: setattr(extra.layout, "display", "grid" if change["new"] else "none"), "value")
        row = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center", width="100%")
        self.box = widgets.VBox(
            [
                widgets.HTML(charts.STYLE + html.STYLE, layout=widgets.Layout(display="none")),
                self._head,
                widgets.HBox([*self._actions.values(), self._preset, use, back], layout=row),
                self._notice,
                ladder,
                widgets.HBox([more, self._measured, self._measure_button]),
                extra,
                self._grid([*(field.box for field in self._fields.values()), send], 124).add_class("ups-fields"),
                widgets.HBox([*self._notes.values()], layout=row),
                widgets.HBox([self._axis, self._terms], layout=row),
                self._plots,
                self._sample,
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

    def _choice(self, name: str, options: list, name_width: str, width: str = "max-content") -> widgets.Dropdown:
        """A menu; not ToggleButtons, because their label pushes them below their neighbours."""
        style, layout = {"description_width": name_width}, widgets.Layout(width=width)
        return widgets.Dropdown(options=options, description=name, style=style, layout=layout)

    def _field(self, path: str, name: str, tooltip: str) -> Field:
        return Field(name, tooltip, lambda text: self.asking.value(path, text))

    def _button(self, name: str, tooltip: str, act) -> widgets.Button:
        button = widgets.Button(description=name, tooltip=tooltip, layout=widgets.Layout(width="auto"))
        if act is not None:
            button.on_click(lambda _: self._try(act))
        return button

    def _widgets(self, top=None):
        top = top or self.box
        for child in getattr(top, "children", ()):
            yield from self._widgets(child)
        yield top

    # -- asking ------------------------------------------------------------------------------------------------------

    def _try(self, act) -> None:
        """Do what a button says; problems become sentences below the buttons, and what was asked before is dropped."""
        with self._lock:
            try:
                self._said, self._awaited, self._question = "", None, None
                self._problems.clear()
                act()
            except (UpsError, OSError) as error:
                self._said = "not sent: " + "; ".join(map(str, getattr(error, "problems", [error])))
            self._shown_for = None  # a toggle shows what was clicked; now it shows what is
            self.refresh()

    def _clicked(self, phase: Phase, on: bool) -> None:
        def flip():
            try:
                self._request(f"{phases.label(phase.name)} {'on' if on else 'off'}", self.asking.flip(phase, on))
            except ConfigError as error:
                self._problems[phase.name] = "not sent: " + "; ".join(map(str, error.problems))

        with self._lock:
            if not self._ours:
                self._try(flip)

    def _annotate(self) -> None:
        with self._lock:
            if not self._ours:
                words = [word.strip() for word in self._notes["tags"].value.split(",")]
                self.run.annotate(self._notes["note"].value.strip(), list(filter(None, words)))

    def _request(self, what: str, overlay: dict | None, said: str = "") -> None:
        """Ask for settings, or with None for those of the start; first ask the person if that takes a relaunch."""

        def send():
            self._said = said
            self._awaited = self.run.back_to_start() if overlay is None else self.run.update(overlay), what

        if self.asking.is_cold(overlay):
            return self._ask(f"{what}: all processes save, end and start again. Do it?", send)
        send()

    def _ask(self, question: str, act) -> None:
        """Do nothing yet: the notice line asks, with two buttons."""
        self._question = question, act

    def _stop(self) -> None:
        self._ask("Stop: the run finishes its step, saves, evaluates and ends. Do it?", self.run.stop)

    def _measure(self) -> None:
        name, history = self._measured.value, self.history
        if name != NOTHING:  # what cannot be is refused before anybody is asked
            self.asking.flip(BY_NAME[name], not phases.is_on(BY_NAME[name], self.asking.configs()[0]))
        what = f"{self._measured.label}, in turns"

        def send():
            self._awaited = self.run.measure(name), what

        times = history.steps["time_s"][-40:]
        took = f", about {duration(MOST_STEPS * float(np.diff(times).mean()))}" if len(times) > 1 else ""
        said = f"steps with and without it in turns, until the ratio is known to {WITHIN:.0%}, at most {MOST_STEPS:,}"
        self._ask(f"Measure {self._measured.label}: {said}{took}. Do it?", send)

    def _back_to_best(self) -> None:
        def send():
            self._awaited = self.run.back_to_best(), "back to best"

        self._ask(f"Back to the weights of step {self.history.best_step}: what was learned since is lost. Do it?", send)

    def _send_fields(self) -> None:
        edited = {path: field for path, field in self._fields.items() if field.is_edited}
        wanted = {path: field.read() for path, field in edited.items()}  # all are right, or nothing is sent
        if not wanted:
            return

        def send():
            overlay = {self._path(path): value for path, value in wanted.items()}
            self._request(", ".join(f"{CONTROLS[path][0]} {plain(wanted[path])}" for path in wanted), overlay)
            for field in edited.values():
                field.accept()

        rate, running = wanted.get("optimizer.lr", 0.0), setting(self.asking.configs()[0], self._path("optimizer.lr"))
        if rate >= BOLD_LR * running:
            much = f"{rate / running:,.0f} times the running {running:g}"
            return self._ask(f"learning rate {rate:g}: {much}. Do it?", send)
        send()

    def _path(self, path: str) -> str:
        """Where a setting stands: in the section of the stage that trains now, if that has an optimizer of its own."""
        stage = (self.history.start or {}).get("stage") or OPERATOR
        has_own = stage in self.asking.config.stages.planned and getattr(self.asking.config.stages, stage).optimizer
        return f"stages.{stage}.{path}" if has_own and path.startswith("optimizer.") else path

    def _send_preset(self) -> None:
        name = self._preset.value
        if name == AS_STARTED:
            return self._back()
        asked, left_out = self.asking.preset(name)
        left_out = "; ".join(f"left out {phases.label(phase)}: {reason}" for phase, reason in left_out.items())
        self._request(name, asked, left_out)

    def _back(self) -> None:
        self._request("the config the run was started with", None)

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
        name, stages = self.run.folder.name, self.asking.config.stages
        since = [b["time"] for b in runfolder.read_heartbeats(self.run.folder).values() if b["state"] == "compiling"]
        compiling_s = time.time() - min(since) if since and self.status == "running" else None
        applied, desired = self.asking.configs()
        price, alive = desired.cost.price_per_hour, self.status in runfolder.ALIVE
        held_s = cost.held_s(self.run.manifest, None if alive else self.history.last)
        self._head.value = html.header(self.history, name, self.status, self.cause, stages, price, held_s, compiling_s)
        question = self._question[0] if self._question else ""
        answer = self.history.answer(*self._awaited) if self._awaited else ""
        if compiling_s is not None:
            answer = answer.replace(": requested", f": compiling, {duration(compiling_s)}")
        said = self._said or html.warning(self.history)
        self._note.value = html.note(question, calm=False) or html.note(answer) + html.note(said, calm=False)
        self._confirm.layout.visibility = "visible" if question else "hidden"
        notes = self.run.notes
        self._notes["tags"].value, self._notes["note"].value = ", ".join(notes["tags"]), notes["note"]
        self._plots.value = charts.svg(self.history, self._axis.value, self._terms.value)
        if len(self.history.evaluations) > self._sampled:
            self._sampled, self._sample.value = len(self.history.evaluations), html.sample(self.run.folder)
        claims = {phase.name: phase.expected.factor for phase in PHASES if phase.expected}
        self._table.value = html.flips(self.history, claims)
        alive, paused = self.status in ("starting", "running"), self.history.paused
        ready = {"Pause": not paused, "Resume": paused, "Back to best": self.history.best_step is not None}
        for action, button in self._actions.items():
            button.disabled = not (alive and ready.get(action, True))
        for button in self._askers:
            button.disabled = not alive
        happened = len(self.history.flips), self.history.relaunching
        stage = (self.history.start or {}).get("stage")
        shown_for = applied, desired, alive, stage, *happened, tuple(self._problems.items())
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
            verdict = self.asking.verdict(phase)
            parts = verdict.why if verdict.kind == phases.ON_PARTS else ""
            self._cards[name].value = html.switch(phase, state, problem, whole, parts)

    def _draw_fields(self, desired: RunConfig, alive: bool) -> None:
        for path, field in self._fields.items():
            field.text.disabled = not alive
            field.show(plain(setting(desired, self._path(path)) or 0))

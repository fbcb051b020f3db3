"""Runs as notebooks see them: started, what one is doing, what it said, and what is asked of it."""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import LoggingConfig, RunConfig
from upsnb.errors import ConfigError, RunError, RunFailed, RunTimeout
from upsnb.rules import did_you_mean
from upsnb.runs import checkpoint_index, mirror, runfolder
from upsnb.runs.files import locked, write_json

# Set by what people sit in front of; VS Code gives the last two to its notebooks' kernels, not to its terminals.
INTERACTIVE = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "VSCODE_PID", "VSCODE_CWD")
POLL_S = 0.1
WITHIN, MOST_STEPS = 0.05, 1000  # of a measurement, where nothing else is asked for
NOTHING = "nothing"  # what `Run.measure` is asked for where two equal arms are to tell the noise
NETWORK = ("model", "latent", "operator")  # sections that choose what is trained
INTERRUPTS = ("KeyboardInterrupt", "CancelledError")  # what Ctrl-C raises; the second in a cell that awaits
SECONDS_TO_OBEY = 900.0  # until a request or a launch is acknowledged: a step that compiles may take that long
_supervisors: list[subprocess.Popen] = []  # a pipe closes with its object, and a rebound variable must not end training


def is_headless() -> bool:
    """Whether nobody sits in front of this process: papermill, nbval, a script."""
    return not any(name in os.environ for name in INTERACTIVE)


def be_headless() -> None:
    """From now on nobody sits in front of this process, nor of what it starts, though a notebook's cell called it."""
    for name in INTERACTIVE:
        os.environ.pop(name, None)


def find(name: Path | str) -> Path:
    """The folder of a run: by its path from here or from the project's folder, or by its name in outputs/.

    Raises:
        RunError: there is none; with the nearest name.
    """
    project = runfolder.project_root()
    outputs = project / LoggingConfig().root
    places = [place / name for place in (Path.cwd(), project, outputs)] if str(name).strip() else []
    folders = [place for place in places if os.path.isdir(place)]  # of no text at all does it raise an error
    if folders:
        return next((folder for folder in folders if (folder / runfolder.MANIFEST).exists()), folders[0])
    known = [folder.relative_to(outputs).as_posix() for folder in runfolder.runs_below(outputs)]
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else "python -m upsnb list shows the runs that are there"
    raise RunError(f"{str(name)!r}: no such folder, nor a run in {outputs} -> {hint}")


class Run:
    """A run by its folder: what it is doing, what it said, and requests to it."""

    def __init__(self, folder: Path | str, process: subprocess.Popen | None = None):
        self.folder = Path(folder).absolute()
        self._loaded: tuple | None = None  # which checkpoint, and its model
        self._process = process  # the supervisor, if this process started it; holds an attached run's pipe
        self._goes_on = process is None or process.stdin is None  # without whoever waits for it

    @classmethod
    def attach(cls, folder: Path | str) -> Run:
        """The run of a folder, from any process and at any time; arguments and errors as of `find`."""
        run = cls(find(folder))
        runfolder.read_manifest(run.folder)
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status()})"

    @property
    def config(self) -> RunConfig:
        """The resolved config the run was started with."""
        return configs.load(self.folder / runfolder.CONFIG)

    @property
    def current_config(self) -> RunConfig:
        """The config it runs with now: the one it was started with, and all changes that were applied since."""
        return overlays.apply(self.config, self.manifest["applied"]["overlay"])

    @property
    def manifest(self) -> dict:
        """What was run, where, and how it went; read anew each time."""
        return runfolder.read_manifest(self.folder)

    @property
    def notes(self) -> dict:
        """What people wrote about it: a `note` and `tags`."""
        return runfolder.read_notes(self.folder)

    def annotate(self, note: str | None = None, tags: Sequence[str] | None = None) -> None:
        """Write a note or tags on the run; None leaves what there is."""
        written = {"note": note, "tags": None if tags is None else list(tags)}
        with locked(self.folder):
            notes = self.notes | {name: value for name, value in written.items() if value is not None}
            write_json(self.folder / runfolder.NOTES, {"format": runfolder.FORMAT, **notes})

    def status(self) -> str:
        """One of starting, running, stopping, finished, failed, died."""
        return runfolder.state(self.folder, self._process)[0]

    def cause(self) -> str | None:
        """Why the run failed or died, in one sentence; None otherwise."""
        return runfolder.state(self.folder, self._process)[1]

    def events(self, kinds=None) -> list[dict]:
        """All events so far, or those of some kinds."""
        return runfolder.read_events(self.folder, kinds)

    # -- requests ------------------------------------------------------------------------------------------------

    def update(self, overlay: dict) -> int:
        """Ask for settings to change at the next step boundary, on top of those that were changed before.

        Settings that cannot change between two steps (`phases.COLD`) make all ranks save and end; the run is launched
        again with them, and goes on where it was.

        Args:
            overlay: in any written form; `{}` changes nothing. `back_to_start` drops all changes.
        Returns:
            A revision. The `flip` event that says whether it was applied names it, or a later one asked for meanwhile.
        Raises:
            ConfigError: a setting that does not exist, or a contradiction; nothing was asked.
        """
        flat, base = overlays.flatten(overlay), self.config

        def merged(standing: dict) -> dict:
            overlays.apply(base, whole := overlays.stack(standing, flat), "the update")
            return whole

        return runfolder.write_control(self.folder, merged).revision

    def flip(self, phase: str, on: bool) -> int:
        """Ask for a phase or an extra to be switched on, or back to what the run was started with, without it.

        Returns:
            A revision, as `update` does.
        """
        from upsnb import phases  # loads torch, which readers of a run do not need

        if phase not in phases.BY_NAME:
            raise ConfigError([f"{phase}: unknown phase -> {did_you_mean(phase, phases.BY_NAME)}"], "the flip")
        chosen = phases.BY_NAME[phase]
        return self.update(chosen.on if on else phases.off_overlay(chosen, self.config))

    def measure(self, what: str | dict, within: float = WITHIN, steps: int = MOST_STEPS) -> int:
        """Ask what a phase, or other settings, do to the throughput, while the run goes on.

        Turns without and with it alternate, A B B A, and then the run has the settings that it had. A `measuring` event
        names the revision returned here and says whether it began; then a `flip_effect` with `method: interleaved`.

        Args:
            what: a phase or an extra, which is switched the other way; settings in any written form; or "nothing",
                which measures two equal arms: how far apart those come out is the noise floor.
            within: turns end once the 95 % interval reaches at most so far from the ratio, as a share of it.
            steps: and at the latest after so many.
        Raises:
            ConfigError: it does not exist, contradicts other settings or takes a relaunch; nothing was asked.
        """
        from upsnb import phases  # loads torch, which readers of a run do not need

        current, where = self.current_config, f"the measurement of {what}"
        if isinstance(what, dict):
            overlay = overlays.flatten(what)
        elif what == NOTHING:
            overlay = {}
        elif what in phases.BY_NAME:
            phase = phases.BY_NAME[what]
            overlay = phases.off_overlay(phase, self.config) if phases.is_on(phase, current) else phase.on
        else:
            hint = did_you_mean(what, (*phases.BY_NAME, NOTHING))
            raise ConfigError([f"{what}: unknown phase -> {hint}"], where)
        problems = phases.no_turns(current, overlays.apply(current, overlay, where))
        if not (within > 0 and steps > 0):
            problems.append(f"within {within}, steps {steps} -> both must be above 0")
        if problems:
            raise ConfigError(problems, where)
        asked = {"overlay": overlay, "within": float(within), "steps": int(steps)}
        return runfolder.write_control(self.folder, None, runfolder.MEASURE, measure=asked).revision

    def back_to_start(self) -> int:
        """Ask for the config that the run was started with."""
        return runfolder.write_control(self.folder, {}).revision

    def checkpoint(self) -> int:
        """Ask for a checkpoint at the next step boundary; its `checkpoint` event names the revision returned here."""
        return runfolder.write_control(self.folder, None, runfolder.CHECKPOINT).revision

    def back_to_best(self) -> int:
        """Ask for the best checkpoint's weights; the `restored` event that names the revision says what came of it.

        The optimizer's state comes with them. Settings, clock and place in the data stay as they are.
        """
        return runfolder.write_control(self.folder, None, runfolder.RESTORE).revision

    def profile(self) -> int:
        """Ask all ranks to profile their next steps; the `profile` event names the revision returned here.

        It leaves `profile.rank<k>.json` and a trace of each rank; `profiling.report` makes sentences of them.
        """
        return runfolder.write_control(self.folder, None, runfolder.PROFILE).revision

    def pause(self) -> int:
        """Ask all ranks to wait at the next step boundary; the `paused` event names the revision returned here.

        Time limits stand still, flips and `stop` are obeyed. A run that is launched again waits as well: after a cold
        flip, and after a crash.
        """
        return runfolder.write_control(self.folder, None, runfolder.PAUSE).revision

    def resume(self) -> int:
        """Ask a paused run to go on; the `resumed` event names the revision returned here."""
        return runfolder.write_control(self.folder, None, runfolder.RESUME).revision

    def stop(self) -> None:
        """Ask the run to finish its step, save and end; returns at once."""
        runfolder.write_control(self.folder, None, runfolder.STOP)

    # -- waiting and results -------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, on_event: Callable[[dict], None] | None = None) -> str:
        """Return when the run has finished.

        Args:
            timeout: give up waiting after so many seconds; the run goes on.
            on_event: called with every event of rank 0, those before the call included.
        Raises:
            RunFailed: the run ended in any other way; carries the cause and the end of the log.
            RunTimeout: it still runs; a TimeoutError.
        """
        with self.stopped_by_interrupts():
            for event in self._follow(None if on_event else ("end",), timeout, "end"):
                if on_event:
                    on_event(event)
        status, cause = runfolder.state(self.folder, self._process)
        if status != "finished":
            raise RunFailed(self.folder, status, cause or "unknown", self.log_tail())
        return status

    def wait_for(self, kind: str, revision: int = 0, step: int = 0, timeout_s: float = SECONDS_TO_OBEY) -> dict:
        """The first event of a kind, as soon as it is there, those before the call included.

        Args:
            revision: of a request; the first event that answers it, or a later one, counts.
            step: the first event of this step or a later one counts.
            timeout_s: give up waiting after so many seconds; the run goes on.
        Raises:
            RunError: the run ended before; says how and why.
            RunTimeout: it still runs.
        """
        with self.stopped_by_interrupts():
            for event in self._follow((kind,), timeout_s, kind):
                if (event.get("revision", revision) or 0) >= revision and (event["step"] or 0) >= step:
                    return event
        status, cause = runfolder.state(self.folder, self._process)
        raise RunError(f"{self.folder}: {status} before its {kind} event" + (f": {cause}" if cause else ""))

    @contextlib.contextmanager
    def stopped_by_interrupts(self) -> Iterator[None]:
        """Within it, Ctrl-C asks a run to stop that would end with this process; any other run goes on, and says so."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ in INTERRUPTS and self.status() in runfolder.ALIVE:
                if self._goes_on:
                    print(f"{self.folder.name}: goes on without this cell -> {_found_again(self.folder)}", flush=True)
                else:
                    self.stop()
                    print(f"{self.folder.name}: saves its state and ends, because its user stopped it", flush=True)
            raise

    @contextlib.contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """Within it, whatever is raised stops the run: to whoever started it, it is of no use any more."""
        goes_on, self._goes_on = self._goes_on, False
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # its folder may be what is gone
                self.stop()
            raise
        self._goes_on = goes_on

    def _follow(self, kinds: Sequence[str] | None, timeout_s: float | None, awaited: str) -> Iterator[dict]:
        """Events, each once, until the run has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        tail = runfolder.Tail(self.folder, kinds)
        while True:
            status = self.status()  # before the events, so that none of a run's last ones is missed
            yield from tail.read()
            if status not in runfolder.ALIVE:
                return
            if deadline is not None and time.monotonic() > deadline:
                said = f"still {status} after {timeout_s:g} s, without its {awaited} event"
                raise RunTimeout(f"{self.folder}: {said}\n{self.log_tail(10)}")
            time.sleep(POLL_S)

    def load_model(self, which: str = "latest", device: str = "cpu", stage: str | None = None):
        """The trained model, in evaluation mode, with averaged weights where the run kept them.

        Args:
            which: checkpoint, by its role: latest, previous, best or epoch.
            stage: one that has ended; None: of a run of several the last one whose gate said pass.
        Raises:
            RunError: there is no such checkpoint or stage, or none that is whole; or this machine has no such device.
        """
        from upsnb.training import trained  # loads torch, which readers of a run do not need

        return trained.load_model(self.folder, which, device, stage)

    def predict(
        self,
        fields,
        dataset=None,
        parameters=None,
        num_frames=None,
        which="latest",
        device="cpu",
        stage=None,
        members=None,
        seed=0,
        points=None,
    ):
        """What the trained model says of fields in physical units; `models.inference.predict` describes everything.

        The model is loaded at the first call, and again when another checkpoint has come to be the one asked for.

        Args:
            which, device, stage: as of `load_model`.
        """
        from upsnb.models import inference  # loads torch, which readers of a run do not need

        answers = stage or self.manifest.get("answers")
        now = which, checkpoint_index.read_index(self.folder).get(which), str(device), answers
        if self._loaded is None or self._loaded[0] != now:
            self._loaded = now, self.load_model(which, device, stage)
        return inference.predict(self._loaded[1], fields, dataset, parameters, num_frames, members, seed, points)

    def log_tail(self, num_lines: int = 30) -> str:
        """Last lines of the workers' output."""
        return runfolder.log_tail(self.folder, num_lines)


def start(
    config: RunConfig,
    folder: Path | str | None = None,
    attached: bool | None = None,
    worker: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Start a run in processes of its own and return at once.

    With `training.on_missing: skip`, phases that cannot run here are left out, printed, and named in the manifest.
    Other runs that train on this machine are printed too: both are slower then, and may not fit beside each other.

    Args:
        folder: where the run lives; empty: a new folder below `logging.root`.
        attached: the run ends when this process does; empty: only outside interactive notebooks.
        worker: script that every rank runs instead of `upsnb.worker`.
        environment: variables over this process's own, such as which GPUs the run may see.
    Raises:
        ConfigError: this machine cannot run the config, or its model fails; nothing was started or written.
        RunError: the folder, or its mirror, holds a run that is alive or one that the config does not continue.
    """
    from upsnb import hardware, phases  # they load torch, which readers of a run do not need
    from upsnb.training import preflight

    machine, skipped = hardware.detect(), {}
    if config.training.on_missing == "skip":
        config, skipped = phases.skip_missing(config, machine)
    hardware.check_runnable(config, machine)
    for said in preflight.check(config):
        print(f"warning: {said}", flush=True)
    is_reference = all(getattr(config, name) == getattr(RunConfig(), name) for name in NETWORK)
    if is_reference and hardware.resolve_device(config, machine) == "cpu":
        said = "nothing chose a model, so it is the reference model, which takes a CPU hours"
        print(f"{said} -> put params/quick.yaml below your settings for a small one", flush=True)
    if said := mirror.prepare(config, folder and Path(folder).absolute()):
        print(said, flush=True)
    folder = runfolder.create(config, folder, skipped)
    for other in _training_beside(folder, runfolder.project_root() / config.logging.root):
        print(f"{other.name}: still trains on this machine -> {_found_again(other)}", flush=True)
    for phase, reason in skipped.items():
        print(f"skipped {phase}: {reason}", flush=True)
    if config.training.num_nodes > 1:
        print(f"waits for {config.training.num_nodes - 1} more: python -m upsnb join {folder}", flush=True)
    return Run(folder, _supervised(folder, is_headless() if attached is None else attached, worker, environment))


def _supervised(
    folder: Path, attached: bool, worker: Path | str | None, environment: Mapping[str, str] | None
) -> subprocess.Popen:
    """The supervisor of a new run, which starts its ranks."""
    command = [sys.executable, "-m", "upsnb.runs.supervisor", str(folder)]
    command += ["--attached"] if attached else []
    command += ["--worker", str(Path(worker).absolute())] if worker else []
    package_home = str(Path(__file__).resolve().parents[2])
    with open(folder / runfolder.LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=runfolder.project_root(),  # data and outputs are relative to it, wherever the notebook stands
            stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_home))),
            },
            start_new_session=True,  # an interrupt of the kernel is no interrupt of the run
        )
    for ended in [other for other in _supervisors if other.poll() is not None]:
        _supervisors.remove(ended)
        if ended.stdin is not None:
            ended.stdin.close()
    _supervisors.append(process)
    return process


def start_or_attach(config: RunConfig, folder: Path | str | None = None) -> Run:
    """As `start`; but a run that lives in the folder already is attached to, and printed."""
    if folder is None or not (Path(folder) / runfolder.MANIFEST).exists():
        return start(config, folder)
    run = Run.attach(folder)
    if run.status() not in runfolder.ALIVE:
        return start(config, folder)
    from upsnb.models.chosen import with_source  # loads torch, which readers of a run do not need

    ours = ("logging.", "checkpoint.resume")  # of no training
    different = [path for path in overlays.difference(run.config, with_source(config)) if not path.startswith(ours)]
    said = f", with other settings ({', '.join(different)}), which stay as they are" if different else ""
    print(f"{run.folder.name}: is {run.status()} already and attached to{said}", flush=True)
    return run


def _found_again(folder: Path) -> str:
    """What to do about a run that goes on."""
    root = runfolder.project_root()
    name = folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)
    return f"python -m upsnb stop {name} ends it, handle.Run.attach({name!r}) gets it back"


def _training_beside(folder: Path, root: Path) -> Iterator[Path]:
    """Folders of runs below `root` that live on this machine, but for those of the study that `folder` is in."""
    study = root.joinpath(*folder.relative_to(root).parts[:1]) if folder.is_relative_to(root) else folder
    for other in runfolder.runs_below(root):
        with contextlib.suppress(RunError, OSError):  # it cannot be read, or is being deleted
            here = runfolder.read_manifest(other)["host"] == socket.gethostname()
            if here and not other.is_relative_to(study) and runfolder.state(other)[0] in runfolder.ALIVE:
                yield other

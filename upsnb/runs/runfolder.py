"""The run folder: the only wire between notebook, supervisor, workers and reports. Every file in it is plain text."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.overlays import project_root as project_root
from upsnb.runs import cost
from upsnb.runs.events import EventWriter as EventWriter  # so that this module is all a worker needs
from upsnb.runs.events import Heartbeat as Heartbeat
from upsnb.runs.events import Tail as Tail
from upsnb.runs.events import last_step, newest_events
from upsnb.runs.events import read_events as read_events
from upsnb.runs.events import read_heartbeats as read_heartbeats
from upsnb.runs.files import Shape, fill_reserve, locked, numbered, read_json
from upsnb.runs.files import write_json as write_json
from upsnb.runs.processes import is_alive

FORMAT = 1  # version of manifest.json and control.json
CONFIG, MANIFEST, CONTROL, LOG = "config.yaml", "manifest.json", "control.json", "worker.log"
CHECKPOINTS, FIGURES = "checkpoints", "figures"
FIGURES_BEFORE = ".figures.before"  # those of the segment before the last one
STAGES = "stages"  # what each stage of several has ended with: weights, and what they were worth on validation
GLANCE = "glance.npz"  # what the model makes of one validation sample of each dataset, as of the last validation
NOTES = "notes.json"  # what people wrote about the run
REVISION = ".revision"  # in a project that was sent to another machine: the commit of its code
REPORT, EVALUATION, EXAMPLES = "report.json", "evaluation.json", "examples.npz"  # also of comparisons and plans: report
COMPILE_CACHE = ".cache/torchinductor"  # beside the run folders: compiled kernels, shared by all runs
ALIVE = ("starting", "running", "stopping")
CUT_SHORT = ("stopped", "budget")  # ends of a run that did not train as long as its settings say
STOP = "stop"  # the control command that ends a run after its current step, with a checkpoint
CHECKPOINT, PROFILE, RESTORE, PAUSE, RESUME = "checkpoint", "profile", "restore", "pause", "resume"
MEASURE = "measure"  # comes with an entry of its own that says what
COMMANDS = (STOP, CHECKPOINT, PROFILE, RESTORE, PAUSE, RESUME, MEASURE)
SETTINGS = "settings"  # entry of `Control.asked` beside the commands: the revision that last asked for settings
NEWEST_BYTES = 1 << 14  # of events, in which the last one is
MOST_CONTROL_BYTES = 1 << 16  # a request for every setting there is takes a quarter of it
STARTUP_ALLOWANCE_S = 1800.0  # until a rank's first step is done: compiling it may take that long
SUPERVISOR_GRACE_S = 60.0  # how long a new run may go without its supervisor's name in the manifest


# -- manifest -----------------------------------------------------------------------------------------------------

Revision = Annotated[int, Field(ge=1, le=2**52)]  # ranks tell each other in float64


class _Applied(Shape):
    revision: Annotated[int, Field(ge=0)]
    overlay: dict[str, Any]


class _Segment(Shape):
    started: float = 0.0
    ended: float = 0.0
    overlay: dict[str, Any] = {}
    revision: int = 0
    cold_flip: dict[str, Any] | None = None


class _Manifest(Shape):
    status: Literal["starting", "running", "stopping", "finished", "failed", "died"]
    cause: str | None
    created: float
    host: str
    segments: list[_Segment]
    applied: _Applied
    supervisor: Annotated[str, Field(pattern=r"^\d+:")] | None


def read_manifest(folder: Path) -> dict:
    """The manifest as plain data.

    Raises:
        RunError: there is none, or it is damaged.
    """
    try:
        return read_json(Path(folder) / MANIFEST, FORMAT, _Manifest)
    except FileNotFoundError:
        raise RunError(f"{folder}: has no {MANIFEST} -> not a run folder") from None


@dataclass(frozen=True)
class Launch:
    """What one launch of the workers starts from; the supervisor writes it into the manifest's segment."""

    number: int = 0
    overlay: dict = field(default_factory=dict)  # on top of config.yaml, dotted keys
    revision: int = 0  # of control.json, the one that the overlay answers
    cold_flip: dict | None = None  # the `relaunch` event of a flip that this launch is to carry out


def read_launch(folder: Path, number: int) -> Launch:
    """The launch of a segment; workers that were started without a supervisor take config.yaml as it is."""
    segments = read_manifest(folder)["segments"]
    entry = segments[number] if number < len(segments) else {}
    return Launch(number, entry.get("overlay", {}), entry.get("revision", 0), entry.get("cold_flip"))


def update_segment(folder: Path, number: int, **changes) -> None:
    """Change one segment's entry in the manifest, where it has one; safe beside other writers."""
    folder = Path(folder)
    with locked(folder):
        manifest = read_manifest(folder)
        if number < len(manifest["segments"]):
            manifest["segments"][number] |= changes
            write_json(folder / MANIFEST, manifest)


def update_manifest(folder: Path, last_words: bool = False, **changes) -> dict:
    """Change top-level entries of the manifest; safe beside other writers."""
    folder = Path(folder)
    with locked(folder):
        manifest = {**read_manifest(folder), **changes}
        write_json(folder / MANIFEST, manifest, last_words)
    return manifest


# -- creation ------------------------------------------------------------------------------------------------------


def code_revision() -> str:
    """The git commit of this code, `-dirty` where files differ from it, evidence in `outputs/` aside.

    It is "unknown" outside a repository. Code that was sent to another machine says in a file which one it is.
    """
    with contextlib.suppress(OSError):
        return (project_root() / REVISION).read_text().strip()
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A package installed inside a foreign repository is not its code.
        git("ls-files", "--error-unmatch", "errors.py")
        differs = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)outputs")
        return git("rev-parse", "HEAD") + "-dirty" * bool(differs)
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def create(config: RunConfig, folder: Path | str | None = None, skipped: dict[str, str] | None = None) -> Path:
    """Make the folder of a new run, or make an ended run's folder ready to be continued (`checkpoint.resume`).

    Args:
        skipped: phases that were asked for and left out of `config`, and why.
    """
    from upsnb import hardware  # here, because it loads torch and readers of a run need none
    from upsnb.models import chosen

    config = chosen.with_source(config)
    folder = new_folder(config.logging.name, config.logging.root) if folder is None else Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    segments: list[dict] = []
    check_free(folder, config)
    if (folder / MANIFEST).exists():
        segments = _release(folder)
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    fill_reserve(folder)
    configs.save(config, folder / CONFIG)
    manifest = {
        "format": FORMAT,
        "status": "starting",
        "stage": config.stages.planned[0],  # the one that is trained
        "cause": None,  # one sentence, once the run has failed
        "end_reason": None,  # of a finished run, from its end event
        "created": time.time(),
        "code_revision": code_revision(),
        "versions": hardware.versions(),
        "hardware": hardware.detect().as_dict(),
        "host": socket.gethostname(),
        "seeds": {
            "training": config.training.seed,
            "data": {name: dataset.generate.seed for name, dataset in config.data.datasets.items()},
        },
        "segments": segments,  # one per launch of the workers
        "phases_skipped": skipped or {},  # phase: why
        # what the run does now: the last revision of control.json that was answered, and the difference from
        # config.yaml that is in force since; a refused revision is answered and leaves the overlay as it was
        "applied": {"revision": read_control(folder).revision, "overlay": {}},
        "supervisor": None,  # process that watches over the run
    }
    write_json(folder / MANIFEST, manifest)
    return folder


def asked(folder: str, name: str = "") -> Path | None:
    """The folder that a notebook is given, from the project's if it is relative; else a new one of a name, or None."""
    return project_root() / folder if folder else new_folder(name) if name else None


def new_folder(name: str, root: str = "outputs") -> Path:
    """A folder of its own for a run or a report, named after the time; made at once, so that no other takes it.

    Args:
        root: relative to the project.
    """
    root = project_root() / root
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for folder in map(root.joinpath, numbered(stem)):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def check_free(folder: Path, config: RunConfig) -> None:
    """
    Raises:
        RunError: the folder holds a run that is alive, or one that the config does not continue.
    """
    if not (folder / MANIFEST).exists():
        return
    status, _ = state(folder)
    if status in ALIVE:
        raise RunError(f"{folder}: its run is {status} -> attach to it, or stop it first")
    if not config.checkpoint.resume:
        raise RunError(f"{folder}: already holds a run -> choose another folder, or set checkpoint.resume: true")


def _release(folder: Path) -> list[dict]:
    """Drop an ended run's old requests; its segments so far."""
    segments = read_manifest(folder)["segments"]
    if segments and segments[-1].keys() & {"started", "ended"} == {"started"}:  # nobody was left to write the end down
        segments[-1]["ended"] = _last_sign(folder)
    shutil.copy(folder / CONFIG, folder / f"config.segment{max(len(segments) - 1, 0)}.yaml")
    if (folder / CONTROL).exists():  # a stop or a flip asked of the old segment is not asked of the next
        write_control(folder, {}, after=Control(max(read_control(folder).revision, last_answered(folder))))
    return segments


def set_aside(folder: Path) -> None:
    """Take away the report of the segment before, and put its figures where nobody takes them for those of the next."""
    (folder / REPORT).unlink(missing_ok=True)
    if (folder / FIGURES).is_dir():
        shutil.rmtree(folder / FIGURES_BEFORE, ignore_errors=True)
        os.rename(folder / FIGURES, folder / FIGURES_BEFORE)


def runs_below(root: Path) -> Iterator[Path]:
    """Folders of runs in a folder, those of a study two levels deeper."""
    for depth in ("*", "*/*", "*/*/*"):
        for manifest in root.glob(f"{depth}/{MANIFEST}"):
            yield manifest.parent


# -- notes ---------------------------------------------------------------------------------------------------------


def read_notes(folder: Path) -> dict:
    """`note`, a text, and `tags`, a list of words, that people gave a run."""
    try:
        return {"note": "", "tags": []} | read_json(Path(folder) / NOTES, FORMAT)
    except FileNotFoundError:
        return {"note": "", "tags": []}


def measured(folder: Path, stage: str) -> dict[str, dict]:
    """What a stage's forecasts were worth at its end, on the validation split; empty where that is not known.

    Returns:
        as of `evaluation.evaluate_ensembles`
    """
    try:
        return read_json(Path(folder) / STAGES / f"{stage}.json", None)
    except FileNotFoundError:
        return {}


@contextlib.contextmanager
def further_events(folder: Path) -> Iterator[EventWriter]:
    """The events of a run, to write more of the stage that trains; for a process that is none of its ranks."""
    events = EventWriter(folder, stage=read_manifest(folder).get("stage"))
    try:
        yield events
    finally:
        events.close()


# -- control -------------------------------------------------------------------------------------------------------


class _Measure(Shape):
    overlay: dict[str, Any]
    within: Annotated[float, Field(gt=0)]
    steps: Annotated[int, Field(gt=0, le=2**52)]


class _Control(Shape):
    revision: Revision
    overlay: dict[str, Any]
    command: Literal[COMMANDS] | None = None
    asked: dict[Literal[(*COMMANDS, SETTINGS)], Revision] = {}
    measure: _Measure | None = None

    @model_validator(mode="after")
    def _asked_by_then(self):
        if max(self.asked.values(), default=0) > self.revision:
            raise ValueError("asked names a revision that is still to come")
        if self.measure is None and MEASURE in (self.command, *self.asked):
            raise ValueError("nothing says what to measure")
        return self


@dataclass(frozen=True)
class Control:
    """What is asked of a run: a difference from its config.yaml, and perhaps a command."""

    revision: int = 0  # grows with every request; 0: there is none
    overlay: dict = field(default_factory=dict)  # dotted setting: value; the whole desired difference
    command: str | None = None  # what this revision asks for beside settings: one of COMMANDS
    # command, or SETTINGS: revision that last asked for it; nothing gets lost when a second request comes before the
    # run has read the first
    asked: dict[str, int] = field(default_factory=dict)
    measure: dict | None = None  # of the last MEASURE: `overlay` on top of what runs, `within` a share, at most `steps`
    problem: str = ""  # why the file is no request: then nothing is asked

    @property
    def stop(self) -> bool:
        """Whether the run is asked to end."""
        return STOP in self.asked

    @property
    def paused(self) -> bool:
        """Whether the run is asked to wait: a state and no event, so that a relaunched run waits as well."""
        return self.asked.get(PAUSE, 0) > self.asked.get(RESUME, 0)


def read_control(folder: Path | str) -> Control:
    """What is asked of the run now; cheap enough (40 microseconds) for every step boundary of rank 0.

    Never an error, because anybody may write that file, and no run may end by it.
    """
    try:
        values = read_json(Path(folder) / CONTROL, FORMAT, _Control, MOST_CONTROL_BYTES)
    except FileNotFoundError:
        return Control()
    except RunError as error:
        return Control(problem=str(error))
    revision, command, asked = values["revision"], values.get("command"), dict(values.get("asked", {}))
    by_hand = revision > max(asked.values(), default=0)
    if by_hand:
        asked[SETTINGS] = revision
    if command and (by_hand or command not in asked):
        asked[command] = revision
    return Control(revision, values["overlay"], command, asked, values.get("measure"))


def write_control(
    folder: Path | str,
    overlay: dict | Callable[[dict], dict] | None,
    command: str | None = None,
    after: Control | None = None,
    measure: dict | None = None,
) -> Control:
    """Ask something of the run; the file is replaced in one step and its revision grows by 1.

    Args:
        overlay: the whole desired difference from config.yaml, dotted keys; None leaves it as it is. A function makes
            it from the one that stands (`effective_overlay`), and no other request comes in between.
        command: rides along with this revision; "stop" stays.
        after: a request that came before, whatever the file says now.
        measure: as in Control, with the command of that name.
    """
    folder = Path(folder)
    with locked(folder):  # two panels that click at once must not write the same revision, nor lose a setting
        old = read_control(folder)
        if after is not None and after.revision >= old.revision:
            old = after
        if callable(overlay):
            overlay = overlay(effective_overlay(folder, old))
        revision, asked = (old.revision or last_answered(folder)) + 1, dict(old.asked)
        if overlay is not None or command is None:
            asked[SETTINGS] = revision
        if command and not old.stop:
            asked[command] = revision
        command = STOP if old.stop else command  # a click just after it must not undo a stop
        overlay = dict(old.overlay if overlay is None else overlay)
        new = Control(revision, overlay, command, asked, measure or old.measure)
        value = {"format": FORMAT, "revision": revision, "overlay": overlay, "asked": asked}
        value |= {"measure": new.measure} if new.measure else {}
        if (folder / CONTROL).is_dir():  # whoever put it there, a request gets through
            os.rename(folder / CONTROL, folder / f"{CONTROL}.{time.time_ns()}")
        write_json(folder / CONTROL, {**value, "command": command} if command else value)
    return new


def last_answered(folder: Path) -> int:
    """The last revision that a run has answered: the next is to be greater, even where control.json was lost."""
    events = read_events(folder, ("flip", CHECKPOINT, PROFILE, "restored", "measuring", "paused", "resumed"))
    return max((event.get("revision") or 0 for event in events), default=0)


def effective_overlay(folder: Path, control: Control) -> dict:
    """What the next request is put on top of: the request that still waits for its answer, else what is in force.

    A setting that was refused is in neither, or it would have every later request refused with it.
    """
    applied = read_manifest(folder)["applied"]
    return control.overlay if control.asked.get(SETTINGS, 0) > applied["revision"] else applied["overlay"]


# -- state ---------------------------------------------------------------------------------------------------------


def state(folder: Path, process: subprocess.Popen | None = None) -> tuple[str, str | None]:
    """One of starting, running, stopping, finished, failed, died; and why it failed or died, in one sentence.

    Args:
        process: the supervisor, where this process started it.
    """
    for _ in range(2):  # twice: it may have ended between reading its status and looking for its process
        manifest = read_manifest(folder)
        if manifest["status"] not in ALIVE or _is_supervised(folder, manifest, process):
            return manifest["status"], manifest["cause"]
    step = last_step(folder)
    where = "before its first step" if step is None else f"at about step {step}"
    code = process.poll() if process else None
    how = f" (exit code {code})" if code is not None else ""
    killed = f"its supervisor was killed or the machine restarted{how}"
    return "died", f"{killed} while the run was {manifest['status']}, {where}"


def _last_sign(folder: Path) -> float:
    """When a run last said something, Unix time."""
    newest = newest_events(folder, None, NEWEST_BYTES)
    return newest[-1]["time"] if newest else read_manifest(folder)["created"]


def costs(folder: Path) -> dict:
    """What a run has cost, as `cost.of` says; one that died held its machine until it last said something."""
    manifest = read_manifest(folder)
    config = overlays.apply(configs.load(folder / CONFIG), manifest["applied"]["overlay"])
    until = None if state(folder)[0] in ALIVE else _last_sign(folder)
    return cost.of(config.cost, cost.held_s(manifest, until))


def _is_supervised(folder: Path, manifest: dict, process: subprocess.Popen | None) -> bool:
    if process is not None:
        return process.poll() is None
    if manifest["host"] != socket.gethostname():  # its processes cannot be seen from here, its files can
        newest = 0.0
        for path in (folder, *folder.glob("heartbeat.rank*")):
            with contextlib.suppress(FileNotFoundError):  # of a launch that is over
                newest = max(newest, path.stat().st_mtime)
        timeout_s = configs.load(folder / CONFIG).training.stall_timeout_s
        return time.time() - newest < max(SUPERVISOR_GRACE_S, timeout_s)
    if manifest["supervisor"] is None:
        return time.time() - manifest["created"] < SUPERVISOR_GRACE_S
    return is_alive(manifest["supervisor"])


def log_tail(folder: Path, num_lines: int, from_byte: int = 0, name: str = LOG) -> str:
    """Last lines of worker.log, or of another machine's log, of those after `from_byte`."""
    try:
        with open(folder / name, "rb") as file:
            file.seek(max(from_byte, os.fstat(file.fileno()).st_size - (1 << 16)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except FileNotFoundError:
        return ""

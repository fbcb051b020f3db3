"""The run folder: the only wire between notebook, supervisor, workers and reports. Every file in it is plain text."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from upsnb import config as configs
from upsnb.config import RunConfig
from upsnb.errors import RunError, RunFailed
from upsnb.events import EventWriter as EventWriter  # so that `runs` is all a worker needs
from upsnb.events import Heartbeat as Heartbeat
from upsnb.events import Tail, read_events, read_heartbeats
from upsnb.files import fill_reserve, locked
from upsnb.files import write_json as write_json
from upsnb.processes import is_alive

FORMAT = 1  # version of manifest.json and control.json
CONFIG, MANIFEST, CONTROL, LOG = "config.yaml", "manifest.json", "control.json", "worker.log"
CHECKPOINTS = "checkpoints"
ALIVE = ("starting", "running", "stopping")
STOP = "stop"  # the control command that ends a run after its current step, with a checkpoint
COMMANDS = (STOP, "checkpoint", "pause", "resume")
STARTUP_ALLOWANCE_S = 1800.0  # until a rank's first step is done: compiling it may take that long
SUPERVISOR_GRACE_S = 60.0  # how long a new run may go without its supervisor's name in the manifest


# -- manifest -----------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict:
    """The manifest as plain data."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text())
    except FileNotFoundError:
        raise RunError(f"{folder}: has no {MANIFEST} -> not a run folder") from None
    except ValueError as error:
        raise RunError(f"{folder}/{MANIFEST}: not JSON ({error})") from None
    if manifest.get("format") != FORMAT:
        raise RunError(f"{folder}/{MANIFEST}: format {manifest.get('format')!r}, this version reads {FORMAT}")
    return manifest


def update_manifest(folder: Path, last_words: bool = False, **changes) -> dict:
    """Change top-level entries of the manifest; safe beside other writers."""
    folder = Path(folder)
    with locked(folder):
        manifest = {**read_manifest(folder), **changes}
        write_json(folder / MANIFEST, manifest, last_words)
    return manifest


# -- creation ------------------------------------------------------------------------------------------------------


def project_root() -> Path:
    """The folder that holds `params/` and `notebooks/`: above the working directory, else above the package."""
    here, package = Path.cwd(), Path(__file__).resolve().parent.parent
    for folder in (here, *here.parents, package):
        if (folder / "params").is_dir() and (folder / "notebooks").is_dir():
            return folder
    return here


def code_revision() -> str:
    """The git commit of this code, `-dirty` where files differ from it; "unknown" outside a repository."""
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", "errors.py"
        )  # a package installed inside a foreign repository is not its code
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def create(config: RunConfig, folder: Path | str | None = None) -> Path:
    """Make the folder of a new run, or make an ended run's folder ready to be continued (`checkpoint.resume`)."""
    from upsnb import hardware  # here, because it loads torch and readers of a run need none

    folder = _new_folder(config) if folder is None else Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    segments: list[dict] = []
    if (folder / MANIFEST).exists():
        segments = _release(folder, config)
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    fill_reserve(folder)
    configs.save(config, folder / CONFIG)
    manifest = {
        "format": FORMAT,
        "status": "starting",
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
        "phases_skipped": {},  # phase: why
        "supervisor": None,  # process that watches over the run
    }
    write_json(folder / MANIFEST, manifest)
    return folder


def _new_folder(config: RunConfig) -> Path:
    root = project_root() / config.logging.root
    stem = f"{config.logging.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in range(1, 1000):
        folder = root / (stem if count == 1 else f"{stem}-{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise RunError(f"{root}/{stem}: and 999 more exist -> choose another logging.name")


def _release(folder: Path, config: RunConfig) -> list[dict]:
    """Check that an ended run may be continued and drop its old requests; its segments so far."""
    status = Run(folder).status()
    if status in ALIVE:
        raise RunError(f"{folder}: its run is {status} -> attach to it, or stop it first")
    if not config.checkpoint.resume:
        raise RunError(f"{folder}: already holds a run -> choose another folder, or set checkpoint.resume: true")
    segments = read_manifest(folder)["segments"]
    shutil.copy(folder / CONFIG, folder / f"config.segment{max(len(segments) - 1, 0)}.yaml")
    if (folder / CONTROL).exists():  # a stop or a flip asked of the old segment is not asked of the next
        revision = read_control(folder).revision + 1
        write_json(folder / CONTROL, {"format": FORMAT, "revision": revision, "overlay": {}})
    return segments


# -- control -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """What is asked of a run: a difference from its config.yaml, and perhaps a command."""

    revision: int = 0  # grows with every request
    overlay: dict = field(default_factory=dict)  # dotted setting: value; the whole desired difference
    command: str | None = None  # what this revision asks for beside settings: one of COMMANDS
    asked: dict[str, int] = field(default_factory=dict)  # command: revision that last asked for it; nothing gets lost
    # when a second request comes before the run has read the first


def read_control(folder: Path | str) -> Control:
    """What is asked of the run now; cheap enough (30 microseconds) for every step boundary of rank 0."""
    path = Path(folder) / CONTROL
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Control()
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error})") from None
    if values.get("format") != FORMAT:
        raise RunError(f"{path}: format {values.get('format')!r}, this version reads {FORMAT}")
    command, asked = values.get("command"), values.get("asked", {})
    if command and asked.get(command) is None:  # written by hand
        asked[command] = values["revision"]
    return Control(values["revision"], values["overlay"], command, asked)


def write_control(folder: Path | str, overlay: dict | None, command: str | None = None) -> Control:
    """Ask something of the run; the file is replaced in one step and its revision grows by 1.

    Args:
        overlay: the whole desired difference from config.yaml, dotted keys; None leaves it as it is.
        command: rides along with this revision; "stop" stays.
    """
    folder = Path(folder)
    with locked(folder):  # two panels that click at once must not write the same revision
        old = read_control(folder)
        command = STOP if old.command == STOP else command  # a click just after it must not undo a stop
        revision = old.revision + 1
        asked = {**old.asked, command: revision} if command else old.asked
        new = Control(revision, dict(old.overlay if overlay is None else overlay), command, asked)
        value = {"format": FORMAT, "revision": new.revision, "overlay": new.overlay, "asked": asked}
        write_json(folder / CONTROL, {**value, "command": command} if command else value)
    return new


# -- a run, seen from outside --------------------------------------------------------------------------------------


class Run:
    """A run by its folder: what it is doing, what it said, and the request to stop."""

    def __init__(self, folder: Path | str, process: subprocess.Popen | None = None):
        self.folder = Path(folder).absolute()
        self._process = process  # the supervisor, if this process started it; holds an attached run's pipe

    @classmethod
    def attach(cls, folder: Path | str) -> Run:
        """The run of a folder, from any process and at any time.

        Raises:
            RunError: the folder holds no run.
        """
        run = cls(folder)
        read_manifest(run.folder)
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status()})"

    @property
    def config(self) -> RunConfig:
        """The resolved config the run was started with."""
        return configs.load(self.folder / CONFIG)

    @property
    def manifest(self) -> dict:
        """What was run, where, and how it went; read anew each time."""
        return read_manifest(self.folder)

    def status(self) -> str:
        """One of starting, running, stopping, finished, failed, died."""
        return self._state()[0]

    def cause(self) -> str | None:
        """Why the run failed or died, in one sentence; None otherwise."""
        return self._state()[1]

    def _state(self) -> tuple[str, str | None]:
        for _ in range(2):  # twice: it may have ended between reading its status and looking for its process
            manifest = self.manifest
            if manifest["status"] not in ALIVE or self._is_supervised(manifest):
                return manifest["status"], manifest["cause"]
        steps = [beat["step"] for beat in read_heartbeats(self.folder).values() if beat["beats"]]
        where = f"at about step {max(steps)}" if steps else "before its first step"
        code = self._process.poll() if self._process else None
        how = f" (exit code {code})" if code is not None else ""
        return (
            "died",
            f"its supervisor was killed or the machine restarted{how} while the run was {manifest['status']}, {where}",
        )

    def _is_supervised(self, manifest: dict) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        if manifest["host"] != socket.gethostname():  # its processes cannot be seen from here, its files can
            newest = max(path.stat().st_mtime for path in (self.folder, *self.folder.glob("heartbeat.rank*")))
            return time.time() - newest < max(SUPERVISOR_GRACE_S, self.config.training.stall_timeout_s)
        if manifest["supervisor"] is None:
            return time.time() - manifest["created"] < SUPERVISOR_GRACE_S
        return is_alive(manifest["supervisor"])

    def events(self, kinds=None, rank: int = 0) -> list[dict]:
        """All events so far, or those of some kinds."""
        return read_events(self.folder, kinds, rank)

    def update(self, overlay: dict) -> int:
        """Ask for settings to change at the next step boundary, on top of what was asked before.

        Args:
            overlay: in any written form; `{}` changes nothing. `back_to_start` drops all changes.
        Returns:
            The revision that the `flip` event will name once it is applied, or refused.
        Raises:
            ConfigError: a setting that does not exist; nothing was asked.
        """
        from upsnb import overlays

        flat = overlays.flatten(overlay)
        overlays.apply(self.config, {**read_control(self.folder).overlay, **flat}, "the update")
        return write_control(self.folder, {**read_control(self.folder).overlay, **flat}).revision

    def flip(self, phase: str, on: bool) -> int:
        """Ask for a phase to be switched on or off; returns the revision, as `update` does."""
        from upsnb import phases  # loads torch, which readers of a run do not need

        chosen = phases.BY_NAME[phase]
        return self.update(chosen.on if on else chosen.off)

    def back_to_start(self) -> int:
        """Ask for the config that the run was started with."""
        return write_control(self.folder, {}).revision

    def stop(self) -> None:
        """Ask the run to finish its step, save and end; returns at once."""
        write_control(self.folder, None, STOP)

    def wait(self, timeout: float | None = None, on_event: Callable[[dict], None] | None = None) -> str:
        """Return when the run has finished.

        Args:
            timeout: give up waiting after so many seconds; the run goes on.
            on_event: called with every event of rank 0, those before the call included.
        Raises:
            RunFailed: the run ended in any other way; carries the cause and the end of the log.
            TimeoutError: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        tail = Tail(self.folder)
        while True:
            status, cause = self._state()  # before the events, so that none of a run's last ones is missed
            for event in tail.read() if on_event else ():
                on_event(event)
            if status == "finished":
                return status
            if status not in ALIVE:
                raise RunFailed(self.folder, status, cause or "unknown", self.log_tail())
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder}: still {status} after {timeout:g} s")
            time.sleep(0.2)

    def log_tail(self, num_lines: int = 30) -> str:
        """Last lines of the workers' output."""
        return log_tail(self.folder, num_lines)


def log_tail(folder: Path, num_lines: int, from_byte: int = 0) -> str:
    """Last lines of worker.log, of those after `from_byte`."""
    try:
        with open(folder / LOG, "rb") as file:
            file.seek(max(from_byte, os.fstat(file.fileno()).st_size - (1 << 16)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except FileNotFoundError:
        return ""

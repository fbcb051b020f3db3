"""A run's checkpoints in a second place, such as a mounted Google Drive, for machines that may be taken away.

A mirror is a folder of the run's name with an index of its own: what is named there is whole, whenever the machine was
lost. The supervisor copies, so that training never waits for the other disk and never ends because of it.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.runs import checkpoint_index, events, runfolder
from upsnb.runs.checkpoint_index import INDEX
from upsnb.runs.files import replacing, sha256_of

RETRY_S = 30.0  # after trouble with the other disk
SILENT_S = 120.0  # a disk that takes no byte for so long holds up the end of a run no longer
SMALL = (runfolder.CONFIG, runfolder.NOTES, events.events_path(Path()).name)  # go with every checkpoint


def place(config: RunConfig, folder: Path) -> Path | None:
    """Where a run's checkpoints are mirrored to; None: nowhere."""
    root = config.checkpoint.mirror.folder
    return runfolder.project_root() / root / Path(folder).name if root else None


def prepare(config: RunConfig, folder: Path | None) -> str:
    """Before a run starts: bring its checkpoints back where this machine has none of them; what was done, in words.

    Args:
        folder: of the run; None: a new one of a name that no mirror has.
    Raises:
        RunError: the mirror's folder is not there, holds another run of this name, or no checkpoint that is whole.
    """
    there = place(config, folder or Path("new"))
    if there is None:
        return ""
    if not there.parent.is_dir():
        raise RunError(f"checkpoint.mirror.folder: {there.parent} is no folder -> mount the drive, or make the folder")
    if folder is None or checkpoint_index.is_there(folder) or not checkpoint_index.is_there(there):
        return ""
    if not config.checkpoint.resume:
        raise RunError(
            f"{there}: mirrors a run of this name -> set checkpoint.resume: true to go on with it, or choose another"
            " run folder"
        )
    try:
        copy(there, folder)
    except RunError:
        if not checkpoint_index.is_there(folder):  # the one before it is whole
            raise
    step = checkpoint_index.step_of(checkpoint_index.read_index(folder), "latest")
    return f"goes on from step {step}, brought back from {there}"


def copy(
    source: Path, target: Path, budget_gb: float = float("inf"), moved: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Copy the checkpoints that another run folder lacks, the oldest first, each whole or not at all.

    A role that stands on the same files in both is not copied again, and damaged files are not copied at all.

    Args:
        budget_gb: disk space for those in `target` [GB].
        moved: told the bytes of each block.
    Raises:
        OSError: the target's disk is full, gone or not writable; what it had stays as it was.
        RunError: the latest checkpoint is damaged, or larger than the budget.
    """
    index, damage = checkpoint_index.read_index(source), {}
    checkpoint_index.prepare(target)
    for name in sorted(checkpoint_index.named(index), key=lambda name: index["checkpoints"][name]["step"]):
        entry, roles = index["checkpoints"][name], [role for role in ("best", "epoch") if index[role] == name]
        if _has(target, entry, roles):
            continue
        size = checkpoint_index.num_bytes(entry["files"]) / 1e9
        if size > budget_gb:
            raise RunError(f"a checkpoint takes {size:.2g} GB, the budget there is {budget_gb:g} -> raise the budget")
        written = checkpoint_index.temporary(target, entry["step"])
        written.mkdir()
        try:
            for file, digest in entry["files"].items():
                _copy_file(checkpoint_index.home(source) / name / file, written / file, digest, moved)
            checkpoint_index.commit(target, entry["step"], entry["files"], roles, budget_gb)
        except RunError as error:
            checkpoint_index.discard(target, entry["step"])
            damage[name] = error
        except OSError:
            checkpoint_index.discard(target, entry["step"])
            raise
    if index["latest"] in damage:
        raise damage[index["latest"]]
    for name in SMALL:
        if (source / name).exists():
            with open(source / name, "rb") as old, replacing(target / name) as new:
                shutil.copyfileobj(old, new)


def _has(target: Path, entry: dict, roles: list[str]) -> bool:
    """Whether the same files are there, in these roles as far as the budget leaves any."""
    index = checkpoint_index.read_index(target)
    same = [name for name, other in index["checkpoints"].items() if other == entry]
    return bool(same) and all(index[role] in (*same, None) for role in roles)


def _copy_file(source: Path, target: Path, digest: dict, moved: Callable[[int], None]) -> None:
    with open(source, "rb") as old, replacing(target) as new:
        found = sha256_of(old, lambda block: moved(new.write(block)))
    if found != digest["sha256"]:
        raise RunError(f"{source}: does not match its checksum, so it is not mirrored")


class Mirror:
    """Keeps a run's mirror up to date from a thread; what goes wrong there is a warning of the run and ends nothing."""

    def __init__(self, folder: Path, config: RunConfig):
        self.folder, self.target, self.budget_gb = folder, place(config, folder), config.checkpoint.mirror.budget_gb
        self.thread: threading.Thread | None = None
        self.done: int | None = None  # change of the index that was copied last
        self.told: tuple[int | None, str] | None = None  # mirrored step and trouble, as they were written down last
        self.retry = self.moved = 0.0  # when to try again, and when the other disk took something last

    def follow(self) -> None:
        """Begin to copy where there is something new; returns at once."""
        if self.target is None or (self.thread is not None and self.thread.is_alive()):
            return
        changed = self._changed()
        if changed is not None and changed != self.done and time.monotonic() >= self.retry:
            self.moved = time.monotonic()
            self.thread = threading.Thread(target=self._copy, args=(changed,), name="mirror", daemon=True)
            self.thread.start()

    def finish(self, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait for the last checkpoint to be there, as long as anything moves."""
        for _ in range(3):  # what is being copied may be old by now, and what is new may be replaced while it is read
            self.retry = 0.0
            self.follow()
            while self.thread is not None and self.thread.is_alive():
                if in_a_hurry():
                    return
                if time.monotonic() - self.moved > SILENT_S:
                    self._tell(f"{self.target} took nothing for {SILENT_S:g} s, and the run has ended")
                    return
                self.thread.join(0.1)

    def _changed(self) -> int | None:
        with contextlib.suppress(OSError):
            return (checkpoint_index.home(self.folder) / INDEX).stat().st_mtime_ns
        return None

    def _count(self, num_bytes: int) -> None:
        self.moved = time.monotonic()

    def _copy(self, changed: int) -> None:
        try:
            if not self.target.parent.is_dir():  # an unmounted drive leaves a place on the local disk
                raise FileNotFoundError(f"{self.target.parent} is gone")
            copy(self.folder, self.target, self.budget_gb, self._count)
        except FileNotFoundError as error:
            if self._changed() == changed:  # else a newer checkpoint has taken the place of the one that was read
                self._fail(error)
        except (OSError, RunError) as error:
            self._fail(error)
        else:
            self.done = changed
            self._tell("")

    def _fail(self, error: Exception) -> None:
        self.retry = time.monotonic() + RETRY_S
        self._tell(" ".join(str(error).split()))

    def _tell(self, trouble: str) -> None:
        """Write down where the mirror stands, once for each change."""
        step = None
        with contextlib.suppress(RunError, OSError):
            step = checkpoint_index.step_of(checkpoint_index.read_index(self.target), "latest")
        if (step, trouble) == self.told:
            return
        known, self.told = self.told, (step, trouble)
        with contextlib.suppress(OSError, RunError):
            fact = {"folder": str(self.target), "step": step, "trouble": trouble or None}
            runfolder.update_manifest(self.folder, mirror=fact)
            if trouble and (known is None or known[1] != trouble):
                said = f"checkpoints are not mirrored now, and training goes on: {trouble}"
                with runfolder.further_events(self.folder) as log:
                    log.write("warning", step or 0, message=said)

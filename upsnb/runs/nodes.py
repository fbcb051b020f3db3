"""Several machines that train one run: the first supervises it, each other one joins it.

`python -m upsnb join <folder>` launches this machine's share of the ranks whenever the first machine launches its own,
and ends them when that launch has ended. Both meet in the run's folder, on a disk that all machines see; nobody is told
an address before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.errors import RunError
from upsnb.runs import postmortem, ranks, runfolder
from upsnb.runs.files import Shape, locked, read_json, write_json
from upsnb.runs.processes import kill_marked, process_identity
from upsnb.runs.runfolder import ALIVE, FORMAT

FOLDER = "nodes"  # of the run's; one file for each machine that has joined
POLL_S = 0.2
BEAT_S = 1.0
SILENT_S = 20.0  # a machine that gives no sign for so long is gone
WORD_S = 3.0  # for other machines to write down what they noticed
GRACE_S = 10.0  # for ranks to notice by themselves, with an error that says more


class _Node(Shape):
    host: str
    beats: int
    segment: int | None  # launch that its ranks belong to
    exit_code: int | None  # of these ranks, once they have ended
    killed: str | None  # which of them died without a word, and how


def _read(folder: Path, node: int) -> dict | None:
    try:
        return read_json(folder / FOLDER / f"{node}.json", FORMAT, _Node)
    except (FileNotFoundError, RunError):  # nobody, or somebody whose disk is away
        return None


# -- on the first machine ------------------------------------------------------------------------------------------


class NodeWatch:
    """What the other machines of a launch do, as far as the first one sees: on its own clock, for theirs may differ."""

    def __init__(self, folder: Path, num_nodes: int, segment: int):
        self.folder, self.others, self.segment = folder, range(1, num_nodes), segment
        self.seen: dict[int, tuple[int, float]] = {}  # beats of those that joined this launch, and when they grew last
        self.since: float | None = None  # when one was found to have left

    def absent(self) -> list[int]:
        """Machines that have no ranks in this launch yet."""
        entries = {node: _read(self.folder, node) for node in self.others}
        return [node for node, entry in entries.items() if entry is None or entry["segment"] != self.segment]

    def lost(self) -> str | None:
        """Which machine is gone, or had a rank killed, in one sentence: of both nothing is written anywhere else."""
        now = time.monotonic()
        for node in self.others:
            entry = _read(self.folder, node)
            if entry is None or entry["segment"] != self.segment:
                if node in self.seen:
                    return f"machine {node} left the run"
                continue
            if entry["beats"] != self.seen.get(node, (None,))[0]:
                self.seen[node] = entry["beats"], now
            if entry["killed"]:
                return f"machine {node} ({entry['host']}): {entry['killed']}"
            if now - self.seen[node][1] > SILENT_S:
                return f"machine {node} ({entry['host']}) is gone: no sign of life for {SILENT_S:g} s"
        return None

    def failed(self) -> str | None:
        """As `lost`, or what the ranks of another machine failed of."""
        if said := self.lost():
            return said
        entries = {node: _read(self.folder, node) for node in self.seen}
        for node, entry in entries.items():
            if entry and entry["exit_code"]:
                said = f"machine {node} ({entry['host']}): its ranks ended with exit code {entry['exit_code']}"
                return postmortem.raised(self.folder) or said
        return None

    def failed_for_good(self) -> str | None:
        """As `failed`, once this machine's ranks had time to notice by themselves, with an error that says more."""
        said, now = self.failed(), time.monotonic()
        self.since = None if said is None else self.since or now
        return said if said and now - self.since > GRACE_S else None

    def last_word(self) -> str | None:
        """As `lost`, after this machine's ranks have failed: others notice at the same time, and write it down."""
        deadline = time.monotonic() + WORD_S
        while self.others and self.failed() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.lost()


# -- on every other machine ----------------------------------------------------------------------------------------


class Member:
    """One further machine of a run, from joining to the run's end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.identity = process_identity(os.getpid())
        self.node = 0
        self.config = None  # of the launch that its ranks belong to
        self.segment: int | None = None
        self.ranks: subprocess.Popen | None = None
        self.place = Path()  # of torchrun's files, on a disk of this machine
        self.log_start = self.beats = 0
        self.beaten = self.over_since = self.seen = 0.0
        self.exit_code, self.killed = None, None
        self.interrupts = 0

    def run(self, wait_s: float) -> str:
        """Train with this machine until the run has ended; its status then. SIGTERM and Ctrl-C are this method's.

        Args:
            wait_s: for the run to start, and to have room for another machine.
        Raises:
            RunError: it did not in that time, or it is a run of a single machine.
        """
        deadline = time.monotonic() + wait_s
        self._wait_for_start(deadline)
        self._claim(deadline)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._interrupt)
        try:
            with tempfile.TemporaryDirectory(prefix="upsnb-", ignore_cleanup_errors=True) as place:
                self.place = Path(place)
                return self._train()
        finally:
            kill_marked(self.identity)
            with contextlib.suppress(OSError):
                (self.folder / FOLDER / f"{self.node}.json").unlink()

    def _train(self) -> str:
        while True:
            status, cause = self._state()
            self._follow(status not in ALIVE)
            if status not in ALIVE and self.ranks is None:
                print(f"{self.folder.name}: {status}{': ' * bool(cause)}{cause or ''}", flush=True)
                return status
            time.sleep(POLL_S)

    def _state(self) -> tuple[str, str | None]:
        """Of the run; a shared disk may be away for a moment."""
        try:
            state = runfolder.state(self.folder)
            self.seen = time.monotonic()
            return state
        except RunError:
            if time.monotonic() - self.seen > SILENT_S:
                raise
            return "running", None

    def _interrupt(self, *_) -> None:
        """The first signal asks the whole run to save and end, as on its first machine; a second one ends at once."""
        self.interrupts += 1
        if self.interrupts > 1:
            raise KeyboardInterrupt
        runfolder.write_control(self.folder, None, runfolder.STOP)
        print("asked the run to stop: it finishes its step and saves", flush=True)

    def _wait_for_start(self, deadline: float) -> None:
        told = False
        while True:
            with contextlib.suppress(RunError):
                if runfolder.state(self.folder)[0] in ALIVE:
                    return
            if time.monotonic() > deadline:
                remedy = "start it on the first machine, in a folder that both see"
                raise RunError(f"{self.folder}: no run has started here -> {remedy}")
            if not told:
                print(f"waits for a run in {self.folder}", flush=True)
            told = True
            time.sleep(POLL_S)

    def _claim(self, deadline: float) -> None:
        """Take a number that no living machine has; one that is gone gives its own up after a while."""
        count = configs.load(self.folder / runfolder.CONFIG).training.num_nodes
        if count == 1:
            raise RunError(f"{self.folder}: is a run of one machine -> start it with training.num_nodes")
        (self.folder / FOLDER).mkdir(exist_ok=True)
        while time.monotonic() < deadline:
            with locked(self.folder):
                (probe := self.folder / FOLDER / ".now").touch()  # the disk's own clock, which all machines share
                for node in range(1, count):
                    path = self.folder / FOLDER / f"{node}.json"
                    if not path.exists() or probe.stat().st_mtime - path.stat().st_mtime > SILENT_S:
                        self.node = node
                        self._beat()
                        print(f"joined as machine {node} of {count}, counted from 0: {self.folder}", flush=True)
                        return
            time.sleep(1.0)
        raise RunError(f"{self.folder}: has its {count} machines -> nothing to do here")

    def _beat(self) -> None:
        self.beats += 1
        self.beaten = time.monotonic()
        own = {"host": socket.gethostname(), "beats": self.beats, "segment": self.segment}
        own |= {"exit_code": self.exit_code, "killed": self.killed}
        with contextlib.suppress(OSError):  # a shared disk may be away for a moment
            write_json(self.folder / FOLDER / f"{self.node}.json", {"format": FORMAT, **own})

    def _follow(self, over: bool) -> None:
        """Launch, watch, end: whatever the first machine's launch calls for now."""
        current = {"ended": None}  # until the first machine has launched its ranks
        with contextlib.suppress(RunError):
            current = [current, *runfolder.read_manifest(self.folder)["segments"]][-1]
        over = over or "ended" in current
        if not over and current["number"] != self.segment:
            self._end_ranks()
            self._launch(current)
        elif self.ranks is not None and self.ranks.poll() is not None:
            self._note_end()
        elif over and self.ranks is not None:
            self.over_since = self.over_since or time.monotonic()
            if time.monotonic() - self.over_since > GRACE_S:
                self._end_ranks()
        if time.monotonic() - self.beaten > BEAT_S:
            self._beat()

    def _launch(self, segment: dict) -> None:
        base = configs.load(self.folder / runfolder.CONFIG)
        self.config = overlays.apply(base, segment["overlay"], "the run's changed config")
        self.segment, self.over_since, self.exit_code, self.killed = segment["number"], 0.0, None, None
        place = self.place / str(self.segment)
        place.mkdir()
        print(f"launch {self.segment}: {self.config.training.ranks_per_node} ranks here", flush=True)
        self.ranks, self.log_start = ranks.start(
            self.folder, self.config, place, self.segment, self.identity, self.node
        )
        self._beat()

    def _note_end(self) -> None:
        """Write down how the ranks ended; a rank that was killed cannot."""
        self.exit_code, self.ranks = self.ranks.returncode, None
        if self.exit_code:
            count = self.config.training.ranks_per_node
            first = postmortem.first_failures(self.folder, self.exit_code, self.log_start, count, self.node)
            self.killed = postmortem.own_death(self.folder, first)
        kill_marked(self.identity)
        self._beat()

    def _end_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
            kill_marked(self.identity)
            self.ranks.wait()
            self.ranks = None

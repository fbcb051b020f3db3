"""Watches over one run: starts its ranks, relaunches after a crash, and makes the manifest end honest.

`python -m upsnb.runs.supervisor <folder> [--attached] [--worker PATH]`; the exit code is 0 only for a finished run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.errors import RunError
from upsnb.runs import checkpoint_index, files, postmortem, ranks, recovery, runfolder
from upsnb.runs.events import last_step
from upsnb.runs.mirror import Mirror
from upsnb.runs.nodes import NodeWatch
from upsnb.runs.postmortem import Ending
from upsnb.runs.processes import kill_marked, marked, process_identity
from upsnb.runs.ranks import TORCHRUN

POLL_S = 0.1
ORPHANED = "the process that started this run is gone, and an attached run ends with it"
LOST_S = 20.0  # a disk may be away for a moment; a folder that is away for longer is lost
LOST = "its folder was removed or moved while it trained"
SIGN_S = 10.0  # between two touches of the folder, by which other machines see that the run is watched over
STACKS_S = 1.0  # time for hung ranks to write down where they stand


class Supervisor:
    """One run, from its first launch to its last status."""

    def __init__(self, folder: Path, worker: Path | None = None):
        self.folder, self.worker = folder, worker
        self.base = self.config = configs.load(folder / runfolder.CONFIG)  # the second with what was changed since
        self.identity = process_identity(os.getpid())
        self.parent_gone = threading.Event()
        self.terminations = 0  # SIGTERM and SIGINT so far
        self.stop_asked = False
        self.mirror = Mirror(folder, self.base)
        self.home = os.open(folder, os.O_RDONLY)  # stays the folder's where it is moved
        self.status = "starting"

    # -- from outside --------------------------------------------------------------------------------------------

    def listen(self, attached: bool) -> None:
        """React to signals, and to the end of the process that started an attached run."""

        def count(*_) -> None:
            self.terminations += 1

        signal.signal(signal.SIGTERM, count)
        signal.signal(signal.SIGINT, count)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal does not end a run
        if attached:
            threading.Thread(target=self._read_until_closed, daemon=True).start()

    def _read_until_closed(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        self.parent_gone.set()

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Supervise to the end; returns the exit code."""
        runfolder.update_manifest(self.folder, supervisor=self.identity)
        try:
            end = self._launch_until_done()
        except BaseException as error:
            end = Ending("failed", f"the supervisor itself raised {type(error).__name__}: {error}")
            raise
        finally:
            kill_marked(self.identity)
            shutil.rmtree(self.folder / TORCHRUN, ignore_errors=True)
            if self._is_lost():
                print(f"{self.folder}: {end.cause}", file=sys.stderr, flush=True)  # the log is open still
                with contextlib.suppress(OSError):
                    self.folder = Path(os.readlink(f"/proc/self/fd/{self.home}"))
            if not self._is_lost():
                self.mirror.finish(in_a_hurry=lambda: self.terminations > 1)
                self._close_segment(end)
        return 0 if end.status == "finished" else 1

    def _launch_until_done(self) -> Ending:
        restarts, flip = 0, None  # flip: the `relaunch` event of a cold flip that this launch is to carry out
        while True:
            end = self._segment(restarts, flip)
            unanswered = (
                flip is not None and runfolder.read_manifest(self.folder)["applied"]["revision"] < flip["revision"]
            )
            if end.relaunch is None and unanswered and (end.crashed or end.hung):
                self._close_segment(end, status="starting")
                self._roll_back(flip, end)
                flip = None
                continue
            flip = end.relaunch
            shrinks = end.out_of_memory and not self._stop_asked() and self._shrink(end.cause)
            if flip is None and not shrinks:  # one that asks for less is no restart: it ends at single pairs
                may_continue = end.crashed and not self._stop_asked() and checkpoint_index.is_there(self.folder)
                if not may_continue or restarts >= self.config.training.max_restarts:
                    return end
                restarts += 1
            self._close_segment(end, status="starting")

    def _roll_back(self, flip: dict, end: Ending) -> None:
        """Answer a cold flip whose workers failed before they had done a step; the next launch is without it."""
        applied = runfolder.read_manifest(self.folder)["applied"]["overlay"]
        runfolder.update_manifest(self.folder, applied={"revision": flip["revision"], "overlay": applied})
        with runfolder.further_events(self.folder) as events:
            events.write(
                "flip",
                flip["step"],
                revision=flip["revision"],
                applied=False,
                reason=f"the relaunch failed, so the run goes on without it: {end.cause}",
                changes={},
                phases={},
                phases_on=flip["phases_on"],
                skipped={},
                overlay=applied,
                cold=True,
                duration_ms=round(1e3 * (time.time() - flip["since"]), 3),
            )

    def _shrink(self, cause: str) -> bool:
        return recovery.ask_for_less(self.folder, self.base, self.config, cause, last_step(self.folder) or 0)

    def _segment(self, restarts: int, flip: dict | None) -> Ending:
        """Launch the workers once and watch them until none is left."""
        segment = self._open_segment(restarts, flip)
        training = self.config.training
        watch = StallWatch(training.num_gpus, training.stall_timeout_s)
        others = NodeWatch(self.folder, training.num_nodes, segment)
        place = self.folder / TORCHRUN
        workers, log_start = ranks.start(self.folder, self.config, place, segment, self.identity, worker=self.worker)
        self.seen, self.stop_deadline, self.beats, signed = time.monotonic(), None, {}, -math.inf
        while workers.poll() is None:
            time.sleep(POLL_S)
            beats = runfolder.read_heartbeats(self.folder)
            if not self._is_lost():
                self.seen = time.monotonic()
                if self.seen - signed > SIGN_S:
                    signed = self.seen
                    with contextlib.suppress(OSError):
                        os.utime(self.folder)
                self._follow(beats)
                self.mirror.follow()
            forced = self._reason_to_kill()
            left = None if forced else others.failed_for_good()
            hung = None if forced or left else watch.stalled(beats, time.monotonic())
            if hung and (absent := others.absent()):
                hung = f"{hung}; machine {absent[0]} never joined (python -m upsnb join {self.folder}, there)"
            if hung:
                self._ask_for_stacks(beats)
            if forced or left or hung:
                self._kill(workers)
                exit_code, is_lost = workers.wait(), self._is_lost()
                cause = forced or left or hung
                failed = Ending("failed", cause, exit_code=exit_code, crashed=left is not None, hung=hung is not None)
                return failed if is_lost else postmortem.ended(self.folder, exit_code) or failed
        kill_marked(self.identity)  # loaders and threads of ranks that died without a word
        if self._is_lost():
            return Ending("failed", LOST, exit_code=workers.returncode)
        return postmortem.examine(self.folder, workers.returncode, log_start, training.ranks_per_node, others.last_word)

    def _follow(self, beats: dict[int, dict]) -> None:
        """Note what the workers do, and what they are asked to."""
        if self.status == "starting" and any(beat["beats"] for beat in beats.values()):
            self._note_status("running")
        if self.terminations and not self._stop_asked():
            runfolder.write_control(self.folder, None, runfolder.STOP)
        if not self._stop_asked():
            return
        if self.status != "stopping":
            self._note_status("stopping")
        compiles = any(beat["state"] == "compiling" for beat in beats.values())  # its silence `StallWatch` judges
        if self.stop_deadline is None or compiles or beats != self.beats:  # a last evaluation may take long
            self.stop_deadline = time.monotonic() + self.config.training.stall_timeout_s
        self.beats = beats

    def _reason_to_kill(self) -> str | None:
        if time.monotonic() - self.seen > LOST_S:
            return LOST
        if self.parent_gone.is_set() and not self._stop_asked():  # one that its user has stopped may end well
            return ORPHANED
        if self.terminations > 1:
            return "it was told to end at once by a second signal"
        if self.stop_deadline is not None and time.monotonic() > self.stop_deadline:
            waited = self.config.training.stall_timeout_s
            return f"it was asked to stop, and its workers neither ended nor gave a sign of life for {waited:g} s"
        return None

    def _is_lost(self) -> bool:
        """Whether the folder is no longer in its place, or is another run's."""
        try:
            return runfolder.read_manifest(self.folder)["supervisor"] != self.identity
        except RunError:  # or it is there and damaged
            return not (self.folder / runfolder.MANIFEST).exists()

    def _stop_asked(self) -> bool:
        self.stop_asked = self.stop_asked or runfolder.read_control(self.folder).stop  # whatever is written afterwards
        return self.stop_asked

    def _ask_for_stacks(self, beats: dict[int, dict]) -> None:
        """Let every rank write its stacks to the log; only ranks, because the signal would end torchrun."""
        alive = set(marked(self.identity))
        for beat in beats.values():
            if beat["pid"] in alive:
                os.kill(beat["pid"], signal.SIGUSR1)
        time.sleep(STACKS_S)

    def _kill(self, workers: subprocess.Popen) -> None:
        workers.kill()
        for _ in range(2):  # twice: one may have been starting another
            kill_marked(self.identity)

    # -- manifest ------------------------------------------------------------------------------------------------

    def _note_status(self, status: str) -> None:
        """Note a status on the way; on a full disk later or never, because the reserve is for the last one."""
        with contextlib.suppress(OSError):
            runfolder.update_manifest(self.folder, status=status)
            self.status = status

    def _open_segment(self, restarts: int, flip: dict | None) -> int:
        """Begin a segment in manifest and events; its number.

        It starts from config.yaml and what was changed since, by a cold flip's request or as it was applied last: a
        relaunch loses no flip, and makes none twice.
        """
        step = last_step(self.folder) or 0
        for pattern in ("heartbeat.rank*", "failure.rank*.json"):  # of the segment before; it has taken them in
            for path in self.folder.glob(pattern):
                path.unlink()
        shutil.rmtree(self.folder / TORCHRUN, ignore_errors=True)
        (self.folder / TORCHRUN).mkdir()
        files.fill_reserve(self.folder)
        manifest = runfolder.read_manifest(self.folder)
        segments, start = manifest["segments"], flip or manifest["applied"]
        self.config = overlays.apply(self.base, start["overlay"], "the run's changed config")
        environment, kept = ranks.nccl_environment(self.config)
        segment = {
            "number": len(segments),
            "started": time.time(),
            "restarts": restarts,  # after crashes, so far
            "step": step,
            "overlay": start["overlay"],  # on top of config.yaml
            "revision": start["revision"],  # of control.json, which the overlay answers
            "cold_flip": flip,  # the event that asked for this launch
            "num_ranks": self.config.training.num_gpus,
            "environment": environment,  # NCCL's variables; the workers add what they see
            "environment_kept": kept,  # variables of the user that won over training.nccl_tuning
        }
        with runfolder.further_events(self.folder) as events:
            events.write("segment", step, number=segment["number"], num_ranks=segment["num_ranks"])
        self.status = "starting"
        runfolder.update_manifest(self.folder, status=self.status, segments=[*segments, segment])
        return segment["number"]

    def _close_segment(self, end: Ending, status: str | None = None) -> None:
        segments = runfolder.read_manifest(self.folder)["segments"]
        outcome = {"ended": time.time(), "status": end.status, "exit_code": end.exit_code, "cause": end.cause}
        if segments and "ended" not in segments[-1]:
            segments[-1] |= {**outcome, "failures": postmortem.read_failures(self.folder)}
        runfolder.update_manifest(
            self.folder,
            last_words=True,
            status=status or end.status,
            cause=None if status else end.cause,
            end_reason=end.reason,
            segments=segments,
        )


class StallWatch:
    """Tells a hung rank by heartbeats that stand still, on this process's own clock.

    Not by the time inside a heartbeat: a suspended laptop wakes with a clock hours ahead and must not lose its run.
    """

    def __init__(self, num_ranks: int, timeout_s: float):
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.startup_s = max(timeout_s, runfolder.STARTUP_ALLOWANCE_S)
        started = time.monotonic()
        self.seen: dict[int, tuple] = dict.fromkeys(range(num_ranks), (None, started))

    def stalled(self, beats: dict[int, dict], now: float) -> str | None:
        """Which ranks hang and since which step, in one sentence; None while all go on."""
        hung = []
        done = [rank for rank, beat in beats.items() if beat["state"] == "done"]
        for rank in range(self.num_ranks):
            beat = beats.get(rank)
            key = beat and (beat["step"], beat["beats"], beat["state"])
            if key != self.seen[rank][0]:
                self.seen[rank] = (key, now)
            stepped = beat and beat["step"] > beat["first"] and beat["state"] not in ("compiling", "waiting")
            # A rank that has ended well waits for the others, and is to exit once they have ended too.
            waits = rank in done and len(done) < self.num_ranks
            since = max(time for _, time in self.seen.values()) if rank in done else self.seen[rank][1]
            if now - since > (self.timeout_s if stepped else self.startup_s) and not waits:
                hung.append(rank)
        if not hung:
            return None
        progress = {rank: (beats[rank]["step"], beats[rank]["beats"]) if rank in beats else (-1, 0) for rank in hung}
        last = [rank for rank in hung if progress[rank] == min(progress.values())]
        step = min(progress.values())[0]
        names, whose = (f"rank {last[0]}", "its") if len(last) == 1 else (f"ranks {', '.join(map(str, last))}", "their")
        where = f"at step {step}" if step >= 0 else f"before {whose} first step"
        silent = now - min(self.seen[rank][1] for rank in last)
        return f"{names} hung {where}: no heartbeat for {silent:.0f} s (stacks are in {runfolder.LOG})"


def main(arguments: list[str] | None = None) -> int:
    """Supervise one run folder."""
    parser = argparse.ArgumentParser(prog="python -m upsnb.runs.supervisor", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="run folder as runfolder.create made it")
    parser.add_argument("--attached", action="store_true", help="end the run when standard input closes")
    parser.add_argument("--worker", type=Path, help="script to run on every rank instead of upsnb.worker")
    options = parser.parse_args(arguments)
    supervisor = Supervisor(options.folder.absolute(), options.worker and options.worker.absolute())
    supervisor.listen(options.attached)
    try:
        return supervisor.run()
    except RunError as error:  # its folder's files are damaged
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Starting a run: check, make its folder, hand it to a supervisor, return."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from upsnb import hardware, phases
from upsnb.config import RunConfig
from upsnb.runs import handle, runfolder

INTERACTIVE = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG")  # set by servers that people sit in front of
_supervisors: list[subprocess.Popen] = []  # a pipe closes with its object, and a rebound variable must not end training


def start(
    config: RunConfig,
    folder: Path | str | None = None,
    attached: bool | None = None,
    worker: Path | str | None = None,
) -> handle.Run:
    """Start a run in processes of its own and return at once.

    With `training.on_missing: skip`, phases that cannot run here are left out, printed, and named in the manifest.

    Args:
        folder: where the run lives; empty: a new folder below `logging.root`.
        attached: the run ends when this process does; empty: only outside interactive notebooks.
        worker: script that torchrun starts instead of `upsnb.worker`.
    Raises:
        ConfigError: this machine cannot run the config; nothing was started or written.
        RunError: the folder holds a run that is alive, or one that the config does not continue.
    """
    found, skipped = hardware.detect(), {}
    if config.training.on_missing == "skip":
        config, skipped = phases.skip_missing(config, found)
    hardware.check_runnable(config, found)
    folder = runfolder.create(config, folder, skipped)
    for phase, reason in skipped.items():
        print(f"skipped {phase}: {reason}", flush=True)
    if attached is None:
        attached = not any(name in os.environ for name in INTERACTIVE)
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
                "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_home))),
            },
            start_new_session=True,  # an interrupt of the kernel is no interrupt of the run
        )
    for ended in [other for other in _supervisors if other.poll() is not None]:
        _supervisors.remove(ended)
        if ended.stdin is not None:
            ended.stdin.close()
    _supervisors.append(process)
    return handle.Run(folder, process)

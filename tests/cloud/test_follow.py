"""A run at Vast.ai that is followed to its end, over machines that are taken away."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from fake_vast import KEY, OWN_KEY, FakeVast
from waiting import until

from upsnb import overlays
from upsnb.__main__ import read_parameters
from upsnb.cloud import follow, launches, vast
from upsnb.cloud.host import KEPT, Host
from upsnb.errors import RunError
from upsnb.overlays import project_root
from upsnb.runs import checkpoint_index
from upsnb.runs.files import read_json, write_json
from upsnb.runs.handle import Run

NOTEBOOK = project_root() / "notebooks/01_train.ipynb"
SMOKE = project_root() / "params/smoke.yaml"


@pytest.fixture
def wanted() -> dict:
    return vast.needs(overlays.load(SMOKE, overrides={"training.time_limit_s": 60.0}))


def record(kept: Path, wanted: dict, **changes) -> str:
    """A run that was started at Vast, and what is known of it."""
    (kept / "away").mkdir()
    known = {"format": 1, "name": "away", "provider": "vast", "host": None, "instance": None, "price_per_hour": 1.2}
    known |= {"limit_s": 9e3, "created": time.time(), "budget": 5.0, "spent": 0.0, "needs": wanted, "given": {}}
    known |= {"notebook": "notebooks/01_train.ipynb", "image": vast.IMAGE, "interruptible": True}
    write_json(kept / "away" / KEPT, known | changes)
    return "away"


def test_what_is_left_of_a_budget_is_all_that_a_new_machine_may_cost(cloud, kept, wanted, monkeypatch):
    asked = []

    def rent(folder, planned, *rest):
        asked.append(planned["budget"])
        raise RunError("no Python 3.11 to 3.14 -> install one there")

    monkeypatch.setattr(launches, "rent", rent)
    monkeypatch.setattr(follow, "MOST_FAILURES", 2)
    name = record(kept, wanted, spent=3.75)
    with pytest.raises(RunError, match="2 times in a row: no Python"):
        follow.follow(name, 0.0, lambda line: None)
    assert asked == [1.25, 1.25]
    write_json(kept / name / KEPT, read_json(kept / name / KEPT, 1) | {"spent": 4.99})
    with pytest.raises(RunError, match="is spent before anything trains"):
        follow.follow(name, 0.0, lambda line: None)
    assert not cloud.rented and "has no machine" in launches.status(name)
    assert launches.destroy(name) == "it had no machine" and not (kept / name / KEPT).exists()


def test_a_launch_that_fails_costs_a_run_nothing_of_what_it_may_still_be_followed_by(cloud, kept, wanted):
    before = read_json(kept / record(kept, wanted, spent=3.75) / KEPT, 1)
    cloud.trouble["PUT /asks/N"] = [400]
    (planned,) = launches.plan(wanted, 5.0)
    with pytest.raises(RunError, match="trouble 400"):
        launches.start_rented(planned, NOTEBOOK, {}, overlays.load(SMOKE), kept / "away", say=lambda line: None)
    assert read_json(kept / "away" / KEPT, 1) == before and not cloud.instances


def test_trouble_of_a_moment_ends_nothing_and_an_ended_run_ends_its_machine(cloud, kept, wanted, near, monkeypatch):
    cloud.rent(101, {})
    monkeypatch.setattr(Host, "pull", lambda self, name, folder: 0)
    cloud.trouble["GET /instances/N"], said = [500], []
    states = iter(("running\nstep 5", "finished"))
    monkeypatch.setattr(Host, "state", lambda self, name: next(states))
    name = record(kept, wanted, instance=7000, host=vars(near))
    assert follow.follow(name, 0.0, said.append)
    assert [line.split(": ")[1] for line in said[:-1]] == ["not now", "running", "finished"]
    assert not cloud.instances and not (kept / name / KEPT).exists()


def test_one_that_has_stopped_itself_is_started_for_what_lies_there(cloud, kept, wanted, near, monkeypatch):
    cloud.rent(101, {})
    cloud.instances[7000]["actual_status"] = "exited"
    came = []
    monkeypatch.setattr(vast, "wait", lambda number, known, say: near)
    monkeypatch.setattr(
        Host, "pull", lambda self, name, folder: came.append(cloud.instances[7000]["actual_status"]) or 0
    )
    monkeypatch.setattr(Host, "state", lambda self, name: "finished")
    assert follow.follow(record(kept, wanted, instance=7000, host=vars(near)), 0.0, lambda line: None)
    assert came[0] == "running" and cloud.rented == 1 and not cloud.instances


@pytest.mark.parametrize("answers", [True, False])
def test_a_machine_on_which_nothing_ever_began_is_not_started_for_ever(cloud, kept, wanted, near, monkeypatch, answers):
    """Whoever launched it was gone before it began. Each start is paid for."""
    cloud.rent(101, {})
    cloud.instances[7000]["actual_status"] = "exited"
    starts, tried = [], []

    def nothing_there(self, name, *_):
        raise RunError("there is no run folder yet")

    def state(self, name):
        return "starting" if answers else nothing_there(self, name)

    def rent(*_):
        tried.append(1)
        raise RunError("no Python there")

    monkeypatch.setattr(vast, "start_again", starts.append)
    monkeypatch.setattr(vast, "wait", lambda number, known, say: near)
    monkeypatch.setattr(launches, "rent", rent)
    for name, function in (("pull", nothing_there), ("state", state)):
        monkeypatch.setattr(Host, name, function)
    name = record(kept, wanted, instance=7000, host=vars(near))
    with pytest.raises(RunError, match="5 times in a row"):
        follow.follow(name, 0.0, lambda line: None)
    assert (len(starts), len(tried), len(cloud.instances)) == ((1, 5, 0) if answers else (5, 0, 1))


def test_a_study_that_came_may_be_let_go_and_all_that_it_trains_is_stopped(kept, wanted, near, monkeypatch):
    folder = kept / record(kept, wanted, host=vars(near), provider="ssh")
    place = Path(near.folder) / folder.name
    for name in ("runs/first", "runs/second"):
        (place / "outputs" / folder.name / name).mkdir(parents=True)
        (place / "outputs" / folder.name / name / "manifest.json").touch()
    (place / "venv/bin").mkdir(parents=True)
    (place / "venv/bin/python").write_text(
        '#!/bin/sh\n[ "${4%first}" = "$4" ] && echo "$4" >> asked\n'
    )  # one has ended
    (place / "venv/bin/python").chmod(0o755)
    near.stop(folder.name)
    assert (place / "asked").read_text().split() == [f"outputs/{folder.name}/runs/second"]
    monkeypatch.setattr(Host, "state", lambda self, name: "finished")
    with pytest.raises(RunError, match="was never pulled"):
        launches.destroy(folder.name)
    (folder / "sweep.json").touch()
    assert "is deleted" in launches.destroy(folder.name)


def test_what_would_not_be_found_again_is_not_rented_for(kept, wanted, tmp_path):
    config = overlays.load(SMOKE, overrides={"logging.root": "elsewhere"})
    with pytest.raises(RunError, match="elsewhere: it would not be found again"):
        launches._folder(config, None)
    (kept / "study/runs/one").mkdir(parents=True)
    with pytest.raises(RunError, match="one: it would not be found again"):
        launches._folder(overlays.load(SMOKE), kept / "study/runs/one")


def test_a_run_that_has_finished_rents_nothing_when_its_machine_is_gone(cloud, kept, wanted, monkeypatch):
    name = record(kept, wanted, instance=7000)
    (kept / name / "manifest.json").touch()
    monkeypatch.setattr(follow, "read_manifest", lambda folder: {"status": "finished"})
    assert follow.follow(name, 0.0, lambda line: None)
    assert not cloud.rented and not (kept / name / KEPT).exists()


def test_what_is_here_of_a_study_goes_along_and_a_run_without_a_checkpoint_begins_anew(kept, wanted, near, monkeypatch):
    sent, folder = [], kept / record(kept, wanted)
    monkeypatch.setattr(Host, "send", lambda self, name, given, run=None: sent.append(run))
    for name in ("install", "begin"):
        monkeypatch.setattr(Host, name, lambda *_: None)
    asked = {"notebook": "notebooks/11_sweep.ipynb", "given": {}}
    launches._begin(near, folder, asked)
    (folder / "sweep.json").touch()
    launches._begin(near, folder, asked)
    (folder / "manifest.json").touch()
    launches._begin(near, folder, asked)
    assert sent == [None, folder, None]


def signal_all(place: Path, sent: signal.Signals, of: str = "") -> None:
    """A signal to whatever works in a folder.

    Args:
        of: only to programs whose names begin so.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            works_there = Path(os.readlink(process / "cwd")).is_relative_to(place)
            if works_there and (process / "comm").read_text().startswith(of):
                os.kill(int(process.name), sent)


def lose(place: Path) -> None:
    """A folder with all that works in it."""
    signal_all(place, signal.SIGKILL)
    shutil.rmtree(place)


@pytest.mark.long
def test_a_run_is_rented_and_goes_on_elsewhere_when_its_machine_is_taken_away(cloud: FakeVast, kept, box, monkeypatch):
    """By the real command and a real sshd. All that was on the machine is lost with it, once a checkpoint was pulled.
    That goes on, for what the first one has left of the budget; in the end both are gone, and the folder is whole."""
    found = subprocess.run(["ssh", "-G", "box"], capture_output=True, text=True, check=True).stdout
    cloud.port_of_ssh = int(next(line.split()[1] for line in found.splitlines() if line.startswith("port ")))
    settings = ["training.time_limit_s=12", "checkpoint.interval=10"]
    given, config = read_parameters(NOTEBOOK, [SMOKE], settings)
    (planned,) = launches.plan(vast.needs(config), 5.0, interruptible=True)
    said: list[str] = []
    folder = launches.start_rented(planned, NOTEBOOK, given, config, say=said.append)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if OWN_KEY in path.read_text(errors="replace")]
    assert "instance 7000" in launches.status(folder.name)
    onstart, ended, lost, pull = cloud.instances[7000]["onstart"], [], [], Host.pull

    there = Path(box.folder) / folder.name

    def pulled_and_lost(self: Host, name: str, to: Path) -> int:
        found = pull(self, name, to)
        if not lost and checkpoint_index.is_there(to):
            lost.append(lose(there))
        return found

    monkeypatch.setattr(Host, "pull", pulled_and_lost)
    until(lambda: checkpoint_index.is_there(there / "outputs" / folder.name), "no checkpoint")
    signal_all(there, signal.SIGSTOP, of="python")  # however slowly it is followed, it is not over before it is lost
    follower = threading.Thread(target=lambda: ended.append(follow.follow(folder.name, 0.5, said.append)))
    follower.start()
    until(lambda: any("not now" in line for line in said), "it has not noticed")  # as a machine dies: silent at first
    cloud.instances[7000]["actual_status"] = "exited"
    follower.join()
    assert ended == [True], said
    run = Run.attach(folder)
    assert run.status() == "finished" and len(run.manifest["segments"]) == 2
    (again,) = [line for line in said if "goes on from step" in line]
    assert int(again.split("step ")[1].split(",")[0]) > 0 and "$5" in again
    cost = run.config.cost
    assert cost.price_per_hour == pytest.approx(0.55) and planned["training_dollars"] - 0.1 < cost.budget < 5.0
    assert cloud.rented == 2 and not cloud.instances, "both machines ended"
    assert not (folder / KEPT).exists() and (folder / "report.json").exists()
    text = "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    text += "".join(said) + onstart
    assert KEY not in text and OWN_KEY not in text

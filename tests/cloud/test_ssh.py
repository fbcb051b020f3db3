"""A notebook that runs on another machine over ssh, with a real sshd on loopback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from upsnb import overlays
from upsnb.__main__ import read_parameters
from upsnb.cloud import launches, vast
from upsnb.cloud.host import Host
from upsnb.errors import RunError
from upsnb.overlays import project_root
from upsnb.runs import checkpoint_index, runfolder
from upsnb.runs.handle import Run

EXAMPLE = project_root() / "examples/affinity/affinity.ipynb"
BEGIN = """import sys
from pathlib import Path
from upsnb.__main__ import read_parameters
from upsnb.training import workload
notebook = Path(sys.argv[1]).absolute()
print(sys.modules[type(workload.of(read_parameters(notebook, [Path("given.yaml")], [])[1])).__module__].__file__)
"""
SETTINGS = ("-f", "params/smoke.yaml", "-p", "training.time_limit_s=4")


def upsnb(*arguments, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "upsnb", *map(str, arguments)], capture_output=True, text=True, cwd=project_root()
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_notebook_runs_there_its_folder_comes_back_and_goes_on_there(box, tmp_path):
    said = upsnb("cloud", "ssh", "box", *SETTINGS, "-p", "logging.name=elsewhere", "--folder", box.folder)
    (name,) = [word for word in said.split() if word.startswith("elsewhere-") and "." not in word][:1]
    folder, there = project_root() / "outputs" / name, Path(box.folder) / name
    try:
        until(lambda: ": running" not in launches.status(name), every_s=4.0)
        assert ": finished" in upsnb("cloud", "status", name), upsnb("cloud", "logs", name)
        assert "MB came" in upsnb("cloud", "pull", name)
        run = Run.attach(folder)
        assert run.status() == "finished" and (folder / "report.json").exists()
        assert run.manifest["code_revision"] == runfolder.code_revision()
        again = ("cloud", "ssh", "box", *SETTINGS, "--resume", name, "--folder", box.folder)
        assert f"cloud destroy {name}" in upsnb(*again, code=2), "it is held there"
        assert "is deleted" in upsnb("cloud", "destroy", name) and not there.exists()

        upsnb(*again, "-p", "training.time_limit_s=8")
        until(lambda: ": finished" in launches.status(name), every_s=4.0)
        upsnb("cloud", "pull", name)
        assert len(run.manifest["segments"]) == 2, "it went on from its checkpoint"
        assert checkpoint_index.choose(folder).passed_over == ()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_an_example_is_sent_and_finds_its_workload_there(near, kept, monkeypatch):
    begun = []
    monkeypatch.setattr(launches.runfolder, "new_folder", lambda name, root="": _made(kept / name))
    monkeypatch.setattr(Host, "install", lambda self, name: None)
    monkeypatch.setattr(Host, "begin", lambda self, name, notebook, more=(): begun.append(notebook))
    folder = launches.start_on(near, EXAMPLE, *read_parameters(EXAMPLE, [], ["training.time_limit_s=7"]))
    there = Path(near.folder) / folder.name
    assert begun == ["examples/affinity/affinity.ipynb"]
    command = [sys.executable, "-c", BEGIN, begun[0]]
    environment = {**os.environ, "PYTHONPATH": str(there)}
    found = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(there / "examples/affinity/workload.py"), found.stderr


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("missing", ["notebook", "preset", "workload", "weights"])
def test_what_would_be_missing_there_is_refused_before_anything_is_asked_for(near, tmp_path, monkeypatch, missing):
    notebook, given = project_root() / "notebooks/01_train.ipynb", {}
    config = overlays.load(project_root() / "params/smoke.yaml")
    if missing == "notebook":
        notebook, said = tmp_path / "mine.ipynb", "mine.ipynb"
    elif missing == "preset":
        (tmp_path / "mine.yaml").write_text("{}")
        given, said = {"preset": str(tmp_path / "mine.yaml")}, "mine.yaml"
    elif missing == "weights":
        config, said = overlays.apply(config, {"model.pretrained": str(tmp_path)}), tmp_path.name
    else:
        config, said = overlays.load(overrides={"data.datasets": {}, "data.workload": "mine.py:Mine"}), "mine.py"
    monkeypatch.setattr(Host, "run", lambda *asked: pytest.fail("it was connected to"))
    monkeypatch.setattr(vast, "ssh_keys", lambda: pytest.fail("Vast was asked"))
    for start in (lambda: launches.start_on(near, notebook, given, config), lambda: rented(notebook, given, config)):
        with pytest.raises(RunError, match=f"{said}: would be missing there, because only .*examples/ are sent -> "):
            start()


def rented(notebook, given, config) -> Path:
    return launches.start_rented({}, notebook, given, config)


def test_a_host_that_does_not_answer_is_said_in_a_sentence():
    with pytest.raises(RunError, match="nowhere.invalid.*without a password"):
        Host("nowhere.invalid").run("true")


def test_what_a_script_says_there_is_said_here(box):
    assert box.run("echo $((6 * 7))") == b"42\n"
    with pytest.raises(RunError, match="box: no such thing$"):
        box.run("echo no such thing >&2; exit 7")

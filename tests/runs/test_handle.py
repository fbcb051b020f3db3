"""The run folder: what is written is whole, readers see only that, and a status is never a guess."""

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from made_runs import END, fields, make_event
from waiting import LONGEST_S

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError, RunFailed
from upsnb.runs import files, handle, processes, ranks, runfolder


@pytest.fixture
def folder(tmp_path):
    return runfolder.create(RunConfig(), tmp_path / "run")


def test_modules_that_ranks_import_stay_compiled_whatever_an_image_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "imported.py").touch()
    environment = os.environ | ranks.environment(tmp_path, RunConfig(), tmp_path, 0, "1:2")
    subprocess.run([sys.executable, "-c", "import imported"], cwd=tmp_path, env=environment, check=True)
    assert [path.suffix for path in tmp_path.glob("__pycache__/imported.*")] == [".pyc"]


@pytest.mark.parametrize("own", ["", "glibc.malloc.tcache_count=1"])
def test_ranks_ask_for_large_pages_unless_a_user_has_told_glibc_something(tmp_path, monkeypatch, own):
    monkeypatch.setenv("GLIBC_TUNABLES", own) if own else monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = ranks.environment(tmp_path, RunConfig(), tmp_path, 0, "1:2")
    assert environment["GLIBC_TUNABLES"] == (own or "glibc.malloc.hugetlb=1")


@pytest.mark.parametrize(("overlay", "said"), [
    ({"data.datasets.darcy": None}, True), ({"latent.dim": 64}, False), ({"pdet.depth": 2}, False),
])  # fmt: skip
def test_a_cpu_that_is_given_the_reference_model_is_told_so_first(tmp_path, monkeypatch, capsys, overlay, said):
    """Settings that choose data and no model take a CPU hours: nobody means that."""
    fake = SimpleNamespace(
        Popen=lambda *a, **k: SimpleNamespace(poll=lambda: None, stdin=None), DEVNULL=0, PIPE=0, STDOUT=0
    )
    monkeypatch.setattr(handle, "subprocess", fake)
    handle.start(overlays.resolve(overlay, {"device": "cpu"}), tmp_path / "run", attached=False)
    assert ("nothing chose a model, so it is the reference model" in capsys.readouterr().out) is said


@pytest.fixture
def living(tmp_path, monkeypatch):
    """`living(folder)`: a run in a folder, by a made-up supervisor that runs until the test ends."""
    (tmp_path / "params").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    process = SimpleNamespace(poll=lambda: None, stdin=None)
    fake = SimpleNamespace(Popen=lambda *a, **k: process, DEVNULL=0, PIPE=0, STDOUT=0)
    monkeypatch.setattr(handle, "subprocess", fake)
    monkeypatch.setattr(handle, "_supervisors", [])

    def make(folder, start=handle.start, **options):
        run = start(overlays.resolve({"device": "cpu", "latent.dim": 64}), folder, **options)
        runfolder.update_manifest(run.folder, status="running", supervisor=processes.process_identity(os.getpid()))
        return run

    return make


def test_what_still_trains_on_this_machine_is_said_but_for_the_same_study(living, tmp_path, capsys):
    outputs = tmp_path / "outputs"
    living(outputs / "train-1")
    assert "still trains" not in capsys.readouterr().out
    living(outputs / "study/runs/one")
    said = capsys.readouterr().out
    assert "train-1: still trains on this machine -> python -m upsnb stop outputs/train-1" in said
    living(outputs / "study/runs/other")
    said = capsys.readouterr().out
    assert said.count("still trains") == 1 and "train-1: still" in said
    runfolder.update_manifest(outputs / "train-1", status="finished")
    runfolder.update_manifest(outputs / "study/runs/one", host="elsewhere")
    (outputs / "study/runs/other/manifest.json").write_text("no")
    living(outputs / "train-2")
    assert "still trains" not in capsys.readouterr().out


def test_a_live_run_is_attached_to_and_one_that_has_ended_is_not(living, tmp_path, capsys):
    folder = tmp_path / "outputs/train"
    living(folder, handle.start_or_attach)
    assert "attached" not in capsys.readouterr().out
    same = overlays.resolve({"device": "cpu", "latent.dim": 64, "logging.name": "other"})
    assert handle.start_or_attach(same, folder).folder == folder
    assert capsys.readouterr().out == "train: is running already and attached to\n"
    handle.start_or_attach(overlays.apply(same, {"latent.dim": 32}), folder)
    assert "with other settings (latent.dim), which stay as they are" in capsys.readouterr().out
    runfolder.update_manifest(folder, status="finished")
    with pytest.raises(RunError, match="already holds a run"):
        handle.start_or_attach(same, folder)


@pytest.mark.parametrize(("attached", "stops"), [(False, False), (True, True)])
def test_an_interrupt_says_whether_the_run_goes_on(living, tmp_path, monkeypatch, capsys, attached, stops):
    run = living(tmp_path / "outputs/train", attached=attached)
    run._goes_on = not attached  # as the supervisor's pipe would say

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    said = capsys.readouterr().out
    assert ("goes on without this cell -> python -m upsnb stop outputs/train ends it" in said) is not stops
    assert ("handle.Run.attach('outputs/train') gets it back" in said) is not stops
    assert runfolder.read_control(run.folder).stop is stops and ("saves its state and ends" in said) is stops
    with pytest.raises(KeyboardInterrupt), run.stopped_by_errors():
        run.wait()
    assert "goes on" not in capsys.readouterr().out and runfolder.read_control(run.folder).stop


# -- folder --------------------------------------------------------------------------------------------------------


def test_reading_a_run_loads_no_torch(folder):
    code = (
        f"import sys; from upsnb.runs import handle; handle.Run.attach({str(folder)!r}).status(); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_folder_describes_the_run(folder):
    run = handle.Run.attach(folder)
    assert run.config == RunConfig() and run.status() == "starting" and run.cause() is None
    manifest = run.manifest
    assert manifest["seeds"]["training"] == 42 and manifest["versions"]["torch"] and manifest["hardware"]["num_cores"]
    assert manifest["segments"] == [] and manifest["phases_skipped"] == {}


def test_code_is_another_by_what_differs_in_it_and_not_by_evidence(tmp_path, monkeypatch):
    def git(*command):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *command], cwd=tmp_path, check=True)

    code, evidence = tmp_path / "upsnb/errors.py", tmp_path / "outputs/reference/report.json"
    for path in (code, evidence, tmp_path / "upsnb/runs/runfolder.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    monkeypatch.setattr(runfolder, "__file__", str(tmp_path / "upsnb/runs/runfolder.py"))
    monkeypatch.chdir(tmp_path)
    assert runfolder.code_revision() == "unknown"
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    revision = runfolder.code_revision()
    assert re.fullmatch("[0-9a-f]{40}", revision)
    evidence.write_text("2\n")
    assert runfolder.code_revision() == revision
    code.write_text("2\n")
    assert runfolder.code_revision() == f"{revision}-dirty"


def test_folders_of_one_second_do_not_collide(tmp_path, monkeypatch):
    for name in ("params", "notebooks", "notebooks/deeper"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks/deeper")
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    folders = [runfolder.create(RunConfig()) for _ in range(3)]
    names = ["train-20260101-000000", "train-20260101-000000-2", "train-20260101-000000-3"]
    assert folders == [tmp_path / "outputs" / name for name in names]


def test_used_folder_is_refused_and_no_folder_is_no_run(folder, tmp_path):
    with pytest.raises(RunError, match="its run is starting"):
        runfolder.create(RunConfig(), folder)
    runfolder.update_manifest(folder, status="failed")
    with pytest.raises(RunError, match="already holds a run"):
        runfolder.create(RunConfig(), folder)
    with pytest.raises(RunError, match="not a run folder"):
        handle.Run.attach(tmp_path)


def test_continued_run_keeps_its_past_and_drops_old_requests(folder):
    runfolder.update_manifest(folder, status="finished", segments=[{"number": 0}])
    runfolder.write_control(folder, {"training.compile": True}, "stop")
    runfolder.create(overlays.resolve({"checkpoint": {"resume": True}}), folder)
    assert runfolder.read_manifest(folder)["segments"] == [{"number": 0}]
    control = runfolder.read_control(folder)
    assert (control.revision, control.overlay, control.command) == (2, {}, None), "the revision still grows"
    assert not control.stop and runfolder.read_manifest(folder)["applied"] == {"revision": 2, "overlay": {}}
    assert (folder / "config.segment0.yaml").exists()


def test_what_the_segment_before_showed_is_set_aside(folder):
    for text in ("first", "second"):
        (folder / "figures").mkdir()
        (folder / "figures" / "loss.png").write_text(text)
        (folder / "report.json").write_text(text)
        runfolder.set_aside(folder)
        assert not (folder / "figures").exists() and not (folder / "report.json").exists()
    assert (folder / ".figures.before" / "loss.png").read_text() == "second"
    runfolder.set_aside(folder)


def test_a_notebook_s_folder_is_below_the_project_wherever_it_runs(tmp_path, monkeypatch):
    for name in ("params", "notebooks"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert runfolder.asked("outputs/mine") == tmp_path / "outputs/mine"
    assert runfolder.asked(str(tmp_path / "here"), "train") == tmp_path / "here"
    assert runfolder.asked("") is None and runfolder.asked("", "memory").parent == tmp_path / "outputs"


def test_full_disk_costs_the_reserve_and_not_the_manifest(folder, monkeypatch):
    real, calls = os.replace, []

    def full(source, target):
        if (folder / files.RESERVE).exists():
            raise OSError(28, "No space left on device")
        calls.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        runfolder.update_manifest(folder, status="running")
    runfolder.update_manifest(folder, last_words=True, status="failed")
    assert runfolder.read_manifest(folder)["status"] == "failed" and len(calls) == 1
    assert not [path for path in folder.iterdir() if path.name.startswith(".manifest")], "no half-written file stays"


# -- status --------------------------------------------------------------------------------------------------------


def test_run_without_its_supervisor_has_died(folder):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    runfolder.update_manifest(folder, status="running", supervisor=processes.process_identity(child.pid))
    run = handle.Run.attach(folder)
    assert run.status() == "running"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
    assert run.status() == "died" and "before its first step" in run.cause()
    child.wait()
    child.stdin.close()
    assert run.status() == "died"


def test_reused_pid_is_another_process(folder):
    pid, _, started = processes.process_identity(os.getpid()).partition(":")
    runfolder.update_manifest(folder, status="running", supervisor=f"{pid}:{started}0")
    assert handle.Run.attach(folder).status() == "died"


def test_run_whose_supervisor_never_came_has_died(folder):
    runfolder.update_manifest(folder, created=time.time() - 100)
    assert handle.Run.attach(folder).status() == "died"


def test_run_of_another_machine_lives_by_its_heartbeat(folder):
    runfolder.update_manifest(folder, status="running", host="elsewhere", supervisor="1:1")
    runfolder.Heartbeat(folder, 0).beat(3)
    assert handle.Run.attach(folder).status() == "running"
    for path in (folder / "heartbeat.rank0", folder):
        os.utime(path, (time.time() - 10_000,) * 2)
    assert handle.Run.attach(folder).status() == "died"


def test_wait_returns_for_finished_runs_only(folder):
    run = handle.Run.attach(folder)
    with pytest.raises(TimeoutError, match="still starting"):
        run.wait(timeout=0)
    runfolder.EventWriter(folder).write("end", 3, **END)
    (folder / runfolder.LOG).write_text("".join(f"line {i}\n" for i in range(100)))
    runfolder.update_manifest(folder, status="failed", cause="rank 1 raised ValueError")
    with pytest.raises(RunFailed, match="rank 1 raised ValueError") as caught:
        run.wait()
    assert caught.value.log_tail.splitlines()[-1] == "line 99" and len(caught.value.log_tail.splitlines()) == 30
    runfolder.update_manifest(folder, status="finished")
    seen = []
    assert run.wait(on_event=seen.append) == "finished" and [event["kind"] for event in seen] == ["end"]


# -- events --------------------------------------------------------------------------------------------------------


def test_every_line_is_valid_json_with_kind_time_step_first(folder):
    import numpy as np

    events, before = runfolder.EventWriter(folder, 1), time.time()
    events.write(
        "step", 4, loss=math.nan, losses={"a": 1.0, "b": [math.inf]}, rate=np.float32(0.5), bad=np.float32("inf")
    )
    text = (folder / "events.rank1.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    event = json.loads(text, parse_constant=refuse)
    assert list(event)[:3] == ["kind", "time", "step"] and before - 1e-6 <= event["time"] <= time.time() + 1e-6
    assert event["loss"] is None and event["losses"] == {"a": 1.0, "b": [None]} and event["rate"] == 0.5
    assert event["nonfinite"] == ["loss", "losses.b.0", "bad"]


@pytest.mark.parametrize("length", [1, 100, 65536, 200_000])
@pytest.mark.parametrize("num_whole", [0, 2])
def test_half_line_of_a_crash_is_cut(folder, length, num_whole):
    events = runfolder.EventWriter(folder)
    for step in range(num_whole):
        events.write("paused", step)
    events.close()
    with open(folder / "events.jsonl", "a") as file:
        file.write("x" * length)
    runfolder.EventWriter(folder).write("paused", num_whole)
    assert [event["step"] for event in runfolder.read_events(folder)] == list(range(num_whole + 1))


def test_tail_reads_only_what_is_new_and_whole(folder):
    tail = runfolder.Tail(folder)
    assert tail.read() == []
    events = runfolder.EventWriter(folder)
    events.write("paused", 1)
    assert [event["step"] for event in tail.read()] == [1] and tail.read() == []
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"kind": "paused", "ti')
        file.flush()
        assert tail.read() == []
        file.write('me": 0.0, "step": 2}\n')
    assert [event["step"] for event in tail.read()] == [2]


def test_kinds_are_not_confused_by_their_prefixes(folder):
    events = runfolder.EventWriter(folder)
    for kind in ("flip", "flip_effect", "step"):
        events.write(kind, 1, kind_of="flip", **fields(kind))
    assert [event["kind"] for event in runfolder.read_events(folder, ["flip"])] == ["flip"]
    assert [event["kind"] for event in runfolder.read_events(folder, ["step", "flip_effect"])] == [
        "flip_effect",
        "step",
    ]


def test_damaged_line_is_told_and_hides_no_other(folder):
    events = runfolder.EventWriter(folder)
    events.write("paused", 1)
    with open(folder / "events.jsonl", "a") as file:
        file.write("\0\0\0garbage\n")
    events.write("paused", 2)
    kinds = [event["kind"] for event in runfolder.read_events(folder)]
    assert kinds == ["paused", "warning", "paused"]


def test_many_events_are_parsed_in_one_call_and_unwanted_ones_not_at_all(folder, monkeypatch):
    line = json.dumps({**make_event("step", 7), "time": 1.5})
    (folder / "events.jsonl").write_text(10_000 * (line + "\n"))
    runfolder.EventWriter(folder).write("paused", 7)
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(len(text)), loads(text))[1])
    assert len(runfolder.read_events(folder)) == 10_001 and len(parsed) == 1
    assert len(runfolder.read_events(folder, ("paused",))) == 1 and len(parsed) == 2 and parsed[1] < 100


# -- heartbeats ----------------------------------------------------------------------------------------------------


def test_heartbeat_says_where_a_rank_is_and_costs_one_write(folder, monkeypatch):
    heartbeat = runfolder.Heartbeat(folder, 3)
    assert heartbeat.step is None and runfolder.read_heartbeats(folder)[3]["state"] == "waiting"
    size = (folder / "heartbeat.rank3").stat().st_size
    writes, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (writes.append(given[2]), pwrite(*given))[1])
    monkeypatch.setattr(os, "open", None)  # a file that stays open
    for step in range(500, 1500):
        heartbeat.beat(step)
    monkeypatch.undo()
    assert writes == [0] * 1000
    beat = runfolder.read_heartbeats(folder)[3]
    assert (beat["step"], beat["beats"], beat["first"], beat["pid"]) == (1499, 1000, 500, os.getpid())
    heartbeat.done()
    assert runfolder.read_heartbeats(folder)[3]["state"] == "done" and heartbeat.step == 1499
    assert (folder / "heartbeat.rank3").stat().st_size == size


def test_heartbeat_says_since_when_a_rank_compiles(folder):
    heartbeat = runfolder.Heartbeat(folder, 0)
    heartbeat.beat(7)
    for _ in range(2):
        heartbeat.compiling()
        first = runfolder.read_heartbeats(folder)[0]
    heartbeat.compiling()
    assert (first["state"], first["step"], first["beats"]) == ("compiling", 7, 1)
    assert runfolder.read_heartbeats(folder)[0] == first, "many graphs are one compilation"
    heartbeat.beat(7)
    assert runfolder.read_heartbeats(folder)[0]["state"] == "beating"


# -- control -------------------------------------------------------------------------------------------------------


def test_control_file_follows_its_contract(folder):
    assert runfolder.read_control(folder) == runfolder.Control(0, {}, None)
    runfolder.write_control(folder, {"training.compile": True}, "checkpoint")
    text = json.loads((folder / "control.json").read_text())
    contract = {"format": 1, "revision": 1, "overlay": {"training.compile": True}, "command": "checkpoint"}
    assert text == {**contract, "asked": {"settings": 1, "checkpoint": 1}}
    assert runfolder.write_control(folder, None, "pause") == runfolder.Control(
        2, {"training.compile": True}, "pause", {"settings": 1, "checkpoint": 1, "pause": 2}
    )


def test_stop_is_not_undone_by_a_later_click(folder):
    handle.Run.attach(folder).stop()
    assert runfolder.write_control(folder, {"training.compile": True}).command == "stop"
    assert runfolder.write_control(folder, {}, "checkpoint").command == "stop"


def test_a_control_file_written_by_hand_is_obeyed(folder):
    control = folder / "control.json"
    control.write_text('{"format": 1, "revision": 4, "overlay": {"training.compile": true}, "command": "checkpoint"}')
    assert runfolder.read_control(folder).asked == {"settings": 4, "checkpoint": 4}
    runfolder.write_control(folder, None, "pause")
    text = json.loads(control.read_text())
    control.write_text(json.dumps({**text, "revision": 6, "command": "stop"}))  # as an editor would leave it
    read = runfolder.read_control(folder)
    assert read.stop and read.paused and read.asked == {"settings": 6, "checkpoint": 4, "pause": 5, "stop": 6}


def test_two_commands_between_two_boundaries_are_both_seen(folder):
    run = handle.Run.attach(folder)
    assert [run.checkpoint(), run.pause(), run.update({"batch_size": 4})] == [1, 2, 3]
    control = runfolder.read_control(folder)
    assert control.asked == {"checkpoint": 1, "pause": 2, "settings": 3} and control.paused
    assert run.resume() == 4
    assert not runfolder.read_control(folder).paused


def test_a_refused_setting_does_not_poison_the_next_request(folder):
    run = handle.Run.attach(folder)
    run.update({"batch_size": 4})
    runfolder.update_manifest(folder, applied={"revision": 1, "overlay": {"training.batch_size": 4}})
    run.update({"latent.dim": 16, "noise": 0.1})
    runfolder.update_manifest(folder, applied={"revision": 2, "overlay": {"training.batch_size": 4}})  # refused
    run.update({"compile": True})
    assert runfolder.read_control(folder).overlay == {"training.batch_size": 4, "training.compile": True}
    assert run.current_config.training.batch_size == 4 and not run.current_config.training.compile


def test_what_is_no_setting_and_no_phase_is_not_asked(folder):
    run = handle.Run.attach(folder)
    with pytest.raises(ConfigError, match="did you mean bf16"):
        run.flip("bf61", True)
    with pytest.raises(ConfigError, match="did you mean training.batch_size"):
        run.update({"batchsize": 4})
    assert runfolder.read_control(folder).revision == 0


def test_an_event_is_waited_for_by_revision_and_by_step(folder):
    runfolder.update_manifest(folder, supervisor=processes.process_identity(os.getpid()))
    run, events = handle.Run.attach(folder), runfolder.EventWriter(folder)
    for revision, step in ((None, 2), (3, 5), (4, 9)):
        events.write("checkpoint", step, revision=revision)
    assert run.wait_for("checkpoint")["step"] == 2
    assert [run.wait_for("checkpoint", revision)["step"] for revision in (2, 3, 4)] == [5, 5, 9]
    assert run.wait_for("checkpoint", step=6)["revision"] == 4
    with pytest.raises(TimeoutError, match="still starting after 0 s, without its checkpoint event"):
        run.wait_for("checkpoint", 5, timeout_s=0)
    later = threading.Timer(0.3, lambda: events.write("flip", 10, **fields("flip", revision=5)))
    later.start()
    assert run.wait_for("flip", 5, timeout_s=LONGEST_S)["step"] == 10
    later.join()
    runfolder.update_manifest(folder, status="failed", cause="rank 1 raised ValueError")
    assert run.wait_for("flip")["step"] == 10, "what came before the end counts"
    with pytest.raises(RunError, match="failed before its eval event: rank 1 raised ValueError"):
        run.wait_for("eval")
    events.close()


SETTINGS = ("training.noise", "optimizer.lr", "training.lambda_spectral", "training.grad_clip")


def _click_settings(folder, path, values):
    for value in values:
        handle.Run(folder).update({path: value})


def test_viewers_that_click_at_once_lose_no_setting(folder):
    fork = multiprocessing.get_context("fork")
    values = [round(0.01 * count, 2) for count in range(1, 9)]
    clickers = [fork.Process(target=_click_settings, args=(folder, path, values)) for path in SETTINGS]
    for clicker in clickers:
        clicker.start()
    for clicker in clickers:
        clicker.join()
    control = runfolder.read_control(folder)
    assert control.revision == len(SETTINGS) * len(values)
    assert control.overlay == dict.fromkeys(SETTINGS, values[-1])


def _click(folder, count):
    for _ in range(count):
        runfolder.write_control(folder, {})


def test_two_writers_never_share_a_revision(folder):
    other = multiprocessing.get_context("fork").Process(target=_click, args=(folder, 40))
    threads = [threading.Thread(target=_click, args=(folder, 40)) for _ in range(2)]
    for writer in (other, *threads):
        writer.start()
    seen = []
    while other.is_alive() or any(thread.is_alive() for thread in threads):
        seen.append(runfolder.read_control(folder).revision)  # raises on half a file
    for writer in (other, *threads):
        writer.join()
    assert runfolder.read_control(folder).revision == 120 and seen == sorted(seen)


def test_unknown_format_is_refused(folder):
    runfolder.write_json(folder / "control.json", {"format": 9})
    control = runfolder.read_control(folder)
    assert "format 9, this version reads 1" in control.problem and not (control.revision or control.asked)
    runfolder.write_json(folder / "manifest.json", {"format": 9})
    with pytest.raises(RunError, match="format 9, this version reads 1"):
        runfolder.read_manifest(folder)


def test_a_heartbeat_that_is_just_being_created_is_no_heartbeat_yet(folder):
    (folder / "heartbeat.rank0").touch()
    runfolder.Heartbeat(folder, 1).beat(3)
    assert list(runfolder.read_heartbeats(folder)) == [1]

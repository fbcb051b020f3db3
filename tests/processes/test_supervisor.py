"""Every way a run can end, with real processes: the status is honest, the cause names the rank, nothing is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import LONGEST_S, until

from upsnb import overlays
from upsnb.errors import RunError, RunFailed
from upsnb.runs import handle, runfolder

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
WORKER = Path(__file__).parent / "faulty_worker.py"
STARTED = []
SECRET = "known-to-the-environment-alone"


def config(num_ranks, **training):
    training = {"device": "cpu", "num_gpus": num_ranks, "threads_per_rank": 1, **training}
    return overlays.resolve({"training": training})


def start(monkeypatch, folder, fault, num_ranks, attached=False, **training):
    monkeypatch.setenv("UPSNB_FAULT", fault)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    run = handle.start(config(num_ranks, **training), folder, attached=attached, worker=WORKER)
    STARTED.append(run)
    return run


@pytest.fixture(autouse=True)
def end_with_the_test():
    """A failing test must not leave a run behind: workers end with their supervisor."""
    yield
    while STARTED:
        STARTED.pop()._process.kill()


def processes_of(folder):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command and int(path.parent.name) != os.getpid():
            found.append(command)
    return found


def assert_nothing_left(folder):
    until(lambda: not processes_of(folder), "a process of the run is left")


def assert_failed(run, status="failed"):
    """The run's cause, after checking all that holds of every failure."""
    with pytest.raises(RunFailed) as caught:
        run.wait()
    assert caught.value.status == run.status() == handle.Run.attach(run.folder).status() == status
    assert "\n" not in run.cause() and len(run.cause()) < 600
    assert run._process.wait() != 0
    assert_nothing_left(run.folder)
    assert not [path for path in run.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return run.cause()


def test_finished_run(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "late:1:0", 2)
    assert run.status() in runfolder.ALIVE
    seen = []
    assert run.wait(on_event=seen.append) == run.status() == "finished"
    assert run._process.wait() == 0 and run.cause() is None
    assert_nothing_left(run.folder)
    assert [event["kind"] for event in seen][:1] == ["segment"] and seen[-1]["kind"] == "end"
    assert {event["loss"] for event in seen if event["kind"] == "step"} == {2.0}
    (segment,) = run.manifest["segments"]
    assert segment["status"] == "finished" and run.manifest["end_reason"] == "epochs"
    assert not (run.folder / ".torchrun").exists()
    assert segment["exit_code"] == 0 and segment["failures"] == [], "rank 0 waits for the late one"
    assert "its group stands: True" in run.log_tail(100), "taking gloo's groups down has aborted ranks"


def test_raising_rank_is_named_with_its_message(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "raise:1:3", 2)
    assert assert_failed(run) == "rank 1 raised ValueError at step 3: the loss is not finite"
    assert "[default1]:ValueError: the loss is" in run.log_tail(200)
    assert run.manifest["segments"][0]["failures"][0]["rank"] == 1


def test_killed_rank_is_named_though_others_fail_after_it(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "kill:1:3", 2)
    assert assert_failed(run) == "rank 1 was killed by SIGKILL (out of memory?) at step 3"


def test_hung_rank_is_found_and_its_stack_is_in_the_log(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "hang:1:3", 2, stall_timeout_s=5.0)
    cause = assert_failed(run)
    assert re.match(r"ranks? (0, )?1 hung at step 3: no heartbeat for \d+ s", cause)
    assert "faulty_worker.py" in run.log_tail(300) and "in misbehave" in run.log_tail(300)


def test_killed_torchrun_takes_its_ranks_with_it(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "endless:0:0", 2)
    run.wait_for("step", step=2)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        command = path.read_bytes() if path.exists() else b""
        if b"torch.distributed.run" in command and str(run.folder).encode() in command:
            os.kill(int(path.parent.name), signal.SIGKILL)
    assert assert_failed(run) == "torchrun was killed by SIGKILL"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MiB and the fault that fills it; without the right to mount one, a device that is always full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk]).returncode == 0
    )
    yield disk, "fill" if mounted else "dev_full"
    if mounted:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_full_disk_is_told_apart_and_still_written_down(monkeypatch, small_disk):
    disk, fault = small_disk
    run = start(monkeypatch, disk / "run", f"{fault}:0:2", 1, max_restarts=3)
    cause = assert_failed(run)
    assert cause.startswith(f"no space left on the disk of {run.folder} (rank 0 raised OSError at step ")
    assert len(run.manifest["segments"]) == 1, "a relaunch cannot help"


def test_crash_is_continued_from_its_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3"), monkeypatch.setenv("WORLD_SIZE", "4")  # of a job that this run is started in
    run = start(monkeypatch, tmp_path / "run", "raise:0:6:0", 1, max_restarts=1)
    assert run.wait() == "finished"
    crashed, finished = run.manifest["segments"]
    assert "ValueError at step 6" in crashed["cause"] and finished["status"] == "finished"
    steps = [event["step"] for event in run.events(["step"])]
    assert steps == [*range(1, 7), *range(5, 13)], "the second launch repeats what came after the checkpoint at 4"
    assert run.manifest["cause"] is None
    assert_nothing_left(run.folder)


def test_relaunches_end(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "exit:0:6", 1, max_restarts=1)
    assert assert_failed(run) == "rank 0 raised SystemExit at step 6: 0"
    assert [segment["status"] for segment in run.manifest["segments"]] == ["failed", "failed"]


def test_killed_supervisor_leaves_a_died_run_and_no_process(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "endless:0:0", 2)
    run.wait_for("step", step=20)
    assert run.status() == "running"
    run._process.kill()
    cause = assert_failed(run, "died")
    assert "supervisor was killed" in cause and "exit code -9" in cause


def test_stopped_run_finishes_and_can_be_continued(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "endless:0:0", 2)
    run.wait_for("step", step=2)
    with pytest.raises(RunError, match="is (starting|running)"):
        runfolder.create(config(2), run.folder)
    run.stop()
    assert run.wait() == "finished" and run.manifest["end_reason"] == "stopped"
    assert run._process.wait() == 0
    assert_nothing_left(run.folder)
    with pytest.raises(RunError, match=r"checkpoint\.resume"):
        runfolder.create(config(2), run.folder)
    runfolder.create(overlays.apply(config(2), {"checkpoint.resume": True}), run.folder)
    assert runfolder.read_control(run.folder).command is None and len(run.manifest["segments"]) == 1


def test_a_stopped_run_is_left_in_peace_while_it_goes_on_evaluating(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "slow_end:0:0", 1, stall_timeout_s=5.0)  # of 8 s
    run.wait_for("step", step=2)
    run.stop()
    assert run.wait() == "finished" and run.manifest["end_reason"] == "stopped"


def test_a_run_that_is_silent_is_seen_to_live_from_another_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(runfolder, "SUPERVISOR_GRACE_S", 0.0)
    run = start(monkeypatch, tmp_path / "run", "hang:0:3", 1, stall_timeout_s=30.0)
    run.wait_for("step", step=3)
    runfolder.update_manifest(run.folder, host="another")
    hour_ago = time.time() - 3600

    def looks_dead() -> bool:
        for path in (run.folder, *run.folder.glob("heartbeat.rank*")):
            os.utime(path, (hour_ago, hour_ago))
        return runfolder.state(run.folder)[0] == "died"  # unless somebody signed right now

    until(looks_dead)
    until(lambda: runfolder.state(run.folder)[0] in runfolder.ALIVE, "nobody signed")


def test_second_sigterm_ends_a_run_that_cannot_stop(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "hang:0:3", 1)
    run.wait_for("step", step=3)
    run._process.terminate()
    until(lambda: run.status() == "stopping")
    run._process.terminate()
    assert "second signal" in assert_failed(run)


def test_sigterm_is_a_stop(monkeypatch, tmp_path):
    run = start(monkeypatch, tmp_path / "run", "endless:0:0", 1)
    run.wait_for("step", step=2)
    run._process.terminate()
    assert run.wait() == "finished" and run.manifest["end_reason"] == "stopped"
    assert_nothing_left(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", *(pytest.param(how, marks=pytest.mark.long) for how in ("removed", "taken"))])
def test_run_whose_folder_is_gone_ends_and_says_so(monkeypatch, tmp_path, how):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    run = start(monkeypatch, folder, "endless:0:0", 1)
    run.wait_for("step", step=2)
    log = open(folder / runfolder.LOG)
    if how == "taken":  # the same path holds another run by now
        runfolder.update_manifest(folder, supervisor="1:another")
    else:
        folder.rename(moved)
    if how == "removed":
        shutil.rmtree(moved, ignore_errors=True)
    assert run._process.wait(LONGEST_S) == 1
    assert_nothing_left(folder)
    assert f"{folder}: its folder was removed or moved while it trained" in log.read()
    log.close()
    if how == "moved":
        assert handle.Run.attach(moved).status() == "failed"
        assert handle.Run.attach(moved).cause() == "its folder was removed or moved while it trained"


@pytest.mark.parametrize("waits", [pytest.param("run.wait()", marks=pytest.mark.long), "run.wait_for('end')"])
def test_interrupted_script_has_stopped_its_run(monkeypatch, tmp_path, waits):
    folder = tmp_path / "run"
    monkeypatch.setenv("UPSNB_FAULT", "endless:0:0")
    script = attached_script(folder, waits)
    run = until(lambda: (folder / runfolder.MANIFEST).exists() and handle.Run.attach(folder))
    run.wait_for("step", step=2)
    script.send_signal(signal.SIGINT)
    assert script.wait(LONGEST_S) == -signal.SIGINT, "130 in a shell"
    assert run.wait() == "finished" and run.manifest["end_reason"] == "stopped"
    assert_nothing_left(folder)


def attached_script(folder, then):
    """A process that starts a run which ends with it."""
    settings = {"training": {"device": "cpu", "threads_per_rank": 1}}
    code = f"""
import signal, time
from upsnb import overlays
from upsnb.runs import handle
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
run = handle.start(overlays.resolve({settings!r}), {str(folder)!r}, attached=True, worker={str(WORKER)!r})
{then}
"""
    return subprocess.Popen([sys.executable, "-c", code])


def test_attached_run_ends_with_the_process_that_started_it(monkeypatch, tmp_path):
    folder = tmp_path / "run"
    monkeypatch.setenv("UPSNB_FAULT", "endless:0:0")
    kernel = attached_script(folder, "time.sleep(600)")
    try:
        until((folder / runfolder.MANIFEST).exists)
        run = handle.Run.attach(folder)
        run.wait_for("step", step=2)
    finally:
        kernel.kill()
        kernel.wait()
    with pytest.raises(RunFailed, match="the process that started this run is gone"):
        run.wait()
    assert run.status() == "failed"
    assert_nothing_left(folder)

"""Two machines, two ranks each, train one run: as four ranks of one machine would, and when one of them is lost.

Here both are this machine: each has a network namespace of its own, or its loopback is their network.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONGEST_S, until

from upsnb import overlays
from upsnb.errors import ConfigError, RunFailed
from upsnb.runs import handle, nodes, processes, ranks, runfolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")]
SETTINGS = {
    "training.num_gpus": 4, "training.batch_size": 2, "training.ema_decay": 0.9, "training.compile": False,
    "checkpoint.interval": 3,
}  # fmt: skip


@pytest.fixture
def join():
    """`join(folder, *before)`: the command that another machine joins with; they end with the test."""
    started = []

    def start(folder, *before) -> subprocess.Popen:
        command = [*before, sys.executable, "-m", "upsnb", "join", str(folder)]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path.cwd())
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(autouse=True)
def over_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ranks.LOOPBACK)


def losses(run) -> list[float]:
    return [event["loss"] for event in run.events(("step",))]


@pytest.fixture
def network(monkeypatch):
    """What goes before a command to run it on either machine, and where the first one is reached, as /proc/net says.

    Two network namespaces joined by a cable, where this system lets one make them; else loopback.
    """
    names = [f"ups{os.getpid()}{end}" for end in "ab"]
    cable = ("type", "veth", "peer", names[1], "netns", names[1])

    def ip(*words) -> bool:
        return subprocess.run(["ip", *words], stderr=subprocess.DEVNULL).returncode == 0

    def connect(number: int, name: str) -> bool:
        steps = (
            ("address", "add", f"10.99.7.{number}/24", "dev", name),
            ("link", "set", name, "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "dev", name),
        )
        return all(ip("-n", name, *step) for step in steps) and ip("netns", "exec", name, "true")

    try:
        made = (
            shutil.which("ip")
            and all(ip("netns", "add", name) for name in names)
            and ip("link", "add", names[0], "netns", names[0], *cable)
            and all(connect(number, name) for number, name in enumerate(names, 1))
        )
        if made:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # they find the way out themselves
            yield *(("ip", "netns", "exec", name) for name in names), "0107630A"
        else:
            yield (), (), "0100007F"
    finally:
        for name in names if shutil.which("ip") else ():
            ip("netns", "delete", name)


def test_two_machines_train_as_one_does_and_listen_on_their_network_alone(
    tiny_config, train_here, tmp_path, join, network
):
    on_first, on_second, address = network
    config = tiny_config(("darcy",), **SETTINGS, **{"stages.operator.epochs": 100_000, "training.num_nodes": 2})
    folder = runfolder.create(config, tmp_path / "run")
    command = [*on_first, sys.executable, "-m", "upsnb.runs.supervisor", str(folder)]
    first = subprocess.Popen(command, cwd=runfolder.project_root(), stdout=subprocess.DEVNULL)
    other, run = join(folder, *on_second), handle.Run.attach(folder)
    try:
        run.wait_for("step", step=8)
        show = [*on_first, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        table = subprocess.run(show, capture_output=True, text=True).stdout
        rows = [line.split() for line in table.splitlines() if ":" in line]
        listening = {row[1].split(":")[0][-8:] for row in rows if row[3] == "0A"}
    finally:
        run.stop()
        assert run.wait() == "finished" and first.wait() == 0
    if on_first:  # there nothing else listens
        assert listening <= {address, "0100007F"} and address in listening
    alone = tmp_path / "alone"
    one_rank = {"training.num_nodes": 1, "training.num_gpus": 1, "training.batch_size": 8}

    def stop_there(step):
        if step == 7:
            runfolder.write_control(alone, None, runfolder.STOP)

    train_here(overlays.apply(config, one_rank), alone, stop_there)
    expected = losses(handle.Run.attach(alone))
    assert len(expected) == 8 and losses(run)[:8] == pytest.approx(expected, rel=1e-5)
    assert run.events(("start",))[-1]["num_ranks"] == 4 and set(runfolder.read_heartbeats(folder)) == {0, 1, 2, 3}
    said, _ = other.communicate(timeout=LONGEST_S)
    assert other.returncode == 0 and "joined as machine 1 of 2" in said and "finished" in said
    assert not list((folder / nodes.FOLDER).glob("*.json"))


@pytest.mark.long
def test_other_machines_follow_through_a_relaunch(tiny_config, tmp_path, join):
    config = tiny_config(("darcy",), **SETTINGS, **{"training.num_nodes": 2, "stages.operator.epochs": 100_000})
    run = handle.start(config, tmp_path / "run", attached=True)
    other = join(run.folder)
    try:
        flip = run.wait_for("flip", run.update({"training.use_fsdp2": True}))
        assert flip["applied"] and flip["cold"]
        run.wait_for("step", step=flip["step"] + 5)
    finally:
        run.stop()
    assert run.wait() == "finished"
    said, _ = other.communicate(timeout=LONGEST_S)
    assert other.returncode == 0 and "launch 1" in said


@pytest.mark.long
def test_a_machine_that_is_lost_is_named_and_another_takes_its_place(tiny_config, tmp_path, join):
    config = tiny_config(("darcy",), **SETTINGS, **{
        "training.num_nodes": 2, "training.max_restarts": 2, "stages.operator.epochs": 100_000,
    })  # fmt: skip
    run = handle.start(config, tmp_path / "run", attached=True)
    other = join(run.folder)
    run.wait_for("checkpoint")
    os.kill(runfolder.read_heartbeats(run.folder)[2]["pid"], signal.SIGKILL)
    until(lambda: len(run.manifest["segments"]) > 1)
    assert "rank 2 was killed by SIGKILL" in run.manifest["segments"][0]["cause"]
    assert "machine 1" in run.manifest["segments"][0]["cause"]
    step = run.wait_for("checkpoint", step=run.manifest["segments"][1]["step"] + 1)["step"]

    mark = processes.process_identity(other.pid)
    other.kill()
    until(lambda: len(run.manifest["segments"]) > 2)
    until(lambda: not processes.marked(mark))
    join(run.folder)
    try:
        run.wait_for("step", step=step + 5)
    finally:
        run.stop()
    assert run.wait() == "finished"
    assert [segment["restarts"] for segment in run.manifest["segments"]] == [0, 1, 2]


@pytest.mark.long
def test_an_error_on_another_machine_is_the_cause(tiny_config, tmp_path, join):
    config = tiny_config(("darcy",), **SETTINGS, **{"training.num_nodes": 2, "stages.operator.epochs": 100_000})
    run = handle.start(config, tmp_path / "run", attached=True)
    other = join(run.folder)
    run.wait_for("checkpoint")
    os.kill(runfolder.read_heartbeats(run.folder)[3]["pid"], signal.SIGINT)
    with pytest.raises(RunFailed):
        run.wait()
    said, _ = other.communicate(timeout=LONGEST_S)
    assert "rank 3 raised KeyboardInterrupt" in run.cause() and other.returncode == 1 and run.cause() in said


def test_who_cannot_join_is_told_why(tiny_config, tmp_path, join):
    def refused(folder) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "upsnb", "join", str(folder), "--wait", "3"], capture_output=True, text=True
        )
        assert done.returncode == 2
        return done.stderr

    assert "no run has started here" in refused(tmp_path / "nothing")
    config = tiny_config(("darcy",), **{"stages.operator.epochs": 100_000})
    run = handle.start(config, tmp_path / "run", attached=True)
    assert "is a run of one machine" in refused(run.folder)
    run.stop()
    with pytest.raises(ConfigError, match="give each machine as many"):
        overlays.apply(config, {"training.num_gpus": 3, "training.num_nodes": 2})


SRUN = """#!/bin/bash
# Stands for Slurm's: one task on each of two machines, both this one; ends with the worse code.
for node in 0 1; do SLURM_NODEID=$node SLURM_NNODES=2 "$@" & tasks[node]=$!; done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


@pytest.mark.long
def test_a_job_of_slurm_saves_before_its_time_is_over_and_goes_on_in_the_next(tmp_path, monkeypatch):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("UPSNB_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("UPSNB_PYTHON", sys.executable)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    steps = [0]
    for launches in (1, 2):
        command = ["bash", "params/slurm/train.sbatch", "-f", "params/smoke.yaml", "-p", "num_gpus=2"]
        job = subprocess.Popen(
            [*command, "-p", "training.time_limit_s=1e5", "-p", "stages.operator.epochs=100000"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=runfolder.project_root(),
        )  # fmt: skip
        try:
            until(lambda: (tmp_path / "run" / runfolder.MANIFEST).exists())
            run = handle.Run.attach(tmp_path / "run")
            until(lambda run=run, launches=launches: len(run.manifest["segments"]) == launches)
            run.wait_for("step", step=steps[-1] + 5)
            job.send_signal(signal.SIGTERM)
            said, _ = job.communicate(timeout=LONGEST_S)
        finally:
            job.kill()
        assert job.returncode == 0, said
        assert (run.status(), run.manifest["end_reason"]) == ("finished", "stopped")
        steps.append(run.events(("end",))[-1]["step"])
    assert [start["step"] for start in run.events(("start",))] == steps[:2]
    assert run.config.training.num_nodes == 2

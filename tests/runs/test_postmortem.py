"""Verdicts on ended launches and on hung ones, from what they leave in the run folder."""

import json

import pytest
from made_runs import fields

from upsnb.runs import checkpoint_index, postmortem, runfolder
from upsnb.runs.supervisor import StallWatch

ENTRY = """[{index}]:
  time      : 2026-08-01_12:00:{second:02d}
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 1{rank}) {name}
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def log(folder, *entries):
    """torchrun's closing summary, its root cause at the end as torchrun prints it."""
    root, *others = [
        ENTRY.format(index=index, rank=rank, code=code, second=second, name="(SIGNAL)" if code < 0 else "")
        for index, (rank, code, second) in enumerate(entries)
    ]
    text = ["E torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "====", "worker.py FAILED", "----"]
    text += ["Failures:", *(others or ["  <NO_OTHER_FAILURES>"]), "----", "Root Cause (first observed failure):", root]
    (folder / runfolder.LOG).write_text("\n".join([*text, "===="]))


def failure(folder, rank, time, message="boom", **more):
    values = {
        "rank": rank,
        "time": time,
        "step": 4,
        "type": "ValueError",
        "message": message,
        "disk_full": False,
        **more,
    }
    (folder / f"failure.rank{rank}.json").write_text(json.dumps(values))


def cause(folder, exit_code=1, num_ranks=3):
    result = postmortem.examine(folder, exit_code, 0, num_ranks)
    assert result.status == "failed"
    return result.cause


def ended(folder, checkpoint=True, segments=1):
    events = runfolder.EventWriter(folder)
    checkpoint_index.prepare(folder)
    events.write("segment", 0, number=0)
    for step in (5, 9):
        written = checkpoint_index.temporary(folder, step)
        written.mkdir()
        (written / "state").write_text("state")
        path = checkpoint_index.commit(folder, step, {"state": checkpoint_index.digest(written / "state")})
    if not checkpoint:
        (path / "state").write_text("sta")
    events.write("end", 9, **fields("end", reason="epochs"))
    for number in range(1, segments):
        events.write("segment", 9, number=number)


def test_finished_needs_end_event_and_checkpoint_and_no_more(tmp_path):
    assert cause(tmp_path, 1) == "torchrun ended with exit code 1, see worker.log"
    ended(tmp_path)
    assert postmortem.examine(tmp_path, 0, 0, 3) == postmortem.Ending("finished", None, "epochs", 0)
    log(tmp_path, (2, -6, 0))
    late = postmortem.Ending("finished", None, "epochs", 1)
    assert postmortem.examine(tmp_path, 1, 0, 3) == late, "it came to its end"


def test_ranks_that_saved_for_a_relaunch_are_launched_again_however_their_processes_ended(tmp_path):
    ended(tmp_path, segments=2)
    runfolder.EventWriter(tmp_path).write("relaunch", 9, **fields("relaunch", revision=3))
    found = postmortem.examine(tmp_path, 1, 0, 3)
    assert (found.status, found.crashed, found.relaunch["revision"]) == ("relaunching", False, 3)


def test_exit_code_0_without_an_end_event_is_no_success(tmp_path):
    assert cause(tmp_path, 0) == "all ranks ended with exit code 0 but wrote no end event"


def test_end_event_of_an_earlier_segment_does_not_count(tmp_path):
    ended(tmp_path, segments=2)
    assert cause(tmp_path, 0) == "all ranks ended with exit code 0 but wrote no end event"


def test_exit_code_0_without_its_checkpoint_is_no_success(tmp_path):
    ended(tmp_path, checkpoint=False)
    assert cause(tmp_path, 0) == "all ranks ended with exit code 0 but left no checkpoint"
    assert checkpoint_index.is_there(tmp_path), "of an earlier step, to continue from"


def test_earliest_failure_is_the_cause(tmp_path):
    failure(tmp_path, 0, time=20.0, message="Connection closed by peer")
    failure(tmp_path, 1, time=19.9, message="two\n  lines " + "x" * 1000)
    log(tmp_path, (0, 1, 0), (1, 1, 0))
    assert cause(tmp_path).startswith("rank 1 raised ValueError at step 4: two lines xxx")
    assert len(cause(tmp_path)) < 400


def test_killed_rank_comes_before_the_failures_it_causes(tmp_path):
    failure(tmp_path, 0, time=20.0, message="Connection closed by peer")
    log(tmp_path, (0, 1, 0), (1, -9, 0))
    assert cause(tmp_path) == "rank 1 was killed by SIGKILL (out of memory?) before its first step"


def test_rank_killed_by_torchrun_itself_is_no_cause(tmp_path):
    failure(tmp_path, 0, time=20.0)
    log(tmp_path, (0, 1, 0), (1, -9, 30))
    assert cause(tmp_path) == "rank 0 raised ValueError at step 4: boom"


def test_abort_is_the_cause_only_where_no_rank_raised(tmp_path):
    log(tmp_path, (0, -6, 0), (1, -15, 0))
    assert cause(tmp_path) == "rank 0 was killed by SIGABRT before its first step"
    failure(tmp_path, 1, time=20.0)
    assert cause(tmp_path) == "rank 1 raised ValueError at step 4: boom"


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (-9, "rank 0 was killed by SIGKILL (out of memory?) before its first step"),
        (-15, "rank 0 was killed by SIGTERM before its first step"),
        (70, "rank 0 ended with exit code 70 before its first step"),
    ],
)
def test_a_single_ranks_own_exit_code_is_its_cause(tmp_path, exit_code, expected):
    log(tmp_path, (2, -11, 0))  # of a launch with several
    assert cause(tmp_path, exit_code, num_ranks=1) == expected


def test_what_ranks_wrote_down_once_torchrun_was_killed_is_no_cause(tmp_path):
    failure(tmp_path, 1, time=20.0)
    assert cause(tmp_path, -9) == "torchrun was killed by SIGKILL"


def test_what_a_single_rank_wrote_down_is_its_cause(tmp_path):
    failure(tmp_path, 0, time=20.0)
    assert cause(tmp_path, 1, num_ranks=1) == "rank 0 raised ValueError at step 4: boom"


def test_summary_of_an_earlier_launch_is_not_read(tmp_path):
    log(tmp_path, (0, -9, 0))
    log_end = (tmp_path / runfolder.LOG).stat().st_size
    assert postmortem.examine(tmp_path, 1, log_end, 3).cause.startswith("torchrun ended")


def test_full_disk_wins_and_is_no_crash(tmp_path):
    failure(tmp_path, 0, time=20.0, message="Connection closed by peer")
    failure(tmp_path, 1, time=20.1, message="[Errno 28] No space left on device", type="OSError", disk_full=True)
    assert cause(tmp_path).startswith(f"no space left on the disk of {tmp_path} (rank 1 raised OSError at step 4: ")
    assert not postmortem.examine(tmp_path, 1, 0, 3).crashed


# -- hung ranks ----------------------------------------------------------------------------------------------------


def beat(step, beats=None, first=0, state="beating"):
    return {
        "pid": 1,
        "step": step,
        "beats": step if beats is None else beats,
        "first": first,
        "state": state,
        "time": 0.0,
    }


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr("upsnb.runs.supervisor.time.monotonic", lambda: 0.0)
    return StallWatch(2, 10.0)


def test_rank_that_stays_behind_is_named(watch):
    beats = {0: beat(7, beats=15), 1: beat(7, beats=14)}
    assert watch.stalled(beats, 1.0) is None and watch.stalled(beats, 10.0) is None
    assert watch.stalled(beats, 11.5).startswith("rank 1 hung at step 7: no heartbeat for 1")


def test_equal_ranks_are_all_named(watch):
    watch.stalled({0: beat(7), 1: beat(7)}, 1.0)
    assert watch.stalled({0: beat(7), 1: beat(7)}, 12.0).startswith("ranks 0, 1 hung at step 7")


def test_first_step_may_take_longer(watch):
    resumed = {0: beat(500, beats=1, first=500), 1: beat(500, beats=1, first=500)}
    assert watch.stalled(resumed, 1.0) is None and watch.stalled(resumed, 1000.0) is None
    assert "hung at step 500" in watch.stalled(resumed, 1.0 + runfolder.STARTUP_ALLOWANCE_S + 1.0)
    assert "hung before their first step" in StallWatch(2, 10.0).stalled({}, runfolder.STARTUP_ALLOWANCE_S + 1.0)


def test_a_step_that_compiles_may_take_as_long_as_the_first(watch):
    compiles = {0: beat(7, state="compiling"), 1: beat(7, state="compiling")}
    assert watch.stalled(compiles, 1.0) is None and watch.stalled(compiles, 1000.0) is None
    assert watch.stalled({0: beat(7), 1: beat(7)}, 1001.0) is None
    assert "hung at step 7" in watch.stalled({0: beat(7), 1: beat(7)}, 1012.0)


def test_rank_that_is_done_may_be_silent_while_others_work(watch):
    for now in range(1, 60):
        assert watch.stalled({0: beat(now), 1: beat(7, state="done")}, float(now)) is None
    assert watch.stalled({0: beat(59, state="done"), 1: beat(7, state="done")}, 60.0) is None
    assert "hung" in watch.stalled({0: beat(59, state="done"), 1: beat(7, state="done")}, 71.0)

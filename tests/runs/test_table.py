"""The table of all runs: complete, quick, and no folder can spoil it."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest
from made_runs import fields, make_event

from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.report import results
from upsnb.runs import events, handle, processes, runfolder
from upsnb.runs.table import table


def make(folder, status="finished", created=1.8e9, steps=40, flips=(), end=True, **manifest):
    """A run of two datasets at 100 ms a step, 16 samples each."""
    runfolder.create(RunConfig(), folder)
    written = runfolder.EventWriter(folder)
    written.write("segment", 0, number=0, num_ranks=2)
    written.write("start", 0, **fields("start", num_ranks=2, phases_on=["bf16"]))
    for number in range(1, steps + 1):
        written.write("step", number, **fields("step", time_s=0.1 * number))
        if number in flips:
            told = fields("flip", phases_on=["compile", "bf16"], message='a "kind": "flip" text')
            written.write("flip", number, **told)
    written.write("eval", steps, **fields("eval", val_nrmse={"advection": 0.5, "darcy": 0.25}))
    if end:
        written.write("end", steps, **fields("end", train_time_s=0.1 * steps, peak_memory_gib=[0.5]))
        evaluation = {"advection": {"nrmse_mean": 0.1, "rollout_nrmse_mean": 0.2}, "darcy": {"nrmse_mean": 0.05}}
        summary = {"split": "test", "datasets": {name: {"test": values} for name, values in evaluation.items()}}
        runfolder.write_json(folder / "evaluation.json", summary)
    written.close()
    segments = [{"number": 0, "status": status}]
    runfolder.update_manifest(folder, status=status, created=created, segments=segments, **manifest)
    return handle.Run.attach(folder)


def only(root) -> pd.Series:
    (row,) = [row for _, row in table(root).iterrows()]
    return row


@pytest.mark.parametrize("reported", [True, False])
def test_row_says_the_same_with_and_without_a_report(tmp_path, reported):
    run = make(tmp_path / "a", flips=[20])
    if reported:
        results.train_report(run)
    row = only(tmp_path)
    assert (row["run"], row.status, row.device, row.phases_on, row.split) == (
        *("a", "finished", "cpu", "compile, bf16", "test"),
    )
    assert (row.num_ranks, row.steps, row.train_time_s) == (2, 40, pytest.approx(4.0))
    assert (row.nrmse_advection, row.nrmse_darcy) == (0.2, 0.05), "rolled out where there is a time"
    assert row.samples_per_s == row.ci95_low == row.ci95_high == pytest.approx(160)
    assert row.created == datetime.fromtimestamp(1.8e9)
    assert pd.isna(row.cause)


def test_newest_comes_first_and_datasets_of_all_runs_have_columns(tmp_path):
    for created, name in ((3e8, "b"), (1e8, "a"), (2e8, "c")):
        make(tmp_path / name, created=created)
    with open(events.events_path(make(tmp_path / "d", created=4e8, end=False).folder), "a") as file:
        file.write(json.dumps({**make_event("eval", 41, val_nrmse={"other": 0.75}), "time": 9e9}) + "\n")
    frame = table(tmp_path)
    assert list(frame["run"]) == ["d", "b", "c", "a"]
    assert frame.nrmse_other.tolist()[0] == 0.75 and frame.nrmse_other.isna().sum() == 3
    assert frame.nrmse_darcy.isna().tolist() == [True, False, False, False]


def test_live_run_is_followed_and_an_old_report_is_not_believed(tmp_path):
    run = make(tmp_path / "a")
    results.train_report(run)
    runfolder.update_manifest(
        run.folder,
        status="running",
        segments=[{"number": 0}, {"number": 1}],
        supervisor=processes.process_identity(os.getpid()),
    )
    written = runfolder.EventWriter(run.folder)
    written.write("segment", 40, number=1, num_ranks=4)
    written.write("start", 40, **fields("start", num_ranks=4, phases_on=[]))
    written.write("step", 41, **fields("step", time_s=4.1, samples_per_s=1.0, steady=False))
    row = only(tmp_path)
    assert (row.status, row.num_ranks, row.steps, row.phases_on) == ("running", 4, 41, "")
    assert (row.split, row.nrmse_darcy) == ("validation", 0.25), "the first launch's test errors are not this one's"
    assert row.samples_per_s == pytest.approx(160) and row.train_time_s == 4.1


def test_failed_and_killed_runs_give_their_cause(tmp_path):
    make(tmp_path / "failed", status="failed", created=2e8, cause="rank 1 raised MemoryError", end=False)
    make(tmp_path / "killed", status="running", created=1e8, supervisor="1:never", end=False)
    frame = table(tmp_path)
    assert list(frame.status) == ["failed", "died"]
    assert frame.cause[0] == "rank 1 raised MemoryError" and "its supervisor was killed" in frame.cause[1]
    assert list(frame.steps) == [40, 40]


def test_run_without_a_step_is_a_row(tmp_path):
    runfolder.create(RunConfig(), tmp_path / "new")
    row = only(tmp_path)
    assert (row.status, row.steps) == ("starting", 0)
    assert row[["train_time_s", "num_ranks", "device", "phases_on", "split", "samples_per_s"]].isna().all()


REPORTED = {
    "status": "finished", "num_launches": 1, "train_time_s": 1.0, "num_ranks": 1, "device": "cpu", "steps": 3,
    "phases_on": [], "samples_per_s": {"median": 1.0, "ci95": [1.0, 1.0]}, "datasets": {},
}  # fmt: skip
DAMAGE = {
    "not a run": lambda folder: (folder / "manifest.json").unlink(),
    "cut manifest": lambda folder: (folder / "manifest.json").write_text('{"format": 1, "sta'),
    "list for a manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest of another version": lambda folder: (folder / "manifest.json").write_text('{"format": 99}'),
    "manifest without entries": lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
    "manifest is a folder": lambda folder: [(folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()],
    "binary manifest": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "report of other types": lambda folder: (folder / "report.json").write_text(json.dumps({**REPORTED, "steps": "x"})),
    "report with too much": lambda folder: (folder / "report.json").write_text(
        json.dumps({**REPORTED, "steps": 10**30})
    ),
    "evaluation of other types": lambda folder: (folder / "evaluation.json").write_text(
        '{"datasets": {"darcy": {"test": {"nrmse_mean": [1]}}}}'
    ),
    "report of another shape": lambda folder: (folder / "report.json").write_text('{"status": "finished"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_a_row_and_hides_no_other(tmp_path, damage):
    make(tmp_path / "good", created=1e8)
    DAMAGE[damage](make(tmp_path / "bad").folder)
    frame = table(tmp_path).set_index("run")
    assert frame.status["bad"] == "unreadable" and len(frame.cause["bad"]) > 5
    assert frame.status["good"] == "finished" and frame.nrmse_darcy["good"] == 0.05


def test_a_folder_that_nobody_may_read_and_one_that_vanishes_are_rows(tmp_path, monkeypatch):
    make(tmp_path / "good", created=1e8)
    for name in ("closed", "vanishes", os.fsdecode(b"odd-\xff")):
        (tmp_path / name).mkdir()
    exists = Path.exists

    def watched(path):
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied")
        if path.parent.name == "vanishes" and path.parent.is_dir():
            path.parent.rmdir()
        return exists(path)

    monkeypatch.setattr(Path, "exists", watched)
    frame = table(tmp_path).set_index("run")
    assert set(frame.index) == {"good", "closed", "vanishes", "odd-\\xff"}
    assert list(frame.status[["good", "closed", "vanishes"]]) == ["finished", "unreadable", "unreadable"]


def test_damaged_files_beside_a_good_manifest_cost_only_what_they_held(tmp_path):
    folder = make(tmp_path / "a").folder
    (folder / "report.json").write_text('{"format": 1,')
    path = events.events_path(folder)
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "time": \x00\x00\n{"kind": "step", "ti')
    row = only(tmp_path)
    assert (row.status, row.steps, row.nrmse_darcy) == ("finished", 40, 0.05)
    assert row.cause.startswith("report.json: not JSON")


def test_foreign_folder_is_named_and_hidden_folders_and_files_are_not(tmp_path):
    for name in ("holiday", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("no folder at all")
    row = only(tmp_path)
    assert (row["run"], row.status) == ("holiday", "unreadable") and "not a run folder" in row.cause


def test_runs_one_folder_deeper_are_found(tmp_path):
    make(tmp_path / "sweep" / "a")
    make(tmp_path / "sweep" / "b")
    assert sorted(table(tmp_path)["run"]) == ["sweep/a", "sweep/b"]


def test_runs_of_a_comparison_are_found_and_reports_are_no_runs(tmp_path):
    make(tmp_path / "compare-1" / "runs" / "baseline-seed42")
    for folder in (tmp_path / "compare-1", tmp_path / "memory-1", tmp_path / "reference" / "memory"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text("{}")
    assert list(table(tmp_path)["run"]) == ["compare-1/runs/baseline-seed42"]


def test_empty_root_is_an_empty_table_and_no_root_an_error(tmp_path):
    frame = table(tmp_path)
    assert len(frame) == 0 and {"run", "status", "created", "samples_per_s", "cause"} <= set(frame)
    with pytest.raises(RunError, match="no such folder"):
        table(tmp_path / "nowhere")


def test_two_hundred_runs_without_reports_are_listed_without_torch(tmp_path):
    """One of the runs wrote 40 MB of events."""
    run = make(tmp_path / "run-0", steps=400)
    long = make(tmp_path / "long", steps=40, end=False)
    line = json.dumps({**make_event("step", 1), "time": 1.0, "padding": "x" * 100}) + "\n"
    path = events.events_path(long.folder)
    path.write_text(line * 100_000 + path.read_text())
    for number in range(1, 200):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        for name in ("manifest.json", "events.jsonl", "evaluation.json", "config.yaml"):
            os.link(run.folder / name, folder / name)
    code = "import sys; from upsnb.runs.table import table;print(len(table(sys.argv[1])), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.stdout.split() == ["201", "False"], done.stderr

"""Exports: what another tool is told of a run, whatever state it is in, and that the run stays as it was."""

import csv
import threading
import time

import pandas as pd
import pytest
from made_runs import END, START, finished, make_event, of, step, write_run

from upsnb.__main__ import main
from upsnb.errors import ConfigError, RunError
from upsnb.runs import runfolder
from upsnb.widgets import export

SEGMENT = {"kind": "segment", "step": 0, "number": 0}
BEGIN = {"kind": "start", "step": 0, **START}


def told(folder, kind="scalars"):
    with open(folder / f"{kind}.csv", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_number_and_every_marker_is_there_and_the_run_as_it_was(tmp_path):
    run = finished(tmp_path / "run")
    before = contents(run.folder)
    folder = export.export(run, "csv")
    assert folder == run.folder / "exports/csv" and contents(run.folder) == before
    rows = pd.read_csv(folder / "scalars.csv").pivot(columns="name", index="step", values="value")
    steps = run.events(("step",))
    assert rows["loss"].dropna().tolist() == [event["loss"] for event in steps]
    assert rows["loss/relative"].dropna().tolist() == [event["losses"]["relative"] for event in steps]
    assert rows["samples_per_s"].dropna().tolist() == [event["samples_per_s"] for event in steps]
    assert rows["validation_nrmse/waves"].dropna().to_dict() == {40: 0.3}
    assert "validation_nrmse/darcy" not in rows, "it was not finite"
    assert [row["text"] for row in told(folder, "markers")][-1].startswith("ended by time")


def test_changes_guards_and_their_effects_are_told_in_words(tmp_path):
    guard = {"guard": "nonfinite", "action": "skipped", "reason": "the loss is not finite"}
    events = [SEGMENT, BEGIN, step(1), make_event("flip", 1, changes={"training.compile": True})]
    events += [make_event("flip_effect", 2), {"kind": "guard", "step": 2, **guard}]
    events += [make_event("flip", 3, revision=2, applied=False, reason="out of memory")]
    said = [row["text"] for row in told(export.export(write_run(tmp_path / "run", events), "csv"), "markers")]
    assert said[1:] == [
        "step 1: change 1: training.compile True",
        "step 2: change 1: 1.310 [1.270, 1.350] times as fast",
        "step 2: guard nonfinite, skipped: the loss is not finite",
        "step 3: change 2 was refused: out of memory",
    ]


def test_steps_that_a_launch_does_again_are_told_apart(tmp_path):
    events = [SEGMENT, BEGIN, step(1), step(2), step(3), {**SEGMENT, "number": 1, "step": 2}, {**BEGIN, "step": 1}]
    rows = told(export.export(write_run(tmp_path / "run", [*events, step(2, ms=50.0)]), "csv"))
    times = [(row["launch"], row["step"], float(row["value"])) for row in rows if row["name"] == "step_time_ms"]
    assert times == [("0", "1", 100.0), ("0", "2", 100.0), ("0", "3", 100.0), ("1", "2", 50.0)]


def test_an_export_that_is_made_again_replaces_its_own_and_nothing_else(tmp_path, capsys):
    run = write_run(tmp_path / "run", [SEGMENT, BEGIN, step(1)], status="running")
    folder = tmp_path / "there"
    assert main(["export", str(run.folder), "--to", "csv", "-o", str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder)] and len(told(folder)) == 6
    writer = runfolder.EventWriter(run.folder)
    writer.write(**step(2))
    writer.close()
    export.export(run, "csv", folder)
    assert {row["step"] for row in told(folder)} == {"1", "2"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="holds something that was not made here -> name a new folder"):
        export.export(run, "csv", tmp_path / "mine")
    assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"


def test_a_run_is_followed_to_its_end(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [SEGMENT, BEGIN], status="running")
    writer = runfolder.EventWriter(run.folder)

    def train():
        for number in range(1, 50):
            time.sleep(0.01)
            writer.write(**step(number))
        writer.write("end", 49, **END)
        writer.close()

    trainer = threading.Thread(target=train)
    trainer.start()
    ended = "failed", "its machine burnt down"
    monkeypatch.setattr(runfolder, "state", lambda *_: ("running", None) if trainer.is_alive() else ended)
    folder = export.export(run, "csv", follow=True)
    assert [row["step"] for row in told(folder) if row["name"] == "loss"] == [str(number) for number in range(1, 50)]


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        (("notes",), ConfigError, "--to notes: is none of csv, tensorboard, wandb, mlflow"),
        (("tensorboard",), ConfigError, "tensorboard is not installed -> .*-e '.\\[tensorboard\\]'"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path, monkeypatch, arguments, error, said):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    run = finished(tmp_path / "run")
    with pytest.raises(error, match=said):
        export.export(run, *arguments)
    assert not (run.folder / export.FOLDER).exists()


def test_a_run_without_events_and_a_folder_that_is_a_file_are_refused(tmp_path):
    with pytest.raises(RunError, match="has no events yet"):
        export.export(write_run(tmp_path / "new", []), "csv")
    run = finished(tmp_path / "run")
    (tmp_path / "file").write_text("here")
    with pytest.raises(RunError, match="cannot be written .* -> name another folder"):
        export.export(run, "csv", tmp_path / "file/inside")
    assert of(run.events(), "end")


def test_curves_of_another_workload_go_by_the_names_of_its_unit_and_error(tmp_path):
    def names(said):
        run = write_run(tmp_path / said["unit"], [SEGMENT, {**BEGIN, **said}, step(1), make_event("eval", 1)])
        return {row["name"] for row in told(export.export(run, "csv"))} | {*export._reached(run)}

    found = names({"unit": "tokens", "metric": "perplexity"})
    assert {"tokens_per_s", "validation_perplexity/waves", "perplexity/waves"} <= found
    assert not [name for name in found if "nrmse" in name or "samples" in name]
    assert "validation_1_-_spearman/waves" in names({"unit": "pairs", "metric": "1 - Spearman"}), "no tool takes spaces"

"""Exports read back by the tools that they are for, in the environment that `make test` builds for them."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import END, START, make_event, step, write_run

from upsnb.runs.handle import Run
from upsnb.widgets import export

for package in ("tensorboard", "wandb", "mlflow"):
    pytest.importorskip(package, reason=f"{package} is not here -> make test runs this in .extras")

RELATIVE = [(step, 1 / step) for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose third step was done again by a second launch, and that was changed meanwhile."""
    begin = {"kind": "start", "step": 0, **START}
    events = [{"kind": "segment", "step": 0, "number": 0}, begin, step(1), step(2)]
    events += [make_event("flip", 2, changes={"training.compile": True}), step(3, losses={"relative": 9.0})]
    events += [{"kind": "segment", "step": 2, "number": 1}, {**begin, "step": 2}, step(3)]
    events += [make_event("eval", 3, val_nrmse={"waves": 0.3, "darcy": None}), {"kind": "end", "step": 3, **END}]
    return write_run(tmp_path_factory.mktemp("exported") / "run", events)


def test_tensorboard_shows_curves_markers_and_each_step_once(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(export.export(run, "tensorboard"))).Reload()
    relative = [(point.step, point.value) for point in shown.Scalars("loss/relative")]
    assert relative == [(step, pytest.approx(value)) for step, value in RELATIVE]
    assert [point.wall_time for point in shown.Scalars("loss")] == [
        event["time"] for event in [*run.events(("step",))[:2], run.events(("step",))[-1]]
    ]
    assert [point.value for point in shown.Scalars("validation_nrmse/waves")] == [pytest.approx(0.3)]
    (flip,) = shown.Tensors("events/flip/text_summary")
    assert flip.step == 2 and b"training.compile True" in flip.tensor_proto.string_val[0]


def history(path):
    """Rows of a run's offline file: protocol buffers in the blocks of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        if kind in (1, 4):  # a record that is whole, or its last part
            items = Record.FromString(whole).history.item
            yield {"/".join(item.nested_key) or item.key: item.value_json for item in items}
            whole = b""
        at += 7 + size
        if -at % 32768 < 7:  # no room for another header in this block
            at += -at % 32768


def test_weights_and_biases_keeps_it_offline_under_one_id(run, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    ids = set()
    for _ in range(2):
        # in a process of its own, as the command is: the last records are on disk once that has ended
        command = [sys.executable, "-m", "upsnb", "export", str(run.folder), "--to", "wandb"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (path,) = Path(done.stdout.strip()).glob("wandb/offline-run-*/run-*.wandb")
        ids.add(path.stem)
        told = list(history(path))
        steps = [(int(row["step"]), float(row["loss/relative"])) for row in told if "loss/relative" in row]
        assert steps == [*RELATIVE[:2], (3, 9.0), RELATIVE[2]], "it goes by a step of its own, which may go back"
        assert any("training.compile True" in row.get("events/flip", "") for row in told)
    assert len(ids) == 1


def test_mlflow_finds_the_run_that_it_has(run, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'all.db'}")
    export.export(run, "mlflow")
    export.export(Run(run.folder), "mlflow", tmp_path / "again")
    client = mlflow.MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs([client.get_experiment_by_name(export.PROJECT).experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["training.compile"] == "False"
    history = sorted({(point.step, point.value) for point in client.get_metric_history(found.info.run_id, "loss")})
    assert history == RELATIVE
    assert found.data.metrics["validation_nrmse/waves"] == 0.3


def test_mlflow_without_a_server_stays_in_the_exports_folder(run, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = export.export(run, "mlflow")
    assert not list(Path.cwd().iterdir())
    (text,) = folder.glob("artifacts/*/artifacts/events.txt")
    assert "training.compile True" in text.read_text()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    assert len(client.search_runs([client.get_experiment_by_name(export.PROJECT).experiment_id])) == 1

"""A run in other tools: TensorBoard, Weights & Biases, MLflow, or CSV files.

An export reads what a run wrote and changes nothing of it, so it works while the run trains and after it has ended.
Made again, it begins with the first event and replaces what it had written; the tools that number runs find it under
the same id.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.errors import ConfigError, RunError, RunFailed, UpsError
from upsnb.rules import did_you_mean
from upsnb.runs import table
from upsnb.runs.events import FIELDS, naming
from upsnb.runs.files import own_folder
from upsnb.runs.handle import Run
from upsnb.runs.recovery import in_one_line
from upsnb.runs.runfolder import ALIVE
from upsnb.widgets.progress import Progress

FOLDER = "exports"  # in the run's folder
PROJECT = "upsnb"  # what the tools file runs under
MEASURED = ("loss", "learning_rate", "samples_per_s", "step_time_ms", "data_wait_ms", "peak_memory_gib")  # of a step
MARKED = ("start", "flip", "relaunch", "guard", "paused", "resumed", "warning", "end")  # told in words
BATCH = 500  # metrics in a request of MLflow, which takes up to 1000


class Sink(ABC):
    """Where an export goes; steps come in their order, but for a launch that goes back to a checkpoint."""

    @abstractmethod
    def __init__(self, run: Run, run_id: str, folder: Path):
        """
        Args:
            run_id: always the same for a run.
            folder: its own, empty.
        """

    @abstractmethod
    def scalars(self, event: dict, values: dict[str, float]) -> None:
        """Numbers of an event, by name."""

    @abstractmethod
    def text(self, event: dict, said: str) -> None:
        """What happened, in a line."""

    @abstractmethod
    def back_to(self, step: int) -> None:
        """What was told of later steps is done again from here."""

    @abstractmethod
    def close(self, status: str, reached: dict[str, float]) -> None:
        """The last call.

        Args:
            status: of the run.
            reached: what its row in `runs.table` says, numbers alone.
        """


class Csv(Sink):
    """`scalars.csv`, a row for each number, and `markers.csv`, a row for whatever happened."""

    def __init__(self, run: Run, run_id: str, folder: Path):
        self.files = [open(folder / f"{kind}.csv", "w", newline="") for kind in ("scalars", "markers")]
        self.rows, self.marks = map(csv.writer, self.files)
        self.rows.writerow(("launch", "stage", "step", "time", "name", "value"))
        self.marks.writerow(("launch", "stage", "step", "time", "text"))
        self.launch = 0

    def scalars(self, event: dict, values: dict[str, float]) -> None:
        place = self.launch, event["stage"], event["step"], event["time"]
        self.rows.writerows((*place, name, value) for name, value in values.items())

    def text(self, event: dict, said: str) -> None:
        self.marks.writerow((self.launch, event["stage"], event["step"], event["time"], said))
        for file in self.files:
            file.flush()

    def back_to(self, step: int) -> None:
        self.launch += 1

    def close(self, status: str, reached: dict[str, float]) -> None:
        for file in self.files:
            file.close()


class TensorBoard(Sink):
    """An event file: curves, and markers under Text; steps that were done again replace what they had shown."""

    def __init__(self, run: Run, run_id: str, folder: Path):
        self.folder = str(folder)
        self.writer = self._open()
        self.writer.add_text("config", f"```yaml\n{configs.dump(run.current_config)}\n```")

    def _open(self, purge_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.folder, purge_step=purge_step)

    def scalars(self, event: dict, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, event["step"], event["time"])

    def text(self, event: dict, said: str) -> None:
        self.writer.add_text(f"events/{event['kind']}", said, event["step"], event["time"])
        self.writer.flush()

    def back_to(self, step: int) -> None:
        self.writer.close()
        self.writer = self._open(step + 1)

    def close(self, status: str, reached: dict[str, float]) -> None:
        self.writer.add_text("reached", "\n".join(f"- {name}: {value:.6g}" for name, value in reached.items()))
        self.writer.close()


class WandB(Sink):
    """Offline unless WANDB_MODE says otherwise; `wandb sync` sends it later, into the run of the same id."""

    def __init__(self, run: Run, run_id: str, folder: Path):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=run.folder.name,
            dir=folder,
            config=run.current_config.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # its own step may not go back, a resumed run's may

    def scalars(self, event: dict, values: dict[str, float]) -> None:
        self.run.log({"step": event["step"], **values})

    def text(self, event: dict, said: str) -> None:
        self.run.log({"step": event["step"], f"events/{event['kind']}": said})

    def back_to(self, step: int) -> None:
        self.run.log({"step": step, "events/back_to": f"step {step}"})

    def close(self, status: str, reached: dict[str, float]) -> None:
        self.run.summary.update({"status": status, **reached})
        self.run.finish(exit_code=int(status not in ("finished", *ALIVE)))


class MLflow(Sink):
    """Where MLFLOW_TRACKING_URI says, else in a database of its own; markers are the artifact events.txt."""

    def __init__(self, run: Run, run_id: str, folder: Path):
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        own = folder.absolute()  # MLflow would put files where the user stands
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        place = None if uri else (own / "artifacts").as_uri()
        uri = uri or f"sqlite:///{own / 'mlflow.db'}"
        self.client, self.entities = mlflow.MlflowClient(tracking_uri=uri), mlflow.entities
        experiment = self.client.get_experiment_by_name(PROJECT)
        where = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT, place)
        known = self.client.search_runs([where], f"tags.upsnb_id = '{run_id}'")
        started = known[0] if known else self.client.create_run(where, None, {"upsnb_id": run_id}, run.folder.name)
        self.number, self.waiting, self.told = started.info.run_id, [], []
        settings = {} if known else overlays.flatten(run.config.model_dump(mode="json"))  # it lets nobody change them
        params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in settings.items()]
        for at in range(0, len(params), 100):
            self.client.log_batch(self.number, params=params[at : at + 100])

    def scalars(self, event: dict, values: dict[str, float]) -> None:
        at = int(1e3 * event["time"])
        self.waiting += [self.entities.Metric(name, value, at, event["step"]) for name, value in values.items()]
        if len(self.waiting) >= BATCH:
            self._send()

    def text(self, event: dict, said: str) -> None:
        self.told.append(said)
        self._send()

    def back_to(self, step: int) -> None:
        self.told.append(f"back to step {step}")

    def _send(self) -> None:
        self.client.log_batch(self.number, metrics=self.waiting)
        self.waiting = []
        if self.told:
            self.client.log_text(self.number, "\n".join(self.told), "events.txt")

    def close(self, status: str, reached: dict[str, float]) -> None:
        self._send()
        for name, value in reached.items():
            self.client.log_metric(self.number, f"reached/{name}", value)
        ended = {"finished": "FINISHED", **dict.fromkeys(ALIVE, "RUNNING")}
        self.client.set_terminated(self.number, ended.get(status, "FAILED"))


CSV = "csv"  # needs no package; every other one has the name of its own
SINKS: dict[str, type[Sink]] = {CSV: Csv, "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def export(run: Run, to: str, folder: Path | None = None, follow: bool = False) -> Path:
    """Write a run's events for another tool; returns the folder that they are in.

    Args:
        to: one of `SINKS`.
        folder: replaced where an export made it; empty: `exports/<to>` in the run's folder.
        follow: go on until the run has ended.
    Raises:
        ConfigError: there is no such tool, or it is not installed.
        RunError: the run has said nothing yet, or the folder holds something else or cannot be written.
    """
    if to not in SINKS:
        raise ConfigError([f"--to {to}: is none of {', '.join(SINKS)} -> {did_you_mean(to, SINKS)}"], "the export")
    if to != CSV and find_spec(to) is None:
        remedy = f".venv/bin/pip install -c constraints.txt -e '.[{to}]'"
        raise ConfigError([f"--to {to}: {to} is not installed -> {remedy}"], "the export")
    first = run.events()[:1]
    if not first:
        raise RunError(f"{run.folder}: has no events yet -> wait for its first one")
    folder = folder or run.folder / FOLDER / to
    try:
        own_folder(folder)
        sink = SINKS[to](run, _run_id(first[0]), folder)
        copy = _Copy(sink)
        try:
            if follow:
                with contextlib.suppress(RunFailed):  # it is told like any other end
                    run.wait(on_event=copy)
            else:
                for event in run.events():
                    copy(event)
        finally:  # after Ctrl-C too: what is there by then is to be seen
            sink.close(run.status(), _reached(run))
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror or error}) -> name another folder with -o"
        ) from None
    except Exception as error:
        if to == CSV or isinstance(error, UpsError):
            raise
        found = in_one_line(error)
        raise RunError(f"{to} refused it ({found}) -> look at its settings in the environment") from error
    return folder


class _Copy:
    """Events, one by one, into a sink."""

    def __init__(self, sink: Sink):
        self.sink, self.step, self.naming = sink, 0, naming({})

    def __call__(self, event: dict) -> None:
        if event["kind"] == "start" and event["step"] < self.step:
            self.sink.back_to(event["step"])
        if event["kind"] == "start":
            self.naming = naming(event)
        if event["kind"] == "step":
            self.step = event["step"]
        if values := {name: value for name, value in numbers(event, **self.naming).items() if value is not None}:
            self.sink.scalars(event, values)
        for said in words(event):
            self.sink.text(event, said)


def numbers(event: dict, unit: str, metric: str) -> dict[str, float | None]:
    """What an event measured, by the name that curves go under; None where it was not finite.

    Args:
        unit: what throughput counts.
        metric: what a validation measured.
    """
    if event["kind"] == "step":
        terms = {f"loss/{term}": value for term, value in event["losses"].items()}
        return {**{_own(name, unit): event.get(name) for name in MEASURED}, **terms}
    if event["kind"] == "eval":
        return {f"{event['split']}_{_key(metric)}/{name}": value for name, value in event["val_nrmse"].items()}
    if event["kind"] == "telemetry":
        return {f"{name}/{rank}": value for name in FIELDS["telemetry"] for rank, value in enumerate(event[name])}
    return {}


def _key(name: str) -> str:
    """A unit or a metric as part of a curve's name: `nrmse`, `attribute_error`; no tool takes all signs."""
    return re.sub(r"[^\w.-]+", "_", name.lower()).strip("_")


def _own(name: str, unit: str) -> str:
    """`samples_per_s` of something else than samples; any other name as it is."""
    return f"{_key(unit)}_per_s" if name == "samples_per_s" else name


def words(event: dict) -> list[str]:
    """What happened, where something did, in the words of a run's progress."""
    said: list[str] = []
    if event["kind"] in MARKED:
        Progress(said.append)(event)
    elif event["kind"] == "flip_effect":
        low, high = event["ci95"]
        ratio = f"{event['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        said = [f"step {event['step']}: change {event['revision']}: {ratio} times as fast"]
    return said


def _run_id(first: dict) -> str:
    """An id that stays a run's own, wherever its folder goes and however often it is continued."""
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]


def _reached(run: Run) -> dict[str, float]:
    """Numbers of the run's row in `runs.table`."""
    row = table.row(run.folder, run.folder.name)
    said = naming(row)
    found = {_own(name, said["unit"]): row.get(name) for name in ("steps", "train_time_s", "samples_per_s")}
    found |= {f"{_key(said['metric'])}/{name}": value for name, value in row["nrmse"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}

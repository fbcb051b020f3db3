"""What the command line does with runs and files, one function a command; a run is its folder or its name."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, DataError, RunError
from upsnb.overlays import as_typed
from upsnb.runs import checkpoint_index, cost, handle, runfolder
from upsnb.runs.handle import Run
from upsnb.runs.nodes import Member
from upsnb.runs.runfolder import ALIVE, FIGURES, REPORT
from upsnb.widgets.progress import Progress, rewrite

SUMMARISED_BY = {  # modules by the kind of report they write, imported when asked: all of them take two seconds
    "board": "compare.board",
    "check": "compare.check",
    "cloud": "cloud.launches",
    "compare": "compare.verdict",
    "data": "report.data_report",
    "memory": "memory.plan",
    "models": "compare.models",
    "phases": "compare.ladder",
    "profile": "profile.report",
    "scaling": "compare.scaling",
    "sweep": "compare.sweep",
    "transfer": "report.transfer",
    "worth": "report.worth",
}
SHARED = "11_sweep"  # the notebook whose trainings several machines can share
LOG_LINES = 25  # of what a failed run said last


def list_runs(root: Path | None) -> None:
    """Print a line for each run in a folder, newest first."""
    import pandas as pd

    from upsnb.report.file import number
    from upsnb.runs import table

    runs = table.table(root)
    if runs.empty:
        print(f"no runs in {as_typed(table.find_root(root))} -> python -m upsnb run notebooks/01_train.ipynb makes one")
        return
    runs["created"] = runs["created"].dt.strftime("%Y-%m-%d %H:%M")
    nrmse = [column for column in runs if column.startswith("nrmse_")]
    shown = runs[["run", "status", "created", "steps", "samples_per_s", *nrmse, "phases_on", "cause"]]

    def text(value) -> str:
        return "-" if pd.isna(value) else number(value) if isinstance(value, float) else " ".join(str(value).split())

    columns = [[name, *map(text, values)] for name, values in shown.dropna(axis=1, how="all").items()]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def check(names: list[str], folder: Path | None) -> int:
    """Try phases and params files on this machine, all of them with three measurements; 1 where one failed."""
    from upsnb.compare import check

    base = overlays.load(runfolder.project_root() / "params/memory_reference.yaml")
    folder = folder or runfolder.new_folder("check")
    report = check.check(base, folder, chosen=names, short=not names)
    print(f"{check.summary(report).splitlines()[0]}; {as_typed(folder / REPORT)} has all of it")
    return int(any(row["verdict"] == check.FAILED for row in report["rows"]))


def show(name: str) -> None:
    """Print what a run is doing or has reached, and if it failed, why."""
    folder = handle.find(name)
    if not (folder / runfolder.MANIFEST).exists() and (folder / REPORT).exists():  # a comparison, a plan
        print(summary(folder))
        return
    from upsnb.report import results

    run = Run.attach(folder)
    (status, cause), control = runfolder.state(folder), runfolder.read_control(folder)
    print(f"{as_typed(folder)}: {status}{', paused' * (status in ALIVE and control.paused)}")
    if status in ALIVE:
        said: list[str] = []
        progress = Progress(said.append)
        for event in run.events():
            progress(event)
        print(*said[-3:], sep="\n")
    print(_told(results.run_numbers(run)))
    if status in ALIVE and control.revision > run.manifest["applied"]["revision"]:
        print(f"asked and not answered yet: {control.command or control.overlay}")
    kept = checkpoint_index.read_index(folder)
    steps = (f"{role} step {kept['checkpoints'][kept[role]]['step']}" for role in ("latest", "best") if kept[role])
    print(f"checkpoints: {', '.join(steps) or 'none yet'}")
    if second := run.manifest.get("mirror"):
        trouble = f"; {second['trouble']}" if second["trouble"] else ""
        print(f"mirrored: step {second['step']} in {second['folder']}{trouble}")
    print(*_results(folder), sep="\n")
    if cause:
        failures = (run.manifest["segments"] or [{}])[-1].get("failures") or [{}]
        last = (failures[0].get("traceback") or run.log_tail(LOG_LINES)).splitlines()[-LOG_LINES:]
        print(f"\n{status}: {cause}", *last, f"all of it: {as_typed(folder / runfolder.LOG)}", sep="\n")


def resume(name: str) -> None:
    """Let a paused run go on, or continue one that has ended before its end, from its latest checkpoint."""
    run = Run.attach(name)
    status, manifest = run.status(), run.manifest
    if status in ALIVE:
        if not runfolder.read_control(run.folder).paused:
            raise RunError(f"{name}: is {status} and not paused -> nothing to do")
        print(f"goes on at step {run.wait_for('resumed', run.resume())['step']}")
        return
    if status == "finished" and manifest["end_reason"] not in runfolder.CUT_SHORT:
        remedy = "start a new run with more stages.operator.epochs or training.time_limit_s"
        raise RunError(f"{name}: has trained to its end ({manifest['end_reason']}) -> {remedy}")
    if cost.is_spent(run.current_config.cost, runfolder.costs(run.folder)["held_s"]):
        spent = f"has spent its budget of ${run.current_config.cost.budget:g}"
        raise RunError(f"{name}: {spent} -> go on in Python with a larger one, as docs/runs.md says")
    if not checkpoint_index.is_there(run.folder):
        raise RunError(f"{name}: has no whole checkpoint to go on from -> start a new run")
    from upsnb.report import figures, results

    progress, past = Progress(), len(run.events())

    def told(event: dict) -> None:
        nonlocal past
        past -= 1
        if past < 0 or event["kind"] == "start":
            progress(event)

    run = handle.start(overlays.apply(run.current_config, {"checkpoint.resume": True}), run.folder)
    run.wait(on_event=told)
    results.train_report(run)
    results.write_figures(figures.RunFigures.of(run))
    print(summary(run.folder))


def join(folder: Path, wait_s: float) -> int:
    """Train with this machine too, until the run has ended; 1 if it did not end well."""
    return int(Member(folder.absolute()).run(wait_s) != "finished")


def stop(name: str) -> None:
    """Let a run finish its step, save and end; returns when it has."""
    run = _living(name)
    run.stop()
    print("asked to stop: it finishes its step and saves", flush=True)
    run.wait(timeout=handle.SECONDS_TO_OBEY)
    print(f"stopped at step {run.events()[-1]['step']} -> python -m upsnb resume {name} goes on")


def flip(name: str, phase: str, state: str) -> None:
    """Ask a run to switch a phase on or off, and say what it did."""
    run = _living(name)
    event = run.wait_for("flip", run.flip(phase, state == "on"))
    if not event["applied"]:
        raise RunError(f"{name}: {phase} was refused at step {event['step']}: {event['reason']}")
    Progress()(event)


def compare(first: str, second: str, folder: Path | None) -> None:
    """Print what the second of two finished runs gains and loses; a folder gets the report and figures as well."""
    from upsnb.compare import figures, verdict

    report = verdict.compare(Run.attach(first), Run.attach(second), folder)
    print(verdict.summary(report))
    if folder is not None:
        print(*map(as_typed, figures.write_figures(folder).values()), sep="\n")


def evaluate(
    name: str, files: list[Path], params: list[str], folder: Path | None, which: str, stage: str | None, device: str
) -> None:
    """Print what a run's model is worth on other data, with figures.

    Args:
        files, params: what they say over the run's settings.
    """
    from upsnb.report import transfer

    asked = overlays.Layers("what is asked of it")
    for file in files:
        asked.put(asked.read(file)[0], file)
    for source, values in overlays.settings_of(params, asked.problems):
        asked.put(values, source)
    if asked.problems:
        raise ConfigError(asked.problems, asked.where)
    print(summary(transfer.transfer(Run.attach(name), asked.flat(), folder, which, stage, device)))


def worth(name: str, folder: Path | None, which: str, stage: str | None, device: str) -> None:
    """Print what a run's model errs and takes beside the solvers of its equations, with a figure."""
    from upsnb.report import worth

    run = Run.attach(name)
    folder = folder or runfolder.new_folder(f"{run.folder.name}-{worth.KIND}", run.config.logging.root)
    worth.measure(run, folder, which, stage, device)
    print(summary(folder))


def export(name: str, to: str, folder: Path | None, follow: bool) -> None:
    """Write what a run measured for another tool, as long as it trains where it is followed."""
    from upsnb.widgets import export

    print(as_typed(export.export(Run.attach(name), to, folder, follow)))


def pack(name: str, folder: Path | None, which: str, onnx: bool, push: str | None, public: bool) -> None:
    """Write a run's model and its card into a folder to give away, and put it on a hub."""
    from upsnb.report import pack

    written = pack.pack(Run.attach(name), folder, which, onnx)
    print(as_typed(written))
    if push:
        print(pack.push(written, push, public))


def board(names: list[str], folder: Path | None, price: float) -> None:
    """Print the leaderboard of runs, and write its page and its CSV."""
    from upsnb.compare import board, board_pages

    report = board.board(names, price)
    written = board_pages.write(report, folder or runfolder.new_folder("board"))
    print(board.summary(report), *map(as_typed, written), sep="\n")


def sweep(file: Path, folder: Path | None, share: str) -> int:
    """Train what a sweep's file asks for and is not there yet, or a share of it; 1 where a training failed."""
    from upsnb.compare import sweep

    planned = sweep.read(file, share)
    name = "-".join((planned.name, *share.split("/"))) if share else planned.name
    folder = folder or runfolder.project_root() / planned.base.logging.root / name
    report = sweep.run(planned, folder, log=print)
    return _told_of_sweep(folder, report)


def gather(folder: Path, shares: list[Path]) -> int:
    """Put together what several machines trained of one sweep; 1 where a training failed."""
    from upsnb.compare import sweep

    return _told_of_sweep(folder, sweep.gather(folder, shares))


def _told_of_sweep(folder: Path, report: dict) -> int:
    from upsnb.compare import sweep, sweep_figures

    print(sweep.summary(report), *map(as_typed, sweep_figures.write_figures(folder).values()), sep="\n")
    return int(any(point["failed"] for point in report["points"]))


# -- data ----------------------------------------------------------------------------------------------------------


def data_list() -> None:
    """Print the published files, by family."""
    from upsnb.data.published import PUBLISHED

    for family, files in PUBLISHED.items():
        print(family, *(f"  {file.name}  {file.size_gib:.3g} GiB" for file in files), sep="\n")


def data_get(name: str, folder: Path, first: int | None) -> None:
    """Fetch a published file or its first samples, saying how far it is."""
    from upsnb.data import download

    unit, size = ("samples", 1) if first else ("MiB", 2**20)
    path = download.get(name, folder, first, lambda done, of: rewrite(f"{done // size} of {of // size} {unit}"))
    print(as_typed(path))


def data_look(files: list[Path]) -> None:
    """Print what files hold, and which families they can be read as; where none, a row to train on them."""
    from upsnb.data import look

    for path in files:
        print(as_typed(path), *(f"  {line}" for line in look.contents(path)), sep="\n")
        readable = look.recognise([path])
        print(f"  is read as: {', '.join(readable) or 'none of the known families'}")
        if not readable:
            try:
                proposed = look.propose(path)
                print("  to train on it, correct what was guessed here and give it to -f:", *proposed, sep="\n")
            except DataError as error:
                print(f"  {error}")


def data_check(files: list[Path]) -> None:
    """Print what was measured of datasets and what stands against believing a score on them.

    Args:
        files: of one dataset, or params files, on top of each other, which name several.
    """
    import numpy as np

    from upsnb.data import audit, datasets, look, source

    if all(path.suffix in (".yaml", ".yml") for path in files):
        config, root, said = overlays.load(*files), runfolder.project_root(), []
        datasets.generate_missing(config, root)
        found = {name: datasets.open_split(name, config, root / config.data.root) for name in config.data.datasets}
    else:
        opened, said = look.open_unknown(files)
        fraction = max(0.1, 1 / np.bincount(opened.file_of_sample).min())  # one test sample of each file at least
        found = {opened.family.name: (opened, source.split_samples(opened, "pdebench", 0.0, fraction))}
    for name, (opened, splits) in found.items():
        measured = audit.audit(opened, splits)
        print(f"{name}: {opened.num_samples} samples, {opened.num_times} frames, grid {opened.grid_shape}")
        print(*(f"  {line}" for line in (*said, *audit.table(measured))), sep="\n")
        print(*(measured.findings or ["nothing stands against it"]), sep="\n")


def _living(name: str) -> Run:
    run = Run.attach(name)
    status = run.status()
    if status not in ALIVE:
        raise RunError(f"{name}: is {status} -> only a run that trains can be asked for something")
    return run


# -- what was reached ----------------------------------------------------------------------------------------------


def summary(folder: Path) -> str:
    """The report as text, and where notebook and figures are."""
    lines = []
    try:
        reached = json.loads((folder / REPORT).read_text())
        if reached.get("kind") in SUMMARISED_BY:
            module = importlib.import_module(f"upsnb.{SUMMARISED_BY[reached['kind']]}")
            lines += ["", module.summary(reached), ""]
        else:
            lines += ["", _told(reached), ""]
    except FileNotFoundError:
        pass  # a notebook that does not train, or one that failed before
    except ValueError as error:
        lines.append(f"{as_typed(folder)}/{REPORT} is damaged: {error}")
    return "\n".join([*lines, *_results(folder)])


def _told(report: dict) -> str:
    """A training report: what is to be known first, its table, where there is one, and what it cost."""
    from upsnb.report import results

    rows = results.table(report)
    told = [] if rows.empty else [rows.to_string(index=False)]
    return "\n".join([*report.get("leaks", ()), *told, results.costs(report)])


def _results(folder: Path) -> list[str]:
    paths = [folder / "notebook.ipynb", *sorted((folder / FIGURES).glob("*.png"))]
    return [as_typed(path) for path in paths if path.exists()]


# -- elsewhere ---------------------------------------------------------------------------------------------------------


Asked = tuple[Path, dict, RunConfig]  # a notebook, what to pass to it, and the config that comes of it


def cloud_ssh(asked: Asked, address: str, port: int | None, folder: str, resume: str | None) -> None:
    """Let a notebook run on a machine that answers ssh."""
    from upsnb.cloud import launches
    from upsnb.cloud.host import Host

    print(f"{address}: code goes there, then packages that it lacks; minutes the first time", flush=True)
    _started(launches.start_on(Host(address, port, folder), *asked, handle.find(resume) if resume else None))


def cloud_offers(asked: Asked, budget: float | None, max_price: float | None, interruptible: bool) -> int:
    """Print what a run needs and the machines to be had that have it; 1 where nobody could be asked."""
    from upsnb.cloud import launches

    report = launches.survey(asked[2], budget, max_price, None, interruptible)
    print(launches.summary(report))
    return int(report["trouble"] is not None)


def cloud_launch(
    asked: Asked,
    budget: float,
    offer: int | None,
    max_price: float | None,
    image: str | None,
    resume: str | None,
    sure: bool,
    instances: int = 1,
    interruptible: bool = False,
) -> None:
    """Rent GPUs and let a notebook run there; unless sure, print what would be done.

    Raises:
        RunError: whatever `launches` cannot do; several instances for what is no sweep, or for one offer or run.
    """
    from upsnb.cloud import launches, vast

    if instances < 1 or instances > 1 and (asked[0].stem != SHARED or offer is not None or resume):
        raise RunError(f"--instances {instances}: share out the trainings of {SHARED}, without --offer and --resume")
    resumed, image = handle.find(resume) if resume else None, image or vast.IMAGE
    plans = launches.plan(vast.needs(asked[2]), budget, offer, max_price, instances, interruptible)
    print(launches.needed(plans[0]["needs"]), launches.offered([one["offer"] for one in plans]).to_string(), sep="\n")
    for planned in plans:
        hours, price = planned["limit_s"] / 3600, planned["offer"]["price_per_hour"]
        held = f"${price:.3f} an hour: ${budget / instances:g} are {hours:.2f} h"
        print(f"{held}; before that the run saves and ends, then it is stopped")
    if not sure:
        commands = [launches.command(planned, "upsnb-RUN", Path("onstart.sh"), image) for planned in plans]
        print("nothing is rented; with --yes:", *commands, sep="\n")
        return
    notebook, given, config = asked
    for number, planned in enumerate(plans, 1):
        its_own = {**given, "share": f"{number}/{instances}"} if instances > 1 else given
        _started(launches.start_rented(planned, notebook, its_own, config, resumed, image))


def _started(folder: Path) -> None:
    name = folder.name
    print(f"{name} trains there. python -m upsnb cloud status {name}; logs, pull, follow, stop and destroy likewise")


def cloud_status(names: list[str]) -> None:
    """Print a line for each run elsewhere."""
    from upsnb.cloud import launches

    runs = [launches.find(name)[0].name for name in names] or [folder.name for folder in launches.started()]
    if not runs:
        print("nothing was started elsewhere")
    for name in runs:
        print(launches.told(name), flush=True)


def cloud_logs(name: str, num_lines: int) -> None:
    """Print what a run elsewhere printed last."""
    from upsnb.cloud import launches

    folder, record = launches.find(name)
    print(launches.host(record).output(folder.name, num_lines))


def cloud_pull(name: str) -> None:
    """Bring a run's folder here."""
    from upsnb.cloud import launches

    folder, moved = launches.pull(name)
    print(f"{as_typed(folder)}: {moved / 1e6:.1f} MB came; python -m upsnb show {folder.name}")


def cloud_follow(name: str, every_s: float) -> int:
    """Pull a run until it has ended, on other machines if need be; 1 where it failed."""
    from upsnb.cloud import follow

    return int(not follow.follow(name, every_s, functools.partial(print, flush=True)))


def cloud_stop(name: str) -> None:
    """Let a run elsewhere save and end."""
    from upsnb.cloud import launches

    folder, record = launches.find(name)
    launches.host(record).stop(folder.name)
    print(f"{folder.name}: saves and ends there; then pull")


def cloud_destroy(name: str, sure: bool) -> None:
    """End what a run holds elsewhere."""
    from upsnb.cloud import launches

    print(launches.destroy(name, sure))

"""Runs of this project that train elsewhere: where each one is, what it does, and how it comes back.

`cloud.json` in a run's folder here says it; the rest of the folder comes with a pull, and is then a run like any other.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pandas as pd
import yaml

from upsnb import overlays
from upsnb.cloud import vast
from upsnb.cloud.host import CODE, KEPT, KNOWN, Host
from upsnb.config import LoggingConfig, RunConfig
from upsnb.errors import RunError
from upsnb.report.file import finish
from upsnb.runs import checkpoint_index, handle, runfolder
from upsnb.runs.files import Shape, read_json, write_json

FORMAT, KIND = 1, "cloud"
SHOWN = 10  # offers
COLUMNS = {  # of an offer, as they are shown
    "id": "offer",
    "gpus": "GPUs",
    "gib": "GiB each",
    "price_per_hour": "$/h",
    "bid": "of which bid",
    "dollars": "$ for the run",
    "hours_for_budget": "h for the budget",
    "tflops_per_dollar": "TFLOPS h/$",
    "nvlink_gb_s": "NVLink GB/s",
    "pcie_gb_s": "PCIe GB/s",
    "reliability": "reliability",
    "where": "where",
}
SHORTEST_H = 0.1  # of training, below which nothing is rented


class _Host(Shape):
    address: str
    port: int | None
    folder: str
    known: str | None


class _Record(Shape):
    provider: Literal["ssh", "vast"]
    name: str
    host: _Host | None  # None: rented, and not up yet
    instance: int | None  # of Vast's; None while it is between two
    price_per_hour: float
    limit_s: float
    created: float


class Spent(RunError):
    """What is left of a budget pays for no training."""


def start_on(host: Host, notebook: Path, given: dict, config: RunConfig, resumed: Path | None = None) -> Path:
    """Let a notebook run on a machine that answers ssh; the run's folder here.

    Args:
        given: parameters of the notebook, a mapping for each section.
        config: what they come to.
        resumed: a run's folder to go on with there.
    Raises:
        RunError: no connection, no Python there, a name that is taken there, or what `_asked` refuses.
    """
    asked = _asked(notebook, given, config)
    folder = _folder(config, resumed)
    record = {"provider": "ssh", "instance": None, "price_per_hour": config.cost.price_per_hour, "limit_s": 0.0}
    with _nothing_left(folder):
        _begin(host, folder, asked)
        _keep(folder, host, record)
    return folder


def plan(
    wanted: dict,
    budget: float,
    offer: int | None = None,
    max_price: float | None = None,
    count: int = 1,
    interruptible: bool = False,
) -> list[dict]:
    """What would be rented for a run, for how long and at what price; nothing is rented.

    Args:
        wanted: as `vast.needs` says.
        count: of instances, which share the budget and take an offer each, the cheapest first.
        interruptible: machines that are bid for.
    Returns:
        For each instance the offer's row, what is needed, the dollars that it may cost and those of them that are for
        training, and seconds until the switch stops it.
    Raises:
        RunError: too few offers, or not this one.
        Spent: before anything trains.
    """
    share = budget / count
    rows = vast.offers(wanted, share, max_price, interruptible)
    if len(rows) < count:
        known = f"{len(rows)} offers have" if rows else "no offer has"
        raise RunError(f"{known} what is needed ({vast.query(wanted, max_price)}) -> ask for less, or later")
    chosen = [row for row in rows if offer in (None, row["id"])][:count]
    if not chosen:
        raise RunError(f"offer {offer}: is not among those that have what is needed -> {rows[0]['id']} is the cheapest")
    return [_planned(row, wanted, share) for row in chosen]


def _planned(chosen: dict, wanted: dict, budget: float) -> dict:
    limit_s = budget / chosen["price_per_hour"] * 3600
    around_h = vast.START_H + vast.GRACE_S / 3600  # paid for before and after training
    training_h = limit_s / 3600 - around_h
    if training_h < SHORTEST_H:
        least = chosen["price_per_hour"] * (around_h + SHORTEST_H)
        raise Spent(f"${budget:g}: is spent before anything trains -> ${least:.2f} at least, or a cheaper offer")
    left = round(chosen["price_per_hour"] * training_h, 4)
    return {"offer": chosen, "needs": wanted, "budget": budget, "training_dollars": left, "limit_s": limit_s}


def survey(
    config: RunConfig, budget: float | None, max_price: float | None, folder: Path | None, interruptible: bool = False
) -> dict:
    """What a run needs and what it would cost where, written as a report; nothing is rented.

    Without an account, or without Vast's command, the report says why there are no offers.
    """
    trouble, wanted, rows = None, vast.needs(config), []
    try:
        rows = vast.offers(wanted, budget, max_price, interruptible)
    except RunError as error:
        trouble = str(error)
    asked = {"budget": budget, "max_price": max_price, "interruptible": interruptible}
    found = {"needs": wanted, "offers": rows, "trouble": trouble}
    return finish({"format": FORMAT, "kind": KIND, **asked, **found}, folder)


def needed(wanted: dict) -> str:
    """What a machine must have, in a line."""
    memory = f"{wanted['gpu_gib']:g} GiB (predicted)" if wanted["gpu_gib"] else "unknown memory: its files are not here"
    rest = f"{wanted['disk_gb']} GB of disk, CUDA {wanted['cuda']:.1f}, compute capability {wanted['capability']:g}"
    return f"needs {wanted['num_gpus']} GPU with {memory}, {rest}"


def offered(rows: list[dict]) -> pd.DataFrame:
    """The first offers as a table; columns that nothing is known of are left out."""
    table = pd.DataFrame(rows[:SHOWN], columns=list(COLUMNS)).rename(columns=COLUMNS)
    return table.set_index("offer").dropna(axis=1, how="all")


def summary(report: dict) -> str:
    """A survey in a few lines."""
    if report["trouble"]:
        return f"{needed(report['needs'])}\nno offers: {report['trouble']}"
    by_epochs = "operations a dollar buys: the run ends by its epochs"
    how = "price of the whole run" if report["needs"]["hours"] else by_epochs
    table = offered(report["offers"]).to_string() if report["offers"] else "nothing to be had"
    return f"{needed(report['needs'])}\n{len(report['offers'])} offers, by {how}\n{table}"


def command(planned: dict, label: str, script: Path, image: str = vast.IMAGE) -> str:
    """The exact command that rents, to read."""
    return shlex.join(["vastai", *vast.create_command(planned["offer"], planned["needs"], label, script, image)])


def line(preset: str, config: RunConfig, budget: float, interruptible: bool = False) -> str:
    """What to type to see what renting for these settings would do."""
    base = overlays.load(overlays.params_path(preset)) if preset else RunConfig()
    own = overlays.difference(base, config)
    given = [word for name, value in {"preset": preset, **own}.items() for word in ("-p", f"{name}={_as_yaml(value)}")]
    asked = ["--budget", f"{budget:g}", *(["--interruptible"] if interruptible else [])]
    return shlex.join(["python", "-m", "upsnb", "cloud", "launch", "01_train", *given, *asked])


def _as_yaml(value) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def start_rented(
    planned: dict,
    notebook: Path,
    given: dict,
    config: RunConfig,
    resumed: Path | None = None,
    image: str = vast.IMAGE,
    say: vast.Say = print,
) -> Path:
    """Rent what was planned, and let a notebook run there; the run's folder here.

    Its price and what is left of the budget become settings of the run, which saves and ends when that is spent.

    Raises:
        RunError: whatever failed, after the instance was destroyed; or that it could not be, and its number.
    """
    asked = {**_asked(notebook, given, config), "image": image}
    if not vast.ssh_keys():
        raise RunError(
            "vastai: the account has no SSH key -> .vastai/bin/vastai create ssh-key, and it gets in with it"
        )
    folder = _folder(config, resumed)
    before = _known(folder)
    with _nothing_left(folder):
        try:
            rent(folder, planned, {"provider": "vast", "budget": planned["budget"], "spent": 0.0, **asked}, say)
        except BaseException:
            if not held(folder):
                _forget(folder)
                if before is not None:  # it may still be followed, for what was left of its budget
                    write_json(folder / KEPT, before)
            raise
    return folder


def rent(folder: Path, planned: dict, record: dict, say: vast.Say) -> None:
    """Rent what was planned and let what a record asks for begin there, or go on from what of it is here.

    Raises:
        RunError: whatever failed. The record says by then that nothing is held, unless that could not be ended.
    """
    price, label = planned["offer"]["price_per_hour"], f"upsnb-{folder.name}"
    record = record | {"price_per_hour": price, "limit_s": planned["limit_s"], "needs": planned["needs"]}
    record |= {"interruptible": planned["offer"]["bid"] is not None, "created": time.time()}
    (folder / KNOWN).unlink(missing_ok=True)  # of a machine before
    with tempfile.TemporaryDirectory() as work:
        script = Path(work) / "onstart.sh"
        script.write_text(vast.onstart(planned["limit_s"]))
        arguments = vast.create_command(planned["offer"], planned["needs"], label, script, record["image"])
        number = record["instance"] = vast.create(arguments, label)
        say(f"rented: instance {number}, {planned['offer']['gpus']}, ${price:.3f} an hour")
        try:
            _keep(folder, None, record)
            host = vast.wait(number, folder / KNOWN, say)
            _keep(folder, host, record)
            say("code goes there, then its packages; a few minutes")
            earlier_h = runfolder.costs(folder)["held_s"] / 3600 if checkpoint_index.is_there(folder) else 0.0
            left = planned["training_dollars"] + price * earlier_h  # a run's time all counts at one price
            _begin(host, folder, record, (f"cost.price_per_hour={price}", f"cost.budget={left:.4f}"))
        except BaseException:
            say(f"destroying instance {number}")
            let_go(folder, record)
            raise


def let_go(folder: Path, record: dict) -> None:
    """Destroy a run's instance, and keep in its record that it has none now and what that one may have cost."""
    vast.destroy(record["instance"])
    spent = record["spent"] + record["price_per_hour"] * (time.time() - record["created"]) / 3600
    _keep(folder, None, record | {"instance": None, "spent": round(spent, 4)})


def held(folder: Path) -> bool:
    """Whether a run has a machine elsewhere."""
    record = _known(folder)
    return record is not None and (record["instance"] is not None or record["host"] is not None)


def _known(folder: Path) -> dict | None:
    """The record of a run that was started elsewhere; None of any other."""
    return read_json(folder / KEPT, FORMAT, _Record) if (folder / KEPT).exists() else None


def _folder(config: RunConfig, resumed: Path | None) -> Path:
    """
    Raises:
        RunError: what was resumed is still held elsewhere, or has nothing to go on from.
    """
    usual = LoggingConfig().root
    elsewhere = config.logging.root != usual if resumed is None else not resumed.absolute().parent.samefile(_outputs())
    if elsewhere:
        found = f"{resumed or config.logging.root}: it would not be found again, `cloud` looks right in {usual}"
        raise RunError(f"{found} -> leave logging.root as it is, or move the run there")
    if resumed is None:
        return runfolder.new_folder(config.logging.name, config.logging.root)
    if held(resumed):
        remedy = f"python -m upsnb cloud pull {resumed.name}, then cloud destroy {resumed.name}"
        raise RunError(f"{resumed.name}: is held elsewhere -> {remedy}")
    if (resumed / runfolder.MANIFEST).exists() and not checkpoint_index.is_there(resumed):
        raise RunError(f"{resumed.name}: has no whole checkpoint to go on from -> start without --resume")
    return resumed


@contextlib.contextmanager
def _nothing_left(folder: Path):
    """Leave no folder of a run that was never started, unless it says what is still rented."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def _forget(folder: Path) -> None:
    for name in (KEPT, KNOWN):
        (folder / name).unlink(missing_ok=True)


def _asked(notebook: Path, given: dict, config: RunConfig) -> dict:
    """What is to run there: a notebook by its path in the project, and what to pass to it.

    Raises:
        RunError: the notebook, its preset, the file of its workload or the run whose weights it begins with is in no
            folder that is sent.
    """
    from upsnb.models import chosen

    root, notebook, wanted = overlays.project_root().resolve(), notebook.resolve(), [notebook]
    if given.get("preset"):
        wanted.append(overlays.params_path(given["preset"]).resolve())
    if (workload := config.data.workload.rpartition(":")[0]).endswith(".py"):
        wanted.append((root / workload).resolve())
    weights = handle.find(config.model.pretrained).resolve() if config.model.pretrained else None
    if weights:
        wanted.append(weights)
    for path in wanted:
        if not any(path.is_relative_to(root / part) for part in CODE):
            sent = ", ".join(f"{part}/" for part in CODE if (root / part).is_dir())
            raise RunError(f"{path}: would be missing there, because only {sent} are sent -> move it into one of them")
    there = {"pretrained": weights.relative_to(root).as_posix()} if weights else {}
    if source := chosen.with_source(config).model.source:  # of a model of the user's own, whose file is not sent
        there["source"] = source
    if there:
        given = {**given, "model": {**given.get("model", {}), **there}}
    return {"notebook": notebook.relative_to(root).as_posix(), "given": given}


def _begin(host: Host, folder: Path, asked: dict, more: Iterable[str] = ()) -> None:
    """Send code, settings and what is here to go on with; let it begin.

    That is a run with a checkpoint, or a study of several runs, which knows by itself which of them are done.

    Args:
        asked: {"notebook", "given"}.
    """
    given, name = asked["given"], folder.name
    goes_on = checkpoint_index.is_there(folder)
    if goes_on:
        given = {**given, "checkpoint": {**given.get("checkpoint", {}), "resume": True}}
    elif not (folder / runfolder.MANIFEST).exists():
        goes_on = _has_some(folder)
    host.send(name, yaml.safe_dump(given, sort_keys=False), folder if goes_on else None)
    host.install(name)
    host.begin(name, asked["notebook"], more)


def _has_some(folder: Path) -> bool:
    """Whether anything of a run or a study is here."""
    return any(path.name not in (KEPT, KNOWN) for path in folder.iterdir())


def _keep(folder: Path, host: Host | None, record: dict) -> None:
    there = vars(host) if host else None
    known = {"format": FORMAT, "name": folder.name, "created": time.time()}
    write_json(folder / KEPT, {**known, **record, "host": there})


# -- those that were started -------------------------------------------------------------------------------------------


def find(name: str) -> tuple[Path, dict]:
    """The folder here and the record of a run that was started elsewhere.

    Raises:
        RunError: there is none of this name.
    """
    folder = _outputs() / Path(name).name
    record = _known(folder)
    if record is None:
        others = ", ".join(folder.name for folder in started()) or "none"
        raise RunError(f"{name}: was not started elsewhere -> those that were: {others}")
    return folder, record


def started() -> list[Path]:
    """Folders here of all runs that were started elsewhere, the newest last."""
    return sorted((path.parent for path in _outputs().glob(f"*/{KEPT}")), key=lambda folder: folder.stat().st_ctime)


def status(name: str) -> str:
    """What a run does there, in a line: its state, what it printed last, and what its machine costs."""
    folder, record = find(name)
    money = ""
    if not held(folder):
        return f"{folder.name}: has no machine -> python -m upsnb cloud follow {folder.name} goes on on another one"
    if record["instance"] is not None:
        found = vast.instance(record["instance"])
        if found is None:
            return f"{folder.name}: instance {record['instance']} is gone; what was pulled is here"
        state = str(found.get("actual_status") or found.get("cur_state"))
        money = f"; instance {record['instance']} {state}, ${record['price_per_hour']:.3f} an hour while it runs"
        if state != "running" or record["host"] is None:
            return f"{folder.name}: {state}{money}; its disk costs until it is destroyed"
    state, *last = host(record).state(folder.name).splitlines()
    return f"{folder.name}: {state}{money}" + (f": {last[0]}" if last else "")


def told(name: str) -> str:
    """The same, or why it is not known."""
    try:
        return status(name)
    except RunError as error:
        return f"{name}: not known: {error}"


def host(record: dict) -> Host:
    """Where a run is.

    Raises:
        RunError: its instance never answered.
    """
    there = record["host"]
    if there is None:
        raise RunError(
            f"{record['name']}: its instance never answered -> python -m upsnb cloud destroy {record['name']}"
        )
    return Host(**there)


def pull(name: str) -> tuple[Path, int]:
    """Bring here what a run wrote there since the last time; its folder here, and the bytes that came.

    Raises:
        RunError: the machine does not answer; of a stopped instance, that it must be started for it.
    """
    folder, record = find(name)
    if record["instance"] is not None:
        found = vast.instance(record["instance"])
        if found is None:
            raise RunError(f"{name}: instance {record['instance']} is gone, and what was not pulled with it")
        if found.get("actual_status") != "running":
            vast.start_again(record["instance"])
            try:
                again = vast.wait(record["instance"], folder / KNOWN, print)
            except RunError as error:
                raise RunError(f"{error}; its disk is kept until it is destroyed") from None
            _keep(folder, again, record)  # it may have another port now
            return folder, again.pull(folder.name, folder)
    return folder, host(record).pull(folder.name, folder)


def destroy(name: str, sure: bool = False) -> str:
    """End what a run holds elsewhere: the instance, or its folder on a machine that was not rented; in words.

    Raises:
        RunError: it trains, or was never pulled, and nobody said that they are sure.
    """
    folder, record = find(name)
    if not sure:
        try:
            state = host(record).state(folder.name)
        except RunError:  # it does not answer
            state = ""
        if state.startswith("running"):
            raise RunError(f"{name}: trains -> python -m upsnb cloud stop {name}, or --yes to lose it")
        if not _has_some(folder) and record["host"] is not None:
            raise RunError(f"{name}: was never pulled -> python -m upsnb cloud pull {name}, or --yes to lose it")
    if record["instance"] is not None:
        vast.destroy(record["instance"])
        done = f"instance {record['instance']} is destroyed"
    elif record["host"] is None:
        done = "it had no machine"
    else:
        host(record).remove(folder.name)
        done = f"{record['host']['address']}: the run's folder there is deleted"
    _forget(folder)
    return done


def _outputs() -> Path:
    return overlays.project_root() / LoggingConfig().root

"""`python -m upsnb`: notebooks without a browser and runs that are there, with an honest exit code."""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from upsnb import commands, overlays
from upsnb.config import RunConfig
from upsnb.errors import Problem, RunError, RunFailed, RunTimeout, UpsError
from upsnb.overlays import as_typed
from upsnb.runs import handle, runfolder
from upsnb.runs.handle import INTERRUPTS
from upsnb.runs.ranks import KEEP_BYTECODE

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit codes; 2 is also argparse's
KERNEL = "python3"  # of this environment, whatever kernel a notebook was last saved with
CAUSE_LINES = 15  # of an error's message; the executed notebook holds the rest
EXAMPLES = """examples:
  python -m upsnb run notebooks/01_train.ipynb -f mine.yaml -p lr=1e-3
  python -m upsnb check                        what works on this machine, in a few minutes
  python -m upsnb list                         all runs in outputs/
  python -m upsnb show my-run                  what it does, what it reached, why it failed
  python -m upsnb flip my-run compile on       change it while it trains
  python -m upsnb stop my-run                  it saves and ends; resume goes on where it was
  python -m upsnb join outputs/my-run          another machine trains too
  python -m upsnb compare one other            two finished runs
  python -m upsnb evaluate my-run -f other-data.yaml      its model on data that it was not trained on
  python -m upsnb worth my-run                 its model beside a solver: is it faster at the same error?
  python -m upsnb board                        all runs that are comparable, ranked
  python -m upsnb sweep lr.yaml                train with many settings, or go on with it
  python -m upsnb export my-run --to csv       or tensorboard, wandb, mlflow
  python -m upsnb cloud ssh me@gpu-box 01_train -f mine.yaml     train there; cloud status, pull

exit codes: 0 done, 1 failed, 2 refused before anything was done, 130 stopped by Ctrl-C"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code: 0 finished, 1 failed, 2 refused before anything started, 130 stopped by user."""
    options = vars(_parser().parse_args(arguments))
    act = options.pop("act")
    try:
        code = act(**options) or OK
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output has had enough, as head has; nor is there a place for the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RunFailed, RunTimeout) as error:
        print(error, file=sys.stderr)
        return FAILED
    except UpsError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped by its user: what it had started ends with it", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m upsnb",
        description="Neural operators on PDEBench, in notebooks. RUN is a run's folder, or its name in outputs/.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = "print version and code revision"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=shown)
    command = _commands(parser, "a run's folder, or its name in outputs/")
    ran = command("run", "check the parameters, execute a notebook, print what it reached", run)
    ran.add_argument("notebook", type=Path, help="for example notebooks/01_train.ipynb, or 01_train")
    _add_parameters(ran)
    _add_folder(ran, "run folder (a new one under outputs/)")
    checked = command(
        "check",
        "try every phase and params file for a few steps on this machine, then take three short measurements",
        commands.check,
    )
    checked.add_argument("names", nargs="*", metavar="NAME", help="phases or params files alone, for example compile")
    _add_folder(checked, "a new one under outputs/")
    listed = command("list", "print all runs, newest first", commands.list_runs)
    listed.add_argument("root", type=Path, nargs="?", metavar="FOLDER", help="folder of run folders (outputs/)")
    command("show", "print what a run does or reached, or why it failed", commands.show, name="RUN")
    command("resume", "go on with a run that is paused or stopped", commands.resume, name="RUN")
    command("stop", "let a run finish its step, save and end", commands.stop, name="RUN")
    joined = command("join", "train with this machine too, in a run of several machines", commands.join)
    joined.add_argument("folder", type=Path, metavar="FOLDER", help="of the run, on a disk that all machines share")
    joined.add_argument(
        "--wait", dest="wait_s", type=float, default=600.0, metavar="S", help="for the run to start (600)"
    )
    flipped = command("flip", "switch a phase of a run while it trains", commands.flip, name="RUN")
    flipped.add_argument("phase", help="for example compile; docs/phases.md lists them")
    flipped.add_argument("state", choices=("on", "off"))
    compared = command("compare", "compare two finished runs", commands.compare, first="RUN", second="OTHER")
    _add_folder(compared, "keep report and figures there")
    judged = command("evaluate", "forecast other data with a run's model, and judge it", commands.evaluate, name="RUN")
    _add_parameters(judged)
    weighed = command("worth", "error and time of a run's model beside a solver's", commands.worth, name="RUN")
    for asked in (judged, weighed):
        asked.add_argument("--which", default="latest", help="its checkpoint: latest, best, previous or epoch")
        asked.add_argument("--stage", help="of a run of several; else the one that answers")
        asked.add_argument("--device", default="cpu", help="cpu or cuda")
        _add_folder(asked, "a new one under outputs/")
    ranked = command("board", "rank models by their test errors, in tables and on a page", commands.board)
    ranked.add_argument("names", nargs="*", metavar="RUN", help="runs, or folders of runs (outputs/)")
    _add_folder(ranked, "a new one under outputs/")
    ranked.add_argument("--price", type=float, default=0.0, metavar="$/H", help="of the machine; else as runs say")
    swept = command("sweep", "train with many settings, or go on with it", commands.sweep)
    swept.add_argument("file", type=Path, help="what to vary; docs/leaderboard.md describes it")
    _add_folder(swept, "named after the file, under outputs/")
    swept.add_argument("--share", default="", metavar="K/N", help="of what N machines train; then gather")
    gathered = command("gather", "put together what several machines trained of one sweep", commands.gather)
    gathered.add_argument("folder", type=_folder, metavar="FOLDER", help="for all of them")
    gathered.add_argument("shares", type=Path, nargs="+", metavar="SHARE", help="a share's folder")
    exported = command(
        "export",
        "write what a run measures for TensorBoard, Weights & Biases, MLflow, or as CSV",
        commands.export,
        name="RUN",
    )
    exported.add_argument("--to", required=True, help="tensorboard, wandb, mlflow or csv")
    exported.add_argument("--follow", action="store_true", help="go on until the run has ended")
    _add_folder(exported, "exports/ in the run's folder")
    given = command("pack", "write a run's model, as files to give away, with a card", commands.pack, name="RUN")
    given.add_argument("--which", default="latest", help="its checkpoint: latest, best, previous or epoch")
    _add_folder(given, "packed/ in the run's folder")
    given.add_argument("--onnx", action="store_true", help="programs for ONNX runtimes too")
    given.add_argument("--push", metavar="USER/MODEL", help="put it on the Hugging Face hub, where you alone see it")
    given.add_argument("--public", action="store_true", help="there, for everybody to see")
    _add_data(command("data", "fetch data files, look into them, audit them"))
    _add_cloud(command("cloud", "train elsewhere: by ssh, or on rented GPUs"))
    return parser


def _commands(to: argparse.ArgumentParser, run_is: str = "") -> Callable[..., argparse.ArgumentParser]:
    """What adds commands below a parser; `run_is`: help on their arguments that name a run."""
    below = to.add_subparsers(required=True, metavar="command")

    def command(name: str, what: str, act: Callable[..., int | None] | None = None, /, **runs: str):
        """`act` is called with the arguments of the command, by name; those in `runs` name a run."""
        added = below.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        added.set_defaults(act=act)
        for run, metavar in runs.items():
            added.add_argument(run, metavar=metavar, help=run_is)
        return added

    return command


def _add_folder(to: argparse.ArgumentParser, which: str, **more) -> None:
    to.add_argument("-o", dest="folder", type=_folder, metavar="FOLDER", help=which, **more)


def _add_parameters(to: argparse.ArgumentParser) -> None:
    several = {"action": "append", "default": []}
    named = "params file, or the name of one in params/"
    to.add_argument("-f", dest="files", type=overlays.params_path, metavar="FILE", help=named, **several)
    to.add_argument("-p", dest="params", metavar="KEY=VALUE", help="one setting, as YAML", **several)


def _add_data(data: argparse.ArgumentParser) -> None:
    command = _commands(data)
    looked = command(
        "look", "print what HDF5 and NumPy files hold, and what to write to train on them", commands.data_look
    )
    looked.add_argument("files", nargs="+", type=Path, metavar="FILE", help="HDF5 or NumPy files")
    checked = command(
        "check", "measure what a dataset can test: repeated samples, a look-up's score", commands.data_check
    )
    what = "HDF5 or NumPy files of one dataset; or params files, whose datasets are measured by their rows and splits"
    checked.add_argument("files", nargs="+", type=Path, metavar="FILE", help=what)
    command("list", "print the published files", commands.data_list)
    got = command("get", "fetch a published file, or go on with it, and check it", commands.data_get)
    got.add_argument("name", help="as data list prints it")
    got.add_argument("-n", dest="first", type=int, metavar="N", help="only the first N samples")
    _add_folder(got, "data/", default=Path("data"))


def _add_cloud(cloud: argparse.ArgumentParser) -> None:
    command = _commands(cloud, "its name in outputs/")

    def asked(act: Callable[..., int | None]) -> Callable[..., int | None]:
        """A command about a notebook with parameters, which are read first."""

        def read(notebook: Path, files: list[Path], params: list[str], **options) -> int | None:
            notebook = _find_notebook(notebook)
            return act((notebook, *read_parameters(notebook, files, params)), **options)

        return read

    reached = command("ssh", "run a notebook on a machine that answers ssh", asked(commands.cloud_ssh))
    reached.add_argument("address", metavar="HOST", help="as ssh knows it: an alias, or user@name")
    reached.add_argument("--port", type=int, help="of its ssh")
    reached.add_argument("--folder", default="upsnb-runs", help="for runs and packages there (upsnb-runs, at home)")
    offered = command("offers", "show GPUs at Vast.ai that a run would fit on", asked(commands.cloud_offers))
    rented = command("launch", "rent GPUs at Vast.ai and run a notebook there", asked(commands.cloud_launch))
    for added in (offered, rented):
        more = {"required": True} if added is rented else {}
        added.add_argument("--budget", type=float, metavar="$", help="spent at most; then it stops itself", **more)
        added.add_argument("--max-price", type=float, metavar="$/H", help="of the whole machine")
        added.add_argument("--interruptible", action="store_true", help="bid: who bids more takes it away")
    rented.add_argument("--offer", type=int, metavar="ID", help="of cloud offers (the cheapest)")
    rented.add_argument("--instances", type=int, default=1, metavar="N", help="that share the trainings of 11_sweep")
    rented.add_argument("--image", help="Docker image with Python 3.11 to 3.14, its venv, and a C++ compiler")
    rented.add_argument(
        "--yes", dest="sure", action="store_true", help="do it; else the command and its price are printed"
    )
    for added in (reached, offered, rented):
        added.add_argument("notebook", type=Path, nargs="?", default=Path("01_train"), help="01_train")
        _add_parameters(added)
    for added in (reached, rented):
        added.add_argument("--resume", metavar="RUN", help="send its checkpoints too, and go on from the latest")
    told = command("status", "print what runs elsewhere do and cost", commands.cloud_status)
    told.add_argument("names", nargs="*", metavar="RUN", help="all")
    logged = command("logs", "print what a run elsewhere printed last", commands.cloud_logs, name="RUN")
    logged.add_argument("-n", dest="num_lines", type=int, default=40, metavar="LINES", help="40")
    command("pull", "bring a run's folder here, what is new of it", commands.cloud_pull, name="RUN")
    followed = command(
        "follow",
        "pull a run until it has ended, then end its machine; go on on another one where it is taken away",
        commands.cloud_follow,
        name="RUN",
    )
    followed.add_argument(
        "--every", dest="every_s", type=float, default=120.0, metavar="S", help="between two pulls (120)"
    )
    command("stop", "let a run elsewhere finish its step, save and end", commands.cloud_stop, name="RUN")
    ended = command(
        "destroy", "end a rented instance, or delete a run's folder there", commands.cloud_destroy, name="RUN"
    )
    ended.add_argument("--yes", dest="sure", action="store_true", help="though it trains, or was never pulled")


def _folder(text: str) -> Path:
    """A folder to write into; one without a name would be the one that the user stands in."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a folder -> write one on one line")
    return Path(text)


class _Version(argparse.Action):
    """Prints what was installed and the revision of the code that runs."""

    def __call__(self, parser, *_):
        try:
            version = metadata.version("upsnb")
        except metadata.PackageNotFoundError:  # run from its folder
            version = "not installed"
        print(f"upsnb {version}, revision {runfolder.code_revision()}")
        parser.exit()


def run(notebook: Path, files: list[Path], params: list[str], folder: Path | None = None) -> int:
    """Execute a notebook in a run folder.

    Raises:
        UpsError: notebook, parameters or folder are not usable; nothing was started.
    """
    from upsnb import hardware, phases  # they load torch, which the other commands do without

    notebook = _find_notebook(notebook)
    machine = hardware.detect()

    def check(config: RunConfig) -> list[Problem]:
        if _plans_only(notebook):
            return []
        skips = config.training.on_missing == "skip"
        return hardware.problems(phases.skip_missing(config, machine)[0] if skips else config, machine)

    parameters, config = read_parameters(notebook, files, params, check)
    try:
        if folder is None:
            folder = runfolder.new_folder(config.logging.name, config.logging.root)
        else:
            runfolder.check_free(folder, config)
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file in its place, no permission, a name too long
        where = as_typed(folder or config.logging.root)
        raise RunError(f"{where}: no folder can be made there ({error.strerror}) -> choose another with -o") from None
    runfolder.set_aside(folder)  # what the segment before showed; a failure must not show its numbers
    executed = folder / "notebook.ipynb"
    print(f"{as_typed(notebook)} -> {as_typed(executed)}", flush=True)
    preset = _defaults(notebook).get("preset")
    if files and preset and "preset" not in parameters:
        names = ", ".join(map(as_typed, files))
        print(f'{names}: on top of the preset {preset} of the notebook (with preset: "" in a file, on top of nothing)')
    interrupts: list[Path] = []
    previous = signal.signal(signal.SIGINT, lambda *_: interrupts.extend(_stop_runs(folder, interrupts)))
    try:
        cause = _execute(notebook, executed, {**parameters, "run_folder": str(folder)}) or _run_failure(folder)
    finally:
        signal.signal(signal.SIGINT, previous)
    print(commands.summary(folder))
    if interrupts:
        print(f"stopped by its user{': ' + cause if cause else ''}", file=sys.stderr)
        return INTERRUPTED
    if cause:
        print(f"FAILED: {cause}\nSee {as_typed(executed)}", file=sys.stderr)
        return FAILED
    return OK


def _stop_runs(folder: Path, stopped: list[Path]) -> list[Path]:
    """Ask the live runs in a folder to stop, so that the notebook tells of what they reached; returns them.

    Raises:
        KeyboardInterrupt: none lives, or they were asked before.
    """
    manifests = [path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{runfolder.MANIFEST}")]
    alive = [run for run in manifests if runfolder.state(run)[0] in runfolder.ALIVE]
    if stopped or not alive:
        raise KeyboardInterrupt
    for run in alive:
        runfolder.write_control(run, None, runfolder.STOP)
    print("stopping: the run saves its state and the notebook tells of it; Ctrl-C again ends it now", file=sys.stderr)
    return alive


def _find_notebook(notebook: Path) -> Path:
    ours = runfolder.project_root() / f"notebooks/{notebook}.ipynb"  # `01_train` means it
    if found := [path for path in (notebook, ours) if path.is_file()]:
        return found[0].absolute()
    known = sorted(as_typed(path) for path in (runfolder.project_root() / "notebooks").glob("*.ipynb"))
    raise RunError(f"{notebook}: no such notebook -> there are {', '.join(known) or 'none in notebooks/'}")


def _plans_only(notebook: Path) -> bool:
    """Whether a notebook says of itself (metadata `upsnb: {plans_only: true}`) that it starts no run of its config.

    It may then be given a config of another machine.
    """
    return bool(json.loads(notebook.read_text())["metadata"].get("upsnb", {}).get("plans_only"))


# -- parameters ----------------------------------------------------------------------------------------------------


def read_parameters(
    notebook: Path, files: list[Path], params: list[str], check: Callable | None = None
) -> tuple[dict, RunConfig]:
    """What to pass to a notebook, one overlay per section, and the config it will make of it.

    Files go on top of the notebook's own preset, unless one of them says `preset: ""`, as under papermill.

    Args:
        check: of `Layers.config`.
    Raises:
        ConfigError: every unknown name, wrong type and contradiction at once, each with what brought it.
    """
    defaults, kinds = _defaults(notebook), overlays.annotations(_parameters_cell(notebook))
    own = {name for name in defaults if name not in overlays.PARAMETERS and not overlays.is_setting(name)}
    given, passed, sources = overlays.Layers("the parameters"), {}, []
    for file in files:
        values, stands_alone = given.read(file)
        sources.append((file, values))
        if stands_alone and "preset" in defaults:
            passed["preset"] = ""
    sources += overlays.settings_of(params, given.problems)
    for source, values in sources:
        if "run_folder" in values:
            given.problems.append(f"{source}: run_folder: is chosen with -o")
        given.problems += [f"{source}: {said}" for said in overlays.of_other_types(values, kinds, sorted(own))]
        passed |= {key: value for key, value in values.items() if key in own or (key == "preset" and key in defaults)}
        given.put({key: value for key, value in values.items() if key not in (*passed, "run_folder")}, source)
        for section in sorted({path.partition(".")[0] for path in given.layers[-1][1]} - defaults.keys()):
            given.problems.append(f"{source}: {section}: is no parameter of {notebook.name}")
    for path, value in given.flat().items():
        section, _, rest = path.partition(".")
        passed.setdefault(section, {})[rest] = value
    kept = {name: value for name, value in defaults.items() if name not in passed}
    layers = overlays.of_notebook({"preset": passed.get("preset"), **kept}, own, injected=())
    layers.where, layers.problems = given.where, given.problems + layers.problems
    layers.layers += given.layers
    return passed, layers.config(check)


def _parameters_cell(notebook: Path) -> str:
    try:
        cells = json.loads(notebook.read_text())["cells"]
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{notebook}: is not a notebook") from None
    source = next((c["source"] for c in cells if "parameters" in c["metadata"].get("tags", ())), None)
    if source is None:
        raise RunError(f"{notebook}: no cell is tagged `parameters` -> tag the one that defines preset and sections")
    source = "".join(source)
    try:
        ast.parse(source)
    except SyntaxError as error:
        found = f"its cell tagged `parameters` is not Python ({error.msg}, line {error.lineno})"
        raise RunError(f"{notebook}: {found} -> correct it; magics go into another cell") from None
    return source


def _defaults(notebook: Path) -> dict:
    """Names that the notebook's parameters cell defines, with their values where these are plain data."""
    defaults = {}
    for name, value in overlays.assignments(_parameters_cell(notebook)).items():
        try:
            defaults[name] = ast.literal_eval(value)
        except (ValueError, TypeError):  # no plain data, or none that could be made
            defaults[name] = {} if name in RunConfig.model_fields else None
    return defaults


# -- execution -----------------------------------------------------------------------------------------------------


def _execute(notebook: Path, executed: Path, parameters: dict) -> str | None:
    """Execute, showing what the cells print as they print it; None, or why it failed."""
    # It builds 40 parsers when jsonschema imports it, for a second or two, to check addresses that no notebook has.
    sys.modules.setdefault("rfc3987_syntax", None)
    try:
        import papermill  # an extra: a hosted notebook trains without it
        from nbclient.exceptions import DeadKernelError
        from traitlets.config import Config
    except ImportError as error:
        raise RunError(f"{error.name} is not installed -> pip install -c constraints.txt -e '.[lab]'") from None
    handle.be_headless()
    os.environ |= KEEP_BYTECODE  # the kernel's as well
    try:
        # Files instead of ports: a free port is looked for here and bound by the kernel a second later, when another
        # process may have it, and the run is lost after a minute's waiting (nteract/papermill#511).
        with tempfile.TemporaryDirectory(prefix="upsnb-") as sockets:
            papermill.execute_notebook(
                *(str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, executed)),  # it formats paths
                parameters=parameters,
                kernel_name=KERNEL,
                language="python",
                cwd=str(runfolder.project_root()),
                progress_bar=False,
                stdout_file=sys.stdout,  # log_output would put every line through a logger, and pictures as text
                stderr_file=sys.stderr,
                autosave_cell_every=10,
                coalesce_streams=True,  # otherwise every flushed line becomes an output of its own
                shutdown_kernel="immediate",  # nothing is left to do in it, and asked politely it takes a second
                config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            )
    except papermill.PapermillExecutionError as error:
        if error.ename in INTERRUPTS:  # of the kernel
            raise KeyboardInterrupt from None
        lines = f"{error.ename}: {error.evalue}".splitlines()
        more = ["  ..."] if len(lines) > CAUSE_LINES else []
        return "\n".join([f"cell [{error.exec_count}] raised {lines[0]}", *lines[1:CAUSE_LINES], *more])
    except DeadKernelError:
        return "the kernel died without a word: a crash in compiled code, or killed, often for want of memory"
    except RuntimeError as error:
        return f"no kernel started ({error}) -> repair {KERNEL}: `jupyter kernelspec list` tells where it is"
    except BrokenPipeError:  # whoever reads what the cells print has had enough
        raise
    except OSError as error:  # a full disk; or a kernel's Python that is there no longer
        return f"{error.filename or executed}: {error.strerror}"
    return None


def _run_failure(folder: Path) -> str | None:
    """Why the run in a folder failed, even if its notebook ran to the end."""
    if not (folder / runfolder.MANIFEST).exists():
        return None  # not every notebook trains
    status, cause = runfolder.state(folder)
    return f"the run {status}: {cause}" if status in ("failed", "died") else None


if __name__ == "__main__":
    sys.exit(main())

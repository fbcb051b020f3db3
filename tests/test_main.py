"""`python -m upsnb run`: what is refused, what fails, and what a reader sees of either."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from upsnb import __main__ as command
from upsnb import overlays
from upsnb.commands import summary
from upsnb.compare import ladder, scaling, verdict
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.memory import plan
from upsnb.profile import report as profiling
from upsnb.runs import handle, runfolder

PROJECT = runfolder.project_root()
PARAMETERS = "preset = ''\n" + "\n".join(f"{name} = {{}}" for name in RunConfig.model_fields) + "\nrun_folder = ''"
CHECK = "from upsnb import overlays\nconfig = overlays.from_notebook(globals())"
REPORT = {
    "format": 1,
    "kind": "train",
    "status": "finished",
    "device": "cpu",
    "num_ranks": 1,
    "parameters": 1234567,
    "samples_per_s": {"median": 321.0, "ci95": [300.0, 340.0]},
    "time_to_first_step_s": 2.5,
    "train_time_s": 150.0,
    "peak_memory_gib": None,
    "phases_on": ["compile"],
    "phases_skipped": {"optimizer_offload": "no GPU"},
    "datasets": {
        "advection": {"test": {"nrmse_mean": 0.012345, "nrmse_median": 0.01, "rollout_nrmse_mean": 0.1,
                               "persistence_nrmse_mean": 0.9}},
        "darcy": {"test": {"nrmse_mean": 0.05, "nrmse_median": None, "training_mean_nrmse_mean": 0.7}},
    },
}  # fmt: skip


def notebook(path: Path, *sources: str, parameters: str | None = PARAMETERS) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if parameters is not None:
        cells.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def params_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused, before a kernel starts, and return what it says."""

    def run(*arguments) -> str:
        assert command.main(["run", *map(str, arguments)]) == command.REFUSED
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err
        return said.err

    return run


# -- what is refused before anything starts ------------------------------------------------------------------------


def test_missing_notebook_is_answered_with_those_there_are(refused, tmp_path, monkeypatch):
    (tmp_path / "params").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "07_here.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    said = refused("notebooks/07_her.ipynb")
    assert "07_her.ipynb: no such notebook -> there are notebooks/07_here.ipynb" in said


def test_every_problem_of_files_and_command_line_is_listed_at_once(refused, tmp_path):
    file = params_file(tmp_path / "p.yaml", "training: {bach_size: 3, accum_steps: 3e0x}\nlatent: {tokens: -1}\n")
    said = refused(
        notebook(tmp_path / "n.ipynb"), "-f", file, "-p", "use_fsdp=1", "-p", "lr", "-p", "amp_dtype=half",
        "-p", "run_folder=x", "-o", tmp_path / "run",
    )  # fmt: skip
    for expected in ("did you mean training.batch_size?", "'3e0x'", "latent.tokens", "did you mean training.use_fsdp2?",
                     "-p lr: has no value", "training.amp_dtype", "run_folder=x: run_folder: is chosen"):  # fmt: skip
        assert expected in said
    assert not (tmp_path / "run").exists()


def test_every_missing_file_is_named(refused, tmp_path):
    said = refused(notebook(tmp_path / "n.ipynb"), "-f", tmp_path / "a.yaml", "-f", tmp_path / "b.yaml")
    assert "a.yaml: no such file" in said and "b.yaml: no such file" in said


def test_config_that_cannot_run_here_is_refused(refused, tmp_path):
    said = refused(notebook(tmp_path / "n.ipynb"), "-p", "num_gpus=512", "-o", tmp_path / "run")
    assert "-p num_gpus=512: training.num_gpus: 512" in said and not (tmp_path / "run").exists()
    file = params_file(tmp_path / "mine.yaml", "training:\n  device: cpu\n  tf32: true\n")
    assert "mine.yaml:3: training.tf32: TensorFloat-32 is" in refused(notebook(tmp_path / "n.ipynb"), "-f", file)


def test_notebook_that_only_plans_takes_the_config_of_another_machine(tmp_path, monkeypatch):
    plans = notebook(tmp_path / "n.ipynb")
    written = json.loads(plans.read_text())
    written["metadata"]["upsnb"] = {"plans_only": True}
    plans.write_text(json.dumps(written))
    executed = []
    monkeypatch.setattr(command, "_execute", lambda *arguments: executed.append(arguments))
    assert command.main(["run", str(plans), "-p", "num_gpus=512", "-o", str(tmp_path / "run")]) == command.OK
    assert executed[0][2]["training"] == {"num_gpus": 512}


def test_notebook_without_tag_or_not_a_notebook_is_refused(refused, tmp_path):
    assert "tagged `parameters`" in refused(notebook(tmp_path / "n.ipynb", "1", parameters=None))
    for source in ("preset = ''\n%env A=1", "preset = '"):
        assert "is not Python (" in refused(notebook(tmp_path / "n.ipynb", parameters=source))
    (tmp_path / "n.ipynb").write_text("not json")
    assert "is not a notebook" in refused(tmp_path / "n.ipynb")


def test_folder_with_a_run_is_not_overwritten(refused, tmp_path):
    runfolder.create(RunConfig(), tmp_path / "run")
    said = refused(notebook(tmp_path / "n.ipynb"), "-o", tmp_path / "run")
    assert "run" in said and not (tmp_path / "run" / "notebook.ipynb").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\\nb", "x" * 300, "."])
def test_a_name_that_leaves_its_folder_is_refused(refused, tmp_path, name):
    assert f'logging.name="{name[:10]}' in refused(notebook(tmp_path / "n.ipynb"), "-p", f'logging.name="{name}"')


@pytest.mark.parametrize("folder", ["taken", "taken/inside", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused(refused, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    said = refused(notebook(tmp_path / "n.ipynb"), "-o", folder)
    assert said.startswith(f"{folder}: no folder can be made there (") and said.count("\n") == 1


@pytest.mark.parametrize("folder", ["", "  ", "two\nlines", "a\x1b[31mb"])
def test_a_folder_without_a_proper_name_is_refused(tmp_path, capsys, folder):
    with pytest.raises(SystemExit) as exit_:
        command.main(["run", str(notebook(tmp_path / "n.ipynb")), "-o", folder])
    assert exit_.value.code == command.REFUSED and "is no name of a folder" in capsys.readouterr().err


# -- what a notebook is passed -------------------------------------------------------------------------------------


def test_files_and_settings_become_one_overlay_per_section(tmp_path):
    path = notebook(tmp_path / "n.ipynb")
    one = params_file(tmp_path / "1.yaml", "training: {batch_size: 4, query_sampling: {num_queries: 9}}\nseed: 5")
    two = params_file(tmp_path / "2.yaml", "training.batch_size: 5\nhidden_dim: 64\n")
    passed, config = command.read_parameters(path, [one, two], ["num_heads=4", "training={seed: 1}", "grad_clip=null"])
    assert passed == {
        "training": {"batch_size": 5, "query_sampling.num_queries": 9, "seed": 1, "grad_clip": None},
        "operator": {"pdet.hidden_dim": 64, "pdet.num_heads": 4},
    }
    assert config.training.batch_size == 5 and config.training.query_sampling.num_queries == 9
    assert config.training.grad_clip is None and config.operator.pdet.hidden_dim == 64


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4", ".1e-3"])
def test_numbers_are_numbers_however_written(tmp_path, text):
    _, config = command.read_parameters(notebook(tmp_path / "n.ipynb"), [], [f"lr={text}", f"betas=[{text}, 9e-1]"])
    assert config.optimizer.lr == 1e-4 and config.optimizer.betas == (1e-4, 0.9)


def test_text_stays_text(tmp_path):
    _, config = command.read_parameters(notebook(tmp_path / "n.ipynb"), [], ["logging.name=a1e4b", "amp=on"])
    assert config.logging.name == "a1e4b" and config.training.amp is True


@pytest.fixture
def with_preset(tmp_path):
    """A notebook whose own preset, low.yaml, sets batch_size 3, seed 7 and hidden_dim 64."""
    params_file(tmp_path / "low.yaml", "batch_size: 3\ntraining:\n  seed: 7\nhidden_dim: 64\n")
    return notebook(tmp_path / "n.ipynb", parameters=PARAMETERS.replace("''", f"'{tmp_path}/low'", 1))


def test_a_file_goes_on_top_of_the_notebooks_preset(with_preset, tmp_path):
    """One that names its data alone must not train the reference model, for hours, instead of the notebook's."""
    file = params_file(tmp_path / "mine.yaml", "data: {datasets: {mine: {family: darcy2d}}}\nseed: 8\n")
    passed, config = command.read_parameters(with_preset, [file], [])
    assert (config.training.batch_size, config.training.seed, config.operator.pdet.hidden_dim) == (3, 8, 64)
    assert list(config.data.datasets) == ["mine"] and "preset" not in passed


def test_nothing_is_below_files_of_which_one_stands_alone(with_preset, tmp_path):
    alone = params_file(tmp_path / "alone.yaml", 'preset: ""\nseed: 9\n')
    file = params_file(tmp_path / "mine.yaml", "batch_size: 4")
    for files in ([alone, file], [file, alone]):
        passed, config = command.read_parameters(with_preset, files, [])
        assert passed["preset"] == "" and config == overlays.resolve({"seed": 9, "batch_size": 4})
    assert command.read_parameters(with_preset, [alone], [f"preset={tmp_path}/low"])[1].operator.pdet.hidden_dim == 64


@pytest.mark.parametrize(("text", "said"), [("seed: 8", True), ('preset: ""\nseed: 8', False)])
def test_what_a_file_is_put_on_top_of_is_said_first(with_preset, tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr(command, "_execute", lambda *arguments: None)
    file = params_file(tmp_path / "mine.yaml", text)
    assert command.main(["run", str(with_preset), "-f", str(file), "-o", str(tmp_path / "run")]) == command.OK
    second = capsys.readouterr().out.splitlines()[1]
    assert (f"mine.yaml: on top of the preset {tmp_path}/low of the notebook" in second) is said


@pytest.mark.parametrize(("text", "param", "expected"), [
    ("seed: 1", "lr=abc", "-p lr=abc: optimizer.lr: got the text 'abc'"),
    ("\ntraining:\n  batch_size: 0", "lr=1", "mine.yaml:3: training.batch_size: got 0"),
    ("pdet: {depth: 0}", "lr=1", "mine.yaml:1: operator.pdet.depth: got 0"),
    ("seed: 1\nbach_size: 3", "lr=1", "mine.yaml:2: bach_size: unknown setting"),
    ("seed: 1", "num_heads=7", "-p num_heads=7: operator.pdet.num_heads: 64 over 7 heads"),
    ("num_heads: 7", "hidden_dim=32", "-p hidden_dim=32: operator.pdet.num_heads: 32 over 7 heads"),
    ("num_heads: 7", "seed=1", "mine.yaml:1: operator.pdet.num_heads: 64 over 7 heads"),
    ("seed: 1", "seed=\n- 1", "-p 'seed=\\n- 1': training.seed: got [1]"),
    ("preset: quick", "seed=1", "mine.yaml: preset: a file cannot name another one"),
])  # fmt: skip
def test_a_problem_names_what_brought_it(refused, with_preset, tmp_path, text, param, expected):
    file = params_file(tmp_path / "mine.yaml", text)
    said = refused(with_preset, "-f", file, "-p", param)
    assert expected in said and said.startswith("1 problem in the parameters\n")


def test_a_problem_of_the_preset_names_its_file_and_line(refused, with_preset, tmp_path):
    params_file(tmp_path / "low.yaml", "batch_size: 3\ntraining:\n  seed: -7\n")
    assert "low.yaml:3: training.seed: got -7" in refused(with_preset, "-p", "lr=1")


def test_a_notebooks_own_parameters_pass_untouched(tmp_path):
    path = notebook(tmp_path / "n.ipynb", parameters=PARAMETERS + "\nnum_pairs = 5")
    assert command.read_parameters(path, [], ["num_pairs=6"])[0] == {"num_pairs": 6}


@pytest.mark.parametrize(("given", "said"), [
    ("fail_on_verdict='false'", "fail_on_verdict: got 'false' -> write true or false"),
    ("seeds=42", "seeds: got 42 -> write list[int]"),
])  # fmt: skip
def test_a_notebooks_own_parameters_have_the_types_that_its_cell_says(refused, tmp_path, given, said):
    own = "\nfail_on_verdict: bool = False\nseeds: list[int] = [1]"
    path = notebook(tmp_path / "n.ipynb", parameters=PARAMETERS + own)
    assert f"-p {given}: {said}" in refused(path, "-p", given)
    file = params_file(tmp_path / "p.yaml", given.replace("=", ": "))
    assert f"p.yaml: {said}" in refused(path, "-f", file)
    assert command.read_parameters(path, [], ["seeds=[1, 2]"])[0] == {"seeds": [1, 2]}


def test_files_and_settings_go_over_the_notebooks_knobs(tmp_path):
    knobs = "\nseed: int = 5  # of the weights\ntime_limit_s: float = None  # [s]"
    path = notebook(tmp_path / "n.ipynb", parameters=PARAMETERS + knobs)
    file = params_file(tmp_path / "p.yaml", "training: {time_limit_s: 9.0}")
    passed, config = command.read_parameters(path, [file], ["seed=6"])
    assert passed == {"training": {"time_limit_s": 9.0, "seed": 6}}
    assert (config.training.time_limit_s, config.training.seed) == (9.0, 6)
    assert command.read_parameters(path, [file], [])[1].training.seed == 5


def test_section_the_notebook_does_not_know_is_refused(tmp_path):
    path = notebook(tmp_path / "n.ipynb", parameters="preset = ''\nrun_folder = ''")
    with pytest.raises(ConfigError, match=r"training: is no parameter of n\.ipynb"):
        command.read_parameters(path, [], ["batch_size=2"])


# -- what is executed ----------------------------------------------------------------------------------------------


def execute(*arguments, cwd) -> subprocess.CompletedProcess:
    call = [sys.executable, "-m", "upsnb", "run", *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("named", ["01_train", "notebooks/01_train.ipynb", str(PROJECT / "notebooks/01_train.ipynb")])
def test_a_notebook_is_found_by_its_path_and_those_of_the_project_by_their_names(named, monkeypatch, tmp_path):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(command, "_execute", lambda given, *arguments: found.append(given))
    found = []
    assert command.main(["run", named, "-p", "preset=smoke", "-o", str(tmp_path / "run")]) == command.OK
    assert found == [PROJECT / "notebooks/01_train.ipynb"]


@pytest.mark.slow
def test_success_prints_table_figures_and_notebook(tmp_path):
    work = (
        "import ipykernel, json, pathlib\n"
        f"report = {REPORT!r}\n"
        "folder = pathlib.Path(run_folder)\n"
        "(folder / 'report.json').write_text(json.dumps(report))\n"
        "(folder / 'figures').mkdir()\n"
        "(folder / 'figures' / 'loss.png').touch()\n"
        "for k in range(300): print('line', k, flush=True)\n"
        "print('batch', config.training.batch_size, 'lr', config.optimizer.lr)\n"
        "print('by', ipykernel.get_connection_info(unpack=True)['transport'])"
    )
    path = notebook(tmp_path / "n.ipynb", CHECK, work)
    done = execute(path, "-p", "batch_size=3", "-p", "lr=1e-4", "-o", "run {odd}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in ("line 299", "batch 3 lr 0.0001", "by ipc", "0.01235", "persistence 0.9", "training mean 0.7",
                     "321", "1,234,567", "skipped optimizer_offload: no GPU", "run {odd}/figures/loss.png",
                     "run {odd}/notebook.ipynb"):  # fmt: skip
        assert expected in done.stdout
    cells = nbformat.read(tmp_path / "run {odd}" / "notebook.ipynb", as_version=4).cells
    assert len(cells[-1].outputs) == 1  # coalesced


@pytest.mark.slow
def test_failing_cell_is_one_cause_and_keeps_the_notebook(tmp_path):
    path = notebook(tmp_path / "n.ipynb", CHECK, "raise RuntimeError('the loss is not a number')", "print('after')")
    done = execute(path, "-o", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == command.FAILED
    assert "FAILED: cell [4] raised RuntimeError: the loss is not a number\nSee run/notebook.ipynb" in done.stderr
    assert "Traceback" not in done.stderr and "after" not in done.stdout
    assert "the loss is not a number" in (tmp_path / "run" / "notebook.ipynb").read_text()


@pytest.mark.slow
def test_what_a_notebook_starts_ends_with_it_though_a_cell_of_a_page_called_it(tmp_path, monkeypatch):
    for name in handle.INTERACTIVE:
        monkeypatch.setenv(name, "a page")
    path = notebook(tmp_path / "n.ipynb", CHECK, "from upsnb.runs import handle\nassert handle.is_headless()")
    assert execute(path, "-o", tmp_path / "run", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_dead_kernel_fails(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "import os\nos._exit(1)", "print('after')")
    done = execute(path, "-o", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == command.FAILED
    assert "FAILED: the kernel died" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "notebook.ipynb").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "starts, expected",
    [("/bin/false", "FAILED: no kernel started"), ("/gone/python", "FAILED: /gone/python: No such file or directory")],
)
def test_kernel_that_cannot_start_fails_without_a_traceback(starts, expected, tmp_path, monkeypatch):
    spec = tmp_path / "kernels" / command.KERNEL / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": [starts, "{connection_file}"], "display_name": "", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    done = execute(notebook(tmp_path / "n.ipynb", "1"), "-o", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == command.FAILED
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "notebook.ipynb").exists()


def test_run_that_failed_fails_although_its_notebook_went_on(tmp_path, monkeypatch, capsys):
    def execute(notebook, executed, parameters):
        runfolder.create(RunConfig(), parameters["run_folder"])
        runfolder.update_manifest(parameters["run_folder"], status="failed", cause="rank 1 ran out of memory")

    monkeypatch.setattr(command, "_execute", execute)
    assert command.main(["run", str(notebook(tmp_path / "n.ipynb")), "-o", str(tmp_path / "run")]) == command.FAILED
    assert "FAILED: the run failed: rank 1 ran out of memory" in capsys.readouterr().err


def test_old_report_is_not_shown_for_a_new_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "run/figures").mkdir(parents=True)
    (tmp_path / "run/report.json").write_text(json.dumps(REPORT))
    (tmp_path / "run/figures/loss.png").touch()
    assert "321" in summary(tmp_path / "run")
    monkeypatch.setattr(command, "_execute", lambda *arguments: "cell [2] raised ZeroDivisionError")
    assert command.main(["run", str(notebook(tmp_path / "n.ipynb")), "-o", str(tmp_path / "run")]) == command.FAILED
    said = capsys.readouterr().out
    assert "321" not in said and "loss.png" not in said


def test_run_folder_is_made_under_outputs(tmp_path, monkeypatch):
    for name in ("params", "notebooks"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr(
        command, "_execute", lambda notebook, executed, parameters: made.append(parameters["run_folder"])
    )
    assert command.main(["run", str(notebook(tmp_path / "n.ipynb")), "-p", "logging.name=trial"]) == command.OK
    (folder,) = (tmp_path / "outputs").iterdir()
    assert folder.name.startswith("trial-") and made == [str(folder)]


@pytest.mark.parametrize("report", [{}, {"datasets": {"d": {"test": {}}}, "samples_per_s": None}])
def test_half_a_report_still_prints(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert summary(tmp_path)
    (tmp_path / "report.json").write_text("{")
    assert "damaged" in summary(tmp_path)


def test_report_of_memory_prints_errors_and_batches(tmp_path):
    row = {"config": "as configured", "predicted_gib": 0.5, "measured_gib": 0.4, "error_percent": 25.0}
    fits = [{"phases": "as configured", "gpu": gpu, "batch_size": size} for gpu, size in (("T4", 7), ("H200", 77))]
    made = {"kind": "memory", "rows": [{**row, "not_measured": None}], "fits": fits, "measured_by": "an allocator"}
    (tmp_path / "report.json").write_text(json.dumps(made))
    said = summary(tmp_path)
    assert "largest error 25 % of 1, an allocator" in said and "T4  H200" in said and "7    77" in said


@pytest.mark.parametrize("module", [verdict, ladder, plan, profiling, scaling])
def test_every_kind_of_report_is_told_by_its_own_module(module, tmp_path, monkeypatch):
    """A report of another kind than training's, told as one of training, is a column of None."""
    monkeypatch.setattr(module, "summary", lambda report: f"told by {module.__name__}: {report['kind']}")
    (tmp_path / "report.json").write_text(json.dumps({"kind": module.KIND}))
    said = summary(tmp_path)
    assert said.strip() == f"told by {module.__name__}: {module.KIND}"

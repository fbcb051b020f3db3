"""A sweep: what its file may say, what it trains, and that it goes on wherever it was ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from figure_checks import check
from made_runs import CONFIG, END, START, step, write_run
from waiting import until

from upsnb import config as configs
from upsnb import overlays
from upsnb.__main__ import main
from upsnb.compare import sweep, sweep_figures
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.hardware import Hardware
from upsnb.runs import handle, runfolder
from upsnb.runs.supervisor import ORPHANED
from upsnb.runs.table import table

GRID = {"lr": [0.001, 0.002], "latent.dim": [32, 64, 96]}


# -- what a file says ----------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_with_every_seed():
    planned = sweep.plan(CONFIG, grid=GRID, seeds=[1, 2])
    assert len(planned.points) == 6 and {"optimizer.lr": 0.002, "latent.dim": 64} in planned.points
    config = planned.config(planned.points[0], 2)
    assert (config.training.seed, config.optimizer.lr, config.evaluation.split) == (2, 0.001, "validation")
    assert config.data == CONFIG.data


def test_more_random_draws_begin_with_the_same():
    asked = {"lr": {"from": 1e-4, "to": 1e-1, "log": True}, "depth": {"from": 2, "to": 9}, "num_heads": [2, 4, 8]}
    few, many = (sweep.plan(CONFIG, random=asked, draws=count).points for count in (5, 30))
    assert many[:5] == few and len({json.dumps(point) for point in many}) == 30
    assert all(1e-4 <= point["optimizer.lr"] <= 1e-1 for point in many)
    assert sum(point["optimizer.lr"] < 3e-3 for point in many) in range(8, 23), "as many below the middle as above it"
    assert all(isinstance(point["operator.pdet.depth"], int) for point in many)


def test_few_values_are_drawn_once_each():
    assert len(sweep.plan(CONFIG, random={"num_heads": [2, 4]}, draws=9).points) == 2


def test_file_puts_settings_over_its_base_and_is_named_after_itself(tmp_path):
    (tmp_path / "base.yaml").write_text('preset: ""\nlatent: {dim: 24}\ntraining: {batch_size: 3}\n')
    file = tmp_path / "widths.yaml"
    said = {"base": str(tmp_path / "base.yaml"), "settings": {"batch_size": 5}, "grid": {"lr": [0.1]}, "seeds": [7]}
    file.write_text(yaml.safe_dump(said))
    planned = sweep.read(file)
    assert (planned.name, planned.seeds, planned.base.latent.dim) == ("widths", (7,), 24)
    assert planned.base.training.batch_size == 5
    assert sweep.read(Path(__file__).parents[2] / "params/sweep/quick.yaml").points, "the documented one"


BAD = {
    "grdi: {lr: [0.1]}": "grdi: unknown -> did you mean grid",
    "base: nowhere\ngrid: {lr: [0.1]}": "nowhere.yaml: no such file",
    "base: 7\ngrid: {lr: [0.1]}": "base: got 7 -> name a params file",
    "settings: {lrr: 1.0}\ngrid: {lr: [0.1]}": "settings: lrr: unknown setting",
    "seeds: [1]": "grid, random: neither -> write one of them",
    "grid: {lr: [0.1]}\nrandom: {lr: [0.1]}\ndraws: 1": "grid, random: both -> write one of them",
    "grid: {lrr: [0.1]}": "grid: lrr: unknown setting -> ",
    "grid: {lr: 0.1}": "grid: lr: got 0.1 -> write a list of values",
    "grid: {lr: []}": "grid: lr: got [] -> write a list of values",
    "grid: {lr: [0.1, 0.1]}": "grid: lr: [0.1, 0.1] has a value twice",
    "grid: {lr: [half]}": "optimizer.lr: got the text 'half'",
    "grid: {lr: [0.1]}\ndraws: 3": "draws: got 3 -> how many points",
    "grid: {seed: [1, 2]}": "grid: seed: cannot be varied -> seeds",
    "grid: {evaluation.split: [test]}": "grid: evaluation.split: cannot be varied -> nothing: a sweep selects on",
    "grid: {lr: [0.1]}\nseeds: 3": "seeds: got 3 -> write a list of whole numbers",
    "grid: {lr: [0.1]}\nseeds: [3, 3]": "seeds: [3, 3] has one twice",
    "random: {lr: {from: 1.0, to: 0.1}}\ndraws: 2": "random: lr: from 1.0 to 0.1 -> the second must be above",
    "random: {lr: {from: 0, to: 0.1, log: true}}\ndraws: 2": "random: lr: from 0 to 0.1 -> ",
    "random: {lr: {low: 1, to: 2}}\ndraws: 2": "random: lr: got {'low': 1, 'to': 2} -> write from and to",
    "random: {lr: [0.1]}": "draws: got 0 -> how many points",
    "grid: {lr: [0.1]}\nsampler: optuna": "sampler: got 'optuna' -> write optuna, beside random",
    "random: {lr: [0.1]}\ndraws: 1\nsampler: grid": "sampler: got 'grid' -> write optuna",
    "grid: {tf32: [true]}\nsettings: {device: cpu}": "TF32: training.tf32: TensorFloat-32 is",
    "grid: {lr: [0.1]}\nshare: 3/2": "share: got '3/2' -> write 2/3 for the second of three",
    "grid: {lr: [0.1]}\nshare: half": "share: got 'half' -> write 2/3",
    "grid: [lr]": "grid: got ['lr'] -> write settings below it",
    f"grid: {{lr: {[n + 1.0 for n in range(1001)]}}}": "1001 points x 1 seeds -> at most 1000 trainings",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_a_bad_file_is_one_sentence(tmp_path, text):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        sweep.read(tmp_path / "s.yaml")
    assert BAD[text] in str(caught.value) and len(caught.value.problems) == 1


# -- what is trained -----------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """Trainings that end at once; `trained.errors` has the nRMSE of each by its `lr`, and what else is said of it."""

    def start(config, folder, environment=None):
        start.asked.append((folder.name, environment, config.checkpoint.resume))
        nrmse, how = start.errors.get(config.optimizer.lr, 0.5), {}
        if isinstance(nrmse, dict):
            nrmse, how = None, nrmse
        return ended(folder, config, nrmse, **how)

    start.asked, start.errors = [], {}
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(handle, "start", start)
    return start


def ended(folder, config, nrmse, status="finished", cause=None, end_reason="epochs"):
    """A run as it is found when it has ended."""
    events = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}, step(1), step(2)]
    events += [{"kind": "end", "step": 2, **END}] if status == "finished" else []
    evaluation = {"format": 1, "split": "validation", "weights": "last"}
    evaluation["datasets"] = {"waves": {"validation": {"nrmse_mean": 9.0, "rollout_nrmse_mean": nrmse}}}
    run = write_run(folder, events, status, cause, evaluation if status == "finished" else None, config=config)
    runfolder.update_manifest(folder, end_reason=end_reason)
    return run


def test_the_best_comes_first_by_validation_and_stands_in_a_params_file(tmp_path, trained):
    trained.errors = {0.001: 0.3, 0.002: 0.1, 0.003: {"status": "failed", "cause": "it broke"}}
    planned = sweep.plan(CONFIG, grid={"lr": [0.001, 0.002, 0.003]}, seeds=[1, 2])
    report = sweep.run(planned, tmp_path, log=lambda text: None)
    assert [point["settings"]["optimizer.lr"] for point in report["points"]] == [0.002, 0.001, 0.003]
    assert report["points"][0]["nrmse"]["median"] == 0.1 and report["points"][2]["failed"] == 2
    best = overlays.load(tmp_path / "best.yaml")
    assert overlays.difference(CONFIG, best) == {"optimizer.lr": 0.002}, "on the test split again, once"
    assert "lr 0.003: - (2 failed: it broke)" in sweep.summary(report)
    assert len(table(tmp_path)) == 6 and set(table(tmp_path)["split"].dropna()) == {"validation"}
    assert list(sweep_figures.table(report)["lr"]) == ["0.002", "0.001", "0.003"]


def test_a_point_that_lost_a_seed_is_not_the_best(tmp_path, trained):
    trained.errors = {0.001: 0.1, 0.002: 0.3}
    planned = sweep.plan(CONFIG, grid={"lr": [0.001, 0.002]}, seeds=[1, 2])
    ended(tmp_path / "runs" / sweep.run_name(planned.points[0], 1), planned.config(planned.points[0], 1), None)
    report = sweep.run(planned, tmp_path, log=lambda text: None)
    assert report["points"][0]["settings"]["optimizer.lr"] == 0.002 and report["points"][1]["failed"] == 1


def test_a_point_that_misses_a_seed_is_not_the_best(tmp_path, trained):
    trained.errors = {0.001: 0.3}
    sweep.run(sweep.plan(CONFIG, grid={"lr": [0.001]}, seeds=[1, 2]), tmp_path, log=lambda text: None)
    trained.errors = {0.002: {"end_reason": "stopped"}}
    planned = sweep.plan(CONFIG, grid={"lr": [0.001, 0.002]}, seeds=[1, 2])
    ended(tmp_path / "runs" / sweep.run_name(planned.points[1], 1), planned.config(planned.points[1], 1), 0.1)
    report = sweep.run(planned, tmp_path, log=lambda text: None)
    assert [point["missing"] for point in report["points"]] == [0, 1] and report["points"][1]["nrmse"]["median"] == 0.1


def test_the_same_call_trains_what_is_missing_and_continues_what_was_interrupted(tmp_path, trained):
    planned = sweep.plan(CONFIG, grid={"lr": [0.001, 0.002, 0.003, 0.004, 0.005]})
    folders = [tmp_path / "runs" / sweep.run_name(point, 42) for point in planned.points]
    states = [
        {}, {"end_reason": "stopped"}, {"status": "failed", "cause": ORPHANED}, {"status": "failed", "cause": "a bug"}
    ]  # fmt: skip
    for folder, point, state in zip(folders, planned.points, states):
        ended(folder, planned.config(point, 42), 0.2, **state)
    said = []
    report = sweep.run(planned, tmp_path, log=said.append)
    asked = {name: resumed for name, _, resumed in trained.asked}
    assert asked == {folders[1].name: True, folders[2].name: True, folders[4].name: False}
    assert sum(point["failed"] for point in report["points"]) == 1, "what failed by itself would fail again"
    trained.asked.clear()
    longer = sweep.plan(CONFIG, grid={"lr": [0.006, 0.001, 0.002, 0.003, 0.004, 0.005]})
    sweep.run(longer, tmp_path, log=said.append)
    assert [name for name, *_ in trained.asked] == [sweep.run_name({"optimizer.lr": 0.006}, 42)], "a longer list"


def test_a_run_that_is_stopped_ends_the_sweep(tmp_path, trained):
    trained.errors = {0.001: {"end_reason": "stopped"}}
    report = sweep.run(sweep.plan(CONFIG, grid={"lr": [0.001, 0.002]}), tmp_path, log=lambda text: None)
    assert len(trained.asked) == 1 and sum(point["missing"] for point in report["points"]) == 2
    assert "2 trainings are left" in sweep.summary(report) and not (tmp_path / "best.yaml").exists()


def test_other_settings_in_the_same_folder_are_refused(tmp_path, trained):
    sweep.run(sweep.plan(CONFIG, grid={"lr": [0.001]}), tmp_path, log=lambda text: None)
    other = overlays.apply(CONFIG, {"training.batch_size": 3})
    with pytest.raises(RunError, match="was trained with another training.batch_size -> choose another folder"):
        sweep.run(sweep.plan(other, grid={"lr": [0.001]}), tmp_path, log=lambda text: None)


def test_a_share_goes_on_and_is_gathered_whatever_its_machine_costs_and_a_model_of_one_s_own_is_the_same(
    tmp_path, trained, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("class Net: ...\n")
    base, grid = overlays.apply(CONFIG, {"model.build": "own.py:Net"}), {"lr": [0.001, 0.002]}
    for number, price in enumerate((0.5, 0.7), 1):
        for left in (5.0, 3.0):  # on another machine it goes on for what is left
            priced = overlays.apply(base, {"cost.price_per_hour": price, "cost.budget": left})
            sweep.run(sweep.plan(priced, grid=grid, share=f"{number}/2"), tmp_path / str(number), log=lambda text: None)
    assert len(trained.asked) == 2
    assert not sum(point["missing"] for point in sweep.gather("all", [Path("1"), Path("2")])["points"])


def shared_out(folder: Path, trained, count: int = 3) -> list[Path]:
    """A sweep of five settings and two seeds, trained by so many machines; their folders."""
    trained.errors = {0.001 * n: 0.1 * n for n in range(1, 6)}
    folders = [folder / f"machine{number}" for number in range(1, count + 1)]
    for number, own in enumerate(folders, 1):
        planned = sweep.plan(CONFIG, grid={"lr": [*trained.errors]}, seeds=[1, 2], share=f"{number}/{count}")
        report = sweep.run(planned, own, log=lambda text: None)
        assert sum(point["missing"] for point in report["points"]) > 0, "it knows of what others train"
    return folders


def test_machines_that_share_a_sweep_train_each_training_once_and_together_all(tmp_path, trained):
    shares = shared_out(tmp_path, trained)
    names = [name for name, *_ in trained.asked]
    assert len(names) == len(set(names)) == 10
    assert sorted(len([*share.glob("runs/*")]) for share in shares) == [3, 3, 4]
    together = sweep.gather(tmp_path / "all", shares)
    trained.asked.clear()
    alone = sweep.run(
        sweep.plan(CONFIG, grid={"lr": [*trained.errors]}, seeds=[1, 2]), tmp_path / "alone", log=lambda text: None
    )
    assert together["points"] == alone["points"] and not any(point["missing"] for point in together["points"])
    assert (tmp_path / "all/best.yaml").read_text() == (tmp_path / "alone/best.yaml").read_text()


def test_tasks_of_a_slurm_array_ask_for_shares_that_the_command_knows(tmp_path, trained, monkeypatch):
    said = tmp_path / "python"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    said.chmod(0o755)
    project, file = runfolder.project_root(), tmp_path / "rates.yaml"
    file.write_text("base: smoke\ngrid: {lr: [0.1, 0.2]}\n")
    for task in "12":
        given = {"ARRAY_TASK_ID": task, "ARRAY_TASK_COUNT": "2", "ARRAY_JOB_ID": "77"}
        environment = {
            **os.environ,
            "UPSNB_PYTHON": str(said),
            **{f"SLURM_{key}": value for key, value in given.items()},
        }
        script = ["bash", project / "params/slurm/sweep.sbatch", file]
        asked = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.split()
        assert asked[:2] == ["-m", "upsnb"] and asked[-1] == f"outputs/slurm-77-{task}"
        assert main([*asked[2:-1], str(tmp_path / task)]) == 0
    assert len({name for name, *_ in trained.asked}) == len(trained.asked) == 2
    assert main(["gather", str(tmp_path / "all"), str(tmp_path / "1"), str(tmp_path / "2")]) == 0
    assert len([*(tmp_path / "all/runs").iterdir()]) == 2


def test_what_one_machine_still_trains_is_gathered_later_and_what_is_there_stays(tmp_path, trained):
    *early, late = shared_out(tmp_path, trained)
    report = sweep.gather(tmp_path / "all", early)
    assert sum(point["missing"] for point in report["points"]) == 3
    mark = next((tmp_path / "all/runs").iterdir()) / "mine"
    mark.touch()
    report = sweep.gather(tmp_path / "all", [late])
    assert not any(point["missing"] for point in report["points"]) and mark.exists()
    assert len([*(tmp_path / "all/runs").iterdir()]) == 10


def test_shares_of_two_sweeps_are_not_gathered_in_one_folder(tmp_path, trained):
    shares = shared_out(tmp_path, trained)
    sweep.run(sweep.plan(CONFIG, grid={"lr": [0.5]}), tmp_path / "other", log=lambda text: None)
    with pytest.raises(RunError, match="other: is of another sweep than .*machine1 -> gather them apart"):
        sweep.gather(tmp_path / "all", [*shares, tmp_path / "other"])
    with pytest.raises(RunError, match="nowhere: holds no sweep"):
        sweep.gather(tmp_path / "all", [tmp_path / "nowhere"])
    assert not (tmp_path / "all").exists()


def test_two_processes_do_not_work_on_one_sweep(tmp_path, trained):
    with sweep._alone(tmp_path), pytest.raises(RunError, match="another process works on this sweep"):
        sweep.run(sweep.plan(CONFIG, grid={"lr": [0.001]}), tmp_path)


def test_every_training_has_gpus_of_its_own(tmp_path, trained, monkeypatch):
    machine = Hardware("cuda", 3, "a GPU", 80.0, 8, (9, 0))
    monkeypatch.setattr(sweep.hardware, "detect", lambda: machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    planned = sweep.plan(overlays.apply(CONFIG, {"training.num_gpus": 2}), grid={"lr": [0.001, 0.002]})
    sweep.run(planned, tmp_path, log=lambda text: None)
    assert [seen for _, seen, _ in trained.asked] == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "7,4"}]
    assert sweep.devices(RunConfig(), Hardware("cpu", 1, "a laptop", 8.0, 2)) == [""]


def test_figure_has_a_panel_for_each_setting(tmp_path, trained):
    trained.errors = {0.001: 0.3, 0.002: 0.03}
    grid = {"lr": [0.001, 0.002], "walls": ["hard", "free"], "latent.dim": [32, 64]}
    planned = sweep.plan(CONFIG, grid=grid)
    sweep.run(planned, tmp_path, log=lambda text: None)
    (path,) = sweep_figures.write_figures(tmp_path).values()
    figure = sweep_figures.slices(json.loads((tmp_path / "report.json").read_text()))
    check(figure)
    assert path.exists() and [ax.get_xlabel() for ax in figure.axes] == [*planned.points[0]]


# -- a search ------------------------------------------------------------------------------------------------------

ASKED = {"lr": {"from": 1e-4, "to": 1e-1, "log": True}, "depth": {"from": 2, "to": 9}, "num_heads": [2, 4]}


def test_without_optuna_a_search_is_refused_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="sampler: optuna is not installed -> .venv/bin/pip install"):
        sweep.plan(CONFIG, random=ASKED, draws=9, sampler="optuna")


def test_a_search_trains_what_is_suggested_and_goes_on_with_all_that_it_knows(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(sweep, "find_spec", bool)
    trained.errors = {0.001: {"end_reason": "stopped"}}
    told = []

    def suggest(axes, known):
        told.append(len(known))
        return {**known[0][0], "optimizer.lr": 0.001 * (len(known) - 4)} if len(known) < 8 else None

    monkeypatch.setattr(sweep, "suggest", suggest)
    planned = sweep.plan(CONFIG, random=ASKED, draws=9, sampler="optuna")
    assert planned.points == sweep.plan(CONFIG, random=ASKED, draws=5).points
    sweep.run(planned, tmp_path, log=lambda text: None)
    assert told == [5], "the sixth was stopped"
    trained.errors = {}
    report = sweep.run(planned, tmp_path, log=lambda text: None)
    assert told == [5, 6, 7, 8] and len(report["points"]) == len(trained.asked) - 1 == 8, "one of them twice"


# -- for real ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_sweep_that_was_killed_goes_on_where_it_was(tiny_config, tmp_path):
    base = tiny_config(
        ("darcy",), **{"stages.operator.epochs": 40, "checkpoint.interval": 2, "evaluation.every_epochs": 20}
    )
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(overlays.difference(RunConfig(), base)))
    said = {"base": str(tmp_path / "base.yaml"), "grid": {"lr": [0.001, 0.002]}}
    (tmp_path / "lr.yaml").write_text(yaml.safe_dump(said))
    call = [sys.executable, "-m", "upsnb", "sweep", str(tmp_path / "lr.yaml"), "-o", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    first = subprocess.Popen(call, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    point = tmp_path / "out/runs" / sweep.run_name({"optimizer.lr": 0.001}, 42)
    until(lambda: runfolder.read_events(point, ("checkpoint",)), "no training has saved anything")
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 points by validation nRMSE" in done.stdout and done.stdout.count("1 seed)") == 2
    manifest = runfolder.read_manifest(point)
    assert manifest["status"] == "finished" and len(manifest["segments"]) == 2, "continued, not begun anew"
    assert runfolder.read_events(point, ("start",))[1]["step"] > 0
    assert configs.load(point / "config.yaml").evaluation.split == "validation"
    again = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "training" not in again.stdout, "nothing is left to do"
    assert len(table(tmp_path / "out")) == 2


def test_a_sweep_of_another_workload_calls_its_error_by_its_name(of_tokens, tmp_path, trained):
    trained.errors = {0.001: {"status": "failed", "cause": "it broke"}, 0.002: 9.0}
    report = sweep.run(sweep.plan(CONFIG, grid={"lr": [0.001, 0.002]}), tmp_path, log=lambda text: None)
    figure = sweep_figures.slices(report)
    told = [sweep.summary(report), *sweep_figures.table(report), figure.get_suptitle(), figure.axes[0].get_ylabel()]
    assert "validation perplexity" in told[1:] and "2 points by validation perplexity" in told[0]
    assert "nRMSE" not in " ".join(told) and report["metric"] == "perplexity"
    del report["metric"]  # as in a report of before
    assert "validation nRMSE" in sweep_figures.table(report)

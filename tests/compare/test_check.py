"""What a check tries, what it refuses, and that what happens in a trial is told as it was."""

import json
import subprocess

import pytest

from upsnb import overlays
from upsnb.__main__ import main, read_parameters
from upsnb.compare import check
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.phases import DOES_NOT_APPLY, PHASES, REFUSED, is_on
from upsnb.runs import runfolder

CPU = Hardware("cpu", 1, "a processor", 16.0, 8)
GPU = Hardware("cuda", 1, "a GPU", 80.0, 8, (9, 0))
T4 = Hardware("cuda", 1, "T4", 15.0, 2, (7, 5))
BASE = overlays.load(runfolder.project_root() / "params/memory_reference.yaml")


def by_name(machine) -> dict[str, check.Trial]:
    return {trial.name: trial for trial in check.plan(BASE, machine)}


def test_every_phase_has_a_trial_of_its_own_at_full_width():
    trials = by_name(GPU)
    for phase in PHASES:
        trial = trials[phase.name]
        assert not trial.refused and trial.config.operator.pdet.hidden_dim == BASE.operator.pdet.hidden_dim == 384
        assert [other.name for other in PHASES if is_on(other, trial.config)] == [phase.name]
        assert trial.config.training.num_gpus == 1


def test_a_params_file_is_tried_whole_and_without_what_the_gpu_lacks():
    new, old = by_name(GPU)["4gpu_optimized"], by_name(T4)["4gpu_optimized"]
    assert new.config.training.amp_dtype == "bfloat16" and not new.without
    assert old.config.training.amp_dtype == "float16" and "bf16: " in old.without and not old.refused


def test_without_a_gpu_files_for_gpus_are_refused_in_words_and_nothing_is_large():
    for trial in by_name(CPU).values():
        assert trial.config.training.batch_size <= 2 and len(trial.config.data.datasets) == 1 or trial.refused, trial
    assert "for GPUs" in by_name(CPU)["2gpu_optimized"].refused and not by_name(CPU)["cpu_optimized"].refused


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_of_its_few_samples_some_are_left_for_each_split(machine):
    """Whatever share a file's own settings take: two in a hundred of many samples are none of these."""
    for trial in check.plan(BASE, machine):
        split = trial.config.data.split
        for dataset in trial.config.data.datasets.values() if not trial.refused else ():
            assert int(dataset.generate.num_samples * min(split.validation_fraction, split.test_fraction)) >= 1, trial


def test_what_does_not_apply_to_a_model_is_not_tried(tmp_path):
    spectral = overlays.load(
        *(runfolder.project_root() / f"params/{name}.yaml" for name in ("smoke", "models/fno")),
    )
    report = check.check(spectral, tmp_path, chosen=["loss_frequency"], log=lambda text: None)
    (row,) = report["rows"]
    assert (row["verdict"], row["why"]) == (DOES_NOT_APPLY, "FNO predicts on its grid only") and row["step_ms"] is None
    assert check.summary(report).startswith("0 ran, 0 refused, 1 did not apply, 0 failed\nloss_frequency: does not")


SPEEDUP = {"median": 1.25, "ci95": [1.1, 1.4]}
MEASURED = {  # what reports of the notebooks say, and what is told of them
    "08_profile": (
        {"kind": "profile", "median_step_ms": 30.0, "floor": {"ms": 12.0}, "mfu": 0.414},
        "30 ms a step, 2.5 times its floor, MFU 41%",
    ),
    "04_phases": (
        {"kind": "phases", "alone": [{"phase": "fused", "ratio": SPEEDUP}, {"phase": "bf16", "ratio": SPEEDUP}]},
        "fused 1.25 [1.10, 1.40]; bf16 1.25 [1.10, 1.40]",
    ),
    "02_compare": (
        {"kind": "compare", "differences": {"optimizer.fused": True}, "speedup": SPEEDUP},
        "with optimizer.fused: 1.25 [1.10, 1.40] times the throughput",
    ),
}


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_short_measurements_are_of_the_same_model_without_a_phase_and_each_notebook_takes_its_words(
    tmp_path, monkeypatch, machine
):
    started = {}

    def run(arguments, log, limit_s, environment):
        _, _, notebook, _, folder, *words = arguments
        parameters, _ = read_parameters(runfolder.project_root() / notebook, [], words[1::2], lambda config: [])
        started[log.stem] = overlays.load(parameters.get("preset") or parameters["baseline"])
        (log.with_suffix("") / runfolder.REPORT).write_text(json.dumps(MEASURED[log.stem][0]))
        return "it broke" if log.stem == "04_phases" else ""

    monkeypatch.setattr(check, "_failed", run)
    monkeypatch.setattr(check, "plan", lambda *arguments: [])
    monkeypatch.setattr(check.hardware, "detect", lambda: machine)
    monkeypatch.setattr(check, "facts", lambda machine: {})
    rows = check.check(BASE, tmp_path, short=True, log=lambda text: None)["rows"]
    assert [row["name"] for row in rows] == [*started] == [*check.SHORT]
    for row in rows:
        broken = row["name"] == "04_phases"
        assert row["verdict"] == (check.FAILED if broken else check.RAN)
        assert row["why"] == ("it broke" if broken else "") and broken == ("measured" not in row)
        assert broken or row["measured"] == MEASURED[row["name"]][1]
    for config in started.values():
        assert config.operator.pdet.hidden_dim == 384 and not [phase.name for phase in PHASES if is_on(phase, config)]
        assert (config.training.batch_size == 2) == (machine is CPU)
    assert len(check.table({"rows": rows})) == len(MEASURED)


def test_without_papermill_notebooks_are_refused_and_have_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    row = check._measured("08_profile", BASE, CPU, tmp_path, 60.0)
    assert row["verdict"] == REFUSED and "papermill is not installed" in row["why"]


def test_what_was_said_before_the_limit_is_kept(tmp_path, monkeypatch):
    log = tmp_path / "log.txt"

    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout, b"step 7\n", b"a warning\n")

    monkeypatch.setattr(subprocess, "run", late)
    assert check._failed(["child"], log, 5.0, {}) == "not done after 5 s" and log.read_text() == "step 7\na warning\n"


@pytest.mark.parametrize("told", MEASURED.values(), ids=MEASURED)
def test_a_measurement_is_told_in_a_line(told):
    assert check._told(told[0]) == told[1]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="chosen: 'fuse' is none"):
        check.plan(BASE, CPU, ["fuse"])


@pytest.mark.slow
@pytest.mark.long  # the notebook of the check does much of it
def test_what_ran_what_was_refused_and_what_failed_are_told_apart(tmp_path, monkeypatch, capsys):
    base = overlays.load(runfolder.project_root() / "params/smoke.yaml")
    plan = check.plan

    def with_one_that_fails(*arguments):
        trials = plan(*arguments)
        broken = overlays.apply(trials[0].config, {"training.batch_size": 4000})  # more than there are pairs
        return [*trials, check.Trial("broken", "phase", broken)]

    monkeypatch.setattr(check, "plan", with_one_that_fails)
    report = check.check(base, tmp_path, chosen=["fused", "tf32"], num_steps=2)
    found = {row["name"]: row for row in report["rows"]}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "fused": check.RAN, "tf32": REFUSED, "broken": check.FAILED,
    }  # fmt: skip
    assert found["fused"]["step_ms"] > 0 and found["fused"]["memory_gib"] > 0
    assert "set it to false" in found["tf32"]["why"] and "lower batch_size" in found["broken"]["why"]
    assert "Traceback" in (tmp_path / "trials/broken/log.txt").read_text()
    assert json.loads((tmp_path / runfolder.REPORT).read_text())["kind"] == "check"
    assert len(check.table(report)) == 3 and check.summary(report).startswith(
        "1 ran, 1 refused, 0 did not apply, 1 failed"
    )


def test_the_command_refuses_what_it_does_not_know(capsys):
    assert main(["check", "fuse"]) == 2
    assert "'fuse' is none -> choose from" in capsys.readouterr().err

"""Phases as data: what a live run may be asked for, and what is left out where it cannot run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.phases import BY_NAME, PHASES, is_on, skip_missing, switchable, unmet
from upsnb.runs import handle, runfolder, supervisor
from upsnb.training.setup import cold_changes

PARAMS = Path(__file__).resolve().parents[1] / "params"
PRESETS = ["conservative", "aggressive", "2gpu_baseline", "2gpu_optimized", "4gpu_baseline", "4gpu_optimized"]
CPU = Hardware("cpu", 1, "a processor", 16.0, 8)
GPU, GPUS = (Hardware("cuda", count, "a GPU", 80.0, 8) for count in (1, 4))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_be_asked_of_a_live_run(preset):
    overlay = overlays.read(PARAMS / f"{preset}.yaml")
    asked = switchable(overlay)
    assert asked and asked.items() <= overlays.flatten(overlay).items()
    assert not any(path.startswith(("latent", "data.", "stages", "diffusion", "logging")) for path in asked)
    assert not {"training.num_gpus", "training.seed", "operator.pdet.depth", "optimizer.lr"} & asked.keys()
    now = overlays.apply(RunConfig(), asked)
    cold_changes(RunConfig(), now)  # raises for a setting that cannot change in a run
    whole = overlays.resolve(overlay)
    for phase in PHASES:  # what the file switches on is on; what it does not speak of stays as it was
        if is_on(phase, whole):
            assert is_on(phase, now), phase.name


def test_every_phase_can_be_asked_of_a_live_run():
    for phase in BY_NAME.values():
        for overlay in (phase.on, phase.off, phase.ladder):
            assert switchable(overlay) == overlay
    with pytest.raises(ConfigError, match="did you mean"):
        switchable({"training.complie": True})


def test_what_cannot_run_is_skipped_alone_and_with_its_reason():
    config = overlays.resolve({"nccl_tuning": True})
    on = overlays.apply(config, {"operator.pdet.use_activation_checkpoint": True, "training.num_workers": 6})
    left, skipped = skip_missing(on, CPU)
    assert skipped.keys() == {"nccl"} and "this run is on the CPU" in skipped["nccl"]
    assert overlays.difference(left, on) == {"training.nccl_tuning": True}
    assert skip_missing(left, CPU) == (left, {})


def test_what_no_phase_is_behind_stays_a_problem():
    config = overlays.resolve({"num_gpus": 8, "on_missing": "skip"})
    left, skipped = skip_missing(config, GPUS)
    assert left == config and not skipped
    with pytest.raises(ConfigError, match="training.num_gpus: 8"):
        hardware.check_runnable(left, GPUS)


@pytest.mark.parametrize(("machine", "num_gpus", "reason"), [(CPU, 2, "on the CPU"), (GPU, 1, "a single device")])
def test_nccl_is_refused_where_it_acts_on_nothing(machine, num_gpus, reason):
    config = overlays.resolve({"num_gpus": num_gpus, "device": "cpu" if machine is CPU else "auto"})
    assert [reason in problem for problem in unmet(BY_NAME["nccl"], config, machine)] == [True]
    assert not unmet(BY_NAME["nccl"], overlays.resolve({"num_gpus": 4}), GPUS)


def test_nccl_variables_are_set_for_the_workers_and_the_users_own_win(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    own = {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    watcher = supervisor.Supervisor(runfolder.create(RunConfig(), tmp_path / "off"))
    assert watcher._nccl_environment() == (own, [])
    folder = runfolder.create(overlays.resolve({"nccl_tuning": True}), tmp_path / "on")
    watcher = supervisor.Supervisor(folder)
    watcher._open_segment(0, None)
    environment = watcher._environment()
    assert {**supervisor.NCCL_TUNING, **own}.items() <= environment.items()
    (segment,) = runfolder.read_manifest(folder)["segments"]
    assert segment["environment"] == {**supervisor.NCCL_TUNING, **own}
    assert segment["environment_kept"] == ["NCCL_IB_DISABLE"]


def test_a_run_starts_without_the_phases_it_skips_and_says_so(tmp_path, monkeypatch, capsys):
    started = []
    fake = SimpleNamespace(Popen=lambda *a, **k: started.append(a) or SimpleNamespace(poll=lambda: None), DEVNULL=0)
    monkeypatch.setattr(handle, "subprocess", SimpleNamespace(PIPE=0, STDOUT=0, **vars(fake)))
    config = overlays.resolve({"device": "cpu", "nccl_tuning": True})
    with pytest.raises(ConfigError, match="nccl_tuning"):
        handle.start(config, tmp_path / "run")
    assert not started and not (tmp_path / "run").exists()
    run = handle.start(overlays.apply(config, {"training.on_missing": "skip"}), tmp_path / "run", attached=False)
    assert run.config.training.nccl_tuning is False and len(started) == 1
    assert run.manifest["phases_skipped"].keys() == {"nccl"}
    assert "skipped nccl: training.nccl_tuning" in capsys.readouterr().out

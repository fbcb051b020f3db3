"""Phases as data: what a live run may be asked for, and what is left out where it cannot run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.phases import (
    BY_NAME,
    COLD,
    COMPANIONS,
    HOT,
    PHASES,
    baseline_overlay,
    is_on,
    off_overlay,
    skip_missing,
    switchable,
    unmet,
)
from upsnb.runs import handle, ranks, runfolder, supervisor
from upsnb.training.setup import cold_changes

PARAMS = Path(__file__).resolve().parents[1] / "params"
PRESETS = ["conservative", "aggressive", "2gpu_baseline", "2gpu_optimized", "4gpu_baseline", "4gpu_optimized"]
ON = {  # params file: the phases that it switches on, by number or as extras
    "1gpu_fast": {1, 6, 8},
    "2gpu_baseline": set(),
    "2gpu_optimized": {1, 2, 3, 4, 5, 6, 8},
    "4gpu_baseline": set(),
    "4gpu_optimized": {1, 2, 3, 4, 5, 6, 7, 8},
    "advection_5min": {1},
    "aggressive": {1, 2, 3, 4, 5, 6, 7, 8, "flex_attention"},
    "conservative": {1, 2, 3, 4, 5, 6},
    "cpu_baseline": set(),
    "cpu_optimized": {1, 6, 8},
    "darcy_5min": {1, 6},
    "eleven": set(),
    "memory_reference": set(),
    "minute": set(),
    "pdebench_files": set(),
    "pdebench_full": set(),
    "pipeline_2gpu": {1, 6, 8},
    "pipeline_4gpu": {1, 6, 8},
    "pipeline_darcy": {1},
    "pipeline_diffusion": set(),
    "pipeline_kolmogorov": {1},
    "pipeline_ks": {1},
    "quick": set(),
    "rehearse": set(),
    "smoke": set(),
}
CPU = Hardware("cpu", 1, "a processor", 16.0, 8)
GPU, GPUS = (Hardware("cuda", count, "a GPU", 80.0, 8) for count in (1, 4))


def phases_on(config: RunConfig) -> set:
    return {phase.number or phase.name for phase in BY_NAME.values() if is_on(phase, config)} - {"no_sync"}  # as ever


@pytest.mark.parametrize("path", sorted(PARAMS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_params_file_switches_on_what_the_table_says(path):
    config = overlays.load(path)
    assert phases_on(config) == ON[path.stem]
    assert config.training.no_sync
    guarded = path.stem in ("conservative", "aggressive")
    assert (config.guards.nonfinite, config.guards.out_of_memory) == (("bfloat16", True) if guarded else ("off", False))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize("preset", ["4gpu_optimized", "aggressive"])
def test_every_phase_has_a_rollback_that_takes_it_alone(preset, phase):
    path = PARAMS / f"rollback/{phase.number}_{phase.name}.yaml"
    without = overlays.load(PARAMS / f"{preset}.yaml", path)
    assert phases_on(without) == ON[preset] - {phase.number}
    assert len([*path.parent.iterdir()]) == len(PHASES)


def test_a_rehearsal_keeps_all_phases():
    assert phases_on(overlays.load(PARAMS / "4gpu_optimized.yaml", PARAMS / "rehearse.yaml")) == ON["4gpu_optimized"]


@pytest.mark.parametrize("phase", BY_NAME.values(), ids=BY_NAME.keys())
@pytest.mark.parametrize("preset", ["quick", "cpu_optimized", "2gpu_baseline", "4gpu_optimized", "aggressive"])
def test_a_phase_off_is_the_run_s_own_again(preset, phase):
    base = overlays.load(PARAMS / f"{preset}.yaml", overrides={"foreach": None} if phase.name == "foreach" else {})
    excluded = {"foreach": {"optimizer.fused": False}, "bf16_gradients": {"training.use_fsdp2": False}}
    others = excluded.get(phase.name, {})
    on = overlays.apply(base, {**phase.on, **others})
    off = overlays.apply(on, off_overlay(phase, base))
    assert is_on(phase, on) and not is_on(phase, off)
    if is_on(phase, base):  # it has no own values without
        said = phase.off_on_cpu or phase.off if hardware.detect().device == "cpu" else phase.off
        assert overlays.difference(off, overlays.apply(off, said)) == {}
    else:
        assert off == overlays.apply(base, others)


def test_bfloat16_on_and_off_leaves_a_float32_run_in_float32():
    base = overlays.resolve({"training.amp_dtype": "float32"})
    on = overlays.apply(base, BY_NAME["bf16"].on)
    assert overlays.apply(on, off_overlay(BY_NAME["bf16"], base)) == base


@pytest.mark.parametrize(("device", "amp"), [("cpu", False), ("cuda", True)])
def test_without_bfloat16_a_run_started_with_it_is_float16_on_a_gpu_and_float32_on_a_cpu(device, amp):
    """Not float16 there, ten times as slow, which would make the phase look ten times as good."""
    base = overlays.load(PARAMS / "cpu_optimized.yaml", overrides={"training.device": device})
    for overlay in (off_overlay(BY_NAME["bf16"], base), baseline_overlay(base)):
        training = overlays.apply(base, overlay).training
        assert (training.amp, training.amp_dtype) == (amp, "float16")


def test_a_float16_run_stays_one():
    base = overlays.load(PARAMS / "2gpu_baseline.yaml", overrides={"training.device": "cpu"})
    assert overlays.apply(base, baseline_overlay(base)).training == base.training


def test_a_baseline_has_no_phase_and_else_its_own_values():
    changes = {"training.device": "cpu"}
    base = overlays.load(PARAMS / "cpu_optimized.yaml", overrides=changes)  # inverse losses every fourth time
    baseline = overlays.apply(base, baseline_overlay(base))
    assert phases_on(baseline) == set()
    assert overlays.difference(base, baseline) == {
        "optimizer.fused": False,
        "training.amp": False,
        "training.amp_dtype": "float16",
        "training.compile": False,
        "training.inverse_loss_frequency": 1,
    }


def test_a_baseline_takes_back_what_was_flipped_since():
    base = overlays.load(PARAMS / "quick.yaml")
    for phase in (BY_NAME["bf16"], BY_NAME["loss_frequency"]):
        assert overlays.apply(overlays.apply(base, phase.on), baseline_overlay(base)) == base


def test_a_phase_that_is_left_out_leaves_the_run_s_own_kernel():
    base = overlays.load(PARAMS / "cpu_optimized.yaml")
    assert base.operator.pdet.attention == "math"
    asked = overlays.apply(base, BY_NAME["flex_attention"].on)
    assert skip_missing(asked, CPU, base)[0] == base
    assert skip_missing(asked, CPU)[0].operator.pdet.attention == "sdpa"


@pytest.mark.parametrize(
    ("workers", "pinned", "on"), [(12, True, True), (1, True, True), (6, False, False), (0, True, False)]
)
def test_data_loading_is_on_with_workers_and_pinned_batches(workers, pinned, on):
    config = overlays.resolve({"num_workers": workers, "pin_memory": pinned, "prefetch_factor": 4})
    assert is_on(BY_NAME["data_loading"], config) == on


def test_fused_needs_no_gpu_and_flex_attention_does():
    assert not unmet(BY_NAME["fused"], RunConfig(), CPU)
    assert unmet(BY_NAME["flex_attention"], RunConfig(), CPU) and not unmet(BY_NAME["flex_attention"], RunConfig(), GPU)


def test_a_setting_that_nothing_reads_yet_is_refused():
    (problem,) = hardware.problems(overlays.resolve({"diffusion.hidden_dim": 128}), CPU)
    assert problem.setting == "diffusion.hidden_dim" and "as wide as the operator" in problem.found


def test_cold_phases_are_those_of_processes():
    assert {phase.name for phase in BY_NAME.values() if not phase.hot} == {
        "fsdp2",
        "nccl",
        "bf16_gradients",
        "expandable_segments",
    }
    assert all(path.startswith(HOT) for phase in BY_NAME.values() if phase.hot for path in phase.on)


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
        assert phase.on.keys() == phase.off.keys()
    assert all(path.startswith((*HOT, *COLD)) for path in COMPANIONS)
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


def test_nccl_variables_are_set_for_the_workers_and_the_users_own_win(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    own = {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    watcher = supervisor.Supervisor(runfolder.create(RunConfig(), tmp_path / "off"))
    assert ranks.nccl_environment(watcher.config) == (own, [])
    folder = runfolder.create(overlays.resolve({"nccl_tuning": True}), tmp_path / "on")
    watcher = supervisor.Supervisor(folder)
    watcher._open_segment(0, None)
    environment = ranks.environment(folder, watcher.config, folder, 0, "1:2")
    assert {**ranks.NCCL_TUNING, **own}.items() <= environment.items()
    (segment,) = runfolder.read_manifest(folder)["segments"]
    assert segment["environment"] == {**ranks.NCCL_TUNING, **own}
    assert segment["environment_kept"] == ["NCCL_IB_DISABLE"]


@pytest.mark.parametrize(
    ("name", "machine", "settings", "reason"),
    [
        ("nccl", CPU, {"num_gpus": 2, "device": "cpu"}, "on the CPU"),
        ("nccl", GPU, {}, "a single device"),
        ("bf16_gradients", GPU, {}, "a single rank"),
        ("bf16_gradients", GPUS, {"num_gpus": 2, "use_fsdp2": True}, "is DDP's"),
        ("expandable_segments", CPU, {}, "on the CPU"),
    ],
)
def test_an_extra_is_refused_where_it_acts_on_nothing(name, machine, settings, reason):
    config = overlays.resolve(settings)
    assert [reason in problem.found for problem in unmet(BY_NAME[name], config, machine)] == [True]
    assert not unmet(BY_NAME[name], overlays.resolve({"num_gpus": 2}), GPUS)


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_the_allocator_is_told_before_it_starts_and_the_user_s_word_stays(tmp_path, monkeypatch, own, given):
    for name in ranks.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for on in (True, False):
        config = overlays.resolve({"expandable_segments": on})
        environment = ranks.environment(tmp_path, config, tmp_path, 0, "1:2")
        assert environment.get("PYTORCH_ALLOC_CONF") == (given if on else None)


def test_a_run_starts_without_the_phases_it_skips_and_says_so(tmp_path, monkeypatch, capsys):
    started = []
    process = SimpleNamespace(poll=lambda: None, stdin=None)
    fake = SimpleNamespace(Popen=lambda *a, **k: started.append(a) or process, DEVNULL=0)
    monkeypatch.setattr(handle, "subprocess", SimpleNamespace(PIPE=0, STDOUT=0, **vars(fake)))
    config = overlays.resolve({"device": "cpu", "nccl_tuning": True})
    with pytest.raises(ConfigError, match="nccl_tuning"):
        handle.start(config, tmp_path / "run")
    assert not started and not (tmp_path / "run").exists()
    run = handle.start(overlays.apply(config, {"training.on_missing": "skip"}), tmp_path / "run", attached=False)
    assert run.config.training.nccl_tuning is False and len(started) == 1
    assert run.manifest["phases_skipped"].keys() == {"nccl"}
    assert "skipped nccl: training.nccl_tuning" in capsys.readouterr().out

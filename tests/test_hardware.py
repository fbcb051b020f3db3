"""What a machine cannot do, or hold, is said before anything starts."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from upsnb import hardware, overlays, phases
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.runs.runfolder import project_root
from upsnb.training.timing import peak_memory_gib

T4 = Hardware("cuda", 1, "T4", 15.0, 2, (7, 5))
A100 = Hardware("cuda", 1, "A100", 40.0, 12, (8, 0))
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def old_driver(monkeypatch):
    """A wheel for CUDA beside a driver that is too old for it."""

    def refuse():
        raise RuntimeError(TOO_OLD)

    exists = os.path.exists
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(os.path, "exists", lambda path: path == hardware.NVIDIA_DRIVER or exists(path))


def test_a_driver_too_old_is_refused_and_nothing_trains_on_the_cpu_unasked(old_driver):
    machine = hardware.detect()
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="too old.*11040.* -> install a driver that fits"):
            hardware.check_runnable(overlays.resolve({"device": device}), machine)
    assert hardware.problems(overlays.resolve({"device": "cpu"}), machine) == []


def test_a_gpu_that_is_hidden_on_purpose_is_none(old_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.detect().unusable == ""


@pytest.mark.parametrize(
    ("settings", "path", "remedy"),
    [
        ({"tf32": True}, "training.tf32", "set it to false"),
        ({"amp": True, "amp_dtype": "bfloat16"}, "training.amp_dtype", "set it to float16"),
    ],
)
def test_formats_that_an_old_gpu_has_no_tensor_cores_for_are_refused(settings, path, remedy):
    (problem,) = hardware.problems(overlays.resolve(settings), T4)
    assert problem.setting == path and "T4 has compute capability 7.5" in problem.found and problem.remedy == remedy
    assert hardware.problems(overlays.resolve(settings), A100) == []


HUGE = {  # the setting that is named: what was asked for
    "operator.pdet.depth": {"hidden_dim": 2, "num_heads": 1, "depth": 10**7},
    "operator": {"operator.pdet.mlp_ratio": 1e9},
    "training.batch_size": {"batch_size": 2**31 - 1},
    "training.num_gpus": {"num_gpus": 10**7},
    "training.num_workers": {"num_workers": 10**7},
    "training.threads_per_rank": {"threads_per_rank": 10**6},
}


@pytest.mark.parametrize("setting", HUGE)
def test_what_cannot_fit_is_refused_by_its_setting(setting):
    config = overlays.resolve({"device": "cpu", **HUGE[setting]})
    found = [problem for problem in hardware.problems(config, hardware.detect()) if problem.setting == setting]
    assert len(found) == 1
    if setting != "training.threads_per_rank":
        assert "at least" in found[0].found and found[0].found.endswith("GiB are there")


@pytest.mark.parametrize(
    "values", [{"latent.dim": 10**9}, {"hidden_dim": 2 * 10**9, "num_heads": 1}, {"basis_size": 2**31 - 1}]
)
def test_what_no_machine_can_hold_is_refused_on_the_largest(values):
    largest = Hardware("cuda", 1, "a GPU", 200.0, 64, (9, 0))
    with pytest.raises(ConfigError, match="and 200.0 GiB are there"):
        hardware.check_runnable(overlays.resolve(values), largest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cpu_that_multiplies_halves_one_by_one_is_named_with_their_kind(dtype):
    fast = Hardware("cpu", 1, "a laptop", 16.0, 4)
    has = {"bfloat16": "cpu_has_bf16", "float16": "cpu_has_fp16"}
    config = overlays.resolve({"device": "cpu", "amp": True, "amp_dtype": dtype})
    for other, field in has.items():
        said = hardware.slow_halves(config, dataclasses.replace(fast, **{field: False}))
        assert (f"a laptop has no instructions for products of {dtype}" in said) == (other == dtype)
    assert not hardware.slow_halves(
        overlays.apply(config, {"training.amp": False}), dataclasses.replace(fast, cpu_has_fp16=False)
    )


def test_a_run_in_float16_is_not_refused_where_that_is_slow():
    slow = Hardware("cpu", 1, "a laptop", 16.0, 4, cpu_has_fp16=False)
    config = overlays.resolve({"device": "cpu", "amp": True, "amp_dtype": "float16", "on_missing": "skip"})
    assert hardware.slow_halves(config, slow) and phases.skip_missing(config, slow) == (config, {})
    assert hardware.problems(config, slow) == []


def test_bf16_is_left_out_where_the_cpu_computes_it_slowly_if_that_is_asked_for():
    slow = Hardware("cpu", 1, "a laptop", 16.0, 4, cpu_has_bf16=False)
    asked = {"device": "cpu", "amp": True, "amp_dtype": "bfloat16"}
    obeyed, skips = overlays.resolve(asked), overlays.resolve({**asked, "on_missing": "skip"})
    assert hardware.problems(obeyed, slow) == [] and hardware.slow_halves(obeyed, slow)
    config, skipped = phases.skip_missing(skips, slow)
    assert not config.training.amp and hardware.problems(config, slow) == []
    assert list(skipped) == ["bf16"] and "a laptop has no instructions" in skipped["bf16"]
    for machine in (dataclasses.replace(slow, cpu_has_bf16=True), A100):
        assert phases.skip_missing(overlays.apply(skips, {"training.device": "auto"}), machine)[1] == {}


# --- in a container ---------------------------------------------------------------------------------------------------


def _grouped(monkeypatch, tmp_path, membership: str, files: dict[str, str]) -> None:
    """Let this process be in control groups whose tree has these files."""
    for path, text in files.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_text(text)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path / "tree")
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**26}[name])


MOST = "9223372036854771712"  # what version 1 says of a group without a limit
GROUPS = {  # what /proc/self/cgroup says, files of the tree -> cores, GiB
    "none": ("0::/\n", {}, 64, 256),
    "no limit": ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, 256),
    "the root of a container": ("0::/\n", {"cpu.max": "400000 100000\n", "memory.max": "17179869184\n"}, 4, 16),
    "a path of the host's": ("0::/docker/1f\n", {"cpu.max": "150000 100000\n"}, 2, 256),
    "a group above": ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1, 256),
    "more than there is": ("0::/\n", {"cpu.max": "12800000 100000", "memory.max": "1099511627776"}, 64, 256),
    "version 1": (
        "5:cpu,cpuacct:/k\n4:memory:/k\n3:cpuset:/\n0::/\n",
        {
            "cpu/k/cpu.cfs_quota_us": "300000",
            "cpu/k/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/k/memory.limit_in_bytes": "8589934592",
            "memory/memory.limit_in_bytes": MOST,
        },
        3,
        8,
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_containers_share_is_what_there_is(monkeypatch, tmp_path, case):
    membership, files, cores, memory_gib = GROUPS[case]
    _grouped(monkeypatch, tmp_path, membership, files)
    assert (hardware.num_cores(), hardware.host_memory_gib()) == (cores, memory_gib)


def test_without_control_groups_there_is_all(monkeypatch, tmp_path):
    _grouped(monkeypatch, tmp_path, "", {})
    (tmp_path / "membership").unlink()
    assert (hardware.num_cores(), hardware.host_memory_gib()) == (64, 256)


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu/cgroup.procs", os.W_OK), reason="makes a group of version 1")
def test_a_real_groups_quota_is_seen_by_the_process_in_it():
    group = Path(f"/sys/fs/cgroup/cpu/upsnb-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        asked = "from upsnb import hardware; print(hardware.num_cores())"
        script = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{asked}'"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=project_root())
        assert done.stdout == "1\n", done.stderr
    finally:
        group.rmdir()


def test_windows_is_refused_with_what_to_do():
    tried = "import sys; sys.platform = 'win32'; import upsnb.errors"
    refused = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True)
    assert refused.returncode and "Linux and macOS -> on Windows, start it in WSL" in refused.stderr


@pytest.mark.parametrize("module", ["upsnb.__main__", "upsnb.config", "upsnb.report.figures", "upsnb.runs.handle"])
def test_windows_is_refused_before_what_it_lacks_is_missed(module):
    order = f"import sys, {module}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, check=True).stdout.split()
    linux_only = {"upsnb.runs.files", "upsnb.runs.ranks", "upsnb.data.download", "upsnb.training.timing"} & {*imported}
    assert all(imported.index("upsnb.errors") < imported.index(name) for name in linux_only)


def test_peak_memory_is_in_gib_on_whatever_system_this_is():
    resident = psutil.Process().memory_info().rss / 2**30
    assert 0.99 * resident <= peak_memory_gib(torch.device("cpu")) < 100 * resident

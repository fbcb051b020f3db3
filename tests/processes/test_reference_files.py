"""The reference setups as they are written, rehearsed at reduced size on CPU ranks."""

from pathlib import Path

import pytest

from upsnb import hardware, overlays, phases
from upsnb.runs import handle

PARAMS = Path(__file__).resolve().parents[2] / "params"
REFERENCE = ("2gpu_baseline", "2gpu_optimized", "4gpu_baseline", "4gpu_optimized")


def rehearsal(name: str):
    return overlays.load(PARAMS / f"{name}.yaml", PARAMS / "rehearse.yaml")


@pytest.mark.parametrize("name", REFERENCE)
def test_a_rehearsal_changes_size_and_device_but_no_phase_loss_or_batch(name):
    changed = overlays.difference(overlays.load(PARAMS / f"{name}.yaml"), rehearsal(name))
    kept = {path for phase in phases.PHASES for path in (*phase.on, *phase.ladder)} - {"training.num_workers"}
    assert not kept & changed.keys()
    assert not any(path.startswith(("training.lambda_", "training.num_gpus", "optimizer.")) for path in changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param("2gpu_baseline", False, marks=pytest.mark.long),
        ("4gpu_optimized", False),
        pytest.param("4gpu_baseline", False, marks=pytest.mark.long),
        pytest.param("2gpu_optimized", True, marks=pytest.mark.long),
        pytest.param("4gpu_optimized", True, marks=pytest.mark.long),
    ],
)
def test_a_reference_file_trains_as_it_is_written(name, compiled, tmp_path, data_root):
    """But for compiled code, in the short one: every rank compiles, at once, and two cores do the work of four."""
    config = overlays.apply(rehearsal(name), {"data.root": str(data_root / "rehearsal")})
    if compiled:  # one dataset's graphs are enough of that
        of_waves = ("data.datasets.advection", "training.lambda_inv_dec", "training.lambda_conservation")
        config = overlays.apply(config, dict.fromkeys(of_waves))
    elif config.training.compile:
        config = overlays.apply(config, {"training.compile": False})
    config, skipped = phases.skip_missing(config, hardware.detect())
    assert skipped.keys() <= {"optimizer_offload", *([] if hardware.cpu_has_bf16() else ["bf16"])}
    run = handle.start(config, tmp_path / "run", attached=True)
    assert run.wait() == "finished"
    (start,) = run.events(("start",))
    assert start["num_ranks"] == config.training.num_gpus
    first, last = run.events(("eval",))[:: len(run.events(("eval",))) - 1]
    assert all(last["val_nrmse"][dataset] < first["val_nrmse"][dataset] for dataset in first["val_nrmse"])

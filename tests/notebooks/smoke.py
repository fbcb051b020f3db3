"""pytest plugin: nbval runs every notebook with params/smoke.yaml instead of its own preset.

`PYTHONPATH=tests/notebooks python -m pytest -p smoke --nbval-lax ... notebooks/01_train.ipynb`

The notebooks stay as their readers see them. Their presets train for minutes, which a test need not; what they show
and assert is the same. In place, not on a copy: paths, kernel folder and kept outputs are then those of the notebook.
"""

import tempfile
from functools import partial
from pathlib import Path

import nbval.kernel
import pytest
import yaml

PARAMS = Path(__file__).resolve().parents[2] / "params"


def smoke(clock: bool = True) -> dict:
    """The sections of params/smoke.yaml; without its clock some epochs, for arms that must see equal samples."""
    sections = yaml.safe_load((PARAMS / "smoke.yaml").read_text())
    if not clock:
        del sections["training"]["time_limit_s"]
        sections["stages"] = {"operator": {"epochs": 2}}
    return sections


OTHERWISE = {  # notebook: parameters beside or instead of the preset
    "00_check": {"preset": "smoke", "chosen": ["fused", "tf32"], "short": False},
    # A number of steps instead of a time: as good on a busy machine as on a quiet one.
    "01_train": {"preset": "smoke", "training": {"time_limit_s": None}, "stages": {"operator": {"epochs": 3}}},
    "02_compare": {**smoke(clock=False), "isolate": "activation_checkpointing", "seeds": [42], "block_s": 1.0},
    "04_phases": {
        "preset": "smoke",
        "chosen": ["activation_checkpointing"],  # with a batch of its own: three kinds of entries, five in all
        "block_s": 1.0,
        "rounds": 2,
        "search_minutes": 0,
    },
    "05_scaling": {
        "preset": "smoke",
        "ranks": [2],
        "wrappers": ["fsdp2"],
        "modes": ["weak"],
        "block_s": 2.0,
        "rounds": 2,
    },
    "06_pipeline": {
        "preset": "smoke",
        "training": {"time_limit_s": None},
        "stages": {"operator": {"epochs": 2}, "finetune": {"epochs": 1}, "crps": {"epochs": 1}},
        "data": {"split": {"validation_fraction": 0.3}},  # of 30 samples, so that a verdict can be had
        "evaluation": {"members": 5},
    },
    "08_profile": {"preset": "smoke", "warm_up_s": 1.0},
    "10_models": {"preset": "smoke", "time_limit_s": 4.0, "others": ["fno"]},
    "11_sweep": {"preset": "smoke", "grid": {"muon_lr": [2e-3, 4e-3]}, "time_limit_s": 2.0},
}


# Files instead of ports: one that was free when it was looked for may be taken by the time the kernel wants it.
SOCKETS = tempfile.TemporaryDirectory(prefix="nbval-")
nbval.kernel.KernelManager = partial(nbval.kernel.KernelManager, transport="ipc", ip=f"{SOCKETS.name}/kernel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the smoke parameters below the notebook's own, as papermill would."""
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and "parameters" in cell.metadata.get("tags", ()):
            values = OTHERWISE.get(item.path.stem, {"preset": "smoke"})
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())

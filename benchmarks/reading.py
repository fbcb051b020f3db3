"""What a step waits for data that are read from a file which is not in memory: without reading processes, and with two.

    python benchmarks/reading.py               # 4 GiB of disk for three minutes

A file of advection in PDEBench's layout, 201 frames of 1024 points, is made and deleted again: a few generated samples,
written over and over, since nothing depends on the values. The system is told to forget its pages every second, so that
reads go to the disk as they would where it does not fit. Outputs go to outputs/reference/reading/reading.json.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from statistics import median

import h5py
import numpy as np
from keep import REFERENCE, ROOT, arguments, save

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.families import FAMILIES
from upsnb.data.generate import generate
from upsnb.runs import handle

NAME = "1D_Advection_Sols_beta0.4.hdf5"
SAMPLE_GIB = 4 * 201 * 1024 / 2**30
SETTINGS = {
    "data": {
        "datasets": {
            "advection": {
                "family": "advection1d",
                "files": [NAME],
                "input_frames": 4,
                "output_frames": 4,
                "augment": True,
            }
        },
        "residency": "workers",
        "split": {"validation_fraction": 0.0, "test_fraction": 0.001},
    },
    "latent": {"dim": 96, "tokens": 128},
    "operator": {"pdet": {"hidden_dim": 96, "depth": 5, "num_heads": 3, "mlp_ratio": 2.0}},
    "training": {"device": "cpu", "batch_size": 32},
    "stages": {"operator": {"epochs": 1}},
    "checkpoint": {"interval": 100000},
    "evaluation": {"rollout": False},
}


def make(folder: Path, size_gib: float) -> Path:
    """A file of that size; its samples repeat."""
    few, path = generate(FAMILIES["advection1d"], folder / f"few_{NAME}", 8, {"beta": 0.4}, 1024, 201), folder / NAME
    with h5py.File(few) as made, h5py.File(path, "w") as out:
        out.attrs.update(made.attrs)
        count = 8 * round(size_gib / SAMPLE_GIB / 8)
        for key in made.keys() - {"tensor"}:
            made.copy(key, out)
        fields = np.asarray(made["tensor"])
        tensor = out.create_dataset("tensor", (count, *fields.shape[1:]), fields.dtype)
        for start in range(0, count, 8):
            tensor[start : start + 8] = fields
    few.unlink()
    return path


def train(config: RunConfig, path: Path) -> dict:
    """One run, whose reads go to the disk; what its steady steps waited for data."""
    over = threading.Event()

    def forget() -> None:
        with open(path, "rb") as file:
            while not over.wait(1.0):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        run = handle.start(config, folder=path.parent / f"run{config.training.num_workers}", attached=True)
        run.wait()
    finally:
        over.set()
        forgetting.join()
    steady = [step for step in run.events(("step",)) if step["steady"]]
    waits, times = ([step[key] for step in steady] for key in ("data_wait_ms", "step_time_ms"))
    return {
        "num_workers": config.training.num_workers,
        "steps": len(steady),
        "step_time_ms": round(median(times), 2),
        "data_wait_ms": round(median(waits), 3),
        "data_wait_share": round(sum(waits) / sum(times), 5),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=4.0, help="of the file [GiB]")
    parser.add_argument("--seconds", type=float, default=40.0, help="to train for, each time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:
        path, rows = make(Path(folder), args.size), []
        own = {"data.root": folder, "training.time_limit_s": args.seconds}
        for num_workers in (0, 2):
            config = overlays.resolve(SETTINGS, {**own, "training.num_workers": num_workers})
            rows.append(train(config, path))
        size = round(path.stat().st_size / 2**30, 2)
    save({"format": 1, "kind": "reading", "size_gib": size, "rows": rows}, REFERENCE / "reading/reading.json")


if __name__ == "__main__":
    main()

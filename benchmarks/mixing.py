"""Ways to mix datasets at equal samples seen: in equal turns, by size, by loss, and one of them later; one model.

    python benchmarks/mixing.py --seeds 0      # four runs, ten minutes; what is known of other seeds stays

Three generated datasets: many easy pairs, fewer of a shock, few of a static problem. Errors are of the test split, 40 %
of the samples; a mixture is judged by its errors over those of equal turns with the same seed, geometric mean over the
datasets. Outputs go to outputs/reference/mixing/.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
from keep import ROOT, arguments, save
from scipy import stats

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.audit import headline
from upsnb.report.file import finish
from upsnb.runs import handle, runfolder

ARMS = {
    "uniform": {},
    "size": {"data.mixing.by": "size"},
    "loss": {"data.mixing.by": "loss"},
    "uniform, Darcy flow from epoch 2": {"data.mixing.from_epoch": {"darcy": 2}},
}
FRAMES = {"input_frames": 4, "output_frames": 4, "augment": True}
SETTINGS = {
    "data": {
        "datasets": {
            "advection": {
                "family": "advection1d",
                "generate": {"num_samples": 160, "resolution": 64, "num_times": 21},
                **FRAMES,
            },
            "burgers": {
                "family": "burgers1d",
                "generate": {"num_samples": 60, "resolution": 64, "num_times": 21},
                **FRAMES,
            },
            "darcy": {"family": "darcy2d", "generate": {"num_samples": 160, "resolution": 32}, "augment": True},
        },
        "split": {"test_fraction": 0.4},
    },
    "latent": {"dim": 48, "tokens": 32},
    "operator": {"pdet": {"hidden_dim": 48, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0}},
    "training": {"device": "cpu", "batch_size": 16, "noise": 0.003, "ema_decay": 0.99},
    "stages": {"operator": {"epochs": 6, "scheduler": {"warmup_fraction": 0.03}}},
    "optimizer": {"lr": 2.0e-3, "muon_lr": 4.0e-3, "weight_decay": 1.0e-4},
    "checkpoint": {"interval": 100000},
}


def train(config: RunConfig) -> dict:
    """One run; its errors, and the samples that it saw of each dataset."""
    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:
        run = handle.start(config, folder=Path(folder) / "run", attached=True)
        run.wait()
        found = json.loads((run.folder / runfolder.EVALUATION).read_text())["datasets"]
        seen = [name for step in run.events(("step",)) for name in step["datasets"]]
    size = config.training.batch_size
    return {
        "nrmse": {name: headline(result["test"]) for name, result in found.items()},
        "samples": {name: size * seen.count(name) for name in found},
    }


def judged(rows: list[dict]) -> dict[str, dict]:
    """Each arm's error over that of equal turns with the same seed: mean over seeds, and its 95 % interval."""
    errors = {(row["arm"], row["seed"]): row["nrmse"] for row in rows}
    found = {}
    for arm in ARMS:
        pairs = [(errors[arm, seed], errors["uniform", seed]) for name, seed in errors if name == arm != "uniform"]
        logs = [np.mean([math.log(own[name] / other[name]) for name in own]) for own, other in pairs]
        if len(logs) > 1:
            low, high = stats.t.interval(0.95, len(logs) - 1, np.mean(logs), stats.sem(logs))
            found[arm] = {"ratio": math.exp(np.mean(logs)), "ci95": [math.exp(low), math.exp(high)], "seeds": len(logs)}
    return found


def main() -> None:
    parser = arguments(__doc__, "mixing")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    path = args.output / runfolder.REPORT
    for seed in args.seeds:
        for arm, overlay in ARMS.items():
            row = {"arm": arm, "seed": seed, **train(overlays.resolve(SETTINGS, {**overlay, "training.seed": seed}))}
            print(row, flush=True)
            row = finish(row, None)  # the others may be of another machine or revision
            # after each run: an interrupted benchmark keeps what it has, and other seeds may be trained beside these
            rows = json.loads(path.read_text())["rows"] if path.is_file() else []
            rows = [other for other in rows if (other["arm"], other["seed"]) != (arm, seed)] + [row]
            rows.sort(key=lambda row: (row["seed"], list(ARMS).index(row["arm"])))
            save({"format": 1, "kind": "mixing", "over_uniform": judged(rows), "rows": rows}, path)


if __name__ == "__main__":
    main()

"""Accuracy for a fixed budget of wall time: the project's own recipe over seeds, and its variants side by side.

    python benchmarks/accuracy.py --data FOLDER_OF_PDEBENCH_FILES                 # 2 tasks x 3 seeds x 5 minutes
    python benchmarks/accuracy.py --data FOLDER --variants --minutes 1 --seeds 0  # the structure's variants

Each run is a run folder of its own, trained through the same launcher as everything else. Results go to
outputs/reference/accuracy/<name>.json, one row a run, with hardware and versions; benchmarks/readme.py
writes them into the documents.
The last 10 % of each file's samples are never trained on, and no weights are selected on them. Parts of the model were
(docs/LOG.md), so read gains of some per cent as none.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from keep import REFERENCE, ROOT, arguments, save

from upsnb import config as configs
from upsnb import overlays
from upsnb.data.datasets import open_dataset
from upsnb.data.source import open_source
from upsnb.report.results import run_numbers
from upsnb.runs import handle
from upsnb.training import evaluation, metrics
from upsnb.training.trained import load_model

TASKS = {"darcy": "params/darcy_5min.yaml", "advection": "params/advection_5min.yaml"}
DOUBLE = "2D_DarcyFlow_beta1.0_res128.hdf5"


def of_file(model: str) -> dict:
    """Settings of a file in params/models/; the data, noise and minutes stay the same, in float32, uncompiled."""
    found = overlays.flatten(overlays.read(ROOT / f"params/models/{model}.yaml"))
    return {**found, "training.amp": False, "training.compile": False}


def weights(**terms: float) -> dict[str, float]:
    """Settings of loss weights."""
    return {f"training.lambda_{term}": weight for term, weight in terms.items()}


PLAIN = {"operator.decoder": "local_basis", "operator.fourier_modes": 0}  # what every variant has unless it says so
VARIANTS = {
    "darcy": {
        "default: patch tokens, local basis": {},
        "decoder: unpatchify": {"operator.decoder": "unpatchify"},
        "decoder: cross-attention": {"operator.decoder": "cross_attention"},
        "encoder: perceiver": {"operator.encoder": "perceiver", "operator.decoder": "cross_attention"},
        "walls left to the decoder": {"operator.walls": "free"},
        "with inverse encoding loss": weights(inv_enc=0.1),
        "AdamW alone": {"optimizer.name": "adamw"},
        "without augmentation": {"data.datasets.darcy.augment": False},
        "peer: FNO of upsnb/models/fno.py": of_file("fno"),
        "peer: U-Net of upsnb/models/unet.py": of_file("unet"),
    },
    "advection": {
        "default: patch tokens, local basis, 4 frames a call": {},
        "decoder: unpatchify": {"operator.decoder": "unpatchify"},
        "linear part in Fourier space": {"operator.fourier_modes": 128},
        "decoder: cross-attention": {"operator.decoder": "cross_attention"},
        "encoder: perceiver": {"operator.encoder": "perceiver", "operator.decoder": "cross_attention"},
        "1 frame a call": {"data.datasets.advection.output_frames": 1},
        "rollout: latent, inverse losses": {
            "operator.rollout": "latent",
            **weights(forward=0.1, inv_enc=0.5, inv_dec=0.1, rollout=0.5),
        },
        "with inverse losses, re-encoding": weights(inv_enc=0.1, inv_dec=0.1),
        "AdamW alone": {"optimizer.name": "adamw"},
        "without augmentation": {"data.datasets.advection.augment": False},
        "peer: FNO of upsnb/models/fno.py": {  # ten frames in and one out: what PDEBench's own is trained with
            **of_file("fno"),
            "model.settings": {"width": 32, "modes": 24, "depth": 4},
            "data.datasets.advection.input_frames": 10,
            "data.datasets.advection.output_frames": 1,
        },
        "peer: U-Net of upsnb/models/unet.py": of_file("unet"),
    },
}


def train(task: str, data: Path, seed: int, minutes: float, variant: str, overlay: dict) -> dict:
    """One run; its errors on the untouched last 10 % and its cost."""
    overrides = {
        **overlay,
        "data.root": str(data.resolve()),
        "training.seed": seed,
        "training.time_limit_s": 60.0 * minutes,
        "logging.name": f"accuracy-{task}",
    }
    config = overlays.load(ROOT / TASKS[task], overrides=overrides)
    run = handle.start(config, attached=True)
    run.wait()
    numbers = run_numbers(run)
    (result,) = numbers["datasets"].values()
    row = {
        "task": task,
        "variant": variant,
        "seed": seed,
        **{key: numbers[key] for key in ("train_time_s", "parameters", "steps")},
        "step_time_ms": round(median(step["step_time_ms"] for step in run.events(("step",)) if step["steady"]), 2),
        "data_wait_share": round(numbers["data_wait_share"], 5),
        **{key: value for key, value in result["test"].items() if isinstance(value, float)},
    }
    if task == "darcy":
        row |= other_evaluations(run.folder, data)
    return row


@torch.no_grad()
def other_evaluations(folder: Path, data: Path) -> dict:
    """The trained Darcy model on fields of twice the resolution, and averaged over the square's symmetries."""
    model = load_model(folder)
    config = configs.load(folder / "config.yaml")
    dataset = open_dataset("darcy", config, data)
    inputs, targets, parameters = evaluation.read_samples(dataset, dataset.splits["test"], "cpu")
    averaged = evaluation.predict(model, dataset, inputs, parameters, symmetry_average=True)
    values = {"symmetry_averaged": metrics.reduce(metrics.sample_statistics(averaged, targets))}
    if (data / DOUBLE).is_file():
        source = open_source("darcy2d", [data / DOUBLE])
        fine, truth = (torch.from_numpy(part) for part in source.read(range(source.num_samples)))
        forecast = evaluation.predict(model, dataset, fine, torch.from_numpy(source.parameters))
        values["double_resolution"] = metrics.reduce(metrics.sample_statistics(forecast, truth))
    return {
        f"{kind}_{key}": value
        for kind, result in values.items()
        for key, value in result.items()
        if key in ("nrmse_mean", "nrmse_median")
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the PDEBench files")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--variants", action="store_true", help="all variants of the structure instead of the default")
    args = parser.parse_args()
    name = f"{'variants' if args.variants else 'seeds'}-{args.minutes:g}min"
    path = REFERENCE / "accuracy" / f"{name}.json"
    rows = []
    for task in args.tasks:
        variants = {name: {**PLAIN, **overlay} for name, overlay in VARIANTS[task].items()}
        for variant, overlay in variants.items() if args.variants else [("the file's", {})]:
            for seed in args.seeds:
                rows.append(train(task, args.data, seed, args.minutes, variant, overlay))
                # after each run: an interrupted benchmark keeps what it has
                save({"format": 1, "kind": "accuracy", "minutes": args.minutes, "rows": rows}, path)


if __name__ == "__main__":
    main()

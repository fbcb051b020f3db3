"""The peer to beat: neuraloperator's FNO with the same data, split, augmentation, noise and minutes as our recipe.

    pip install neuraloperator
    python benchmarks/peer_fno.py --data FOLDER_OF_PDEBENCH_FILES

Fourier Neural Operator (arXiv 2010.08895) as published in the neuraloperator package, with grid embedding, float32 and
uncompiled; AdamW and a cosine over the clock. Results go to outputs/reference/accuracy/peer-fno-<minutes>min.json.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import torch
from neuralop.models import FNO

from upsnb import hardware, overlays
from upsnb.config import SchedulerConfig
from upsnb.data.batches import Loader
from upsnb.data.datasets import Dataset
from upsnb.runs import runfolder
from upsnb.training import evaluation, metrics, optimizers
from upsnb.training.losses import relative_error
from upsnb.training.parallel import Ranks
from upsnb.training.setup import open_datasets

TASKS = {  # ten frames in and one out for advection: what PDEBench's own FNO is trained with
    "darcy": ("params/darcy_5min.yaml", {}, {"n_modes": (16, 16), "hidden_channels": 32}),
    "advection": (
        "params/advection_5min.yaml",
        {"data.datasets.advection.input_frames": 10, "data.datasets.advection.output_frames": 1},
        {"n_modes": (24,), "hidden_channels": 32},
    ),
}


class Peer(torch.nn.Module):
    """FNO between normalised fields; frames and channels are its channels."""

    def __init__(self, dataset: Dataset, settings: dict):
        super().__init__()
        spec = self.spec = dataset.spec
        channels = {
            "in_channels": spec.input_frames * spec.input_channels,
            "out_channels": spec.output_frames * spec.output_channels,
        }
        self.fno = FNO(**settings, **channels, n_layers=4, positional_embedding="grid")

    def forward(self, inputs: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
        """Physical (B, T, 1, *grid) -> physical (B, T_out, 1, *grid)."""
        spec = self.spec
        x = (inputs - spec.input_mean[0]) / spec.input_std[0]
        x = x + noise * torch.randn_like(x) if noise else x
        y = self.fno(x.flatten(1, 2)).unflatten(1, (spec.output_frames, spec.output_channels))
        y = y + x[:, -1:] if spec.time_dependent else y
        return y * spec.output_std[0] + spec.output_mean[0]


def train(task: str, data: Path, seed: int, minutes: float) -> dict:
    """Train for the given minutes and return errors on the untouched last 10 %."""
    params, overlay, settings = TASKS[task]
    overrides = {**overlay, "data.root": str(data.resolve()), "training.seed": seed, "training.compile": False}
    config = overlays.load(runfolder.project_root() / params, overrides=overrides)
    (dataset,) = open_datasets(config, runfolder.project_root(), Ranks(), print).values()
    loader = Loader({dataset.name: dataset}, config, 0, 1, "cpu")
    torch.manual_seed(seed)
    model = Peer(dataset, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule, steps, epoch = SchedulerConfig(warmup_fraction=0.03), 0, 0
    started = time.perf_counter()
    while time.perf_counter() - started < 60 * minutes:
        for batch in loader.epoch(epoch):
            progress = (time.perf_counter() - started) / (60 * minutes)
            if progress >= 1:
                break
            optimizer.param_groups[0]["lr"] = 2e-3 * optimizers.learning_rate_factor(schedule, progress)
            loss = relative_error(model(batch.inputs, config.training.noise), batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        epoch += 1
    elapsed = time.perf_counter() - started
    return {
        "task": task,
        "seed": seed,
        "train_time_s": round(elapsed, 2),
        "parameters": sum(p.numel() * (2 if p.is_complex() else 1) for p in model.parameters()),  # real numbers
        "steps": steps,
        "settings": settings,
        **test_errors(model.eval(), dataset),
    }


@torch.no_grad()
def test_errors(model: Peer, dataset: Dataset) -> dict:
    """One call for Darcy; rollout after the given frames for advection."""
    inputs, targets, _ = evaluation.read_samples(dataset, dataset.splits["test"], "cpu")
    if not dataset.spec.time_dependent:
        return metrics.reduce(metrics.sample_statistics(model(inputs), targets))
    frames, truth = inputs[:, : dataset.given_frames], inputs[:, dataset.given_frames :]
    while frames.shape[1] < inputs.shape[1]:
        frames = torch.cat((frames, model(frames[:, -dataset.spec.input_frames :])), dim=1)
    forecast = frames[:, dataset.given_frames :][:, : truth.shape[1]]
    result = metrics.reduce(metrics.sample_statistics(forecast, truth))
    return {f"rollout_{key}": value for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the PDEBench files")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.detect().num_cores)
    path = runfolder.project_root() / f"outputs/reference/accuracy/peer-fno-{arguments.minutes:g}min.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "format": 1,
        "kind": "accuracy",
        "date": time.strftime("%Y-%m-%d"),
        "minutes": arguments.minutes,
        "code_revision": runfolder.code_revision(),
        "hardware": hardware.detect().as_dict(),
        "versions": {**hardware.versions(), "neuraloperator": version("neuraloperator")},
        "rows": [],
    }
    for task in arguments.tasks:
        for seed in arguments.seeds:
            report["rows"].append(train(task, arguments.data, seed, arguments.minutes))
            runfolder.write_json(path, report)
            print(json.dumps(report["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()

"""What the seam costs: steps of a plain network in the workbench beside a loop written by hand, step by step in turns.

    python benchmarks/wrapper.py     # four quiet minutes; writes outputs/reference/wrapper/wrapper.json

U-Net and FNO of params/models/, on the generated data of params/minute.yaml, a network and an optimizer of its own on
each side. The loop by hand normalises, appends the equation's parameters as channels, takes the same loss, clips
gradients and steps, and keeps no average, draws no noise and counts nothing. Steps of runs are those of `Setup.step`.
Both keep freed pages as runs do, or whoever allocates more pays for it: 3 % of a Darcy step.
"""

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from keep import save

from upsnb import overlays
from upsnb.data import datasets
from upsnb.models.geometry import grid_points
from upsnb.runs import runfolder, supervisor
from upsnb.runs.throughput import throughput_ratio
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

ROOT = Path(__file__).resolve().parents[1]
MODELS, NAMES, TURNS, TURN_S = ("unet", "fno"), ("advection", "darcy"), 12, 4.0
ALIKE = {"training.noise": 0.0, "training.ema_decay": None, "training.device": "cpu"}


def by_hand(setup: Setup, name: str) -> Callable[[object], None]:
    """One step of AdamW on a batch, as somebody writes it who has one dataset and one network."""
    spec, network, chosen = setup.model.specs[name], copy.deepcopy(setup.model.networks[name]), setup.config.optimizer
    optimizer = torch.optim.AdamW(network.parameters(), chosen.lr, chosen.betas, weight_decay=chosen.weight_decay)
    shape, grid = (-1, 1, *(1,) * spec.num_dims), spec.grid_shape
    places = grid_points(grid, torch.device("cpu")).T.reshape(1, -1, *grid)
    mean, std, out_mean, out_std = (
        torch.tensor(values).reshape(shape)
        for values in (spec.input_mean, spec.input_std, spec.output_mean, spec.output_std)
    )

    def step(batch) -> None:
        x = (batch.inputs - mean) / std
        z = x.flatten(1, 2)
        appended = batch.parameters.reshape(len(z), -1, *(1,) * spec.num_dims).expand(-1, -1, *grid)
        z = torch.cat((z, appended, *[torch.ones_like(z[:, :1])] * spec.time_dependent), dim=1)
        given = (places.expand(len(z), -1, *grid),) if "grid" in setup.model.passed else ()
        y = network(z, *given).unflatten(1, (spec.output_frames, spec.output_channels))
        y = (y + x[:, -1:, : spec.output_channels] if spec.time_dependent else y) * out_std + out_mean
        error = (y - batch.targets).flatten(3).norm(dim=-1) / batch.targets.flatten(3).norm(dim=-1)
        optimizer.zero_grad()
        error.mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), setup.config.training.grad_clip)
        optimizer.step()

    return step


def measured(config, name: str) -> dict:
    """Steps per second of both sides in turns, and their ratio."""
    setup = Setup.build(config, runfolder.project_root(), Ranks(), lambda message: None)
    batches, alone = list(setup.loader.epoch(0, 0))[:8], by_hand(setup, name)
    sides = {"workbench": lambda batch, number: setup.step([batch], number), "by hand": lambda batch, _: alone(batch)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(-1, TURNS):  # the first one warms up
        seconds, number = dict.fromkeys(sides, 0.0), 0
        while sum(seconds.values()) < TURN_S:  # step by step in turns: what else the machine does meets both alike
            for side in sides if number % 2 else reversed(sides):
                began = time.perf_counter()
                sides[side](batches[number // 2 % len(batches)], number)
                seconds[side] += time.perf_counter() - began
            number += 1
        if turn >= 0:
            for side, spent in seconds.items():
                rates[side].append(number / spent)
    ratio = throughput_ratio(rates["by hand"], rates["workbench"], paired=True)
    return {"steps_per_s": {side: [round(rate, 3) for rate in those] for side, those in rates.items()}, "cost": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/reference/wrapper/wrapper.json")
    args = parser.parse_args()
    if not supervisor.KEEP_FREED_PAGES.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, (sys.executable, *sys.argv), os.environ | supervisor.KEEP_FREED_PAGES)
    found: dict[str, dict] = {}
    for model in MODELS:
        files = ROOT / "params/minute.yaml", ROOT / f"params/models/{model}.yaml"
        whole = overlays.load(*files, overrides=ALIKE)
        datasets.generate_missing(whole, runfolder.project_root())
        for name in NAMES:
            only = {f"data.datasets.{other}": None for other in NAMES if other != name}
            found.setdefault(model, {})[name] = measured(overlays.apply(whole, only), name)
    save({"format": 1, "kind": "wrapper", "turn_s": TURN_S, "models": found}, args.output)


if __name__ == "__main__":
    main()

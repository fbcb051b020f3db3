"""What the seam costs: steps of a plain network by hand, through its wrapper, and in the workbench, in turns.

    python benchmarks/wrapper.py     # six quiet minutes; writes outputs/reference/wrapper/wrapper.json

U-Net and FNO of params/models/, on the generated data of params/minute.yaml, a network and an optimizer of its own on
each side. The loop by hand normalises, appends the equation's parameters as channels, takes the same loss, clips
gradients and steps, and keeps no average, draws no noise and counts nothing. The same loop through the wrapper calls
`Wrapped` instead of the network, and that is all that differs. Steps of the workbench are those of `Setup.step`, which
also weighs loss terms and schedules. All keep freed pages as runs do, or whoever allocates more pays for it: 3 % of a
Darcy step.
"""

import copy
import itertools
import os
import sys
import time
from collections.abc import Callable

import torch
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.data import datasets
from upsnb.malloc import MALLOC
from upsnb.models.geometry import grid_points
from upsnb.runs.throughput import throughput_ratio
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

MODELS, NAMES, TURNS, TURN_S = ("unet", "fno"), ("advection", "darcy"), 12, 6.0
ALIKE = {"training.noise": 0.0, "training.ema_decay": None, "training.device": "cpu"}


def own_loop(setup: Setup, name: str, wrapped: bool) -> Callable[[object], None]:
    """One step of AdamW on a batch, as somebody writes it who has one dataset and one network, or one `Wrapped`."""
    model, chosen, spec = copy.deepcopy(setup.model), setup.config.optimizer, setup.model.specs[name]
    network, grid = model.networks[name], spec.grid_shape
    optimizer = torch.optim.AdamW(network.parameters(), chosen.lr, chosen.betas, weight_decay=chosen.weight_decay)
    places = grid_points(grid, torch.device("cpu")).T.reshape(1, -1, *grid)
    mean, std, out_mean, out_std = (
        torch.tensor(values).reshape(-1, 1, *(1,) * spec.num_dims)
        for values in (spec.input_mean, spec.input_std, spec.output_mean, spec.output_std)
    )

    def by_hand(batch) -> torch.Tensor:
        x = (batch.inputs - mean) / std
        z = x.flatten(1, 2)
        appended = batch.parameters.reshape(len(z), -1, *(1,) * spec.num_dims).expand(-1, -1, *grid)
        z = torch.cat((z, appended, *[torch.ones_like(z[:, :1])] * spec.time_dependent), dim=1)
        given = (places.expand(len(z), -1, *grid),) if "grid" in model.passed else ()
        y = network(z, *given).unflatten(1, (spec.output_frames, spec.output_channels))
        return (y + x[:, -1:, : spec.output_channels] if spec.time_dependent else y) * out_std + out_mean

    def step(batch) -> None:
        y = model(name, batch.inputs, batch.parameters, spec.dt) if wrapped else by_hand(batch)
        error = (y - batch.targets).flatten(3).norm(dim=-1) / batch.targets.flatten(3).norm(dim=-1)
        optimizer.zero_grad()
        error.mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), setup.config.training.grad_clip)
        optimizer.step()

    return step


def measured(config, name: str) -> dict:
    """Steps per second of all sides in turns, and what the later two cost in units of the first."""
    setup = Setup.build(config, ROOT, Ranks(), lambda message: None)
    batches = list(setup.loader.epoch(0, 0))[:8]
    alone, wrapped = (own_loop(setup, name, wrapped) for wrapped in (False, True))
    sides = {
        "by hand": lambda batch, _: alone(batch),
        "wrapper": lambda batch, _: wrapped(batch),
        "workbench": lambda batch, number: setup.step([batch], number),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    orders = list(itertools.permutations(sides))
    for turn in range(-1, TURNS):  # the first one warms up
        seconds, number = dict.fromkeys(sides, 0.0), 0
        while sum(seconds.values()) < TURN_S:  # step by step in turns: what else the machine does meets all alike
            for side in orders[number % len(orders)]:
                began = time.perf_counter()
                sides[side](batches[number % len(batches)], number)
                seconds[side] += time.perf_counter() - began
            number += 1
        if turn >= 0:
            for side, spent in seconds.items():
                rates[side].append(number / spent)
    costs = {side: throughput_ratio(rates["by hand"], rates[side], paired=True) for side in ("wrapper", "workbench")}
    return {"steps_per_s": {side: [round(rate, 3) for rate in those] for side, those in rates.items()}, "cost": costs}


def main() -> None:
    parser = arguments(__doc__, "wrapper/wrapper.json")
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, (sys.executable, *sys.argv), os.environ | MALLOC)
    found: dict[str, dict] = {}
    for model in MODELS:
        files = ROOT / "params/minute.yaml", ROOT / f"params/models/{model}.yaml"
        whole = overlays.load(*files, overrides=ALIKE)
        datasets.generate_missing(whole, ROOT)
        for name in NAMES:
            only = {f"data.datasets.{other}": None for other in NAMES if other != name}
            found.setdefault(model, {})[name] = measured(overlays.apply(whole, only), name)
    save({"format": 2, "kind": "wrapper", "turn_s": TURN_S, "models": found}, args.output)


if __name__ == "__main__":
    main()

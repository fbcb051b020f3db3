"""Work of a step, counted, and the most of it that this machine can do: the two halves of MFU.

Counted are matrix products and convolutions, as everywhere in this field; elementwise operations, norms and FFTs are
not. One multiplication with its addition is two operations.
"""

from __future__ import annotations

import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.batches import Batch
from upsnb.data.datasets import Dataset
from upsnb.training import stages
from upsnb.training.losses import active_terms, turn
from upsnb.training.timing import elapsed_ms, mark

ESTABLISHED = 10**9  # optimizer steps done: every loss has its full weight
PLAIN = {  # the model's own work: nothing computed twice, attention as its matrix products
    "operator.pdet.use_activation_checkpoint": False,
    "operator.pdet.attention": "math",
    "training.compile": False,
}
SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}  # rows of the square matrices tried
BURST_S = 0.1  # time for one size


def flops_per_microbatch(config: RunConfig, datasets: dict[str, Dataset]) -> dict[str, float]:
    """Forward and backward of one rank's microbatch by dataset, mean over a turn of the losses.

    Counted on fake tensors: in a second, on any machine, without memory, and without touching the model that trains.
    """
    plain, counts = overlays.apply(config, PLAIN), {}
    training, calls = plain.training, 2 if plain.training.lambda_rollout > 0 else 1
    with FakeTensorMode():
        loss = stages.build(plain, datasets)
        loss.generator = torch.Generator()
        for name, dataset in datasets.items():
            spec, found = dataset.spec, {}
            inputs = (training.batch_size, spec.input_frames, spec.input_channels, *spec.grid_shape)
            targets = (training.batch_size, calls * spec.output_frames, spec.output_channels, *spec.grid_shape)
            shapes = (inputs, targets, (training.batch_size, spec.num_parameters))
            batch = Batch(name, *(torch.zeros(shape) for shape in shapes), seed=0)
            chosen = [active_terms(training, ESTABLISHED, number) for number in range(turn(training))]
            for weights in chosen:
                if tuple(weights) not in found:
                    found[tuple(weights)] = count(lambda b=batch, w=weights: loss(b, w, None)[0])
            counts[name] = sum(found[tuple(weights)] for weights in chosen) / len(chosen)
    return counts


def count(forward) -> int:
    """Floating-point operations of a forward pass that returns a scalar, and of its backward pass."""
    with FlopCounterMode(display=False) as counter:
        result = forward()
        if result.requires_grad:
            result.backward()
    return counter.get_total_flops()


def matrix_peak(device: torch.device, dtype: torch.dtype) -> dict:
    """The fastest product of two square matrices here, in this process and with its threads.

    float32 products use TensorFloat-32 where the process does.

    Returns:
        {"tflops", "size", "dtype"}
    """
    best = {"tflops": 0.0, "size": 0, "dtype": str(dtype).removeprefix("torch.")}
    draws = torch.Generator(device).manual_seed(0)  # of its own: a running training's stays as it is
    for size in SIZES[device.type]:
        try:
            # Random: constant bits draw less power, and a GPU computes with them at a clock that no training reaches.
            a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=draws) for _ in range(2))
            once = _seconds(a, b, 1)  # warms up, and says how many fit into the burst
            repeats = max(1, int(BURST_S / once))
            fastest = min(_seconds(a, b, repeats) for _ in range(2))
        except torch.OutOfMemoryError:  # the run's own tensors need the device; smaller sizes have been measured
            break
        tflops = 2 * size**3 / fastest / 1e12
        if tflops > best["tflops"]:
            best |= {"tflops": tflops, "size": size}
        if once > BURST_S:  # the next one takes eight times as long
            break
    return best


@torch.no_grad()
def _seconds(a: torch.Tensor, b: torch.Tensor, repeats: int) -> float:
    """Of one product, mean over a few in a row."""
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    begin, host = mark(a.device), time.perf_counter()
    for _ in range(repeats):
        a @ b
    end = mark(a.device)
    if a.device.type == "cuda":
        end.synchronize()
        return elapsed_ms(begin, end) / 1e3 / repeats
    return (time.perf_counter() - host) / repeats

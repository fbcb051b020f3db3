"""Work of a step, counted, and the most of it that this machine can do: the two halves of MFU and of a step's floor.

Counted are matrix products and convolutions, as everywhere in this field, and FFTs, which are most of some models;
elementwise operations and norms are not. One multiplication with its addition is two operations, of complex numbers
eight. An FFT of N numbers is 5 N log2 N, half of that where one side is real (Cooley and Tukey's count).
Of bytes, what no fusion can spare is counted: each of these reads its operands and writes its result, and attention is
one of them, which never writes its scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from upsnb import overlays
from upsnb.config import OPERATOR, RunConfig
from upsnb.data.datasets import Dataset
from upsnb.data.spec import DatasetSpec
from upsnb.models.surrogate import set_attention
from upsnb.training import stages, workload
from upsnb.training.losses import ESTABLISHED, turn
from upsnb.training.precision import amp_dtype
from upsnb.training.timing import elapsed_ms, mark

PLAIN = {  # the model's own work: nothing computed twice
    "operator.pdet.use_activation_checkpoint": False,
    "operator.pdet.attention": "sdpa",  # one operation; "math" where its products are counted
    "training.compile": False,
}
SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}  # rows of the square matrices tried
COPIED = 2**25  # float32 values, 128 MiB: more than most caches hold
BURST_S = 0.1  # time for one size


class Unread:
    """Stands where a frozen model's forecasts are read instead of computed."""

    def __init__(self, spec: DatasetSpec):
        self.shape = spec.output_frames, spec.output_channels, *spec.grid_shape

    def read(self, pairs: np.ndarray, device: torch.device) -> Tensor:
        return torch.zeros(len(pairs), *self.shape, device=device)


def per_microbatch(
    config: RunConfig,
    datasets: dict[str, Dataset],
    stage: str = OPERATOR,
    progress: float = 0.0,
    kept: Collection[str] = (),
    nbytes: bool = False,
) -> dict[str, float]:
    """Operations of one rank's microbatch by dataset, forward and backward, mean over a turn of the losses.

    Counted on fake tensors: in a second, on any machine, without memory or the model that trains.

    Args:
        kept: datasets whose frozen forecasts the stage reads and does not compute.
        nbytes: instead of operations the bytes that these have to read and write, in the step's dtype.
    """
    counter, attention, dtype = (count_bytes, "sdpa", amp_dtype(config)) if nbytes else (count, "math", None)
    plain, counts = overlays.apply(config, PLAIN), {}
    training, calls, zeros = plain.training, plain.calls(stage), workload.of(plain).zeros
    with FakeTensorMode():
        loss = stages.build(plain, datasets, stage)
        loss.progress = progress
        set_attention(loss.model.blocks(), attention)
        loss.generator = torch.Generator()
        for name, dataset in datasets.items():
            batch, found = zeros(name, dataset.spec, training.batch_size, calls=calls), {}
            if name in kept:
                loss.forecasts = {name: Unread(dataset.spec)}
                batch = replace(batch, pairs=np.zeros((training.batch_size, 2), dtype=np.int64))
            chosen = [loss.weights(ESTABLISHED, number) for number in range(turn(training))]
            for weights in chosen:
                if tuple(weights) not in found:
                    found[tuple(weights)] = counter(lambda b=batch, w=weights: loss(b, w, dtype)[0])
            counts[name] = sum(found[tuple(weights)] for weights in chosen) / len(chosen)
    return counts


def _product(operation, share: float = 1.0) -> Callable:
    """The operations of matrix products, by torch's own formula; four times as many in complex numbers.

    Args:
        share: of what the formula says.
    """

    def counted(*given, out_val: Tensor | tuple[Tensor, ...], **options) -> int:
        factor = 4 if torch.is_tensor(out_val) and out_val.is_complex() else share
        return round(factor * flop_registry[operation](*given, out_val=out_val, **options))

    counted._get_raw = True  # the tensors, not their shapes alone
    return counted


def _transform(x: Tensor, axes: list[int], *_, out_val: Tensor, **options) -> int:
    """Of an FFT: by its longer side, where one is real and has no conjugates."""
    longer = x if x.numel() >= out_val.numel() else out_val
    length = math.prod(longer.shape[axis] for axis in axes)
    each = 5.0 if x.is_complex() and out_val.is_complex() else 2.5
    return round(each * longer.numel() * math.log2(max(length, 2)))


_transform._get_raw = True
ATEN = torch.ops.aten
COUNTED = {operation: _product(operation) for operation in (ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm)}
COUNTED |= dict.fromkeys((ATEN._fft_r2c, ATEN._fft_c2r, ATEN._fft_c2c), _transform)
COUNTED |= {  # the CPU's own attention, on which all is counted and of which torch has no formula
    ATEN._scaled_dot_product_flash_attention_for_cpu: _product(ATEN._scaled_dot_product_flash_attention),
    # four products; the fifth in torch's formula makes the scores again, and nothing is to count twice
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _product(
        ATEN._scaled_dot_product_flash_attention_backward, 4 / 5
    ),
}


def count(forward) -> int:
    """Floating-point operations of a forward pass that returns a scalar, and of its backward pass."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        _both(forward)
    return counter.get_total_flops()


def count_bytes(forward) -> int:
    """Bytes that the same operations of a forward pass that returns a scalar, and of its backward pass, move."""
    with _Bytes() as counter:
        _both(forward)
    return counter.nbytes


def _both(forward) -> None:
    result = forward()
    if result.requires_grad:
        result.backward()


class _Bytes(TorchDispatchMode):
    MOVING = {*flop_registry, *COUNTED}

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function._overloadpacket in self.MOVING:
            tensors = [leaf for leaf in tree_leaves((arguments, options, result)) if torch.is_tensor(leaf)]
            self.nbytes += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)  # less where broadcast
        return result


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
            fastest = _fastest(lambda a=a, b=b: a @ b, device)
        except torch.OutOfMemoryError:  # the run's own tensors need the device; smaller sizes have been measured
            break
        tflops = 2 * size**3 / fastest / 1e12
        if tflops > best["tflops"]:
            best |= {"tflops": tflops, "size": size}
        if fastest > BURST_S:  # the next one takes eight times as long
            break
    return best


def bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device's memory, with this process's threads [GB/s]."""
    draws, size = torch.Generator(device).manual_seed(0), COPIED
    while True:
        try:
            source = torch.randn(size, device=device, generator=draws)
            target = torch.empty_like(source)
            break
        except torch.OutOfMemoryError:  # the run's own tensors need the device
            size //= 2
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device) / 1e9


def _fastest(work: Callable, device: torch.device) -> float:
    """Seconds of one call, mean over a burst of them; of two bursts the faster one."""
    once = _seconds(work, device, 1)  # warms up, and says how many fit into the burst
    repeats = max(1, int(BURST_S / once))
    return min(_seconds(work, device, repeats) for _ in range(2))


def _seconds(work: Callable, device: torch.device, repeats: int) -> float:
    if device.type == "cuda":  # or the device would still be at something else between the marks
        torch.cuda.synchronize(device)
    begin = mark(device)
    for _ in range(repeats):
        work()
    end = mark(device)
    if device.type == "cuda":
        end.synchronize()
    return elapsed_ms(begin, end) / 1e3 / repeats

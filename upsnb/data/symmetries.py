"""Symmetries of equations: what turns a solution into another one; a family's row names its own.

"shift": along every periodic axis; "shift x": along the first one alone. "sign": of all values. "turn": mirror images
and turns of the box, 2 in 1-D, the square's 8 and the cube's 48; components of vectors turn with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from upsnb.data.layouts import Family

KINDS = ("shift", "shift x", "sign", "turn")
SWAPS = ((), (), ((0, 1),), ((0, 1), (1, 2), (0, 1)))  # by dimension: axes whose exchanges make every order of axes
# ... and which of these to make for each order: every one once
ORDERS = ((), ((),), ((0,), (1,)), ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)))


def images(family: Family, inputs: Tensor, targets: Tensor, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """Replace each sample by an image of itself, the same one of inputs and targets.

    Args:
        inputs, targets: (B, T, C, *grid) with the family's channels.
        draws: (B, 2) in [0, 1), which decide the image.
    """
    grid, fields = tuple(inputs.shape[3:]), [inputs, targets]
    if {"shift", "shift x"} & set(family.symmetries):
        axes = [axis for axis, wraps in enumerate(family.periodic) if wraps] if "shift" in family.symmetries else [0]
        for axis, cells in zip(axes, _digits(draws[:, 0], [grid[axis] for axis in axes])):
            fields = [_shift(x, 3 + axis, cells) for x in fields]
    sign, element = _digits(draws[:, 1], [2, num_turns(grid)])
    if "sign" in family.symmetries:
        factor = torch.from_numpy(2.0 * sign - 1).float().to(inputs.device, non_blocking=True)
        fields = [x * factor.view(-1, *(1,) * (x.dim() - 1)) for x in fields]
    if "turn" in family.symmetries:
        channels = family.input_channels, family.output_channels
        fields = [turn(family, x, names, element) for x, names in zip(fields, channels)]
    return fields[0], fields[1]


def num_turns(grid: tuple[int, ...]) -> int:
    """Mirror images and turns of a box, which exchange axes where it is a square or a cube."""
    return 2 ** len(grid) * (len(ORDERS[len(grid)]) if len(set(grid)) == 1 else 1)


def turn(family: Family, x: Tensor, channels: tuple[str, ...], element: np.ndarray, back: bool = False) -> Tensor:
    """Turn each sample (B, T, C, *grid) by its element, a number below `num_turns`; `back` undoes it."""
    num_dims = x.dim() - 3
    vectors = [[channels.index(name) for name in vector] for vector in family.vectors if vector[0] in channels]
    chosen = [element >> axis & 1 for axis in range(num_dims)]
    chosen += list(np.array(ORDERS[num_dims])[element >> num_dims].T)
    steps: list[Callable] = [lambda x, axis=axis: _mirror(x, axis, vectors) for axis in range(num_dims)]
    steps += [lambda x, pair=pair: _exchange(x, pair, vectors) for pair in SWAPS[num_dims]]
    for bits, step in list(zip(chosen, steps))[:: -1 if back else 1]:  # each is its own inverse
        if bits.any():
            mask = torch.from_numpy(bits > 0).to(x.device, non_blocking=True)
            x = torch.where(mask.view(-1, *(1,) * (x.dim() - 1)), step(x), x)
    return x


def average(family: Family, forecast: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Mean of a forecast over all turns of its inputs, each turned back."""
    total, count = 0, num_turns(tuple(inputs.shape[3:]))
    for number in range(count):
        element = np.full(len(inputs), number)
        turned = forecast(turn(family, inputs, family.input_channels, element))
        total = total + turn(family, turned, family.output_channels, element, back=True)
    return total / count


def _digits(draws: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
    """Whole numbers below each of the sizes, all out of one draw in [0, 1)."""
    assert math.prod(sizes) < 2**40  # a draw has 53 bits
    for size in sizes:
        whole, draws = np.divmod(draws * size, 1)[0], draws * size % 1
        yield whole.astype(np.int64)


def _shift(x: Tensor, axis: int, cells: np.ndarray) -> Tensor:
    """Roll each sample along an axis by its own number of cells."""
    size = x.shape[axis]
    index = torch.arange(size) - torch.from_numpy(cells)[:, None]
    index = index.remainder(size).to(x.device, non_blocking=True)
    lead = len(x), *(1,) * (axis - 1), size, *(1,) * (x.dim() - axis - 1)
    return x.gather(axis, index.view(lead).expand_as(x))


def _mirror(x: Tensor, axis: int, vectors: list[list[int]]) -> Tensor:
    x = x.flip(3 + axis)
    for vector in vectors:
        x[:, :, vector[axis]] *= -1  # flip made a copy
    return x


def _exchange(x: Tensor, pair: tuple[int, int], vectors: list[list[int]]) -> Tensor:
    order = list(range(x.shape[2]))
    for vector in vectors:
        one, two = (vector[axis] for axis in pair)
        order[one], order[two] = two, one
    x = x.transpose(3 + pair[0], 3 + pair[1])
    return x[:, :, order] if vectors else x

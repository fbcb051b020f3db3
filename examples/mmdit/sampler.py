"""Pictures out of noise, by following the model's velocity from time 1 to 0."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from examples.mmdit.data import NO_CAPTION, encode
from examples.mmdit.model import CHANNELS, MMDiT

# Where things are and how many is decided while they are barely seen: a disc of 8 x 8 pixels in three channels stands
# out of the noise at time 0.9 or so.
SHIFT = 5.0


def noise(size: tuple[int, int], samples: Iterable[int], seed: int = 0) -> Tensor:
    """What pictures begin as: (B, C, H, W), the same for a sample whatever stands beside it."""
    draws = (torch.Generator().manual_seed(seed + 1_000_003 * (int(sample) + 1)) for sample in samples)
    return torch.stack([torch.randn(CHANNELS, *size, generator=drawn) for drawn in draws])


def shifted(times: Tensor) -> Tensor:
    """Times in [0, 1], moved towards noise by SHIFT, in the same order (arXiv 2403.03206, section 5.3.2)."""
    return SHIFT * times / (1 + (SHIFT - 1) * times)


@torch.no_grad()
def sample(
    model: MMDiT, name: str, tokens_BL: Tensor, z_BCHW: Tensor, steps: int, guidance: float, method: str
) -> Tensor:
    """Pictures of captions.

    Args:
        name: bucket, whose size `z_BCHW` has.
        tokens_BL: token ids of the captions.
        z_BCHW: standard normal noise.
        steps: from noise to picture, `shifted`: shorter near noise.
        guidance: how far beyond the velocity without a caption to that with it (arXiv 2207.12598); 1: just to it.
        method: euler, or heun, which takes two calls a step, the last one excepted.
    Returns:
        (B, C, H, W) float32 in [0, 1].
    """
    without = torch.tensor(encode(NO_CAPTION), device=tokens_BL.device).expand_as(tokens_BL)
    both = torch.cat((tokens_BL, without))

    def velocity(z: Tensor, time: float) -> Tensor:
        if guidance == 1:
            return model.velocity(name, z, torch.full((len(z),), time, device=z.device), tokens_BL)
        times = torch.full((2 * len(z),), time, device=z.device)
        told, untold = model.velocity(name, torch.cat((z, z)), times, both).chunk(2)
        return untold + guidance * (told - untold)

    times = shifted(torch.linspace(1, 0, steps + 1)).tolist()
    for time, after in zip(times, times[1:]):
        v = velocity(z_BCHW, time)
        ahead = z_BCHW + (after - time) * v
        if method == "heun" and after > 0:  # at the picture itself there is no velocity left to correct by
            ahead = z_BCHW + (after - time) * (v + velocity(ahead, after)) / 2
        z_BCHW = ahead
    return model.denormalise(name, z_BCHW).clamp(0, 1)

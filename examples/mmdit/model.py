"""The multimodal diffusion transformer: one stream of tokens for a picture, one for its caption, joined in attention.

After Esser et al., Stable Diffusion 3 (arXiv 2403.03206). Shape letters: B batch, N tokens of a picture, L tokens of a
caption, D width, C channels. Times run from the picture, 0, to noise, 1; samples are drawn the other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.mmdit.data import LENGTH, NO_CAPTION, WORDS, encode
from upsnb.models.network import Network
from upsnb.models.transformer import Mlp, attend, rotary_table, rotate
from upsnb.values import PositiveInt, Section

CHANNELS = 3
REACH = 32  # patches of a unit of rotary positions: waves of 2 to 64 patches
EARLIEST = 0.05  # what a velocity divides by at least: near the picture the noise that is left tells nothing
# Where things are and how many is decided while they are barely seen: a disc of 8 x 8 pixels in three channels stands
# out of the noise at time 0.9 or so.
SHIFT = 5.0


@dataclass(frozen=True)
class BucketSpec:
    """What the model must know of the pictures of one size."""

    name: str
    size: tuple[int, int]  # height and width [pixels]
    mean: tuple[float, ...]  # per channel in [0, 1], over the training split
    std: tuple[float, ...]


class Shape(Section):
    """`model.settings` of a params file."""

    width: PositiveInt = 96
    depth: PositiveInt = 4  # blocks
    num_heads: PositiveInt = 3
    mlp_ratio: PositiveInt = 4  # hidden width of an MLP over width
    patch: PositiveInt = 4  # side of the square that one token holds [pixels]


def zeroed(linear: nn.Linear) -> nn.Linear:
    """One that gives nothing before it is trained."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def waves(positions: Tensor, dim: int) -> Tensor:
    """Cosines and sines of positions (...,), of wavelengths from 2 pi up to 10,000 times that: (..., dim)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=positions.device) / (dim // 2))
    angles = positions[..., None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class JointAttention(nn.Module):
    """Attention among all tokens of both streams, each with projections and QK norms of its own."""

    def __init__(self, dim: int, num_heads: int, readers: int):
        """`readers`: how many streams read, the picture first; both are read from."""
        super().__init__()
        self.num_heads, self.backend = num_heads, "sdpa"
        self.queries = nn.ModuleList(nn.Linear(dim, dim) for _ in range(readers))
        self.keys_values = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(2))
        self.query_norms = nn.ModuleList(nn.RMSNorm(dim // num_heads) for _ in range(readers))
        self.key_norms = nn.ModuleList(nn.RMSNorm(dim // num_heads) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(readers))

    def forward(self, streams: list[Tensor], table: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Both streams, (B, N, D) and (B, L, D) -> what each that reads has found, in its own shape.

        `table` rotates queries and keys of the picture by where their patch lies; words have their place in them.
        """
        queries, keys, values = [], [], []
        for x, project, norm in zip(streams, self.queries, self.query_norms):
            queries.append(norm(self._heads(project(x))))
        for x, project, norm in zip(streams, self.keys_values, self.key_norms):
            k, v = map(self._heads, project(x).chunk(2, dim=-1))
            keys.append(norm(k))
            values.append(v)
        queries[0], keys[0] = rotate(queries[0], table), rotate(keys[0], table)
        q, k, v = (torch.cat(parts, dim=2) for parts in (queries, keys, values))
        # RMSNorm leaves autocast for float32; attention kernels want one dtype. In evaluation torch chooses the kernel:
        # no metric may depend on how fast the step was made.
        y = attend(q.to(v.dtype), k.to(v.dtype), v, self.backend if self.training else "sdpa")
        parts = y.transpose(1, 2).flatten(2).split([x.shape[2] for x in queries], dim=1)
        return [output(part) for output, part in zip(self.outputs, parts)]

    def _heads(self, x_BND: Tensor) -> Tensor:
        return x_BND.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Joint attention, then an MLP for each stream, all of it shifted, scaled and gated by the condition (adaLN-Zero).

    Of the last block only the picture goes on, so there the caption has neither queries nor output nor MLP.
    """

    def __init__(self, dim: int, num_heads: int, hidden_dim: int, last: bool):
        super().__init__()
        readers = 1 if last else 2
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        # shift, scale and gate before attention and before the MLP; who does not read is shifted and scaled once
        self.modulations = nn.ModuleList(zeroed(nn.Linear(dim, count * dim)) for count in (6, 2 if last else 6))
        self.attention = JointAttention(dim, num_heads, readers)
        self.mlps = nn.ModuleList(Mlp(dim, hidden_dim) for _ in range(readers))

    def forward(self, picture_BND: Tensor, caption_BLD: Tensor, condition_BD: Tensor, table) -> tuple[Tensor, Tensor]:
        streams = [picture_BND, caption_BLD]
        changes = [layer(condition_BD)[:, None].split(condition_BD.shape[1], dim=-1) for layer in self.modulations]
        moved = [self.norm(x) * (1 + change[0]) + change[1] for x, change in zip(streams, changes)]
        for stream, found in enumerate(self.attention(moved, table)):
            _, _, gate, scale, shift, mlp_gate = changes[stream]
            x = streams[stream] + gate * found
            streams[stream] = x + mlp_gate * self.mlps[stream](self.norm(x) * (1 + scale) + shift)
        return tuple(streams)


class MMDiT(Network):
    """Noised pictures, times and captions in, pictures out, normalised; for pictures of any size of its buckets."""

    def __init__(self, specs: dict[str, BucketSpec], shape: Shape):
        super().__init__(specs)
        width, patch = shape.width, shape.patch
        self.patch, self.width = patch, width
        for name, spec in specs.items():  # they come with the specs and not with the weights
            for key in ("mean", "std"):
                self.register_buffer(f"{name}_{key}", torch.tensor(getattr(spec, key)).view(-1, 1, 1), persistent=False)
            places = torch.cartesian_prod(*(torch.arange(side // patch) for side in spec.size))
            table = rotary_table(places / REACH, (False, False), width // shape.num_heads)
            # Rotations say how far two patches are apart; near noise nothing else tells a patch on which side it lies.
            where = waves(places, width // 2).flatten(1)
            for key, value in zip(("cos", "sin", "where"), (*table, where)):
                self.register_buffer(f"{name}_{key}", value, persistent=False)
        self.words = nn.Embedding(len(WORDS), width)
        self.places = nn.Parameter(torch.randn(LENGTH, width))
        self.pixels = nn.Linear(CHANNELS * patch**2, width)
        self.time = Mlp(width, width)
        self.summary = nn.Linear(width, width)
        heads, hidden, depth = shape.num_heads, shape.mlp_ratio * width, shape.depth
        self.trunk = nn.ModuleList(Block(width, heads, hidden, last=i == depth - 1) for i in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.output = (zeroed(nn.Linear(width, size)) for size in (2 * width, CHANNELS * patch**2))

    def blocks(self) -> list[nn.Module]:
        return list(self.trunk)

    def normalise(self, name: str, pictures_BCHW: Tensor) -> Tensor:
        """uint8 -> float32 of zero mean and unit variance per channel over the bucket's training split."""
        return (pictures_BCHW / 255 - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_std")

    def denormalise(self, name: str, x_BCHW: Tensor) -> Tensor:
        """The way back, to floats that are in [0, 1] where the picture is one."""
        return x_BCHW * getattr(self, f"{name}_std") + getattr(self, f"{name}_mean")

    def forward(self, name: str, z_BCHW: Tensor, time_B: Tensor, tokens_BL: Tensor) -> Tensor:
        """The picture that a noised one is believed to come from.

        Args:
            name: bucket, one of `specs`.
            z_BCHW: normalised picture * (1 - time) + standard normal noise * time.
            time_B: float32 in [0, 1].
            tokens_BL: int64 ids of the caption's words.
        Returns:
            (B, C, H, W) float32, normalised.
        """
        grid = tuple(side // self.patch for side in z_BCHW.shape[2:])
        table = getattr(self, f"{name}_cos"), getattr(self, f"{name}_sin")
        patches = F.pixel_unshuffle(z_BCHW, self.patch).flatten(2).transpose(1, 2)
        picture, caption = self.pixels(patches) + getattr(self, f"{name}_where"), self.words(tokens_BL)
        condition = F.silu(self.time(waves(1000 * time_B, self.width)) + self.summary(caption.mean(dim=1)))
        caption = caption + self.places
        for block in self.trunk:
            picture, caption = block(picture, caption, condition, table)
        scale, shift = self.modulation(condition)[:, None].chunk(2, dim=-1)
        y = self.output(self.norm(picture) * (1 + scale) + shift).float()
        return F.pixel_shuffle(y.transpose(1, 2).unflatten(2, grid), self.patch)

    def velocity(self, name: str, z_BCHW: Tensor, time_B: Tensor, tokens_BL: Tensor) -> Tensor:
        """Where a noised picture moves as time rises: noise minus picture, (B, C, H, W) float32.

        The network says the picture and not the velocity: pictures are simpler than noise (arXiv 2511.13720).
        """
        time = time_B.clamp_min(EARLIEST).view(-1, 1, 1, 1)
        return (z_BCHW - self(name, z_BCHW, time_B, tokens_BL)) / time


def noise(size: tuple[int, int], samples: Iterable[int], seed: int = 0, draws: int = 1) -> Tensor:
    """Standard normal draws for pictures, (S, B, C, H, W), the same for a sample whatever stands beside it."""
    generators = (torch.Generator().manual_seed(seed + 1_000_003 * (int(sample) + 1)) for sample in samples)
    return torch.stack([torch.randn(draws, CHANNELS, *size, generator=drawn) for drawn in generators], dim=1)


def shifted(times: Tensor) -> Tensor:
    """Times in [0, 1], moved towards noise by SHIFT, in the same order (arXiv 2403.03206, section 5.3.2)."""
    return SHIFT * times / (1 + (SHIFT - 1) * times)


@torch.no_grad()
def sample(model: MMDiT, name: str, tokens_BL: Tensor, noise_SBCHW: Tensor, steps: int, guidance: float) -> Tensor:
    """Pictures of captions.

    Args:
        name: bucket, whose size the noise has.
        tokens_BL: token ids of the captions.
        noise_SBCHW: standard normal. Pictures begin as the first; one more for each step that follows replaces as much
            of their noise as may be new (ancestral sampling: arXiv 2010.02502, eq. 16 with eta 1). The first alone is
            Euler's method, in which nothing else is left to chance.
        steps: from noise to picture, `shifted`: shorter near noise.
        guidance: how far beyond the velocity without a caption to that with it (arXiv 2207.12598); 1: just to it.
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

    times, z_BCHW = shifted(torch.linspace(1, 0, steps + 1)).tolist(), noise_SBCHW[0]
    for step, (time, after) in enumerate(zip(times, times[1:]), start=1):
        v = velocity(z_BCHW, time)
        picture, left = z_BCHW - time * v, z_BCHW + (1 - time) * v  # what z is believed to be made of
        if step < len(noise_SBCHW):
            kept = (1 - time) * after / ((1 - after) * time)
            left = kept * left + math.sqrt(1 - kept**2) * noise_SBCHW[step]
        z_BCHW = (1 - after) * picture + after * left
    return model.denormalise(name, z_BCHW).clamp(0, 1)

"""Fields to latent tokens and back: encoders from a grid, decoders to any point.

Every encoder maps (B, T, C, *grid) at any resolution to (B, L, D); every decoder maps (B, L, D) to a grid of any
resolution, or to any unit coordinates. docs/model.md has the measured comparison.

What touches fields computes in float32 under autocast too: bfloat16 keeps 8 bits of a value, and a good model errs by
less than what that loses. The products are few, beside those of the operator (docs/LOG.md has what it costs and gains).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from upsnb.config import OperatorConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models.geometry import CONVOLUTIONS, grid_points, neighbours, pad, resample, sample_at
from upsnb.models.transformer import Attention, Mlp, rotary_table


class PatchEncoder(nn.Module):
    """Overlapping patches of the field, one token each, in the order of space.

    The kernel covers twice the stride. Another resolution is first brought to the training grid: averaged where it is
    finer, so that the convolution keeps its physical extent.
    """

    def __init__(self, spec: DatasetSpec, dim: int):
        super().__init__()
        self.spec = spec
        channels = spec.input_frames * spec.input_channels
        self.embed = CONVOLUTIONS[spec.num_dims - 1](channels, dim, 2 * spec.patch, stride=spec.patch)
        # Rotary positions are relative; where the domain has walls, a token must also know how far away they are.
        walls = not all(spec.periodic)
        self.position = nn.Parameter(torch.zeros(math.prod(spec.token_grid), dim)) if walls else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        spec = self.spec
        x = resample(x_BTC.flatten(1, 2), spec.grid_shape, spec.periodic)
        x = pad(x, spec.patch // 2, spec.patch - spec.patch // 2, spec.periodic)
        with torch.autocast(x.device.type, enabled=False):
            z = self.embed(x).flatten(2).transpose(1, 2)
        return z if self.position is None else z + self.position


class PerceiverEncoder(nn.Module):
    """Learned latents that attend to the field's patches (Perceiver, arXiv 2103.03206); their order means nothing."""

    def __init__(self, spec: DatasetSpec, dim: int, num_heads: int):
        super().__init__()
        self.patches = PatchEncoder(spec, dim)
        self.latents = nn.Parameter(torch.randn(spec.tokens, dim) * dim**-0.5)
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, qk_norm=True)
        table = rotary_table(grid_points(spec.token_grid), spec.periodic, dim // num_heads)
        self.register_buffer("cos", table[0], persistent=False)
        self.register_buffer("sin", table[1], persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        patches = self.norm(self.patches(x_BTC))
        latents = self.latents.expand(len(patches), -1, -1)
        return latents + self.attention(latents, None, patches, (self.cos, self.sin))


class LocalBasisDecoder(nn.Module):
    """Each token emits coefficients of a small learned basis of the offset to it; neighbours blend by hat weights.

    u(x) = sum over the 2^S nearest tokens n of hat(x - x_n) * sum_k a_nk phi_k(x - x_n). Continuous in x, exact at any
    point, and on a grid a single matrix product with an overlap-add.
    """

    def __init__(self, spec: DatasetSpec, dim: int, num_channels: int, basis_size: int):
        super().__init__()
        self.spec, self.num_channels, self.basis_size = spec, num_channels, basis_size
        self.norm = nn.LayerNorm(dim)
        self.coefficients = nn.Linear(dim, num_channels * basis_size)
        self.basis = Mlp(spec.num_dims, 64, basis_size)

    def forward(self, z_BLD: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(B, L, D) -> (B, C, *shape)."""
        tokens = self.spec.token_grid
        patches = tuple(size // count for size, count in zip(shape, tokens))
        if tuple(p * count for p, count in zip(patches, tokens)) != tuple(shape) or any(p % 2 for p in patches):
            return self.at(z_BLD, grid_points(shape, z_BLD.device)).unflatten(-1, shape)
        return self._overlap_add(z_BLD, patches)

    def at(self, z_BLD: Tensor, points_QS: Tensor) -> Tensor:
        """(B, L, D) and unit coordinates (Q, S) -> (B, C, Q)."""
        index, weight, offset = neighbours(points_QS, self.spec.token_grid, self.spec.periodic)
        value = 0
        with torch.autocast(z_BLD.device.type, enabled=False):
            basis = self.basis(offset) * weight[..., None]  # (Q, 2^S, K)
            coefficients = self._coefficients(z_BLD)  # (B, L, C, K)
            for corner in range(index.shape[1]):  # one corner at a time bounds the gathered memory
                near = coefficients[:, index[:, corner]]
                value = value + torch.einsum("bqck,qk->bcq", near, basis[:, corner])
        return value

    def _coefficients(self, z_BLD: Tensor) -> Tensor:
        return self.coefficients(self.norm(z_BLD)).unflatten(-1, (self.num_channels, self.basis_size))

    def _overlap_add(self, z_BLD: Tensor, patches: tuple[int, ...]) -> Tensor:
        """Every token's support is 2 x patch cells wide: its halves land in two neighbouring output blocks."""
        spec, num_dims = self.spec, self.spec.num_dims
        offsets = grid_points(tuple(2 * p for p in patches), z_BLD.device) * 2 - 1
        hat = (1 - offsets.abs()).prod(-1, keepdim=True)
        with torch.autocast(z_BLD.device.type, enabled=False):
            basis = self.basis(offsets) * hat  # (prod 2p, K)
            a = self._coefficients(z_BLD).flatten(2).transpose(1, 2).unflatten(2, spec.token_grid)
            a = pad(a, 1, 1, spec.periodic).flatten(2).unflatten(1, (self.num_channels, self.basis_size))
            support = torch.einsum("bckl,pk->bclp", a, basis)
        support = support.unflatten(-1, tuple(2 * p for p in patches))
        support = support.unflatten(2, tuple(count + 2 for count in spec.token_grid))
        value = 0
        for halves in itertools.product((0, 1), repeat=num_dims):
            # block b takes the second half of token b - 1 and the first half of token b; ghosts shift both by one
            part = support
            for axis, half in enumerate(halves):
                count, p = spec.token_grid[axis], patches[axis]
                part = part.narrow(2 + axis, 1 - half, count + 1).narrow(2 + num_dims + axis, half * p, p)
            value = value + part
        order = [0, 1] + [i for axis in range(num_dims) for i in (2 + axis, 2 + num_dims + axis)]
        value = value.permute(order).reshape(
            *value.shape[:2], *((count + 1) * p for count, p in zip(spec.token_grid, patches))
        )
        for axis, (count, p) in enumerate(zip(spec.token_grid, patches)):
            value = value.narrow(2 + axis, p // 2, count * p)
        return value


class UnpatchifyDecoder(nn.Module):
    """Each token emits its own patch of the training grid; other points are interpolated from it."""

    def __init__(self, spec: DatasetSpec, dim: int, num_channels: int):
        super().__init__()
        self.spec, self.num_channels = spec, num_channels
        self.norm = nn.LayerNorm(dim)
        self.pixels = nn.Linear(dim, num_channels * spec.patch**spec.num_dims)

    def forward(self, z_BLD: Tensor, shape: tuple[int, ...]) -> Tensor:
        spec, n = self.spec, self.spec.num_dims
        with torch.autocast(z_BLD.device.type, enabled=False):
            x = self.pixels(self.norm(z_BLD)).transpose(1, 2)
        x = x.unflatten(1, (self.num_channels, *(spec.patch,) * n)).unflatten(-1, spec.token_grid)
        order = [0, 1] + [i for axis in range(n) for i in (2 + n + axis, 2 + axis)]
        x = x.permute(order).reshape(len(x), self.num_channels, *spec.grid_shape)
        return resample(x, shape, spec.periodic)

    def at(self, z_BLD: Tensor, points_QS: Tensor) -> Tensor:
        return sample_at(self(z_BLD, self.spec.grid_shape), points_QS, self.spec.periodic)


class CrossAttentionDecoder(nn.Module):
    """Query points attend to all tokens, as in UPT (arXiv 2402.12365, section 3)."""

    def __init__(self, spec: DatasetSpec, dim: int, num_channels: int, num_heads: int, ordered: bool):
        super().__init__()
        self.spec, self.ordered, self.head_dim = spec, ordered, dim // num_heads
        self.num_frequencies = 2 * max(spec.grid_shape) // max(spec.patch, 2)
        self.embed = Mlp(2 * spec.num_dims * self.num_frequencies, dim, dim)
        self.query_norm, self.token_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, qk_norm=True)
        self.norm, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.output = nn.Linear(dim, num_channels)

    def forward(self, z_BLD: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.at(z_BLD, grid_points(shape, z_BLD.device)).unflatten(-1, shape)

    def at(self, z_BLD: Tensor, points_QS: Tensor) -> Tensor:
        frequencies = torch.arange(1, self.num_frequencies + 1, device=points_QS.device)
        # sines of half turns also tell the two ends of a closed axis apart
        turns = [points * (2 if wraps else 1) for points, wraps in zip(points_QS.unbind(1), self.spec.periodic)]
        angles = (math.pi * torch.stack(turns, 1)[..., None] * frequencies).flatten(1)
        queries = self.embed(torch.cat((angles.sin(), angles.cos()), dim=-1)).expand(len(z_BLD), -1, -1)
        tables = (None, None)
        if self.ordered:
            places = (points_QS, grid_points(self.spec.token_grid, points_QS.device))
            tables = tuple(rotary_table(place, self.spec.periodic, self.head_dim) for place in places)
        x = queries + self.attention(self.query_norm(queries), tables[0], self.token_norm(z_BLD), tables[1])
        x = x + self.mlp(self.norm(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.output(x.float()).transpose(1, 2)


def build_encoder(config: OperatorConfig, spec: DatasetSpec, dim: int) -> nn.Module:
    """The encoder that the config names; maps (B, T, C, *grid) to (B, L, D)."""
    if config.encoder == "perceiver":
        return PerceiverEncoder(spec, dim, _codec_heads(dim))
    return PatchEncoder(spec, dim)


def build_decoder(config: OperatorConfig, spec: DatasetSpec, dim: int, num_channels: int) -> nn.Module:
    """The decoder that the config names; called with a grid shape, or `.at` any unit coordinates."""
    if config.decoder == "local_basis":
        return LocalBasisDecoder(spec, dim, num_channels, config.basis_size)
    if config.decoder == "unpatchify":
        return UnpatchifyDecoder(spec, dim, num_channels)
    return CrossAttentionDecoder(spec, dim, num_channels, _codec_heads(dim), ordered=config.encoder == "patch")


def _codec_heads(dim: int) -> int:
    """Heads of about 32 channels, an even width each."""
    return next(heads for heads in range(max(dim // 32, 1), 0, -1) if dim % (2 * heads) == 0)

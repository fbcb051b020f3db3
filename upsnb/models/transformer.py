"""Attention over tokens that keep their place in space, pre-norm blocks made of it, and the operator made of those.

Shape letters, here and in every file of this package: B batch, L latent tokens, Q query points, D width, H heads,
S space dimensions, C channels, T frames.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from upsnb.config import PdetConfig

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
NUM_MODULATIONS = 4  # scale and shift, before attention and before the MLP


def rotary_table(positions: Tensor, periodic: tuple[bool, ...], head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines that rotate pairs of head channels by position (RoFormer, arXiv 2104.09864).

    On a periodic axis the frequencies are whole numbers of turns, so the attention score depends on the periodic
    distance only; elsewhere they are spaced geometrically from half a turn up.

    Args:
        positions: (N, S) float, unit coordinates in [0, 1].
        periodic: one flag per axis.
        head_dim: even width of one head; its pairs are dealt out to the axes in turn, of which the last may get none.
    Returns:
        Two (N, head_dim / 2) float32 tensors.
    """
    num_dims, num_pairs = positions.shape[-1], head_dim // 2
    angles = torch.zeros(positions.shape[0], num_pairs, dtype=torch.float32, device=positions.device)
    for axis in range(min(num_dims, num_pairs)):
        pairs = torch.arange(axis, num_pairs, num_dims, device=positions.device)
        order = torch.arange(len(pairs), device=positions.device, dtype=torch.float32)
        turns = order + 1 if periodic[axis] else 0.5 * 2 ** (order * 5 / max(len(pairs) - 1, 1))
        angles[:, pairs] = 2 * torch.pi * positions[:, axis : axis + 1].float() * turns
    return angles.cos(), angles.sin()


def rotary_sequence(length: int, head_dim: int, theta: float = 10_000.0) -> Tensor:
    """RoFormer's own angles, for places 0, 1, ... of a sequence: (2, N, head_dim / 2), cosines and sines."""
    angles = torch.arange(length)[:, None] * theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHND: Tensor, table: tuple[Tensor, Tensor] | Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of each token by its table row; keeps shape and dtype."""
    cos, sin = (part.to(x_BHND.dtype) for part in table)
    first, second = x_BHND.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def attend(q_BHND: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, backend: str, mask=None) -> Tensor:
    """softmax(q k / sqrt(D)) v; the backends differ in speed, memory and rounding only.

    `sdpa` lets torch choose a kernel, `flash` (arXiv 2205.14135) and `efficient` (arXiv 2112.05682) name one, and fail
    where it cannot run. `flex` is FlexAttention (arXiv 2412.05496), a kernel that the compiler generates, inside a
    compiled block or not. `math` writes the scores out: on a CPU the compiler fuses it into a third of the fused
    kernel's time at 256 tokens in bfloat16 (forward and backward 4.8 against 12.2 ms, 2 cores with avx512_bf16), for
    L^2 memory.

    Args:
        mask: what attends to what, bool that broadcasts to (B, H, N, L), and for `flex` a BlockMask, with which several
            heads may share one of keys and values. `flash` takes none.
    """
    if backend == "math":
        scores = (q_BHND * q_BHND.shape[-1] ** -0.5) @ k_BHLD.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        # Summed up in float32 and written out in the dtype of the scores: float32 would be twice the bytes.
        return torch.softmax(scores, dim=-1).to(v_BHLD.dtype) @ v_BHLD
    if backend == "flex":
        kernel = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        return kernel(q_BHND, k_BHLD, v_BHLD, block_mask=mask, enable_gqa=q_BHND.shape[1] != k_BHLD.shape[1])
    with sdpa_kernel(KERNELS[backend]) if backend in KERNELS else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q_BHND, k_BHLD, v_BHLD, mask)


@functools.cache
def compiled(function):
    """A function as a kernel of its own; FlexAttention, uncompiled, would write the scores out, slower than `math`."""
    return torch.compile(function, dynamic=False)


class Attention(nn.Module):
    """Multi-head attention with QK norm and rotary positions; self-attention unless a context is given."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool, backend: str = "sdpa"):
        super().__init__()
        self.num_heads, self.head_dim, self.backend = num_heads, dim // num_heads, backend
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.query_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.output = nn.Linear(dim, dim)

    def forward(self, x_BND: Tensor, table, context_BLD: Tensor | None = None, context_table=None) -> Tensor:
        """(B, N, D) -> (B, N, D); tables rotate queries and keys, None leaves them as they are."""
        if context_BLD is None:
            context_BLD, context_table = x_BND, table
        batch, num_queries, dim = x_BND.shape
        heads = (self.num_heads, self.head_dim)
        q = self.query(x_BND).view(batch, num_queries, *heads).transpose(1, 2)
        k, v = self.key_value(context_BLD).view(batch, -1, 2, *heads).permute(2, 0, 3, 1, 4)
        q, k = self.query_norm(q), self.key_norm(k)
        if table is not None:
            q = rotate(q, table)
        if context_table is not None:
            k = rotate(k, context_table)
        # The backend is a choice of the training step. In evaluation, in float32 and on any machine, torch chooses: no
        # metric may depend on how fast the step was made, and flash attention takes no float32 on CUDA.
        backend = self.backend if self.training else "sdpa"
        # RMSNorm leaves autocast for float32; attention kernels want one dtype
        y = attend(q.to(v.dtype), k.to(v.dtype), v, backend)
        return self.output(y.transpose(1, 2).reshape(batch, num_queries, dim))


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, dim: int, hidden_dim: int, output_dim: int | None = None):
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, output_dim or dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm attention and MLP, both modulated by the condition (DiT's adaLN, arXiv 2212.09748, without gates).

    The modulation is shared by all blocks and each block adds a learned offset (PixArt's adaLN-single, arXiv
    2310.00426): 12 blocks of their own projections would add half the operator's parameters again.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, qk_norm: bool, drop_path: float, backend: str):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.attention = Attention(dim, num_heads, qk_norm, backend)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.modulation_offset = nn.Parameter(torch.zeros(NUM_MODULATIONS, dim))
        # A tensor: the compiler makes a graph of its own for each plain number, and stops at 8 blocks.
        self.drops = drop_path > 0
        self.recompute_attention = self.recompute_mlp = False
        self.register_buffer("drop_path", torch.tensor(float(drop_path)), persistent=False)
        for output in (self.attention.output, self.mlp.down):  # a new block is the identity
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)

    def forward(self, x_BLD: Tensor, modulation_BMD: Tensor, table) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        scale_a, shift_a, scale_m, shift_m = (modulation_BMD + self.modulation_offset).unsqueeze(2).unbind(1)
        x_BLD = x_BLD + self._thin(self._run(self._attend, self.recompute_attention, x_BLD, scale_a, shift_a, table))
        return x_BLD + self._thin(self._run(self._feed, self.recompute_mlp, x_BLD, scale_m, shift_m))

    def recompute(self, parts: str | None) -> None:
        """Choose what is computed again in backward: all, attention or mlp; None keeps every activation."""
        self.recompute_attention, self.recompute_mlp = parts in ("all", "attention"), parts in ("all", "mlp")

    def _attend(self, x_BLD: Tensor, scale: Tensor, shift: Tensor, table) -> Tensor:
        return self.attention(self.attention_norm(x_BLD) * (1 + scale) + shift, table)

    def _feed(self, x_BLD: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x_BLD) * (1 + scale) + shift)

    def _run(self, part, recompute: bool, *inputs) -> Tensor:
        """Call a part, keeping its activations for backward or only its inputs (arXiv 1604.06174)."""
        if not (recompute and torch.is_grad_enabled()):
            return part(*inputs)
        # No randomness inside the parts (drop-path stays outside), so no random state is kept either.
        return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _thin(self, update: Tensor) -> Tensor:
        """Stochastic depth per sample (arXiv 1603.09382)."""
        if not self.training or not self.drops:
            return update
        keep = torch.rand(update.shape[0], 1, 1, device=update.device) >= self.drop_path
        return update * keep.to(update.dtype) / (1 - self.drop_path)


class Operator(nn.Module):
    """z -> z + change(z, condition), over tokens of any number; the tables say where they are."""

    def __init__(self, config: PdetConfig, latent_dim: int, condition_dim: int):
        super().__init__()
        dim = config.hidden_dim
        self.input = nn.Linear(latent_dim, dim)
        self.modulation = nn.Linear(condition_dim, NUM_MODULATIONS * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(
            Block(dim, config.num_heads, config.mlp_ratio, config.qk_norm, rate, config.attention) for rate in rates
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, latent_dim)

    def forward(self, z_BLD: Tensor, condition_BD: Tensor, table) -> Tensor:
        """(B, L, D_latent) -> (B, L, D_latent)."""
        modulation = self.modulation(condition_BD).unflatten(-1, (NUM_MODULATIONS, -1))
        x = self.input(z_BLD).float()  # all blocks add to it: under autocast only what they add is rounded
        for block in self.blocks:
            x = block(x, modulation, table)
        return z_BLD + self.output(self.norm(x))

"""A decoder for long documents: rotary positions, RMSNorm, SwiGLU, grouped-query attention within each document.

Shape letters as in upsnb: B batch, N tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from upsnb.config import RunConfig
from upsnb.errors import Problem
from upsnb.models.network import Network
from upsnb.models.transformer import attend, compiled, rotary_sequence, rotate
from upsnb.values import PositiveFloat, PositiveInt, Section

SIZES = {  # width, blocks, heads, heads of keys and values
    "tiny": (128, 2, 2, 1),  # for a CPU, where scores cost most: few heads
    "small": (1024, 12, 16, 4),
    "medium": (1536, 18, 24, 6),
    "large": (2048, 24, 32, 8),
}
QUERIES = 256  # that are written out together; fewer leave out more scores and are more kernels to compile
IGNORED = -100  # a target that is none: the next token begins another document


def same_document(documents_BN: Tensor) -> Tensor:
    """Which token attends to which, (B, 1, N, N) bool: those of its own document, up to itself."""
    count = documents_BN.shape[1]
    own = documents_BN[:, None, :, None] == documents_BN[:, None, None, :]
    return own & torch.ones(count, count, dtype=torch.bool, device=own.device).tril()


def attend_by_blocks(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, documents_BN: Tensor) -> Tensor:
    """Attention under the mask of `same_document`, written out for some queries at a time, with the keys up to theirs.

    Nearly half of all scores are never computed, and compiled, no mask is. On a CPU, which has no backward pass for
    FlexAttention, this is what leaves blocks out.
    """
    count, parts = q_BHND.shape[2], []
    place = torch.arange(count, device=q_BHND.device)
    for begin in range(0, count, QUERIES):
        end = min(begin + QUERIES, count)
        scores = (q_BHND[:, :, begin:end] * q_BHND.shape[-1] ** -0.5) @ k_BHND[:, :, :end].transpose(-1, -2)
        own = documents_BN[:, None, begin:end, None] == documents_BN[:, None, None, :end]
        own = own & (place[begin:end, None] >= place[None, :end])
        weights = torch.softmax(scores.masked_fill(~own, -torch.inf), dim=-1).to(v_BHND.dtype)
        parts.append(weights @ v_BHND[:, :, :end])
    return torch.cat(parts, dim=2)


def same_document_blocks(documents_BN: Tensor):
    """The same for FlexAttention (arXiv 2412.05496), which leaves out whole blocks and writes no mask."""

    def allowed(b, h, query, key):
        return (query >= key) & (documents_BN[b, query] == documents_BN[b, key])

    batch, count = documents_BN.shape
    return compiled(create_block_mask)(allowed, batch, None, count, count, device=documents_BN.device)


class Attention(nn.Module):
    """Causal attention within documents; several heads share one of keys and values (GQA, arXiv 2305.13245).

    Each key is blended with the key before it, so that one layer can look for what followed a token ("smeared keys" of
    Olsson et al., In-context Learning and Induction Heads, 2022): that is what a long context is read for, and two
    plain layers take far longer to find it.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.backend = heads, kv_heads, dim // heads, "sdpa"
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.smear = nn.Parameter(torch.zeros(kv_heads, 1, 1))  # its sigmoid is the share of the key before

    def forward(self, x_BND: Tensor, table: Tensor, starts_BN: Tensor, mask) -> Tensor:
        """(B, N, D) -> (B, N, D).

        Args:
            starts_BN: where a document begins, whose first key has none before it.
            mask: of `same_document`; where the kernel is flex, of `same_document_blocks`; where it is math, the
                documents; None: one document.
        """
        batch, count, _ = x_BND.shape
        q = self.query(x_BND).view(batch, count, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.key_value(x_BND).view(batch, count, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        before = F.pad(k[:, :, :-1], (0, 0, 1, 0)).masked_fill(starts_BN[:, None, :, None], 0.0)
        k = torch.lerp(k, before, self.smear.sigmoid().to(k.dtype))
        q, k = rotate(q, table), rotate(k, table)
        y = self._attend(q, k, v.contiguous(), mask)
        return self.output(y.transpose(1, 2).reshape(batch, count, -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        backend = "sdpa" if mask is None or not self.training else self.backend
        if backend != "flex":
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backend == "math":
            return attend_by_blocks(q, k, v, mask)
        return attend(q, k, v, backend, mask)


class SwiGLU(nn.Module):
    """A gated MLP (arXiv 2002.05202) of about as many parameters as one of four times the width without a gate."""

    def __init__(self, dim: int):
        super().__init__()
        hidden = -(-8 * dim // 3 // 64) * 64  # full tiles of a matrix unit
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BND: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BND).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int, kv_heads: int, depth: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.mlp = Attention(dim, heads, kv_heads), SwiGLU(dim)
        for output in (self.attention.output, self.mlp.down):  # so that the sum over blocks starts at unit scale
            nn.init.normal_(output.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x_BND: Tensor, table, starts_BN: Tensor, mask) -> Tensor:
        x_BND = x_BND + self.attention(self.attention_norm(x_BND), table, starts_BN, mask)
        return x_BND + self.mlp(self.mlp_norm(x_BND))


class Head(nn.Module):
    """From the last block to losses, some tokens at a time: logits of a long context never lie in memory together.

    At 32,768 tokens and a vocabulary of 32,768 they would take 4 GiB in float32, and their gradient as much.
    """

    def __init__(self, dim: int, vocabulary: int, chunk: int):
        super().__init__()
        self.norm, self.chunk = nn.RMSNorm(dim), chunk
        self.logits = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x_BND: Tensor, targets_BN: Tensor | None = None, mean: bool = True) -> Tensor:
        """Logits (B, N, V); with targets their mean loss, or each one's (B, N), 0 where there is none."""
        if targets_BN is None:
            return self.logits(self.norm(x_BND))
        pieces = zip(x_BND.flatten(0, 1).split(self.chunk), targets_BN.flatten().split(self.chunk))
        losses = [checkpoint(self._losses, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        losses = torch.cat(losses).view(targets_BN.shape)
        return losses.sum() / (targets_BN != IGNORED).sum().clamp_min(1) if mean else losses

    def _losses(self, x_MD: Tensor, targets_M: Tensor) -> Tensor:
        logits = self.logits(self.norm(x_MD)).float()
        return F.cross_entropy(logits, targets_M.long(), ignore_index=IGNORED, reduction="none")


class Sizes(Section):
    """`model.settings`."""

    size: Literal["tiny", "small", "medium", "large"] = "tiny"
    theta: PositiveFloat = 10_000.0  # base of the rotary frequencies; larger for longer contexts
    chunk: PositiveInt = 2048  # tokens whose logits are in memory together


class Decoder(Network):
    """Tokens to logits, or to losses of the next tokens."""

    any_points = True  # the loss can be taken at some positions alone: training.query_sampling

    def __init__(self, specs: dict, sizes: Sizes):
        super().__init__(specs)
        dim, depth, heads, kv_heads = SIZES[sizes.size]
        longest, vocabulary = (max(getattr(spec, key) for spec in specs.values()) for key in ("context", "vocabulary"))
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, depth) for _ in range(depth))
        self.head = Head(dim, vocabulary, sizes.chunk)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.logits.weight, std=0.02)
        self.register_buffer("table", rotary_sequence(longest, dim // heads, sizes.theta), persistent=False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forbids(self, config: RunConfig) -> list[Problem]:
        found, kernel = super().forbids(config), config.operator.pdet.attention
        if kernel == "flash":
            why = "flash takes no mask, and documents of a chunk do not see each other"
            found.append(Problem("operator.pdet.attention", why, "set it to sdpa, efficient, math or flex"))
        return found

    def hidden(self, tokens_BN: Tensor, documents_BN: Tensor | None = None) -> Tensor:
        """(B, N) int -> (B, N, D): what the head makes logits of.

        Args:
            documents_BN: which document of its chunk each token is of; None: all of one, and no mask is made.
        """
        x, table, mask = self.embedding(tokens_BN), self.table[:, : tokens_BN.shape[1]], None
        if documents_BN is None:
            documents_BN = torch.zeros_like(tokens_BN)
        else:
            kernel = self.layers[0].attention.backend if self.training else "sdpa"
            mask = documents_BN
            if kernel != "math":
                mask = (same_document_blocks if kernel == "flex" else same_document)(documents_BN)
        starts = documents_BN != F.pad(documents_BN[:, :-1], (1, 0), value=-1)
        for block in self.layers:
            x = block(x, table, starts, mask)
        return x

    def forward(self, tokens_BN: Tensor, documents_BN: Tensor) -> Tensor:
        """(B, N) -> logits (B, N, V)."""
        return self.head(self.hidden(tokens_BN, documents_BN))


def next_tokens(tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is read, of which documents, and what comes next: each (B, N), of chunks (B, N + 1)."""
    ends = documents[:, 1:] != documents[:, :-1]
    return tokens[:, :-1], documents[:, :-1], tokens[:, 1:].masked_fill(ends, IGNORED)

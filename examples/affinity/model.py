"""Two proteins in, an affinity out: an encoder laid out like ESM-2's, and a head in which they look at each other.

Shape letters: B pairs, N proteins, T tokens of a chain (one before its residues, one behind), D width.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.affinity.data import NONE
from upsnb.config import RunConfig
from upsnb.errors import DataError, Problem
from upsnb.models.network import Network
from upsnb.models.transformer import Mlp, attend, rotary_sequence, rotate
from upsnb.values import PositiveInt, Section

CLS, PAD, EOS, FIRST = 0, 1, 2, 4  # ESM's vocabulary: <cls>, <pad>, <eos>, and the first residue
NUM_TOKENS = 33
UNMASKED = 0.88  # ESM-2 was trained with 12 % of its tokens masked, and scales embeddings by what was left
TRANSFORMERS = (  # names that the transformers library gives to the same tensors
    (r"^esm\.", ""),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.(query|key|value)\.", lambda found: f".self_attn.{found[1][0]}_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    (r"\.attention\.LayerNorm\.", ".self_attn_layer_norm."),
    (r"\.intermediate\.dense\.", ".fc1."),
    (r"\.output\.dense\.", ".fc2."),
    (r"\.LayerNorm\.", ".final_layer_norm."),
    (r"^(encoder\.)?(sentence_encoder\.)?", ""),
)


@dataclass(frozen=True)
class Spec:
    """What the model must know of a dataset; plain data that travels with every checkpoint."""

    name: str
    tokens: int  # of the longest chain
    mean: float  # pKd over the training split
    std: float
    embedded: int = 0  # width of embeddings that come in place of tokens, from a cache; 0: tokens do

    @property
    def grid_shape(self) -> tuple[int]:
        """How many places a loss could be taken at; query sampling is told that it samples nothing."""
        return (self.tokens,)


class Sizes(Section):
    """`model.settings`."""

    width: PositiveInt = 64  # of the encoder, as the next two; ESM-2 of 8 million parameters has 320, 6, 20
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    head_width: PositiveInt = 64
    head_layers: PositiveInt = 1
    head_heads: PositiveInt = 4
    search_width: PositiveInt = 64
    weights: str = ""  # file of an encoder, below the project's folder; empty: random ones
    frozen: bool = False  # whether the encoder stays as it is


def tokens(chains: np.ndarray) -> Tensor:
    """Residues (N, L), NONE behind the end -> (N, L + 2) int64 tokens of ESM's vocabulary."""
    found = np.full((len(chains), chains.shape[1] + 2), PAD)
    found[:, 0] = CLS
    found[:, 1:-1] = np.where(chains == NONE, PAD, chains + np.int64(FIRST))
    found[np.arange(len(chains)), (chains != NONE).sum(1) + 1] = EOS
    return torch.from_numpy(found)


class Attention(nn.Module):
    """Multi-head attention among residues, of one chain or to those of another; ESM's names."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.backend = num_heads, "sdpa"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(dim, dim))

    def forward(self, x_BTD: Tensor, context_BTD: Tensor, keep_BT: Tensor, table: Tensor) -> Tensor:
        """Args: keep_BT: which tokens of the context are there; table: of `rotary_sequence`."""

        def heads(values: Tensor) -> Tensor:
            return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k = (rotate(heads(part), table) for part in (self.q_proj(x_BTD), self.k_proj(context_BTD)))
        v = heads(self.v_proj(context_BTD))
        backend = self.backend if self.training else "sdpa"  # no metric may depend on how a step was made
        y = attend(q, k, v, backend, keep_BT[:, None, None, :])
        return self.out_proj(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Pre-norm attention and MLP, as in ESM-2 (Lin et al., doi 10.1126/science.ade2574)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.self_attn = Attention(dim, num_heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    @property
    def attention(self) -> Attention:
        """Where the setting of the kernel finds it."""
        return self.self_attn

    def forward(self, x_NTD: Tensor, keep_NT: Tensor, table: Tensor) -> Tensor:
        y = self.self_attn_layer_norm(x_NTD)
        x_NTD = x_NTD + self.self_attn(y, y, keep_NT, table)
        return x_NTD + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x_NTD))))


class Encoder(nn.Module):
    """Tokens of a protein to an embedding of each; state dict as that of fair-esm's ESM-2, without its two heads."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, length: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(NUM_TOKENS, dim, padding_idx=PAD)
        self.layers = nn.ModuleList(EncoderLayer(dim, num_heads) for _ in range(num_layers))
        self.emb_layer_norm_after = nn.LayerNorm(dim)
        self.register_buffer("table", rotary_sequence(length, dim // num_heads), persistent=False)

    def forward(self, tokens_NT: Tensor, keep_NT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_NT) * UNMASKED * keep_NT[..., None]
        for layer in self.layers:
            x = layer(x, keep_NT, self.table)
        return self.emb_layer_norm_after(x)


class Facing(nn.Module):
    """A chain looks at the other one: pre-norm cross-attention and MLP."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attention = Attention(dim, num_heads)
        self.norm, self.mlp_norm, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), Mlp(dim, 2 * dim)

    def forward(self, x_BTD: Tensor, other_BTD: Tensor, keep_BT: Tensor, table: Tensor) -> Tensor:
        """Args: keep_BT: which tokens of the other chain are there."""
        x_BTD = x_BTD + self.attention(self.norm(x_BTD), self.norm(other_BTD), keep_BT, table)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class AffinityModel(Network):
    """pKd of two chains from what their residues see of each other, and a vector of each chain alone to search by."""

    # Phase 3 samples query points as well. Pairs have none, so here it makes the contrastive loss rarer, and no more.
    any_points = True

    def __init__(self, specs: dict[str, Spec], sizes: Sizes):
        super().__init__(specs)
        length, width, head_width = max(spec.tokens for spec in specs.values()), sizes.width, sizes.head_width
        self.frozen = sizes.frozen
        self.encoder = Encoder(width, sizes.num_layers, sizes.num_heads, length).requires_grad_(not sizes.frozen)
        self.input = nn.Linear(width, head_width)
        self.facing = nn.ModuleList(Facing(head_width, sizes.head_heads) for _ in range(sizes.head_layers))
        self.energy = nn.Sequential(nn.LayerNorm(head_width), Mlp(head_width, head_width, 1))
        self.search = nn.Linear(width, 2 * sizes.search_width)
        self.register_buffer("table", rotary_sequence(length, head_width // sizes.head_heads), persistent=False)

    def blocks(self) -> list[nn.Module]:
        return [*([] if self.frozen else self.encoder.layers), *self.facing]

    def encode(self, chains: Tensor, keep: Tensor) -> Tensor:
        """Tokens (..., T), or embeddings (..., T, D) from a cache, to embeddings (..., T, D)."""
        if chains.is_floating_point():
            return chains.float()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.encoder(chains.flatten(0, -2), keep.flatten(0, -2)).unflatten(0, chains.shape[:-1])

    def bind(self, encoded_B2TD: Tensor, keep_B2T: Tensor) -> Tensor:
        """Affinity (B,) float32 in units of the training split: what each token sees in the other chain, added up."""
        x, keep = self.input(encoded_B2TD), keep_B2T.flip(1).flatten(0, 1)
        for block in self.facing:
            x = block(x.flatten(0, 1), x.flip(1).flatten(0, 1), keep, self.table).unflatten(0, (-1, 2))
        shares = self.energy(x).squeeze(-1).float() * keep_B2T
        return shares.sum((1, 2)) / keep_B2T.shape[2] ** 0.5

    def vectors(self, encoded: Tensor, keep: Tensor) -> Tensor:
        """To search by: of chains (..., T, D) as first and as second partner, (..., 2, S) float32, each of length 1."""
        present = keep[..., None].to(encoded.dtype)
        found = self.search((encoded * present).sum(-2) / present.sum(-2)).float()
        return F.normalize(found.unflatten(-1, (2, -1)), dim=-1)

    def forward(self, name: str, chains: Tensor, keep_B2T: Tensor) -> Tensor:
        """pKd (B,) of pairs of chains: tokens (B, 2, T) int64, or embeddings (B, 2, T, D)."""
        return self.bind(self.encode(chains, keep_B2T), keep_B2T) * self.specs[name].std + self.specs[name].mean

    def forbids(self, config: RunConfig) -> list[Problem]:
        found, kernel = super().forbids(config), config.operator.pdet.attention
        if kernel in ("flash", "flex"):
            why = f"{kernel} takes no mask of the tokens that are there, and chains differ in length"
            found.append(Problem("operator.pdet.attention", why, "set it to sdpa, efficient or math"))
        return found


def read_weights(path: Path, encoder: Encoder) -> dict[str, Tensor]:
    """An encoder's tensors from a file of the ESM-2 family: fair-esm's .pt, transformers' .bin or .safetensors.

    Raises:
        DataError: the file holds no such encoder, or one of other sizes.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # here, because few have such a file

        found = load_file(path)
    else:
        with torch.serialization.safe_globals([argparse.Namespace]):  # in which fair-esm keeps its settings
            found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get("model", found)
    renamed = {}
    for name, value in found.items():
        for pattern, name_here in TRANSFORMERS:
            name = re.sub(pattern, name_here, name)
        renamed[name] = value
    here, there = ({name: tuple(x.shape) for name, x in some.items()} for some in (encoder.state_dict(), renamed))
    for name in (*here, f"layers.{len(encoder.layers)}.fc1.weight"):  # of no layer more
        if here.get(name) != there.get(name):
            said = f"{name} is {there.get(name, 'not there')}, in the encoder {here.get(name, 'not there')}"
            raise DataError(f"{path}: {said} -> set model.settings to the file's sizes")
    return {name: renamed[name].float() for name in here}

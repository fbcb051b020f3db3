"""The operator: a conditioned transformer that advances latent tokens by one call."""

from __future__ import annotations

from torch import Tensor, nn

from upsnb.config import PdetConfig
from upsnb.models.attention import NUM_MODULATIONS, Block


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
        self.set_checkpointing(config)
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, latent_dim)

    def set_checkpointing(self, config: PdetConfig) -> None:
        """Choose which parts of which blocks are computed again in backward; may be called between any two steps."""
        for number, block in enumerate(self.blocks):
            on = config.use_activation_checkpoint and number % config.checkpoint_every == 0
            block.recompute_attention = on and config.checkpoint_parts in ("all", "attention")
            block.recompute_mlp = on and config.checkpoint_parts in ("all", "mlp")

    def set_attention(self, backend: str) -> None:
        """Choose the attention kernel of training steps; parameters and results stay, rounding may not."""
        for block in self.blocks:
            block.attention.backend = backend

    def forward(self, z_BLD: Tensor, condition_BD: Tensor, table) -> Tensor:
        """(B, L, D_latent) -> (B, L, D_latent)."""
        modulation = self.modulation(condition_BD).unflatten(-1, (NUM_MODULATIONS, -1))
        x = self.input(z_BLD)
        for block in self.blocks:
            x = block(x, modulation, table)
        return z_BLD + self.output(self.norm(x))

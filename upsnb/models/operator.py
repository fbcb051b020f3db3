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
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, latent_dim)

    def forward(self, z_BLD: Tensor, condition_BD: Tensor, table) -> Tensor:
        """(B, L, D_latent) -> (B, L, D_latent)."""
        modulation = self.modulation(condition_BD).unflatten(-1, (NUM_MODULATIONS, -1))
        x = self.input(z_BLD)
        for block in self.blocks:
            x = block(x, modulation, table)
        return z_BLD + self.output(self.norm(x))

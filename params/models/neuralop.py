"""The Fourier neural operator of the package neuraloperator, for data of any number of dimensions."""

from neuralop.models import FNO
from torch import nn


class NeuralopFNO(FNO):
    """`modes` counts both signs, as there: 32 are 16 of ours."""

    # Theirs puts the arguments of __init__ among the tensors, and a checkpoint holds nothing but tensors.
    state_dict, load_state_dict = nn.Module.state_dict, nn.Module.load_state_dict

    def __init__(self, in_channels, out_channels, grid_shape, width=32, modes=32, depth=4):
        kept = tuple(min(modes, size) for size in grid_shape)
        super().__init__(kept, in_channels, out_channels, width, n_layers=depth)

    def forward(self, x):
        return super().forward(x)

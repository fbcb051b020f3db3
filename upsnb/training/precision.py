"""The number formats that a step computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from upsnb.config import RunConfig

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": None}


def amp_dtype(config: RunConfig) -> torch.dtype | None:
    """The autocast dtype of the step; None computes in float32."""
    return AMP_DTYPES[config.training.amp_dtype] if config.training.amp else None


def build_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for float16; does nothing for other dtypes."""
    return torch.amp.GradScaler(device.type, enabled=amp_dtype(config) == torch.float16)


@contextlib.contextmanager
def highest() -> Iterator[None]:
    """Within it float32 is float32: no TensorFloat-32 in matrix products, nor in cuDNN's convolutions."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


class Tf32:
    """TensorFloat-32 (10 bits of mantissa) for float32 matrix products on CUDA, for the whole process, with an undo.

    By torch's one setting for all backends: the settings per backend exist twice, and a program that mixes the old with
    the new ones fails where it reads them. Convolutions are left alone: cuDNN's may use TensorFloat-32 either way.
    """

    def __init__(self):
        self.found: str | None = None  # precision before it was switched on

    def set(self, on: bool) -> None:
        """Switch on or put back what was found; called twice, the second does nothing."""
        if on and self.found is None:
            self.found = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        elif not on and self.found is not None:
            torch.set_float32_matmul_precision(self.found)
            self.found = None

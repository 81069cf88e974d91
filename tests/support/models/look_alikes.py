"""Modules that look like others which kernels compute."""

import torch
from torch import Tensor, nn


class DoubledNorm(nn.Module):
    """Looks like an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

"""Muon for matrices and AdamW for everything else, on one flat gradient buffer."""

import torch
from torch import nn


class PairOptimizer:
    """Steps a model's parameters.

    Args:
        model: hidden matrices go to Muon, embedding, language model head and norms to AdamW.
        muon_rate, adam_rate: peak learning rates; ``step`` scales both.
        decay: decoupled weight decay of the matrices, relative to the learning rate.
    """

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> None:
        named = list(model.named_parameters())
        total = sum(p.numel() for _, p in named)
        self.flat = torch.zeros(total, device=named[0][1].device)
        views = self.flat.split([p.numel() for _, p in named])
        for (_, p), view in zip(named, views, strict=True):
            p.grad = view.view_as(p)
        matrices = [p for n, p in named if p.ndim == 2 and not _is_vocabulary(n)]
        rest = [p for n, p in named if p.ndim != 2 or _is_vocabulary(n)]
        muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay, momentum=0.95)
        adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10)
        self.rates = ((muon, muon_rate), (adam, adam_rate))

    @torch.no_grad()
    def step(self, scale: float, clip: float = 1.0) -> None:
        """One update at ``scale`` times the peak rates; clears the gradients.

        Muon does not depend on the gradient's size, so ``clip`` matters to AdamW's part only.
        """
        self.flat.mul_((clip / (self.flat.norm() + 1e-6)).clamp(max=1.0))
        for optimizer, rate in self.rates:
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
        self.flat.zero_()


def _is_vocabulary(name: str) -> bool:
    return "embed" in name or "lm_head" in name

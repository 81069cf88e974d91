"""Muon (K. Jordan, 2024) for matrices and AdamW for everything else, on one flat gradient buffer.

Muon orthogonalises the momentum of each matrix by five Newton-Schulz steps. Matrices of one shape
are stacked, so that a step costs a few batched products instead of a loop over layers. Gradients
are views of one fp32 buffer: one all-reduce averages them over the processes.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def orthogonalise(stack: Tensor) -> Tensor:
    """Approximates U V^T of each matrix of ``stack`` [N, rows, columns] in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315  # the quintic of the reference implementation
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class PairOptimizer:
    """Steps a model's parameters.

    Args:
        model: hidden matrices go to Muon, the (tied) embedding and the norms to AdamW.
        muon_rate, adam_rate: peak learning rates; ``step`` scales both.
        decay: decoupled weight decay of the matrices, relative to the learning rate.
    """

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        total = sum(p.numel() for _, p in named)
        # The last element carries the clock: every process leaves a step with the same time.
        self.flat = torch.zeros(total + 1, device=named[0][1].device)
        at = 0
        for _, p in named:
            p.grad = self.flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for p in matrices:
            shapes.setdefault(p.shape, []).append(p)
        self.stacks = [
            (ps, torch.zeros(len(ps), *shape, device=self.flat.device)) for shape, ps in shapes.items()
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.adam = torch.optim.AdamW(
            rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10, foreach=True
        )
        self.muon_rate, self.adam_rate, self.decay = muon_rate, adam_rate, decay

    def reduce(self, clock: float, read: bool) -> float:
        """Averages gradients and ``clock`` (seconds) over the processes.

        Returns the common clock; with ``read`` false the device is not waited for and 0 comes back.
        """
        self.flat[-1] = clock
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.flat)
            self.flat /= dist.get_world_size()
        return float(self.flat[-1]) if read else 0.0

    @torch.no_grad()
    def step(self, scale: float, momentum: float = 0.95, clip: float = 1.0) -> None:
        """One update at ``scale`` times the peak rates; clears the gradients.

        Muon is blind to the gradient's size, so ``clip`` matters to AdamW's part only.
        """
        gradient = self.flat[:-1]
        gradient.mul_((clip / (gradient.norm() + 1e-6)).clamp(max=1.0))
        rate = self.muon_rate * scale
        for parameters, buffer in self.stacks:
            grads = torch.stack([p.grad for p in parameters])
            buffer.lerp_(grads, 1 - momentum)
            update = orthogonalise(grads.lerp(buffer, momentum))
            update *= rate * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_sub_(parameters, list(update.unbind(0)))
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.flat.zero_()

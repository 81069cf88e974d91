"""Decides whether a difference between the logits of two forwards can come from rounding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from triforce_tree.models.few_row import foreign_quantisation
from triforce_tree.models.hf_model import HFModel

# The largest relative error of logits that rounding can cause, by dtype. Wrong attention causes 0.1 or more.
_ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
_ROUNDING_16 = 0.08
NOISE = 2.0**-8
"""A unit in the last place of bf16. Relative noise of this size on the embeddings shows how rounding changes
the logits. If it changes the choice of experts, the change is far larger than ``rounding_limit``."""
_UNDERFLOW = 104.0  # exp(-104) is 0 in fp32
MOST_ROUNDING = 0.5
"""A relative error above this is never attributed to rounding."""


def rounding_limit(model: HFModel) -> float:
    """Returns the largest relative error of logits from rounding in a model of this dtype without experts."""
    # Quantised layers may quantise their inputs too, which rounds far more coarsely than the dtype.
    plain = foreign_quantisation(model.model) is None
    return _ROUNDING.get(model.model.dtype, _ROUNDING_16) if plain else _ROUNDING_16


def explained_error(
    model: HFModel, error: float, reference: Tensor, with_noise: Callable[[], Tensor]
) -> float:
    """Returns the largest relative error of logits that rounding can cause in this model.

    Args:
        model: the model whose logits were compared.
        error: the measured :func:`relative_error`; below :func:`rounding_limit` nothing is computed.
        reference: ``[T, V]``, the logits that ours were compared with.
        with_noise: computes ``reference`` again inside :func:`noisy_embeddings` with :data:`NOISE`.
    """
    limit = rounding_limit(model)
    if limit < error < MOST_ROUNDING and model.model.dtype.itemsize == 2:
        # Rounding may change the choice of experts, and so the logits far more than usual.
        limit = max(limit, relative_error(with_noise(), reference))
    return limit


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Returns the relative difference of logits ``[T, V]``, as the median over the tokens.

    The median ignores single tokens: in 16 bits rounding may decide between two experts. Logits so low that
    their probability is 0 in fp32 count as different only if ours is above that bound. Otherwise the
    thousands of such entries in masked or padded vocabularies would hide the difference of all others.
    """
    bound = reference.amax(-1, keepdim=True) - _UNDERFLOW
    low = reference <= bound
    mean = reference.masked_fill(low, 0.0).sum(-1, keepdim=True) / (~low).sum(-1, keepdim=True)
    size = (reference - mean).masked_fill(low, 0.0).norm(dim=-1)
    error = torch.where(low, (ours - bound).clamp_min(0.0), ours - reference).norm(dim=-1)
    # Logits that are all equal, as of a head of zeros, have no size.
    return float(torch.where(error == 0, error, error / size).median())


@contextmanager
def noisy_embeddings(model: Any, noise: float) -> Iterator[None]:
    """Adds relative noise, the same in each call, to a model's embeddings inside the context; 0 adds none."""
    if not noise:
        yield
        return

    def changed(module: Any, inputs: Any, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return out + noise * out * torch.randn(
            out.shape, generator=generator, dtype=torch.float32, device="cpu"
        ).to(out)

    hook = model.get_input_embeddings().register_forward_hook(changed)
    try:
        yield
    finally:
        hook.remove()

"""How much rounding may change the logits of a forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from triforce_tree.models.few_row import quantisation
from triforce_tree.models.hf_model import HFModel

# Most relative error of the logits that rounding explains; wrong attention gives 0.1 and more.
_ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
_ROUNDING_16 = 0.08
NOISE = 2.0**-8
"""A unit in the last place of bf16. Relative noise of this size on the embeddings shows how far rounding
carries: where it changes the choice of experts, it changes logits far more than ``rounding_limit``."""
_UNDERFLOW = 104.0  # exp(-104) is 0 in fp32
MOST_ROUNDING = 0.5
"""Logits that differ by more are never taken for rounded ones."""


def rounding_limit(model: HFModel) -> float:
    """The relative error of logits that rounding explains in any model of this dtype."""
    # Layers that quantise their inputs too round far more coarsely than their dtype says.
    plain = quantisation(model.model) is None
    return _ROUNDING.get(model.dtype, _ROUNDING_16) if plain else _ROUNDING_16


def explained_error(
    model: HFModel, error: float, reference: Tensor, with_noise: Callable[[], Tensor]
) -> float:
    """The relative error of logits that rounding explains in this model.

    Args:
        model: whose logits were compared.
        error: their :func:`relative_error`; below :func:`rounding_limit` nothing else is computed.
        reference: logits that ours were compared with, ``[T, V]``.
        with_noise: computes them again inside :func:`noisy_embeddings`, with :data:`NOISE`.
    """
    limit = rounding_limit(model)
    if limit < error < MOST_ROUNDING and model.dtype.itemsize == 2:
        # Rounding of one layer's inputs may choose other experts, and change logits far more.
        limit = max(limit, relative_error(with_noise(), reference))
    return limit


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Relative difference of logits ``[T, V]``: the median over the tokens.

    In 16 bits a near tie between experts may be resolved differently, which changes single tokens. Entries
    whose probability is 0 in fp32 may be any number that low: they are compared with that bound, and would
    otherwise hide the difference of all others (masked or padded vocabularies have thousands of them).
    """
    bound = reference.amax(-1, keepdim=True) - _UNDERFLOW
    low = reference <= bound
    mean = reference.masked_fill(low, 0.0).sum(-1, keepdim=True) / (~low).sum(-1, keepdim=True)
    size = (reference - mean).masked_fill(low, 0.0).norm(dim=-1)
    error = torch.where(low, (ours - bound).clamp_min(0.0), ours - reference).norm(dim=-1)
    return float((error / size).median())


@contextmanager
def noisy_embeddings(model: Any, noise: float) -> Iterator[None]:
    """Inside, a model's embeddings have relative noise, the same each time; 0 is none."""
    if not noise:
        yield
        return

    def changed(module: Any, inputs: Any, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return out + noise * out * torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out)

    hook = model.get_input_embeddings().register_forward_hook(changed)
    try:
        yield
    finally:
        hook.remove()

"""Decoder layers under ``torch.compile``: what they share, and what happens where compilation fails.

One compiled graph serves all layers of a model whose code does not depend on the layer, and, with more than
one token a sequence, all numbers of tokens. A graph takes seconds, part of one even where its kernels are in
the compiler's caches.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from triforce_tree.models.compiled.fused_linears import fused

MOST_ROWS = 128
"""Most tokens per sequence of a forward that is compiled and captured."""

COMPILED_GRAPHS = 256
"""Most graphs of the models of a family: of each kind of layer one for a token and one or two for more, by
number of sequences."""

_LOG = logging.getLogger(__name__)


def compile_layers(layers: Iterable[nn.Module], reached: Callable[[], int]) -> None:
    """Replace the forwards of a model's decoder layers by compiled ones.

    Args:
        reached: the number of layers whose attention the current forward has reached.
    """
    sharing = _Sharing()
    for layer in layers:
        layer.forward = _compiled(layer.forward, sharing, reached)


@dataclass
class _Sharing:
    """Whether the layers of a model share what is compiled for more than one token; set where that fails."""

    tokens: bool = True


def _compiled(
    forward: Callable[..., Any], sharing: _Sharing, reached: Callable[[], int]
) -> Callable[..., Any]:
    """``forward`` under torch.compile, or ``forward`` itself once compilation has failed.

    One token a sequence is compiled for itself; all larger numbers of tokens share one compiled function, or
    where that fails have one each.
    """
    fast = torch.compile(forward, backend=fused, fullgraph=True, dynamic=False)
    failed = False

    def run(*inputs: Any, **keywords: Any) -> Any:
        nonlocal failed
        count = inputs[0].shape[1]
        # Longer inputs gain little: they are compute-bound.
        while not failed and count <= MOST_ROWS:
            layer, shared = reached(), sharing.tokens and count > 1
            if shared:
                _mark_tokens(count, (inputs, keywords))
            elif count > 1:
                # Other tensors of the same values, without such marks.
                inputs, keywords = tree_map_only(Tensor, Tensor.detach, (inputs, keywords))
            try:
                return fast(*inputs, **keywords)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if reached() != layer:
                    # The layer has reached its attention, so this is not a compilation failure.
                    raise
                if shared:
                    _LOG.info("decoder layers are compiled for each number of tokens: %s", error)
                    sharing.tokens = False
                else:
                    failed = True
                    _LOG.warning("torch.compile failed, decoder layers run uncompiled: %s", error)
        return forward(*inputs, **keywords)

    return run


def _mark_tokens(count: int, inputs: Any) -> None:
    """Tell the compiler that the second dimension of all ``[B, count, ...]`` among the inputs varies."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == count:
            torch._dynamo.maybe_mark_dynamic(leaf, 1)

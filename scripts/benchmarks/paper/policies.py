"""Retrieval policies that others have published, as functions of ``triforce_tree.kv.chunk_policy``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from triforce_tree.kernels import step
from triforce_tree.models.recurrent.pass_through import CACHE

# Queries whose attention over all keys is in memory at a time.
_QUERIES = 256
_PROBE = "triforce_tree_probe"


def newest(
    q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float, **context: Any
) -> None:
    """StreamingLLM (arXiv 2309.17453): the first chunk, and the newest ones."""
    first = limit - slots + torch.arange(slots, device=limit.device)[:, None]  # [slots, B]
    table[..., :slots] = first.index_fill(0, first.new_zeros(1), 0).t()[:, None].int()


class _ByScore:
    """Selects by scores of chunks; chunks without a score are above all others."""

    capturable = False
    needs_context = True

    def scores(
        self, q: Tensor, means: Tensor, keys: Tensor, limit: Tensor, scale: float, layer: int
    ) -> Tensor:
        """Returns ``[B, H, C']`` of the first C' chunks."""
        raise NotImplementedError

    def __call__(
        self,
        q: Tensor,
        means: Tensor,
        limit: Tensor,
        table: Tensor,
        slots: int,
        scale: float,
        *,
        layer: int,
        keys: Tensor,
    ) -> None:
        scores = self.scores(q, means, keys, limit, scale, layer)
        full = scores.new_full(means.shape[:3], torch.finfo(scores.dtype).max)
        full[..., : scores.shape[2]] = scores
        select_by(full, limit, table, slots)


def select_by(scores: Tensor, limit: Tensor, table: Tensor, slots: int) -> None:
    """Selects chunk 0 and those of the highest scores ``[B, H, C]``, with the default's kernel."""
    one = scores.new_ones(scores.shape[0], scores.shape[1], 1)
    step.select_chunks(one, scores[..., None].contiguous(), limit, table, slots, 1.0)


class OneBuild(_ByScore):
    """TriForce (arXiv 2404.11912, section 4.1): mean keys by the query of the first root, and never again.

    Tokens generated later stay in the cache, as they do there.
    """

    def __init__(self) -> None:
        self._built: dict[int, Tensor] = {}

    def scores(
        self, q: Tensor, means: Tensor, keys: Tensor, limit: Tensor, scale: float, layer: int
    ) -> Tensor:
        if layer not in self._built:
            (batch, heads, _, _), dim = means.shape, q.shape[-1]
            packed = q.reshape(batch, heads, -1, dim).float()
            last = int(limit.min())
            scores = (packed @ means[:, :, :last, :dim].float().transpose(-1, -2)) * scale
            self._built[layer] = scores.log_softmax(-1).amax(2)
        return self._built[layer]


class HeavyHitters(_ByScore):
    """H2O (arXiv 2306.14048): the chunks that received most attention from all of the prompt's queries.

    H2O also evicts while the prompt is read; here every key stays a candidate, which is an upper bound of it.

    Args:
        received: for each layer ``[H, N]``; see :func:`received_attention`.
        chunk: tokens of a chunk.
    """

    def __init__(self, received: Sequence[Tensor], chunk: int) -> None:
        self._scores = [
            one[:, : one.shape[1] // chunk * chunk].unflatten(1, (-1, chunk)).sum(-1) for one in received
        ]

    def scores(
        self, q: Tensor, means: Tensor, keys: Tensor, limit: Tensor, scale: float, layer: int
    ) -> Tensor:
        scores: Tensor = self._scores[layer]
        return scores[None].expand(q.shape[0], -1, -1)


class Bounds(_ByScore):
    """Quest (arXiv 2406.10774): the largest product that keys within a chunk's minima and maxima can have."""

    def scores(
        self, q: Tensor, means: Tensor, keys: Tensor, limit: Tensor, scale: float, layer: int
    ) -> Tensor:
        batch, heads, chunks = means.shape[:3]
        parts = keys.unflatten(2, (chunks, -1))
        low, high = parts.amin(3).float(), parts.amax(3).float()
        packed = q.reshape(batch, heads, -1, q.shape[-1]).float()
        scores = packed.clamp_min(0) @ high.transpose(-1, -2) + packed.clamp_max(0) @ low.transpose(-1, -2)
        outside = torch.arange(chunks, device=q.device) >= limit[:, None]
        scores = (scores * scale).masked_fill(outside[:, None, None], -torch.inf)
        return scores.log_softmax(-1).amax(2)


@contextmanager
def attention_by(model: PreTrainedModel, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Inside, every attention layer of a model calls ``attend``, as transformers' AttentionInterface does."""
    AttentionInterface.register(_PROBE, attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = _PROBE
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def received_attention(model: PreTrainedModel, tokens: Sequence[int]) -> list[Tensor]:
    """Returns the attention that each position received from all later queries, fp32 ``[H, N]`` for each
    layer.

    Args:
        model: whose layers all see everything before them.
        tokens: N.
    """
    count = len(tokens)
    received: dict[int, Tensor] = {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        heads, queries, seen = k.shape[1], q.shape[2], k.shape[2]
        scores = q[0].unflatten(0, (heads, -1)).float() @ k[0, :, None].float().transpose(-1, -2) * scaling
        later = (
            torch.arange(seen, device=q.device) > torch.arange(seen - queries, seen, device=q.device)[:, None]
        )
        probs = scores.masked_fill(later, -torch.inf).softmax(-1)  # [H, G, T, S]
        total = received.setdefault(module.layer_idx, probs.new_zeros(heads, count))
        total[:, :seen] += probs.sum((1, 2))
        out = probs.to(v.dtype) @ v[0, :, None]
        return out.flatten(0, 1).transpose(0, 1)[None], None

    cache = DynamicCache(config=model.config)
    with attention_by(model, attend):
        for first in range(0, count, _QUERIES):
            ids = torch.tensor([list(tokens[first : first + _QUERIES])], device=model.device)
            model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return [received[layer] for layer in sorted(received)]

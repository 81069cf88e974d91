"""What computes tree attention and its companions: the one branch between CPU and GPU.

CUDA tensors go to the Triton kernels, everything else to the torch references that define them.
Triton is imported at the first use, so that machines without it can import the package.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from triforce_tree.kernels import host, reference

# The plans made for a mask, for as long as the mask lives.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.tree_attention``."""
    if not q.is_cuda:
        return reference.tree_attention(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)
    return _planned(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)


def tree_attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output of ``tree_attention`` alone, which on the CPU has a faster way of its own."""
    how: dict[str, Any] = {"scale": scale, "first": first, "softcap": softcap, "sinks": sinks}
    if q.is_cuda:
        return _planned(q, k, v, mask, **how)[0]
    return host.tree_attention(q, k, v, mask, **how)


def _planned(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, first: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """One call through a plan, which the layers of a forward share as they share the mask."""
    from triforce_tree.kernels.launch import run
    from triforce_tree.kernels.plan import Heads, plan_trees

    batch, q_heads, queries, dim = q.shape
    version = 0 if mask.is_inference() else mask._version
    key = (batch, q_heads, k.shape[1], dim, k.shape[2], q.dtype, version)
    plans = _plans.setdefault(mask, {})
    if key not in plans:
        plans[key] = plan_trees(
            Heads(q_heads, k.shape[1], dim),
            [mask] * batch,
            [k.shape[2] - mask.shape[1]] * batch,
            device=q.device,
            dtype=q.dtype,
        )
    if first is not None and batch > 1:
        first = first.repeat(batch)
    packed = q.transpose(1, 2).reshape(batch * queries, q_heads, dim)
    out, lse = run(packed, k, v, plans[key], first=first, **how)
    out = out.view(batch, queries, q_heads, dim).transpose(1, 2)
    return out, lse.view(batch, queries, q_heads).transpose(1, 2)


def cascade(
    q: Tensor, levels: Sequence[tuple[Tensor, Tensor, Tensor | None]], *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over several KV sets at once, level by level, merged by log-sum-exp.

    Args:
        q: ``[B, H_q, T, D]``.
        levels: (k, v, mask) with k, v ``[B, H_kv, S, D]``; mask bool ``[T, N]`` over the level's
            last N rows, or None where every query sees every row.

    Returns:
        As ``tree_attention``.
    """
    unmasked = q.new_ones(q.shape[2], 0, dtype=torch.bool)
    parts = [
        tree_attention(q, k, v, unmasked if mask is None else mask, scale=scale) for k, v, mask in levels
    ]
    outs, lses = zip(*parts, strict=True)
    return merge_states(torch.stack(outs), torch.stack(lses))


@cache
def _triton_op(name: str) -> Callable[..., Any]:
    from triforce_tree.kernels import compaction, merge, scoring

    operators: dict[str, Callable[..., Any]] = {
        "merge_states": merge.merge_states,
        "chunk_scores": scoring.chunk_scores,
        "gather_rows": compaction.gather_rows,
        "compact_rows": compaction.compact_rows,
    }
    return operators[name]


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.merge_states``."""
    op = _triton_op("merge_states") if outs.is_cuda else reference.merge_states
    return op(outs, lses)


def merge_state(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_states`` of two."""
    return merge_states(torch.stack([out, other_out]), torch.stack([lse, other_lse]))


def chunk_scores(q: Tensor, means: Tensor, scale: float) -> Tensor:
    """See ``reference.chunk_scores``."""
    op = _triton_op("chunk_scores") if q.is_cuda else reference.chunk_scores
    return op(q, means, scale)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """See ``reference.gather_rows``."""
    op = _triton_op("gather_rows") if rows.is_cuda else reference.gather_rows
    return op(rows, index)


def compact_rows(rows: Tensor, index: Tensor, start: Tensor) -> None:
    """See ``reference.compact_rows``."""
    op = _triton_op("compact_rows") if rows.is_cuda else reference.compact_rows
    op(rows, index, start)

"""Tree attention on the CPU, without the log-sum-exp that nobody there asks for.

The same function as ``reference.tree_attention``, arranged for speed: the scale goes into the queries,
the softmax is one fused call, and the two products go head by head through oneDNN where torch has it. A
few rows against tens of thousands is a shape that torch's default GEMM packs anew each time; oneDNN reads
the cache in place and takes about half the time (16 queries, 16,384 rows, 3 heads of 128).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference

# Below this many rows one batched product for all heads costs less than a call for each head.
_ROWS_PER_HEAD_CALL = 1024
Product = Callable[[Tensor, Tensor], Tensor]

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


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
) -> Tensor:
    """Output ``[B, H_q, T, D]`` alone; arguments as in ``reference.tree_attention``.

    Every query must see at least one row (tree queries see themselves).
    """
    if softcap is not None or sinks is not None or q.dtype != torch.float32:
        return reference.tree_attention(
            q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks
        )[0]
    batch, q_heads, queries, dim = q.shape
    kv_heads, rows = k.shape[1], k.shape[2]
    group, tail = q_heads // kv_heads, mask.shape[1]
    hidden = ~mask
    before = None if first is None else torch.arange(rows) < first[:, None]

    def attend(x: Tensor, keys: Tensor, values: Tensor, product: Product) -> Tensor:
        scores = product(x, keys)
        by_query = scores.view(*scores.shape[:-2], group, queries, rows)
        by_query[..., rows - tail :].masked_fill_(hidden, -torch.inf)
        if before is not None:
            by_query.masked_fill_(before, -torch.inf)
        return product(scores.softmax(-1), values.mT)

    packed = (q * scale).reshape(batch, kv_heads, group * queries, dim)
    if not ONEDNN or rows < _ROWS_PER_HEAD_CALL:
        out = attend(packed, k, v, _batched)
    else:
        pairs = zip(packed.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True)
        out = torch.stack([attend(x, keys, values, _onednn) for x, keys, values in pairs])
    return out.view(batch, q_heads, queries, dim)


def _batched(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows.mT


def _onednn(x: Tensor, rows: Tensor) -> Tensor:
    """``x @ rows.T`` for ``x`` ``[M, K]`` and ``rows`` ``[N, K]``, any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, rows, None, "none", [], "")

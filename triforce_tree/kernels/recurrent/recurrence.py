"""The recurrence of Mamba, Mamba-2, gated delta rule and Kimi delta attention, row by row.

All four keep a matrix per head, decay it, add the outer product of a value and a key, and read it by a query:

    S <- S * exp(decay);  S <- S + u k^T;  out = S q,

with ``u = v``, or by the delta rule ``u = beta (v - S k)``. They differ in what the decay depends on: on the
head (Mamba-2, gated delta rule: Dao & Gu, arXiv 2405.21060; Yang et al., arXiv 2412.06464), also on the key's
dimension (Kimi delta attention, arXiv 2510.26692), or on the dimensions of both (Mamba: Gu & Dao, arXiv
2312.00752).
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("linear_recurrence", writes=("state", "out"), triton=".recurrence_kernels")
def linear_recurrence(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
    counts: Tensor | None,
    out: Tensor | None,
) -> None:
    """Processes T tokens of each of B sequences one after the other.

    Everything is fp32 except ``counts``. H heads of V x K states share G heads of queries and keys, H a
    multiple of G.

    Args:
        state: ``[B, H, V, K]``; with ``counts`` the state after so many rows is written to it.
        q, k: ``[B, T, G, K]``.
        v: ``[B, T, H, V]``.
        decay: logarithms: ``[B, T, H, 1]`` of a head, ``[B, T, H, K]`` of each dimension of its keys; with
            ``rates`` ``[B, T, H, V]``, which are multiplied by them.
        rates: ``[H, V, K]``, or None.
        beta: ``[B, T, H]`` of the delta rule; None where a row adds ``v k^T`` alone.
        counts: int64 ``[B]``, rows to process, at most T. None: all, and ``state`` is left as it is.
        out: ``[B, T, H, V]``, written for the processed rows; None where only the state is wanted.
    """
    shared = state.shape[1] // k.shape[2]
    now = state
    for t in range(v.shape[1]):
        query, key = (x[:, t].repeat_interleave(shared, 1)[:, :, None] for x in (q, k))  # [B, H, 1, K]
        row = decay[:, t]
        after = now * (row[:, :, None] if rates is None else row[..., None] * rates).exp()
        added = v[:, t]
        if beta is not None:
            added = (added - (after * key).sum(-1)) * beta[:, t, :, None]
        after = after + added[..., None] * key
        read = (after * query).sum(-1)
        if counts is not None:
            used = (counts > t)[:, None, None, None]
            after = torch.where(used, after, now)
            if out is not None:
                out[:, t] = torch.where(used[..., 0], read, out[:, t])
        elif out is not None:
            out[:, t] = read
        now = after
    if counts is not None:
        state.copy_(now)

"""Recurrence of Mamba, Mamba-2, the gated delta rule and Kimi delta attention, token by token.

For every head, a matrix S decays, receives the outer product of a vector u and the key k, and is multiplied
by the query q:

    S <- S * exp(decay);  S <- S + u k^T;  out = S q,

where u is the value v, or ``beta (v - S k)`` with the delta rule. The decay depends on the head (Mamba-2: Dao
& Gu, arXiv 2405.21060; gated delta rule: Yang et al., arXiv 2412.06464), on the head and the dimension of the
key (Kimi delta attention, arXiv 2510.26692), or on the dimensions of key and value (Mamba: Gu & Dao, arXiv
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
    paths: Tensor | None = None,
) -> None:
    """Processes T tokens of each of B sequences one after another, or along the paths of a tree.

    All tensors are fp32 except ``counts``. The H heads share G heads of queries and keys; H is a multiple of
    G. Keys have K elements and values V.

    Args:
        state: ``[B, H, V, K]``; with ``counts``, the state after that many tokens is written to it.
        q, k: ``[B, T, G, K]``.
        v: ``[B, T, H, V]``.
        decay: logarithms of the decay, ``[B, T, H, 1]`` for each head or ``[B, T, H, K]`` for each dimension
            of the key. With ``rates`` it is ``[B, T, H, V]`` and is multiplied by them.
        rates: ``[H, V, K]``, or None.
        beta: ``[B, T, H]`` for the delta rule; None for u = v.
        counts: int64 ``[B]``, number of tokens to process, at most T. None processes all tokens and does not
            write ``state``.
        out: ``[B, T, H, V]``, written for the processed tokens; None computes only the state.
        paths: int64 ``[B, P, L]``, the tokens of P paths, in their order, each of which begins from the state
            of its sequence; -1 follows the last token. Then ``out`` is ``[B, P, H, V]`` with the outputs of
            the last tokens, ``counts`` is None, and ``state`` is not written.
    """
    if paths is not None:
        assert out is not None
        _along(state, q, k, v, decay, rates, beta, out, paths)
        return
    shared = state.shape[1] // k.shape[2]
    now, tokens = state, v.shape[1]
    if counts is not None and counts.device.type == "cpu":
        tokens = int(counts.max())
    for t in range(tokens):
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


def _along(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
    out: Tensor,
    paths: Tensor,
) -> None:
    """Writes the outputs of the last tokens of paths: each path becomes a sequence of its own."""
    (batch, count, length), sequences = paths.shape, torch.arange(len(paths), device=paths.device)
    tokens = paths.clamp_min(0).flatten(1)

    def taken(own: Tensor) -> Tensor:
        return own[sequences[:, None], tokens].view(batch * count, length, *own.shape[2:])

    own_beta = None if beta is None else taken(beta)
    read = torch.empty(batch * count, length, *out.shape[2:], dtype=out.dtype, device=out.device)
    of_path = state.repeat_interleave(count, 0)
    linear_recurrence(of_path, taken(q), taken(k), taken(v), taken(decay), rates, own_beta, None, read)
    last = (paths >= 0).sum(2).clamp_min(1).flatten() - 1
    out.copy_(read[torch.arange(batch * count, device=out.device), last].view_as(out))

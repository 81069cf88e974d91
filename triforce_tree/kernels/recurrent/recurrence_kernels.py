"""Triton kernel of ``recurrence``, with one program for each head (of each path of a tree) and block of
dimensions of values.

Dimensions of values are independent of each other, so a program reads its part of the state once and keeps it
in registers. Reading the state takes most of the time, whatever the number of tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's part of the state, 16 registers in each thread of four warps.
_TILE = 2048
_HEAD, _KEY, _BOTH = 0, 1, 2


@triton.jit
def _recurrence_kernel(
    state_ptr,  # fp32 [B, H, V, K]
    q_ptr,  # fp32 [B, T, G, K]
    k_ptr,
    v_ptr,  # fp32 [B, T, H, V]
    decay_ptr,
    rates_ptr,
    beta_ptr,
    counts_ptr,
    out_ptr,
    paths_ptr,  # int64 [B, P, L]
    rows,
    paths,
    length,
    heads,
    groups,
    values,
    keys,
    DECAY: tl.constexpr,
    DELTA: tl.constexpr,
    STORES: tl.constexpr,
    READS: tl.constexpr,
    PATHS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A path has a program for each head, and so has a sequence without paths.
    program = tl.program_id(0).to(tl.int64)
    path, head = program // heads, program % heads
    sequence = path // paths
    pair = sequence * heads + head
    at_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_k = tl.arange(0, BLOCK_K)
    in_v, in_k = at_v < values, at_k < keys
    inside = in_v[:, None] & in_k[None, :]
    tile = at_v[:, None] * keys + at_k[None, :]
    place = state_ptr + pair * values * keys + tile
    state = tl.load(place, mask=inside, other=0.0)
    if DECAY == 2:
        rates = tl.load(rates_ptr + head * values * keys + tile, mask=inside, other=0.0)
    count = rows
    if STORES:
        count = tl.minimum(tl.load(counts_ptr + sequence), rows).to(tl.int32)
    if PATHS:
        count = tl.load(counts_ptr + path).to(tl.int32)
    for t in range(count):
        row = sequence * rows + t
        if PATHS:
            row = sequence * rows + tl.load(paths_ptr + path * length + t)
        of_group = (row * groups + head // (heads // groups)) * keys
        of_head = row * heads + head
        key = tl.load(k_ptr + of_group + at_k, mask=in_k, other=0.0)
        added = tl.load(v_ptr + of_head * values + at_v, mask=in_v, other=0.0)
        if DECAY == 0:
            state = state * tl.exp(tl.load(decay_ptr + of_head))
        elif DECAY == 1:
            state = state * tl.exp(tl.load(decay_ptr + of_head * keys + at_k, mask=in_k, other=0.0))[None, :]
        else:
            step = tl.load(decay_ptr + of_head * values + at_v, mask=in_v, other=0.0)
            state = state * tl.exp(step[:, None] * rates)
        if DELTA:
            added = (added - tl.sum(state * key[None, :], 1)) * tl.load(beta_ptr + of_head)
        state = state + added[:, None] * key[None, :]
        if READS:
            query = tl.load(q_ptr + of_group + at_k, mask=in_k, other=0.0)
            place_out = of_head
            if PATHS:
                place_out = path * heads + head  # The last token is written last.
            tl.store(out_ptr + place_out * values + at_v, tl.sum(state * query[None, :], 1), mask=in_v)
    if STORES:
        tl.store(place, state, mask=inside)


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
    batch, heads, values, keys = state.shape
    if not state.is_contiguous() or (out is not None and not out.is_contiguous()):
        raise ValueError("the state and the output of a recurrence must be contiguous; copy them first")
    q, k, v, decay = (x.contiguous() for x in (q, k, v, decay))
    kind = _BOTH if rates is not None else _HEAD if decay.shape[-1] == 1 else _KEY
    block_k = triton.next_power_of_2(keys)
    block_v = min(triton.next_power_of_2(values), max(1, _TILE // block_k))
    # ``unused`` replaces arguments that this variant does not read.
    unused = state
    stores, of_sequence, length = counts is not None, 1, 0
    if paths is not None:
        paths = paths.contiguous()
        counts, of_sequence, length = (paths >= 0).sum(2), *paths.shape[1:]
    _recurrence_kernel[batch * of_sequence * heads, triton.cdiv(values, block_v)](
        state, q, k, v, decay,
        unused if rates is None else rates.contiguous(),
        unused if beta is None else beta.contiguous(),
        unused if counts is None else counts,
        unused if out is None else out,
        unused if paths is None else paths,
        v.shape[1], of_sequence, length, heads, k.shape[2], values, keys,
        DECAY=kind, DELTA=beta is not None, STORES=stores, READS=out is not None,
        PATHS=paths is not None,
        BLOCK_V=block_v, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip

"""Triton kernels that judge a token tree: which path is accepted, which token follows, which came second.

Sampling decides at all nodes at once, each as if it were reached, and then follows the decisions: what
happens at a node depends on its own children and random numbers alone. Nodes that the verdicts on first
siblings, which cost nothing, rule out are left undecided.

No residual is ever stored. Refusals of children drawn from one law q leave

    p_k = (p - A_k q)+ / S_k,    S_k = sum (p - A_k q)+,    A_{k+1} = A_k + S_k / T_k

with T_k what the refused tokens leave of q's mass, since (p - a q)+ less b q, cut at zero again, is
(p - (a + b) q)+, and a refused token has nothing left in p: p(x) < q(x). Children that were proposed
deterministically leave p without the refused tokens, and S_k is the sum of that. So a refusal costs one walk
over the vocabulary, and where no sibling is left that walk finds the emitted token too. ``accept`` holds the
definitions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.step.accept import empty_results

_BLOCK_V = 4096
_NONE = tl.constexpr(2**63 - 1)


@triton.jit
def _walk(p_ptr, q_ptr, noise_ptr, gone_ptr, gone, fixed, vocab, share, emit, BLOCK: tl.constexpr):
    """Over the vocabulary: the sum of (p - share q)+, that of q without the ``gone`` refused tokens, and
    the winner of the race for the first.

    Where proposals were ``fixed`` there is no q, and the first is p without the refused tokens.
    ``exponential`` is read where ``emit``, ``q`` where a token was refused; what is not a number counts as 0.
    """
    left_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.float32)
    winner = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        p = tl.load(p_ptr + token, mask=inside, other=0.0)
        # Blocks on both sides: Triton's interpreter makes no mask of a block and a scalar.
        q = tl.load(q_ptr + token, mask=inside & (token * 0 + tl.where(fixed, 0, gone) > 0), other=0.0)
        exponential = tl.load(noise_ptr + token, mask=inside & (token * 0 + emit > 0), other=1.0)
        left = p - share * q
        left = tl.where(left > 0.0, left, 0.0)
        for at in range(gone):
            refused = token == tl.load(gone_ptr + at)
            q = tl.where(refused, 0.0, q)
            left = tl.where(refused & (token * 0 + fixed.to(tl.int32) > 0), 0.0, left)
        left_sum += left
        q_sum += q
        weight = tl.where(left > 0.0, tl.div_rn(left, exponential), 0.0)
        better = weight > best
        winner, best = tl.where(better, token, winner), tl.where(better, weight, best)
    top = tl.max(best, 0)
    # Lanes that met nothing positive hold token 0, which is also what a law without mass emits.
    token = tl.min(tl.where(best == top, winner, 2147483647), 0)
    return tl.sum(left_sum, 0), tl.sum(q_sum, 0), token


@triton.jit
def _judge_kernel(
    outcome_ptr,  # int64 [B, N]: the accepted child, or -1 - the emitted token
    gone_ptr,  # int32 [B, N], scratch: refused tokens, siblings together
    tokens_ptr,  # int64 [B, N] and so on, rows with strides
    parents_ptr,
    p_ptr,  # fp32 [B, N, V]
    q_ptr,  # fp32 [B, M, V]
    q_rows_ptr,  # int64 [B, N]; -1: proposed deterministically
    uniforms_ptr,  # fp32 [B, N]
    noise_ptr,  # fp32 [B, V]
    tokens_b,
    parents_b,
    p_b,
    p_n,
    q_b,
    q_m,
    q_rows_b,
    uniforms_b,
    noise_b,
    nodes,
    q_count,
    vocab,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    me = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    parents_ptr += sequence * parents_b
    q_rows_ptr += sequence * q_rows_b
    p_ptr += sequence * p_b
    q_ptr += sequence * q_b

    # What every node would be judged by: p and q of its token at its parent.
    index = tl.arange(0, BLOCK_N)
    real = index < nodes
    token = tl.load(tokens_ptr + sequence * tokens_b + index, mask=real, other=-1)
    parent = tl.load(parents_ptr + index, mask=real, other=-1)
    uniform = tl.load(uniforms_ptr + sequence * uniforms_b + index, mask=real, other=1.0)
    alive = (token >= 0) & (token < vocab) & (parent >= 0) & (parent < index)
    q_row = tl.load(q_rows_ptr + parent, mask=alive, other=-1)
    alive = alive & (q_row >= -1) & (q_row < q_count)
    p_here = tl.load(p_ptr + parent * p_n + token, mask=alive, other=0.0)
    q_here = tl.load(q_ptr + q_row * q_m + token, mask=alive & (q_row >= 0), other=1.0)
    alive = alive & (q_here > 0.0)
    # Index, verdict and token of a node in one word, whose minimum over siblings is the eldest's.
    plain = (index.to(tl.int64) << 33) | token
    words = plain | ((uniform < tl.div_rn(p_here, q_here)).to(tl.int64) << 32)

    # Up to the root: a first sibling is reached if it is accepted, the others if it is not.
    reached, level = me >= 0, 0
    node = me
    while reached & (node > 0):
        above = tl.load(parents_ptr + node).to(tl.int32)
        eldest = tl.min(tl.where(alive & (parent == above), words, _NONE), 0)
        there = tl.max(tl.where(index == node, alive.to(tl.int32), 0), 0) > 0
        first, taken = (eldest >> 33) == node, ((eldest >> 32) & 1) == 1
        reached = there & (first == taken)
        level += 1
        node = above

    mine = alive & (parent == me) & (level < depth)
    gone_ptr += sequence * nodes + tl.sum((alive & (parent < me)).to(tl.int32), 0)
    p_ptr += me.to(tl.int64) * p_n
    row = tl.max(tl.where(mine, q_row, -1), 0)
    fixed = row < 0
    q_ptr += tl.where(fixed, 0, row) * q_m
    noise_ptr += sequence * noise_b
    outcome = tl.full([], -1, tl.int64)
    share = tl.full([], 0.0, tl.float32)  # A
    left, rest = share + 1.0, share + 1.0  # S, T
    gone = tl.full([], 0, tl.int32)
    while reached:
        chance = p_here - share * q_here
        chance = tl.div_rn(tl.div_rn(tl.where(chance > 0.0, chance, 0.0), left), tl.div_rn(q_here, rest))
        words = plain | ((uniform < chance).to(tl.int64) << 32)
        word = tl.min(tl.where(mine, words, _NONE), 0)
        none = word == _NONE
        if (word != _NONE) & (((word >> 32) & 1) == 1):
            outcome = word >> 33
            reached = me < 0
        else:
            refused = word & 0xFFFFFFFF
            mine = mine & (token != refused)
            alone = tl.max(mine.to(tl.int32), 0) == 0
            tried = share
            if word != _NONE:
                tried = tl.where(fixed, share, share + left / rest)
                tl.store(gone_ptr + gone, refused.to(tl.int32))
                gone += 1
            # The list is written by one thread and read by all.
            tl.debug_barrier()
            mass, q_mass, winner = _walk(
                p_ptr, q_ptr, noise_ptr, gone_ptr, gone, fixed, vocab, tried, alone, BLOCK_V
            )
            # Where nothing is left p stays, and the next round goes on with that.
            share, left = tl.where(mass > 0.0, tried, share), tl.where(mass > 0.0, mass, left)
            rest = tl.where(fixed, rest, q_mass)
            gone = tl.where(fixed & ~(mass > 0.0) & ~none, gone - 1, gone)
            if none | (alone & (mass > 0.0)):
                outcome = -1 - winner.to(tl.int64)
                reached = me < 0
    tl.store(outcome_ptr + sequence * nodes + me, outcome)


@triton.jit
def _follow_kernel(
    path_ptr,  # int64 [B, depth + 1]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    outcome_ptr,  # int64 [B, N]
    nodes,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    index, slot = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    outcomes = tl.load(outcome_ptr + sequence * nodes + index, mask=index < nodes, other=0)
    path = tl.where(slot == 0, 0, -1).to(tl.int64)
    count = 1
    outcome = tl.sum(tl.where(index == 0, outcomes, 0), 0)
    while outcome >= 0:
        path = tl.where(slot == count, outcome, path)
        count += 1
        outcome = tl.sum(tl.where(index == outcome, outcomes, 0), 0)
    tl.store(path_ptr + sequence * (depth + 1) + slot, path, mask=slot <= depth)
    tl.store(count_ptr + sequence, count)
    tl.store(next_ptr + sequence, -1 - outcome)


@triton.jit
def _greedy_kernel(
    path_ptr,  # int64 [B, depth + 1]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    tokens_ptr,  # int64 [B, N], as the next two; rows with strides
    parents_ptr,
    best_ptr,
    tokens_b,
    parents_b,
    best_b,
    nodes,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    index, slot = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    real = index < nodes
    token = tl.load(tokens_ptr + sequence * tokens_b + index, mask=real, other=-1)
    parent = tl.load(parents_ptr + sequence * parents_b + index, mask=real, other=-1)
    alive = (token >= 0) & (parent >= 0) & (parent < index)
    best_ptr += sequence * best_b
    wanted = alive & (token == tl.load(best_ptr + parent, mask=alive, other=-1))
    path = tl.where(slot == 0, 0, -1).to(tl.int64)
    count, node = 1, 0
    child = tl.min(tl.where(wanted & (parent == 0), index, BLOCK_N), 0)
    while (child < BLOCK_N) & (count <= depth):
        path = tl.where(slot == count, child.to(tl.int64), path)
        count += 1
        node = child
        child = tl.min(tl.where(wanted & (parent == node), index, BLOCK_N), 0)
    tl.store(path_ptr + sequence * (depth + 1) + slot, path, mask=slot <= depth)
    tl.store(count_ptr + sequence, count)
    tl.store(next_ptr + sequence, tl.load(best_ptr + node))


@triton.jit
def _second_kernel(
    out_ptr,  # int64 [B, C]
    probs_ptr,  # fp32 [B, C, V] with strides
    chosen_ptr,  # int64 [B, C]
    noise_ptr,  # fp32 [B, C, V] with strides, or None
    probs_b,
    probs_c,
    noise_b,
    noise_c,
    choices,
    vocab,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    sequence, choice = at // choices, at % choices
    chosen = tl.load(chosen_ptr + at)
    floor = float("-inf") if noise_ptr is None else 0.0
    best = tl.full([BLOCK], floor, tl.float32)
    winner = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        place = sequence * probs_b + choice * probs_c + token
        weight = tl.load(probs_ptr + place, mask=inside, other=floor)
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + sequence * noise_b + choice * noise_c + token, mask=inside, other=1.0)
            weight = tl.where(weight > 0.0, tl.div_rn(weight, noise), 0.0)
        better = (weight > best) & (token != chosen)
        winner, best = tl.where(better, token, winner), tl.where(better, weight, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, winner, 2147483647), 0)
    tl.store(out_ptr + at, token.to(tl.int64))


def accept_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``accept.accept_tree``; laws and noise must be fp32."""
    batch, nodes = tokens.shape
    vocab = p.shape[2]
    tokens, parents, q_rows, uniforms = (_dense(x) for x in (tokens, parents, q_rows, uniforms))
    p, q, exponential = (_dense(x) for x in (p, q, exponential))
    outcome = torch.empty(batch, nodes, dtype=torch.int64, device=p.device)
    gone = torch.empty(batch, nodes, dtype=torch.int32, device=p.device)
    block_n, block_v = triton.next_power_of_2(nodes), min(_BLOCK_V, triton.next_power_of_2(vocab))
    _judge_kernel[(nodes, batch)](
        outcome, gone, tokens, parents, p, q, q_rows, uniforms, exponential,
        tokens.stride(0), parents.stride(0), p.stride(0), p.stride(1), q.stride(0), q.stride(1),
        q_rows.stride(0), uniforms.stride(0), exponential.stride(0), nodes, q.shape[1], vocab, depth,
        BLOCK_N=block_n, BLOCK_V=block_v, **_warps(max(1, min(16, block_v // 256))),
    )  # fmt: skip
    path, count, following = empty_results(tokens, depth)
    _follow_kernel[(batch,)](
        path, count, following, outcome, nodes, depth,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(depth + 1), **_warps(max(1, block_n // 256)),
    )  # fmt: skip
    return path, count, following


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``accept.accept_greedy``."""
    batch, nodes = tokens.shape
    tokens, parents, best = (_dense(x) for x in (tokens, parents, best))
    path, count, following = empty_results(tokens, depth)
    block = triton.next_power_of_2(nodes)
    _greedy_kernel[(batch,)](
        path, count, following, tokens, parents, best,
        tokens.stride(0), parents.stride(0), best.stride(0), nodes, depth,
        BLOCK_N=block, BLOCK_P=triton.next_power_of_2(depth + 1), **_warps(max(1, block // 256)),
    )  # fmt: skip
    return path, count, following


def second_choice(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    """See ``accept.second_choice``."""
    batch, choices, vocab = probs.shape
    probs, chosen = _dense(probs), chosen.contiguous()
    exponential = None if exponential is None else _dense(exponential)
    out = torch.empty(batch, choices, dtype=torch.int64, device=probs.device)
    block = min(_BLOCK_V, triton.next_power_of_2(vocab))
    _second_kernel[(batch * choices,)](
        out, probs, chosen, exponential, probs.stride(0), probs.stride(1),
        *((0, 0) if exponential is None else exponential.stride()[:2]), choices, vocab,
        BLOCK=block, **_warps(max(1, min(16, block // 256))),
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _warps(count: int) -> dict[str, int]:
    return {} if knobs.runtime.interpret else {"num_warps": count}

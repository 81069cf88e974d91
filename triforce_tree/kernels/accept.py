"""Triton kernels that judge a token tree: which path is accepted, which token follows, which came second.

Sampling decides at all nodes at once, each as if it were reached, and then follows the decisions: what
happens at a node depends on its own children and random numbers alone. Nodes that the verdicts on first
siblings, which cost nothing, rule out are left undecided.

No residual is ever stored. Refusals of children drawn from one law q leave

    p_k = (p - A_k q)+ / S_k,    S_k = sum (p - A_k q)+,    A_{k+1} = A_k + S_k / T_k

with T_k what the refused tokens leave of q's mass, since (p - a q)+ less b q, cut at zero again, is
(p - (a + b) q)+, and a refused token has nothing left in p: p(x) < q(x). Children that were proposed
deterministically leave p without the refused tokens, and S_k is the sum of that. So a refusal costs one walk
over the vocabulary, and where no sibling is left that walk finds the emitted token too.
``acceptance_reference`` is the definition.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.operators import fake, operator

_BLOCK_V = 4096
_NONE = tl.constexpr(2**63 - 1)


@triton.jit
def _walk(p_ptr, q_ptr, race_ptr, gone_ptr, gone, fixed, vocab, share, emit, BLOCK: tl.constexpr):
    """Over the vocabulary: the sum of (p - share q)+, that of q without the ``gone`` refused tokens, and
    the winner of the race for the first.

    Where proposals were ``fixed`` there is no q, and the first is p without the refused tokens.
    ``race`` is read where ``emit``, ``q`` where a token was refused; what is not a number counts as 0.
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
        race = tl.load(race_ptr + token, mask=inside & (token * 0 + emit > 0), other=1.0)
        left = p - share * q
        left = tl.where(left > 0.0, left, 0.0)
        for at in range(gone):
            refused = token == tl.load(gone_ptr + at)
            q = tl.where(refused, 0.0, q)
            left = tl.where(refused & (token * 0 + fixed.to(tl.int32) > 0), 0.0, left)
        left_sum += left
        q_sum += q
        weight = tl.where(left > 0.0, tl.div_rn(left, race), 0.0)
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
    race_ptr,  # fp32 [B, V]
    tokens_b,
    parents_b,
    p_b,
    p_n,
    q_b,
    q_m,
    q_rows_b,
    uniforms_b,
    race_b,
    nodes,
    laws,
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
    law = tl.load(q_rows_ptr + parent, mask=alive, other=-1)
    alive = alive & (law >= -1) & (law < laws)
    p_here = tl.load(p_ptr + parent * p_n + token, mask=alive, other=0.0)
    q_here = tl.load(q_ptr + law * q_m + token, mask=alive & (law >= 0), other=1.0)
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
    row = tl.max(tl.where(mine, law, -1), 0)
    fixed = row < 0
    q_ptr += tl.where(fixed, 0, row) * q_m
    race_ptr += sequence * race_b
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
                p_ptr, q_ptr, race_ptr, gone_ptr, gone, fixed, vocab, tried, alone, BLOCK_V
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
    laws_ptr,  # fp32 [B, C, V] with strides
    chosen_ptr,  # int64 [B, C]
    race_ptr,  # fp32 [B, C, V] with strides, or None
    laws_b,
    laws_c,
    race_b,
    race_c,
    choices,
    vocab,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    sequence, choice = at // choices, at % choices
    chosen = tl.load(chosen_ptr + at)
    floor = float("-inf") if race_ptr is None else 0.0
    best = tl.full([BLOCK], floor, tl.float32)
    winner = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        place = sequence * laws_b + choice * laws_c + token
        weight = tl.load(laws_ptr + place, mask=inside, other=floor)
        if race_ptr is not None:
            noise = tl.load(race_ptr + sequence * race_b + choice * race_c + token, mask=inside, other=1.0)
            weight = tl.where(weight > 0.0, tl.div_rn(weight, noise), 0.0)
        better = (weight > best) & (token != chosen)
        winner, best = tl.where(better, token, winner), tl.where(better, weight, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, winner, 2147483647), 0)
    tl.store(out_ptr + at, token.to(tl.int64))


@operator("accept_tree")
def accept_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    race: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``acceptance_reference.accept_tree``; laws and noise must be fp32."""
    batch, nodes = tokens.shape
    vocab = p.shape[2]
    tokens, parents, q_rows, uniforms = (_dense(x) for x in (tokens, parents, q_rows, uniforms))
    p, q, race = (_dense(x) for x in (p, q, race))
    outcome = torch.empty(batch, nodes, dtype=torch.int64, device=p.device)
    gone = torch.empty(batch, nodes, dtype=torch.int32, device=p.device)
    block_n, block_v = triton.next_power_of_2(nodes), min(_BLOCK_V, triton.next_power_of_2(vocab))
    _judge_kernel[(nodes, batch)](
        outcome, gone, tokens, parents, p, q, q_rows, uniforms, race,
        tokens.stride(0), parents.stride(0), p.stride(0), p.stride(1), q.stride(0), q.stride(1),
        q_rows.stride(0), uniforms.stride(0), race.stride(0), nodes, q.shape[1], vocab, depth,
        BLOCK_N=block_n, BLOCK_V=block_v, **_warps(max(1, min(16, block_v // 256))),
    )  # fmt: skip
    path, count, following = _results(tokens, depth)
    _follow_kernel[(batch,)](
        path, count, following, outcome, nodes, depth,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(depth + 1), **_warps(1),
    )  # fmt: skip
    return path, count, following


@operator("accept_greedy")
def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``acceptance_reference.accept_greedy``."""
    batch, nodes = tokens.shape
    tokens, parents, best = (_dense(x) for x in (tokens, parents, best))
    path, count, following = _results(tokens, depth)
    _greedy_kernel[(batch,)](
        path, count, following, tokens, parents, best,
        tokens.stride(0), parents.stride(0), best.stride(0), nodes, depth,
        BLOCK_N=triton.next_power_of_2(nodes), BLOCK_P=triton.next_power_of_2(depth + 1), **_warps(1),
    )  # fmt: skip
    return path, count, following


@operator("second_choice")
def second_choice(laws: Tensor, chosen: Tensor, race: Tensor | None) -> Tensor:
    """See ``acceptance_reference.second_choice``."""
    batch, choices, vocab = laws.shape
    laws, chosen = _dense(laws), chosen.contiguous()
    race = None if race is None else _dense(race)
    out = torch.empty(batch, choices, dtype=torch.int64, device=laws.device)
    block = min(_BLOCK_V, triton.next_power_of_2(vocab))
    _second_kernel[(batch * choices,)](
        out, laws, chosen, race, laws.stride(0), laws.stride(1),
        *((0, 0) if race is None else race.stride()[:2]), choices, vocab,
        BLOCK=block, **_warps(max(1, min(16, block // 256))),
    )  # fmt: skip
    return out


@fake("accept_tree")
def _(tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(tokens, rest[-1])


@fake("accept_greedy")
def _(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    return _results(tokens, depth)


@fake("second_choice")
def _(laws: Tensor, chosen: Tensor, race: Tensor | None) -> Tensor:
    return torch.empty_like(chosen, memory_format=torch.contiguous_format)


def _results(tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return tokens.new_empty(batch, depth + 1), tokens.new_empty(batch), tokens.new_empty(batch)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _warps(count: int) -> dict[str, int]:
    return {} if knobs.runtime.interpret else {"num_warps": count}

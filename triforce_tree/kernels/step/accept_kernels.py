"""Triton kernels of acceptance over a token tree: the accepted path, the emitted token, runner-up tokens.

Sampling decides at all nodes in parallel, each as if it were reached, and then follows the decisions: the
outcome at a node depends on its own children and random numbers alone. A node that cannot be reached given
the decisions on first siblings, which need no pass over the vocabulary, is skipped.

No residual is ever stored. Rejections of children drawn from one q leave

    p_k = (p - A_k q)+ / S_k,    S_k = sum (p - A_k q)+,    A_{k+1} = A_k + S_k / T_k

where T_k is the sum of q without the rejected tokens, since max((p - a q)+ - b q, 0) is (p - (a + b) q)+,
and a rejected token has probability 0 in the residual: p(x) < q(x). Children that were proposed
deterministically leave p_k without the rejected tokens, and S_k is the sum of that; A_k stays as the drawn
siblings before them left it. So a rejection costs one pass over the vocabulary, and where no sibling is left
that pass finds the emitted token too. ``accept`` holds the definitions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import dense, warps
from triforce_tree.kernels.step.accept import FIXED, empty_results

_BLOCK_V = 4096
_NO_NODE = tl.constexpr(2**63 - 1)
_FIXED = tl.constexpr(FIXED)


@triton.jit
def _scan_vocab(
    p_ptr, q_ptr, noise_ptr, rejected_ptr, drawn, rejections, vocab, coef, emit, BLOCK: tl.constexpr
):
    """One pass over the vocabulary: the sum of (p - coef q)+, the sum of q without the rejected tokens, and
    the argmax of (p - coef q)+ / exponential.

    The first ``drawn`` of the rejected tokens were drawn; the others were proposed deterministically, and the
    residual is without them. Noise is read where ``emit``, ``q`` where a drawn token was rejected; NaN counts
    as 0.
    """
    residual_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        p = tl.load(p_ptr + token, mask=inside, other=0.0)
        # Blocks on both sides: Triton's interpreter makes no mask of a block and a scalar.
        q = tl.load(q_ptr + token, mask=inside & (token * 0 + drawn > 0), other=0.0)
        exponential = tl.load(noise_ptr + token, mask=inside & (token * 0 + emit > 0), other=1.0)
        residual = p - coef * q
        residual = tl.where(residual > 0.0, residual, 0.0)
        for at in range(rejections):
            rejected = token == tl.load(rejected_ptr + at)
            q = tl.where(rejected, 0.0, q)
            residual = tl.where(rejected & (token * 0 + at >= token * 0 + drawn), 0.0, residual)
        residual_sum += residual
        q_sum += q
        weight = tl.where(residual > 0.0, tl.div_rn(residual, exponential), 0.0)
        better = weight > best
        best_token, best = tl.where(better, token, best_token), tl.where(better, weight, best)
    top = tl.max(best, 0)
    # Elements that met nothing positive hold token 0, which is also what probs of sum 0 emit.
    token = tl.min(tl.where(best == top, best_token, 2147483647), 0)
    return tl.sum(residual_sum, 0), tl.sum(q_sum, 0), token


@triton.jit
def _accept_nodes_kernel(
    outcome_ptr,  # int64 [B, N]: the accepted child, or -1 - the emitted token
    rejected_ptr,  # int32 [B, N], scratch: rejected tokens, siblings together
    tokens_ptr,  # int64 [B, N]; this and the next inputs have a stride between sequences
    parents_ptr,
    p_ptr,  # fp32 [B, N, V]
    q_ptr,  # fp32 [B, M, V]
    q_rows_ptr,  # int64 [B, N]; -1 and -2 as in ``accept.accept_tree``
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
    own_node = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    parents_ptr += sequence * parents_b
    q_rows_ptr += sequence * q_rows_b
    p_ptr += sequence * p_b
    q_ptr += sequence * q_b

    # What decides about every node: p and q of its token at its parent.
    index = tl.arange(0, BLOCK_N)
    real = index < nodes
    token = tl.load(tokens_ptr + sequence * tokens_b + index, mask=real, other=-1)
    parent = tl.load(parents_ptr + index, mask=real, other=-1)
    uniform = tl.load(uniforms_ptr + sequence * uniforms_b + index, mask=real, other=1.0)
    valid = (token >= 0) & (token < vocab) & (parent >= 0) & (parent < index)
    q_row = tl.load(q_rows_ptr + parent, mask=valid, other=-1)
    # The children of a node were drawn from one row, but for those that are deterministic.
    own_row = tl.load(q_rows_ptr + index, mask=real, other=-1)
    q_row = tl.where(own_row == _FIXED, -1, q_row)
    valid = valid & (q_row >= _FIXED) & (q_row < q_count)
    p_here = tl.load(p_ptr + parent * p_n + token, mask=valid, other=0.0)
    q_here = tl.load(q_ptr + q_row * q_m + token, mask=valid & (q_row >= 0), other=1.0)
    valid = valid & (q_here > 0.0)
    # Index, decision and token of a node in one int64, whose minimum over siblings is the first sibling's.
    packed_index = (index.to(tl.int64) << 33) | token
    packed = packed_index | ((uniform < tl.div_rn(p_here, q_here)).to(tl.int64) << 32)

    # Up to the root: a first sibling is reached if it is accepted, the others if it is not.
    reached, level = own_node >= 0, 0
    node = own_node
    while reached & (node > 0):
        above = tl.load(parents_ptr + node).to(tl.int32)
        first_sibling = tl.min(tl.where(valid & (parent == above), packed, _NO_NODE), 0)
        there = tl.max(tl.where(index == node, valid.to(tl.int32), 0), 0) > 0
        is_first, is_accepted = (first_sibling >> 33) == node, ((first_sibling >> 32) & 1) == 1
        reached = there & (is_first == is_accepted)
        level += 1
        node = above

    candidates = valid & (parent == own_node) & (level < depth)
    rejected_ptr += sequence * nodes + tl.sum((valid & (parent < own_node)).to(tl.int32), 0)
    p_ptr += own_node.to(tl.int64) * p_n
    row = tl.max(tl.where(candidates, q_row, -1), 0)
    q_ptr += tl.where(row < 0, 0, row) * q_m
    # Of a deterministic child the q of its drawn siblings; 0 where there are none.
    follows = tl.where(candidates & (q_row < 0), index * 0 + row, -1) >= 0
    q_of_fixed = tl.load(q_ptr + token, mask=follows, other=0.0)
    noise_ptr += sequence * noise_b
    outcome = tl.full([], -1, tl.int64)
    coef = tl.full([], 0.0, tl.float32)  # A
    residual, q_left = coef + 1.0, coef + 1.0  # S, T
    rejections, drawn = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while reached:
        left = p_here - coef * tl.where(q_row >= 0, q_here, q_of_fixed)
        q_now = tl.where(q_row >= 0, tl.div_rn(q_here, q_left), 1.0)
        accept_prob = tl.div_rn(tl.div_rn(tl.where(left > 0.0, left, 0.0), residual), q_now)
        packed = packed_index | ((uniform < accept_prob).to(tl.int64) << 32)
        first_child = tl.min(tl.where(candidates, packed, _NO_NODE), 0)
        no_child = first_child == _NO_NODE
        if (first_child != _NO_NODE) & (((first_child >> 32) & 1) == 1):
            outcome = first_child >> 33
            reached = own_node < 0
        else:
            rejected = first_child & 0xFFFFFFFF
            fixed = tl.max(tl.where(index == (first_child >> 33), (q_row < 0).to(tl.int32), 0), 0) > 0
            candidates = candidates & (token != rejected)
            exhausted = tl.max(candidates.to(tl.int32), 0) == 0
            next_coef = coef
            if first_child != _NO_NODE:
                next_coef = tl.where(fixed, coef, coef + residual / q_left)
                tl.store(rejected_ptr + rejections, rejected.to(tl.int32))
                rejections += 1
                drawn += tl.where(fixed, 0, 1)
            # The list is written by one thread and read by all.
            tl.debug_barrier()
            mass, q_mass, best_token = _scan_vocab(
                p_ptr, q_ptr, noise_ptr, rejected_ptr, drawn, rejections, vocab, next_coef, exhausted, BLOCK_V
            )
            # An empty residual leaves p unchanged, and the next iteration continues with it.
            coef, residual = tl.where(mass > 0.0, next_coef, coef), tl.where(mass > 0.0, mass, residual)
            q_left = tl.where(fixed, q_left, q_mass)
            rejections = tl.where(fixed & ~(mass > 0.0) & ~no_child, rejections - 1, rejections)
            if no_child | (exhausted & (mass > 0.0)):
                outcome = -1 - best_token.to(tl.int64)
                reached = own_node < 0
    tl.store(outcome_ptr + sequence * nodes + own_node, outcome)


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
    tokens_ptr,  # int64 [B, N], as the next two; with a stride between sequences
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
    valid = (token >= 0) & (parent >= 0) & (parent < index)
    best_ptr += sequence * best_b
    matches = valid & (token == tl.load(best_ptr + parent, mask=valid, other=-1))
    path = tl.where(slot == 0, 0, -1).to(tl.int64)
    count, node = 1, 0
    child = tl.min(tl.where(matches & (parent == 0), index, BLOCK_N), 0)
    while (child < BLOCK_N) & (count <= depth):
        path = tl.where(slot == count, child.to(tl.int64), path)
        count += 1
        node = child
        child = tl.min(tl.where(matches & (parent == node), index, BLOCK_N), 0)
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
    best_token = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        place = sequence * probs_b + choice * probs_c + token
        weight = tl.load(probs_ptr + place, mask=inside, other=floor)
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + sequence * noise_b + choice * noise_c + token, mask=inside, other=1.0)
            weight = tl.where(weight > 0.0, tl.div_rn(weight, noise), 0.0)
        better = (weight > best) & (token != chosen)
        best_token, best = tl.where(better, token, best_token), tl.where(better, weight, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_token, 2147483647), 0)
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
    """See ``accept.accept_tree``; probs and noise must be fp32."""
    batch, nodes = tokens.shape
    vocab = p.shape[2]
    tokens, parents, q_rows, uniforms = (dense(x) for x in (tokens, parents, q_rows, uniforms))
    p, q, exponential = (dense(x) for x in (p, q, exponential))
    outcome = torch.empty(batch, nodes, dtype=torch.int64, device=p.device)
    rejected = torch.empty(batch, nodes, dtype=torch.int32, device=p.device)
    block_n, block_v = triton.next_power_of_2(nodes), min(_BLOCK_V, triton.next_power_of_2(vocab))
    _accept_nodes_kernel[(nodes, batch)](
        outcome, rejected, tokens, parents, p, q, q_rows, uniforms, exponential,
        tokens.stride(0), parents.stride(0), p.stride(0), p.stride(1), q.stride(0), q.stride(1),
        q_rows.stride(0), uniforms.stride(0), exponential.stride(0), nodes, q.shape[1], vocab, depth,
        BLOCK_N=block_n, BLOCK_V=block_v, **warps(max(1, min(16, block_v // 256))),
    )  # fmt: skip
    path, count, following = empty_results(tokens, depth)
    _follow_kernel[(batch,)](
        path, count, following, outcome, nodes, depth,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(depth + 1), **warps(max(1, block_n // 256)),
    )  # fmt: skip
    return path, count, following


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``accept.accept_greedy``."""
    batch, nodes = tokens.shape
    tokens, parents, best = (dense(x) for x in (tokens, parents, best))
    path, count, following = empty_results(tokens, depth)
    block = triton.next_power_of_2(nodes)
    _greedy_kernel[(batch,)](
        path, count, following, tokens, parents, best,
        tokens.stride(0), parents.stride(0), best.stride(0), nodes, depth,
        BLOCK_N=block, BLOCK_P=triton.next_power_of_2(depth + 1), **warps(max(1, block // 256)),
    )  # fmt: skip
    return path, count, following


def second_choice(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    """See ``accept.second_choice``."""
    batch, choices, vocab = probs.shape
    probs, chosen = dense(probs), chosen.contiguous()
    exponential = None if exponential is None else dense(exponential)
    out = torch.empty(batch, choices, dtype=torch.int64, device=probs.device)
    block = min(_BLOCK_V, triton.next_power_of_2(vocab))
    _second_kernel[(batch * choices,)](
        out, probs, chosen, exponential, probs.stride(0), probs.stride(1),
        *((0, 0) if exponential is None else exponential.stride()[:2]), choices, vocab,
        BLOCK=block, **warps(max(1, min(16, block // 256))),
    )  # fmt: skip
    return out

"""Triton kernels of traversal verification; ``traversal`` holds the definition.

The weight and the residual of a node after the rejection of its children depend only on tokens and
probabilities, not on other decisions. So all nodes are decided in parallel, each by a program that computes
the weights on the path from the root to the node. A second kernel finds the accepted node that comes first in
the order of the definition.

Residuals are not stored. At a node, let p be the target's probs, q the draft probs of its children, and b the
node's weight before any rejection. After k rejected children the weight a_k and the residual p_k are given by

    a_k p_k = (b p - A_k q)+ / C_k,    a_k = R_k / C_k,    R_k = sum (b p - A_k q)+,
    A_{k+1} = A_k + C_k / T_k,    C_{k+1} = C_k (1 - a_k + R_{k+1} / C_k),    A_0 = 0,    C_0 = 1

where T_k is the sum of q without the rejected tokens. The reason is that ((b p - A q)+ / C - q / T)+ is
(b p - (A + C / T) q)+ / C, in which a rejected token has mass 0. The rejection of a deterministic child does
not change A, and sets the mass of its token to 0. Each rejection takes one pass over the vocabulary. The last
pass at a node also finds the token that is emitted if the node is accepted. The weight of a first child needs
no pass, so a chain takes one pass per node, and all nodes run in parallel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import dense, warps
from triforce_tree.kernels.step.accept import FIXED, empty_results

_BLOCK_V = 4096
_FIXED = tl.constexpr(FIXED)
_NOT_ACCEPTED = tl.constexpr(-1)


@triton.jit
def _sum_vocab(
    p_ptr,
    q_ptr,
    rejected_ptr,
    rejections,
    drawn,
    kept,
    vocab,
    weight,
    coef,
    BLOCK: tl.constexpr,
):
    """Returns the sums over the vocabulary of m = (weight p - coef q)+ and of q without rejected tokens.

    A rejected token is stored as -1 - x if x was proposed deterministically. Then m is 0 at x, except for the
    rejection number ``kept``. ``drawn`` counts the other rejected tokens; if it is 0, q is not read. NaN
    counts as 0.
    """
    mass_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mass, q = _mass(
            p_ptr, q_ptr, rejected_ptr, token, rejections, drawn, kept, vocab, weight, coef
        )  # fmt: skip
        mass_sum += mass
        q_sum += q
    return tl.sum(mass_sum, 0), tl.sum(q_sum, 0)


@triton.jit
def _mass(p_ptr, q_ptr, rejected_ptr, token, rejections, drawn, kept, vocab, weight, coef):
    """Returns m and q of ``token``, see ``_sum_vocab``."""
    inside = token < vocab
    p = tl.load(p_ptr + token, mask=inside, other=0.0)
    # ``token * 0`` makes a block, because Triton's interpreter cannot combine a block with a scalar.
    q = tl.load(q_ptr + token, mask=inside & (token * 0 + drawn > 0), other=0.0)
    mass = weight * p - coef * q
    mass = tl.where(mass > 0.0, mass, 0.0)
    for at in range(rejections):
        rejected = tl.load(rejected_ptr + at)
        q = tl.where(token == rejected, 0.0, q)
        mass = tl.where((token == -1 - rejected) & (token * 0 + at != kept), 0.0, mass)
    return mass, q


@triton.jit
def _draw_token(
    p_ptr,
    q_ptr,
    noise_ptr,
    rejected_ptr,
    rejections,
    drawn,
    kept,
    vocab,
    weight,
    coef,
    BLOCK: tl.constexpr,
):
    """Returns the sum of m over the vocabulary, see ``_sum_vocab``, and the argmax of m / exponential.

    Divisions take most of the time of this pass, so ``_sum_vocab`` exists for passes that need no argmax.
    """
    mass_sum = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        exponential = tl.load(noise_ptr + token, mask=token < vocab, other=1.0)
        mass, _ = _mass(
            p_ptr, q_ptr, rejected_ptr, token, rejections, drawn, kept, vocab, weight, coef
        )  # fmt: skip
        mass_sum += mass
        score = tl.where(mass > 0.0, tl.div_rn(mass, exponential), 0.0)
        better = score > best
        best_token, best = tl.where(better, token, best_token), tl.where(better, score, best)
    top = tl.max(best, 0)
    # Lanes without any positive score hold token 0, which is also emitted for probs of sum 0.
    token = tl.min(tl.where(best == top, best_token, 2147483647), 0)
    return tl.sum(mass_sum, 0), token


@triton.jit
def _judge_kernel(
    outcome_ptr,  # int64 [B, N]: the token to emit if the node is accepted, else -1
    rejected_ptr,  # int32 [B, N], scratch for rejected tokens, in which siblings are contiguous
    tokens_ptr,  # int64 [B, N]; all inputs have a stride between sequences
    parents_ptr,
    p_ptr,  # fp32 [B, N, V]
    q_ptr,  # fp32 [B, M, V]
    q_rows_ptr,  # int64 [B, N]
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
    rejected_ptr += sequence * nodes
    noise_ptr += sequence * noise_b

    # ``p_here`` and ``q_here`` are p and q of each node's token at its parent.
    index = tl.arange(0, BLOCK_N)
    real = index < nodes
    token = tl.load(tokens_ptr + sequence * tokens_b + index, mask=real, other=-1)
    parent = tl.load(parents_ptr + index, mask=real, other=-1)
    own_row = tl.load(q_rows_ptr + index, mask=real, other=-1)
    valid = (token >= 0) & (token < vocab) & (parent >= 0) & (parent < index)
    q_row = tl.load(q_rows_ptr + parent, mask=valid, other=-1)
    # The row of a node whose children are all deterministic is not read, so it may be out of range.
    q_row = tl.where((own_row == _FIXED) & (q_row >= q_count), -1, q_row)
    valid = valid & (q_row < q_count)
    fixed = (q_row < 0) | (own_row == _FIXED)
    p_here = tl.load(p_ptr + parent * p_n + token, mask=valid, other=0.0)
    q_here = tl.load(q_ptr + q_row * q_m + token, mask=valid & (q_row >= 0), other=0.0)
    valid = valid & (fixed | (q_here > 0.0))

    # ``on_path`` marks the path from the root. Parents precede their children, so it is in the order of
    # indices.
    on_path = index == own_node
    level, node = 0, own_node
    while node > 0:
        above = tl.load(parents_ptr + node).to(tl.int32)
        node = tl.where(above < node, above, -1)
        on_path = on_path | (index == node)
        level += 1
    uniform = tl.load(uniforms_ptr + sequence * uniforms_b + own_node)
    alive = (node == 0) & (level <= depth)

    reached = tl.full([], 1.0, tl.float32)  # b, the weight of ``node``
    node, level = own_node * 0, 0
    outcome = tl.full([], _NOT_ACCEPTED, tl.int64)
    while alive:
        is_own = node == own_node
        below = tl.min(tl.where(on_path & (index > node), index, BLOCK_N), 0)
        candidates = valid & (parent == node) & (level < depth)
        place = rejected_ptr + tl.sum((valid & (parent < node)).to(tl.int32), 0)
        row = tl.load(q_rows_ptr + node)
        q_of_node = q_ptr + tl.where((row >= 0) & (row < q_count), row, 0) * q_m
        p_of_node = p_ptr + node.to(tl.int64) * p_n
        weight, coef = reached, reached * 0.0  # a, A
        scale, q_left = coef + 1.0, coef + 1.0  # C, T
        rejections, drawn, kept = node * 0, node * 0, node * 0 - 1
        scanned, emitted = node < 0, node * 0
        child = tl.min(tl.where(candidates, index, BLOCK_N), 0)
        while (child < BLOCK_N) & (child != below):
            is_child = index == child
            rejected = tl.sum(tl.where(is_child, token, 0), 0)
            is_fixed = tl.max((is_child & fixed).to(tl.int32), 0) > 0
            candidates = candidates & (token != rejected)
            child = tl.min(tl.where(candidates, index, BLOCK_N), 0)
            tl.store(place + rejections, tl.where(is_fixed, -1 - rejected, rejected).to(tl.int32))
            rejections += 1
            drawn += tl.where(is_fixed, 0, 1)
            next_coef = tl.where(is_fixed, coef, coef + scale / q_left)
            # One thread writes the list of rejected tokens, and all threads read it.
            tl.debug_barrier()
            emit = is_own & (child == BLOCK_N)
            if emit:
                # After the last child, the sum of q is not needed.
                mass, token_here = _draw_token(
                    p_of_node, q_of_node, noise_ptr, place, rejections, drawn, kept, vocab, reached,
                    next_coef, BLOCK_V,
                )  # fmt: skip
                q_mass = q_left
            else:
                mass, q_mass = _sum_vocab(
                    p_of_node, q_of_node, place, rejections, drawn, kept, vocab, reached, next_coef, BLOCK_V
                )
                token_here = emitted
            share = tl.div_rn(mass, scale)
            rest = 1.0 - weight + share
            # An empty residual does not change p, and the weight becomes 0 unless it is 1.
            empty = mass <= 0.0
            weight = tl.where(empty, tl.where(weight >= 1.0, 1.0, 0.0), tl.div_rn(share, rest))
            scale = tl.where(empty, scale, scale * rest)
            coef = tl.where(empty, coef, next_coef)
            kept = tl.where(empty & is_fixed, rejections - 1, kept)
            q_left = tl.where(is_fixed, q_left, q_mass)
            scanned, emitted = emit & (mass > 0.0), token_here
            candidates = candidates & (index * 0.0 + weight > 0.0)
            child = tl.where(weight > 0.0, child, BLOCK_N)
        if is_own:
            accepted = (node == 0) | (uniform < weight)
            if accepted & ~scanned:
                tl.debug_barrier()
                _, emitted = _draw_token(
                    p_of_node, q_of_node, noise_ptr, place, rejections, drawn, kept, vocab, reached, coef,
                    BLOCK_V,
                )  # fmt: skip
            outcome = tl.where(accepted, emitted.to(tl.int64), _NOT_ACCEPTED)
            alive = node < 0
        else:
            # The child is not reached if a sibling with an equal token removed it.
            is_child = (index == below) & candidates
            p_child = tl.sum(tl.where(is_child, p_here, 0.0), 0)
            q_child = tl.sum(tl.where(is_child, q_here, 0.0), 0)
            is_fixed = tl.max((is_child & fixed).to(tl.int32), 0) > 0
            mass = reached * p_child - coef * q_child
            mass = tl.div_rn(tl.where(mass > 0.0, mass, 0.0), scale)
            chance = tl.div_rn(mass, tl.where(is_fixed, 1.0, tl.div_rn(q_child, q_left)))
            exists = tl.max(is_child.to(tl.int32), 0) > 0
            reached = tl.where(exists & (chance > 0.0), tl.minimum(chance, 1.0), 0.0)
            node, level = below, level + 1
            # Rejections only lower a weight, so a node whose first weight is too low cannot be accepted.
            alive = (reached > 0.0) & ((node != own_node) | (uniform < reached))
    tl.store(outcome_ptr + sequence * nodes + own_node, outcome)


@triton.jit
def _first_kernel(
    path_ptr,  # int64 [B, depth + 1]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    found_ptr,  # int32 [B, N], scratch: whether a node or a descendant is accepted
    outcome_ptr,  # int64 [B, N]
    parents_ptr,  # int64 [B, N], with a stride between sequences
    parents_b,
    nodes,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    index, slot = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    real = index < nodes
    parents_ptr += sequence * parents_b
    found_ptr += sequence * nodes
    outcomes = tl.load(outcome_ptr + sequence * nodes + index, mask=real, other=-1)
    parent = tl.load(parents_ptr + index, mask=real, other=-1).to(tl.int32)
    tl.store(found_ptr + index, (outcomes >= 0).to(tl.int32), mask=real)
    tl.debug_barrier()
    above = tl.where(real & (outcomes >= 0), parent, -1)
    for _ in range(1, depth):
        tl.store(found_ptr + above, index * 0 + 1, mask=above > 0)
        above = tl.load(parents_ptr + above, mask=above > 0, other=-1).to(tl.int32)
    tl.debug_barrier()
    found = tl.load(found_ptr + index, mask=real, other=0) > 0
    path = tl.where(slot == 0, 0, -1).to(tl.int64)
    count, node = 1, 0
    child = tl.min(tl.where(found & (parent == 0), index, BLOCK_N), 0)
    while (child < BLOCK_N) & (count <= depth):
        path = tl.where(slot == count, child.to(tl.int64), path)
        count += 1
        node = child
        child = tl.min(tl.where(found & (parent == node), index, BLOCK_N), 0)
    tl.store(path_ptr + sequence * (depth + 1) + slot, path, mask=slot <= depth)
    tl.store(count_ptr + sequence, count)
    tl.store(next_ptr + sequence, tl.sum(tl.where(index == node, outcomes, 0), 0))


def traverse_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``traversal.traverse_tree``; probs and noise must be fp32."""
    batch, nodes = tokens.shape
    vocab = p.shape[2]
    tokens, parents, q_rows, uniforms = (dense(x) for x in (tokens, parents, q_rows, uniforms))
    p, q, exponential = (dense(x) for x in (p, q, exponential))
    if nodes == 1:
        # There is only a draw. Torch's argmax divides the vocabulary among many programs, the kernel uses
        # one.
        best = (p[:, 0].nan_to_num(0.0) / exponential).argmax(-1)
        path = tokens.new_full((batch, depth + 1), -1)
        path[:, 0] = 0
        return path, torch.ones_like(best), best
    outcome = torch.empty(batch, nodes, dtype=torch.int64, device=p.device)
    scratch = torch.empty(2, batch, nodes, dtype=torch.int32, device=p.device)
    block_n, block_v = triton.next_power_of_2(nodes), min(_BLOCK_V, triton.next_power_of_2(vocab))
    _judge_kernel[(nodes, batch)](
        outcome, scratch[0], tokens, parents, p, q, q_rows, uniforms, exponential,
        tokens.stride(0), parents.stride(0), p.stride(0), p.stride(1), q.stride(0), q.stride(1),
        q_rows.stride(0), uniforms.stride(0), exponential.stride(0), nodes, q.shape[1], vocab, depth,
        BLOCK_N=block_n, BLOCK_V=block_v, **warps(max(1, min(16, block_v // 256))),
    )  # fmt: skip
    path, count, following = empty_results(tokens, depth)
    _first_kernel[(batch,)](
        path, count, following, scratch[1], outcome, parents, parents.stride(0), nodes, depth,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(depth + 1), **warps(max(1, block_n // 256)),
    )  # fmt: skip
    return path, count, following

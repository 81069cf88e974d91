"""Triton kernels of greedy acceptance and of the choice of second tokens, defined in ``accept``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import dense, warps
from triforce_tree.kernels.step.accept import empty_results

_BLOCK_V = 4096


@triton.jit
def _greedy_kernel(
    path_ptr,  # int64 [B, depth + 1]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    tokens_ptr,  # int64 [B, N], like the next two; each has a stride between sequences
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

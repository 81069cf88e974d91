"""Vectorised versions of ops whose definitions loop over sequences in Python, for large batches."""

import pytest
import torch
from torch import Tensor

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.draft_window import RecomputedWindow
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan
from triforce_tree.kernels.cpu import backend as cpu_backend
from triforce_tree.kernels.step.kv_slots import quantized
from triforce_tree.kv import backend
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel


def use_batched_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectorised attention, moves of KV slots and acceptance, for statistics over many short sequences."""
    monkeypatch.setattr(step, "traverse_tree", traverse_tree)
    monkeypatch.setattr(step, "append_kv", append_kv)
    monkeypatch.setattr(step, "move_kv", move_kv)
    monkeypatch.setattr(cpu_backend, "planned_attention", attention)


def prefill_alike(program: DecodingProgram, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """``program.prefill`` of one prompt for the whole batch, computed once."""
    one = backend.prefill

    def prefill_first(model: HFModel, cache: PromptCache, *rest) -> None:
        if cache.sequence == 0:
            one(model, cache, *rest)
            share_first(cache.store)

    monkeypatch.setattr(backend, "prefill", prefill_first)
    share_windows(monkeypatch)
    program.prefill([prompt] * program.batch)


def share_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes draft windows for the first sequence and copies them: for equal sequences only."""
    prefill = RecomputedWindow._prefill

    def prefill_first(self: RecomputedWindow, b: int, tokens: list[int]) -> None:
        if b == 0:
            prefill(self, b, tokens)
            share_first(self.store)

    monkeypatch.setattr(RecomputedWindow, "_prefill", prefill_first)


def share_first(store: KVStore) -> None:
    """Copies the first sequence's KV slots to all others."""
    for group in store.groups:
        for slots in group.parts:
            slots[:, 1:] = slots[:, :1]


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """``step.append_kv`` where all rows fit, without a page table."""
    assert not ring
    assert table is None
    if k_scale is not None and v_scale is not None:
        (k, k_scales), (v, v_scales) = quantized(k), quantized(v)
        append_kv(k_scale, v_scale, k_scales, v_scales, start)
    slots = start[:, None] + torch.arange(k.shape[2])
    assert int(slots.max()) < k_cache.shape[2]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.scatter_(2, slots[:, None, :, None].expand(new.shape), new)


def move_kv(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    start: Tensor,
    ring: int = 0,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """``step.move_kv`` where all rows fit, without a page table."""
    assert not ring
    assert table is None
    width = index.shape[1]
    targets = start[:, None] + torch.arange(width)
    sources = torch.where(index >= 0, start[:, None] + index, targets)
    for rows in (k, v):
        shape = (rows.shape[0], *targets.shape[:1], rows.shape[2], width, rows.shape[4])
        moved = rows.gather(3, sources[None, :, None, :, None].expand(shape))
        rows.scatter_(3, targets[None, :, None, :, None].expand(shape), moved)


def attention(
    q: Tensor, kv: KV, plan: Plan, params: AttentionParams, first: FirstVisible | None = None
) -> Tensor:
    """``planned_attention`` if all sequences have equally many queries, and a tail of at most 64 KV slots."""
    assert first is None
    assert params.softcap is None
    assert params.sinks is None
    k, v, table, scales = kv
    if scales is not None:
        # Of slots past the end, which hold NaN and are not seen, keys and values are 0.
        k, v = (t * own.nan_to_num(0.0) for t, own in zip((k, v), scales, strict=True))
    if table is not None:
        pages, each = table.long(), torch.arange(table.shape[1])[:, None]
        k, v = (t[pages, each].flatten(2, 3) for t in (k, v))
    batch, heads, rows, dim = k.shape
    tail = int(plan.segments[2, 0])
    packed = q.view(batch, -1, heads, plan.heads.group, dim)  # [B, T, H_kv, G, D]
    scores = torch.einsum("btkgd,bksd->bkgts", packed, k) * params.scale
    offset = torch.arange(rows) - plan.lengths.long()[:, None]  # [B, S], 0 at the first slot of the tail
    mask_words = plan.mask.view(batch, -1, 1)
    bits = (mask_words >> offset.clamp(0, 63)[:, None]) & 1  # [B, T, S]
    visible = (offset < 0)[:, None] | ((offset < tail)[:, None] & bits.bool())
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    valid = (offset < tail)[:, None, :, None]
    out = torch.einsum("bkgts,bksd->btkgd", weights, v.masked_fill(~valid, 0.0))
    return out.reshape(*q.shape[:2], -1)


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
    """``step.traverse_tree`` in one pass over all nodes: each is judged as if its siblings were rejected."""
    batch, nodes = tokens.shape
    every = torch.arange(batch)
    # Deterministic children have draft probabilities of one, which become zero for rejected tokens.
    q = torch.cat([q, torch.ones_like(p[:, :1])] if q.shape[1] else [torch.ones_like(p[:, :1])], 1)
    last = q.shape[1] - 1
    rows = torch.where(q_rows < 0, last, q_rows.clamp(0, last))
    draft, target, weight = q[every[:, None], rows], p.clone(), torch.zeros_like(uniforms)
    level, exists = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    weight[:, 0], exists[:, 0] = 1.0, True
    for child in range(1, nodes):
        above, x = parents[:, child].clamp_min(0), tokens[:, child].clamp_min(0)[:, None]
        fixed, a = (rows[every, above] == last)[:, None], weight[every, above][:, None]
        mass, proposal = a * target[every, above], draft[every, above]
        chance = proposal.gather(1, x)
        level[:, child] = level[every, above] + 1
        there = (
            exists[every, above] & (tokens[:, child] >= 0) & (chance[:, 0] > 0) & (level[:, child] <= depth)
        )
        exists[:, child] = there
        weight[:, child] = torch.where(there, (mass.gather(1, x) / chance)[:, 0].clamp(max=1), 0.0)
        left = torch.where(fixed, without(mass, x), (mass - proposal).clamp_min(0))
        total = left.sum(1, keepdim=True)
        after = torch.where(total > 0, total / (1 - a + total), (a >= 1).float())
        others = without(proposal, x)
        others = torch.where(fixed, others, normalised(others, others))
        weight[every, above] = torch.where(there[:, None], after, a)[:, 0]
        target[every, above] = torch.where(
            there[:, None], normalised(left, target[every, above]), target[every, above]
        )
        draft[every, above] = torch.where(there[:, None], others, proposal)
    found = exists & (uniforms < weight)
    for child in reversed(range(1, nodes)):
        found[every, parents[:, child].clamp_min(0)] |= found[:, child]
    node, count = torch.zeros_like(tokens[:, 0]), torch.ones_like(tokens[:, 0])
    path = torch.full((batch, depth + 1), -1)
    path[:, 0] = 0
    for child in range(1, nodes):
        accepted = found[:, child] & (parents[:, child] == node)
        path[every[accepted], count[accepted]] = child
        node, count = torch.where(accepted, child, node), count + accepted
    target = target[every, node]
    return path, count, torch.where(target > 0, target / exponential, 0.0).argmax(1)


def without(probs: Tensor, tokens: Tensor) -> Tensor:
    """``probs`` ``[B, V]`` with those of tokens ``[B, 1]`` set to 0, not normalised."""
    return probs.scatter(1, tokens, 0.0)


def normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    """``masses`` ``[B, V]`` divided by their sums; rows of ``otherwise`` for sums of 0."""
    total = masses.sum(1, keepdim=True)
    return torch.where(total > 0, masses / total, otherwise)

"""Batched stand-ins for ops whose references loop over sequences in Python, for batches of many texts."""

import pytest
import torch
from torch import Tensor

from triforce_tree.decoding import full_cache
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kernels import step
from triforce_tree.kernels.attention import planned
from triforce_tree.kernels.attention.plan import FirstRows, Plan
from triforce_tree.models.hf_model import HFModel


def use_batched_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, row moves and acceptance of a whole batch at once, for statistics over many short texts."""
    monkeypatch.setattr(step, "accept_tree", accept_tree)
    monkeypatch.setattr(step, "append_rows", append_rows)
    monkeypatch.setattr(step, "move_rows", move_rows)
    monkeypatch.setattr(planned, "run", attention)


def prefill_alike(program: DecodingProgram, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """``program.prefill`` of one prompt for the whole batch, computed once."""
    one = full_cache.prefill

    def first_alone(model: HFModel, store, sequence: int, *rest) -> None:
        if sequence == 0:
            one(model, store, sequence, *rest)
            store.kv[:, :, 1:] = store.kv[:, :, :1]

    monkeypatch.setattr(full_cache, "prefill", first_alone)
    share_windows(monkeypatch)
    program.prefill([prompt] * program.batch)


def share_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft windows are computed for the first sequence and copied: for equal texts only."""
    feed = TreeDrafter._feed

    def first_alone(self: TreeDrafter, b: int, tokens: list[int]) -> None:
        if b == 0:
            feed(self, b, tokens)
            self.store.kv[:, :, 1:] = self.store.kv[:, :, :1]

    monkeypatch.setattr(TreeDrafter, "_feed", first_alone)


def append_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, ring: int = 0) -> None:
    """``step.append_rows`` where all rows fit."""
    assert not ring
    batch, heads, rows, dim = k.shape
    at = start[:, None] + torch.arange(rows)
    assert int(at.max()) < k_cache.shape[2]
    at = at[:, None, :, None].expand(batch, heads, rows, dim)
    k_cache.scatter_(2, at, k)
    v_cache.scatter_(2, at, v)


def move_rows(rows: Tensor, index: Tensor, start: Tensor, ring: int = 0) -> None:
    """``step.move_rows`` where all rows fit."""
    assert not ring
    width = index.shape[1]
    targets = start[:, None] + torch.arange(width)
    sources = torch.where(index >= 0, start[:, None] + index, targets)
    shape = (rows.shape[0], *targets.shape[:1], rows.shape[2], width, rows.shape[4])
    moved = rows.gather(3, sources[None, :, None, :, None].expand(shape))
    rows.scatter_(3, targets[None, :, None, :, None].expand(shape), moved)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor | None = None,
    first: FirstRows | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``planned.run`` where all sequences have as many queries, and a tail of at most 64 rows."""
    assert first is None
    assert softcap is None
    assert sinks is None
    if table is not None:
        pages, heads = table.long(), torch.arange(table.shape[1])[:, None]
        k, v = (t[pages, heads].flatten(2, 3) for t in (k, v))
    batch, kv, rows, dim = k.shape
    tail = int(plan.segments[2, 0])
    packed = q.view(batch, -1, kv, plan.heads.group, dim)  # [B, T, H_kv, G, D]
    scores = torch.einsum("btkgd,bksd->bkgts", packed, k) * scale
    place = torch.arange(rows) - plan.lengths.long()[:, None]  # [B, S], 0 where the tail begins
    words = plan.mask.view(batch, -1, 1)
    bits = (words >> place.clamp(0, 63)[:, None]) & 1  # [B, T, S]
    seen = (place < 0)[:, None] | ((place < tail)[:, None] & bits.bool())
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    anyone = (place < tail)[:, None, :, None]
    out = torch.einsum("bkgts,bksd->btkgd", weights, v.masked_fill(~anyone, 0.0))
    return out.reshape(q.shape)


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
    """``step.accept_tree`` in one walk over all nodes: children follow their parents."""
    batch, nodes = tokens.shape
    every = torch.arange(batch)
    node, count = torch.zeros_like(tokens[:, 0]), torch.ones_like(tokens[:, 0])
    path = torch.full((batch, depth + 1), -1)
    path[:, 0] = 0
    # Children proposed deterministically have a draft law of ones, whose refused tokens become zeros.
    q = torch.cat([q, torch.ones_like(p[:, :1])] if q.shape[1] else [torch.ones_like(p[:, :1])], 1)
    q_rows = torch.where(q_rows == -1, q.shape[1] - 1, q_rows.clamp(0, q.shape[1] - 1))
    to_probs, row = p[:, 0], q_rows[:, 0]
    draft = q[every, row]
    for child in range(1, nodes):
        x = tokens[:, child].clamp_min(0)[:, None]
        chance = draft.gather(1, x)[:, 0]
        judged = (parents[:, child] == node) & (tokens[:, child] >= 0) & (count <= depth) & (chance > 0)
        taken = judged & (uniforms[:, child] < to_probs.gather(1, x)[:, 0] / chance)
        refused, fixed = (judged & ~taken)[:, None], (row == q.shape[1] - 1)[:, None]
        left = torch.where(fixed, to_probs.scatter(1, x, 0.0), (to_probs - draft).clamp_min(0))
        to_probs = torch.where(refused, normalised(left, to_probs), to_probs)
        rest = without(draft, x)
        draft = torch.where(refused, torch.where(fixed, rest, normalised(rest, rest)), draft)
        to_probs = torch.where(taken[:, None], p[:, child], to_probs)
        row = torch.where(taken, q_rows[:, child], row)
        draft = torch.where(taken[:, None], q[every, row], draft)
        path[every[taken], count[taken]] = child
        node, count = torch.where(taken, child, node), count + taken
    return path, count, torch.where(to_probs > 0, to_probs / exponential, 0.0).argmax(1)


def without(probs: Tensor, tokens: Tensor) -> Tensor:
    """Laws ``[B, V]`` in which tokens ``[B, 1]`` have no probability, not normalised."""
    return probs.scatter(1, tokens, 0.0)


def normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    total = masses.sum(1, keepdim=True)
    return torch.where(total > 0, masses / total, otherwise)

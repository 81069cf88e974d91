"""Logits of each level for given tokens instead of drawn ones: for measurements and checks.

Everything runs through the models, KV slots and kernels that decoding uses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.drafter import TokenTree
from triforce_tree.cycle.shapes import DeviceShape
from triforce_tree.cycle.stages import DraftStage
from triforce_tree.token_tree import ancestor_mask


def target_logits(cycle: Cycle, tokens: Sequence[int]) -> Tensor:
    """``[T, V]`` of a pass of level 2 over a chain of T tokens, the first of which is the root.

    The texts stay as they are; KV slots behind the root are overwritten, as by any pass.

    Args:
        cycle: fed with a single text, which ends with ``tokens[0]``.
    """
    count = len(tokens)
    tree = _chain(cycle, count)
    tree.tokens.copy_(torch.tensor([list(tokens)], device=cycle.device))
    rows = cycle.full_rows(count, ancestor_mask(list(range(-1, count - 1))), list(range(count)))
    root = cycle.texts.length.clone()
    rows.begin(root)
    logits = cycle.full(tree.tokens, root[:, None] + tree.depths, rows)
    return logits[0]


def retrieval_logits(cycle: Cycle, tokens: Sequence[int], offset: int) -> Tensor:
    """``[T, V]`` of a pass of level 1 over a chain of T tokens, the first of which is the root.

    Args:
        cycle: of three levels, fed with a single text; the ``offset`` tokens behind its end must have passed
            level 1 before.
        tokens: as many as the drafter's trees have levels, and the root.
    """
    view = cycle.rows or cycle.copies
    assert view is not None, "a cycle of three levels has a level 1"
    stage = cycle.stage("grow")
    assert isinstance(stage, DraftStage)
    depths = stage.tree.depths
    # The first slot of each depth; the other slots see themselves alone.
    at = [depths.tolist().index(depth) for depth in range(len(tokens))]
    ids = torch.zeros(1, len(depths), dtype=torch.int64, device=cycle.device)
    ids[0, at] = torch.tensor(list(tokens), device=cycle.device)
    words = (1 << torch.arange(len(depths), device=cycle.device))[None].clone()
    words[0, at] = torch.tensor(
        [sum(1 << a for a in at[: i + 1]) for i in range(len(at))], device=cycle.device
    )
    root = cycle.texts.length + offset
    view.choosing = True
    view.choose(root, cycle.texts.length)
    view.begin(root, words)
    logits = cycle.middle(ids, root[:, None] + depths, view)
    # As the pass that accepts them would, so that the next one finds them in a line.
    path = torch.tensor([at], device=cycle.device)
    view.move(path)
    return logits[0, at]


def draft_probs(cycle: Cycle, generator: torch.Generator) -> Tensor | None:
    """``[V]``, what the drafter's first token behind the text is drawn from; None for a deterministic one."""
    cycle.run("grow", generator)
    stage = cycle.stage("grow")
    assert isinstance(stage, DraftStage)
    probs = stage.tree.probs
    return probs[0, 0].clone() if probs.shape[1] else None


def commit(cycle: Cycle, count: int) -> None:
    """The first ``count`` tokens of the last :func:`target_logits` are text."""
    texts = cycle.texts
    before = texts.length.clone()
    texts.length += count
    if cycle.rows is not None:
        chunk = cycle.rows.store.page
        cycle.rows.renew_means(before // chunk, count // chunk + 2)
    cycle.settled([count])


def _chain(cycle: Cycle, count: int) -> TokenTree:
    return TokenTree.of(DeviceShape((1,) * (count - 1), (((0, 0),),) * (count - 1)), 1, 0, cycle.device)

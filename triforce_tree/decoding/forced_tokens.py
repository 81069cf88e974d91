"""Logits of each level for given tokens instead of drawn ones: for measurements and checks.

Everything runs through the models, KV slots and kernels that decoding uses. A pass is :func:`offer`, then the
levels in their order, since each overwrites the KV slots of the one below, then :func:`commit`. A drafter
misses what was committed in passes without :func:`draft_probs`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import DraftStage
from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.trees.ancestors import ancestor_mask
from triforce_tree.trees.device_shapes import DeviceTreeShape


def offer(cycle: DecodingProgram, text: Sequence[int], coming: Sequence[int]) -> None:
    """Write ``coming`` behind a text, of which they are no part yet.

    Args:
        cycle: fed with a single text, all of whose tokens are ``text``.
        coming: at most as many as level 1 may gather.
    """
    texts, stop = cycle.texts, len(text) + len(coming)
    texts.tokens[0, len(text) : stop] = torch.tensor(list(coming), dtype=torch.int64, device=cycle.device)
    if cycle.drafter is not None:
        cycle.drafter.prepare([text], resumed=False)


def draft_probs(cycle: DecodingProgram, count: int, generator: torch.Generator) -> Tensor | None:
    """What the drafter draws the next token from, behind the root and each of the tokens offered.

    Returns:
        fp32 ``[count, V]``, the root's and those of the first ``count - 1`` tokens; None for a deterministic
        drafter.
    """
    stage, texts = cycle.stage("grow"), cycle.texts
    assert isinstance(stage, DraftStage)
    if stage.drafter.deterministic:
        return None
    probs = []
    for offset in range(count):
        texts.chain.fill_(offset)
        cycle.run("grow", generator)
        probs.append(stage.tree.probs[0, 0].clone())
    texts.chain.zero_()
    return torch.stack(probs)


def retrieval_logits(cycle: DecodingProgram, tokens: Sequence[int], step: int) -> Tensor:
    """``[T, V]`` of level 1 over a chain of T tokens, the first of which is the root.

    Each forward feeds a new root and the tokens below it, and sees what earlier ones fed through their KV
    slots of level 1. Chunks are chosen when, and by the query that, they are while decoding.

    Args:
        cycle: of three levels, fed with a single text, which ends with ``tokens[0]``.
        step: tokens of one forward; at most the nodes of the drafter's trees.
    """
    view = cycle.rows or cycle.copies
    assert view is not None, "a cycle of three levels has a level 1"
    nodes, device = view.mask.shape[0], cycle.device
    step = min(step, nodes)
    own = pack_mask(torch.eye(nodes, dtype=torch.bool, device=device))
    logits: list[Tensor] = []
    whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
    for number, first in enumerate(range(0, len(tokens), step)):
        part = list(tokens[first : first + step])
        count = len(part)
        tree = _chain(cycle, count)
        # The other nodes of a tree are there too, as in every forward of level 1; nobody sees them.
        ids, depths = torch.zeros(1, nodes, **whole), torch.zeros(nodes, **whole)
        words = own[None].clone()
        ids[0, :count], depths[:count] = torch.tensor(part, device=device), tree.depths
        words[:, :count, : tree.words.shape[2]] = tree.words
        root = cycle.texts.length + first
        view.choosing = cycle.config.retrieval.chooses(number)
        if view.choosing:
            view.choose(root, cycle.texts.length)
        view.begin(root, words)
        logits.append(cycle.middle(ids, root[:, None] + depths, view)[0, :count].clone())
    return torch.cat(logits)


def target_logits(cycle: DecodingProgram, tokens: Sequence[int]) -> Tensor:
    """``[T, V]`` of a pass of level 2 over a chain of T tokens, the first of which is the root.

    The text stays as it is; KV slots behind the root are overwritten, as by any pass.

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


def commit(cycle: DecodingProgram, count: int) -> None:
    """The first ``count`` tokens of the last :func:`target_logits` are text, and the next one is the root."""
    texts = cycle.texts
    before = texts.length.clone()
    texts.length += count
    if cycle.rows is not None:
        chunk = cycle.rows.store.page
        cycle.rows.renew_means(before // chunk, count // chunk + 2)
    cycle.settled([count])


def _chain(cycle: DecodingProgram, count: int) -> TokenTree:
    return TokenTree.of(DeviceTreeShape((1,) * (count - 1), (((0, 0),),) * (count - 1)), 1, 0, cycle.device)

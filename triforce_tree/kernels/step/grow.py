"""Tree growth between the forwards of a draft model: first inputs, child tokens, new nodes."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask, unpack_mask
from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.draws import Draws, NoiseDraws, draw_tokens, ranked


@operator(
    "begin_tree",
    writes=("ids", "positions", "root", "at", "lengths"),
    triton=".place_kernels",
    cpu="..cpu.step.grow",
)
def begin_tree(
    ids: Tensor,
    positions: Tensor,
    root: Tensor,
    at: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    end: Tensor,
    dropped: Tensor,
    offsets: Tensor,
    ahead: Tensor,
) -> None:
    """Prepares the draft forwards for a tree rooted at token ``end``.

    The first five arguments are written.

    Args:
        ids: int64 ``[B, A]``, the newest tokens of the sequence, the root last.
        positions: int64 ``[B, C]``, cache positions of the columns, not counting the ``dropped`` tokens.
        root: int64 ``[B, N]``, whose first column receives the root token.
        at: int64 ``[D, B]``, the first KV slot that each forward writes.
        lengths: int32 ``[B]``, KV slots before those of ``ids``.
        tokens: int64 ``[B, S]``, the sequences. One with fewer than A tokens up to ``end`` is padded on the
            left with copies of its first token.
        end, dropped: int64 ``[B]``; for a padded sequence ``dropped`` is negative, at most ``end`` - A + 1.
        offsets: int64 ``[C]``, position of each column relative to the root; the first A are 1 - A ... 0.
        ahead: int64 ``[D]``, first KV slot of each forward relative to the root's.
    """
    newest, place = ids.shape[1], end - dropped
    ids.copy_(tokens.gather(1, (end[:, None] + offsets[:newest]).clamp_min(0)))
    positions.copy_(place[:, None] + offsets)
    root[:, 0] = ids[:, -1]
    at.copy_(place + ahead[:, None])
    lengths.copy_(place - newest + 1)


@operator("expand_nodes", writes=("probs",), triton=".grow_kernels", cpu="..cpu.step.grow")
def expand_nodes(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The draft probs at a tree's frontier, and the tokens that may become their children.

    Args:
        logits: ``[B, F, V]``.
        temperature: fp32 ``[]``; None for 1.
        exponential: fp32 ``[B, F, V]`` of Exp(1) noise: draws without replacement, by descending
            probs / exponential; None: the most probable tokens. The lower id among equals.
        probs: fp32 ``[B, F, V]``, written: softmax of logits / temperature.
        count: K, draws of a node.

    Returns:
        int64 ``[B, F, K]``, tokens in draw order, -1 where there are no more; fp32 ``[B, F, K]``, the K
        largest probabilities, which do not depend on the draws; 0 past V.
    """
    return expand_drawn(
        None if exponential is None else NoiseDraws(exponential),
        logits,
        temperature,
        probs,
        count,
    )


def expand_drawn(
    draws: Draws | None, logits: Tensor, temperature: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """``expand_nodes`` with any source of random decisions; None: the most probable tokens."""
    scores = logits.float() if temperature is None else logits.float() / temperature
    probs.copy_(scores.softmax(-1))
    return draw_tokens(draws, probs, count)


@operator(
    "place_nodes",
    writes=("tokens", "parents", "mask_words", "path_probs", "ids", "mask"),
    triton=".place_kernels",
    cpu="..cpu.step.grow",
)
def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    mask_words: Tensor,
    path_probs: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    by_rank: Tensor,
    probs: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """Adds W children of the frontier ``first ... first + F - 1`` after its nodes.

    The first six arguments are written.

    Which (parent, rank) places they take depends on ``pairs``, or on ``path_probs`` and ``by_rank``: on what
    was known before these draws, as losslessness requires. The i-th largest probability estimates that of the
    i-th draw, whichever token that is.

    Args:
        tokens, parents: int64 ``[B, N]``.
        mask_words: int64 ``[B, N, L]`` with 64 L at least N; bit j of word l: node 64 l + j is the node
            itself or an ancestor.
        path_probs: fp32 ``[B, N]``, products of the draft probabilities along the paths.
        ids: int64 ``[B, W]``, the new tokens as input of a forward, 0 for absent ones.
        mask: int64 ``[B * W, M]``, the attention mask of the new nodes: ``before`` set bits, then those of
            ``mask_words``; None where no forward follows.
        draws, by_rank, probs: of the frontier, see ``expand_nodes``.
        pairs: int64 ``[2, W]``, parents (counted from ``first``) and ranks of the new nodes, siblings by
            rank; None: the W places of largest path probability, the lower (parent, rank) among equals.
    """
    batch, frontier, count = draws.shape
    old, new = slice(first, first + frontier), slice(first + frontier, first + frontier + ids.shape[1])
    if pairs is None:
        # Probabilities fall with the rank: a parent with n chosen places gets its first n draws.
        place_probs = (by_rank * path_probs[:, old, None]).flatten(1)
        chosen = ranked(place_probs).topk(ids.shape[1]).indices.sort(1).values
    else:
        chosen = (pairs[0] * count + pairs[1]).expand(batch, -1)
    above, drawn = chosen // count, draws.flatten(1).gather(1, chosen)
    sequence = torch.arange(batch, device=draws.device)[:, None]
    chance = torch.where(drawn >= 0, probs[sequence, above, drawn.clamp_min(0)], 0.0)
    tokens[:, new], parents[:, new] = drawn, above + first
    path_probs[:, new] = path_probs[:, old].gather(1, above) * chance
    place = torch.arange(new.start, new.stop, device=draws.device)
    own = torch.zeros_like(mask_words[0, new]).scatter_(1, place[:, None] // 64, 1 << place[:, None] % 64)
    mask_words[:, new] = mask_words[sequence, above + first] | own
    ids.copy_(drawn.clamp_min(0))
    if mask is not None:
        seen = torch.nn.functional.pad(unpack_mask(mask_words[:, new]).flatten(0, 1), (before, 0), value=1)
        words = mask.shape[1]
        mask.copy_(pack_mask(seen[:, : 64 * words], words))


def empty_draws(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Uninitialised draws and probabilities by rank of ``expand_nodes``."""
    shape = (*logits.shape[:2], count)
    draws = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return draws, torch.empty(shape, dtype=torch.float32, device=logits.device)


@fake("expand_nodes")
def _(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return empty_draws(logits, count)

"""Growth of a token tree between the forwards of a draft model."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask, unpack_mask
from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.draws import Draws, NoiseDraws, draw_tokens, ranked


@operator(
    "begin_tree",
    writes=("ids", "positions", "root", "at", "lengths"),
    triton=".place_kernels",
    cpu="..cpu.step.operators",
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
    """Prepares the D draft forwards of a tree whose root is token ``end``.

    The first five arguments are written. A forward has up to C columns (input tokens).

    Args:
        ids: int64 ``[B, A]``, the newest A tokens of each sequence; the root is last.
        positions: int64 ``[B, C]``, KV positions of the columns, without counting the ``dropped`` tokens.
        root: int64 ``[B, N]``, tokens of the nodes, of which the first receives the root.
        at: int64 ``[D, B]``, the first KV slot that each forward writes.
        lengths: int32 ``[B]``, number of KV slots before the slots of ``ids``.
        tokens: int64 ``[B, S]``, the sequences. A sequence with fewer than A tokens up to ``end`` is padded
            on the left with copies of its first token.
        end: int64 ``[B]``, index of the root in ``tokens``.
        dropped: int64 ``[B]``, number of tokens that the draft model's KV cache has dropped; negative for a
            padded sequence, at most ``end`` - A + 1.
        offsets: int64 ``[C]``, position of each column relative to the root; the first A are 1 - A ... 0.
        ahead: int64 ``[D]``, first KV slot of each forward relative to the root's slot.
    """
    newest, place = ids.shape[1], end - dropped
    ids.copy_(tokens.gather(1, (end[:, None] + offsets[:newest]).clamp_min(0)))
    positions.copy_(place[:, None] + offsets)
    root[:, 0] = ids[:, -1]
    at.copy_(place + ahead[:, None])
    lengths.copy_(place - newest + 1)


@operator("expand_nodes", writes=("probs",), triton=".grow_kernels", cpu="..cpu.step.operators")
def expand_nodes(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Computes the draft probs at the F frontier nodes of a tree, and tokens that may become their children.

    Args:
        logits: ``[B, F, V]``.
        temperature: fp32 ``[B]``; None for 1.
        exponential: fp32 ``[B, F, V]``, Exp(1) noise for draws without replacement, by descending
            probs / exponential. None takes the most probable tokens. Of equals, the lower id comes first.
        probs: fp32 ``[B, F, V]``, written with softmax of logits / temperature.
        count: K, draws of each node.

    Returns:
        tokens int64 ``[B, F, K]`` in draw order, -1 where there are no more; fp32 ``[B, F, K]``, an estimate
        of the chance that each token is accepted if its parent was, 0 where there is none. The most probable
        tokens have their probabilities. The chances of draws depend on their rank and the largest
        probability (``draws.FIRST_CHANCE``), but not on the tokens.
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
    """Computes ``expand_nodes`` with any source of draws; None takes the most probable tokens."""
    scores = logits.float() if temperature is None else logits.float() / temperature[:, None, None]
    probs.copy_(scores.softmax(-1))
    return draw_tokens(draws, probs, count)


@operator(
    "place_nodes",
    writes=("tokens", "parents", "mask_words", "path_chances", "ids", "mask"),
    triton=".place_kernels",
    cpu="..cpu.step.operators",
)
def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    mask_words: Tensor,
    path_chances: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    chances: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """Adds W children of the frontier nodes ``first ... first + F - 1`` to the tree, after these nodes.

    The first six arguments are written.

    Each new node is a pair (parent, rank of the draw). The pairs depend on ``pairs``, or on ``path_chances``
    and ``chances``. They do not depend on the drawn tokens, as losslessness requires.

    Args:
        tokens, parents: int64 ``[B, N]``, token and parent of each node.
        mask_words: int64 ``[B, N, L]`` with 64 L at least N; bit j of word l says that node 64 l + j is the
            node itself or an ancestor.
        path_chances: fp32 ``[B, N]``, products of the chances along the paths.
        ids: int64 ``[B, W]``, the new tokens as input of a forward, 0 for absent tokens.
        mask: int64 ``[B * W, M]``, the attention mask of the new nodes: ``before`` set bits, then the bits of
            ``mask_words``; None if no forward follows.
        draws, chances: results of ``expand_nodes`` for the frontier.
        pairs: int64 ``[2, W]``, parents (relative to ``first``) and ranks of the new nodes, siblings in order
            of rank. None takes the W pairs whose paths have the largest chances; of equals, the lower pair.
    """
    batch, frontier, count = draws.shape
    old, new = slice(first, first + frontier), slice(first + frontier, first + frontier + ids.shape[1])
    own_chances = (chances * path_chances[:, old, None]).flatten(1)
    if pairs is None:
        # Chances decrease with the rank, so a parent with n children gets its first n draws.
        chosen = ranked(own_chances).topk(ids.shape[1]).indices.sort(1).values
    else:
        chosen = (pairs[0] * count + pairs[1]).expand(batch, -1)
    above, drawn = chosen // count, draws.flatten(1).gather(1, chosen)
    sequence = torch.arange(batch, device=draws.device)[:, None]
    tokens[:, new], parents[:, new] = drawn, above + first
    path_chances[:, new] = own_chances.gather(1, chosen)
    place = torch.arange(new.start, new.stop, device=draws.device)
    own = torch.zeros_like(mask_words[0, new]).scatter_(1, place[:, None] // 64, 1 << place[:, None] % 64)
    mask_words[:, new] = mask_words[sequence, above + first] | own
    ids.copy_(drawn.clamp_min(0))
    if mask is not None:
        seen = torch.nn.functional.pad(unpack_mask(mask_words[:, new]).flatten(0, 1), (before, 0), value=1)
        words = mask.shape[1]
        mask.copy_(pack_mask(seen[:, : 64 * words], words))


def empty_draws(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Allocates the results of ``expand_nodes``."""
    shape = (*logits.shape[:2], count)
    draws = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return draws, torch.empty(shape, dtype=torch.float32, device=logits.device)


@fake("expand_nodes")
def _(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return empty_draws(logits, count)

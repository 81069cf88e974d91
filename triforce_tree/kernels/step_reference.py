"""What one decoding cycle does besides attention and matrix products, in plain torch: the definitions.

The engine keeps a batch of sequences of different lengths on the device and never asks how long they
are: each op here reads lengths, indices and random numbers from tensors. The Triton twins (``rows``,
``select``, ``accept``, ``grow``) have the same signatures, never synchronise with the host and can be
captured in CUDA graphs; these may, and do, loop in Python.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.draws import Draws, NoiseDraws, draw_tokens, ranked


def append_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Write new rows behind the present ones: row t of sequence b goes to row ``start[b] + t``.

    Args:
        k_cache, v_cache: ``[B, H, S, D]``, changed in place; any strides with the last dimension dense.
        k, v: ``[B, H, T, D]``, likewise; rows that would land at S or beyond are dropped.
        start: int64 ``[B]``, not negative.
    """
    size = k_cache.shape[2]
    for sequence, first in enumerate(start.tolist()):
        count = max(0, min(k.shape[2], size - first))
        k_cache[sequence, :, first : first + count] = k[sequence, :, :count].to(k_cache.dtype)
        v_cache[sequence, :, first : first + count] = v[sequence, :, :count].to(v_cache.dtype)


def move_rows(rows: Tensor, index: Tensor, start: Tensor) -> None:
    """Commit accepted paths: row ``start[b] + index[b, i]`` moves to ``start[b] + i``, in place.

    All sources are read before any target is written, so the two may overlap.

    Args:
        rows: ``[P, B, H, S, D]`` (layers times K and V first), any strides with the last dimension dense.
        index: int64 ``[B, R]``; -1, anywhere, moves nothing for its place.
        start: int64 ``[B]``, the committed lengths.
    """
    size = rows.shape[3]
    for sequence, first in enumerate(start.tolist()):
        sources = index[sequence] + first
        targets = torch.arange(index.shape[1], device=rows.device) + first
        moved = (index[sequence] >= 0) & (sources < size) & (targets < size)
        values = rows[:, sequence].index_select(2, sources[moved])
        rows[:, sequence, :, targets[moved]] = values


def chunk_means(means: Tensor, k: Tensor, first: Tensor, count: int, chunk: int) -> None:
    """Recompute the means of chunks ``first[b] ... first[b] + count - 1`` of every layer, in place.

    Chunks that do not lie wholly inside S, or for which ``means`` has no place, are left alone.

    Args:
        means: ``[L, B, H, C, D]``.
        k: keys ``[L, B, H, S, D]``; both have any strides with the last dimension dense.
        first: int64 ``[B]``, not negative.
        count: chunks of each sequence.
        chunk: rows of a chunk.
    """
    places = min(means.shape[3], k.shape[3] // chunk)
    for sequence, begin in enumerate(first.tolist()):
        end = min(begin + count, places)
        if begin < end:
            rows = k[:, sequence, :, begin * chunk : end * chunk].unflatten(2, (end - begin, chunk))
            means[:, sequence, :, begin:end] = rows.float().mean(3).to(means.dtype)


def chunk_interest(q: Tensor, means: Tensor, limit: Tensor, scale: float) -> Tensor:
    """How much each KV head wants each chunk, on a scale that only ranks.

    The largest logarithm of a softmax share over the candidates among the heads of the query group; for
    a group of one the raw score, which ranks alike. Logarithms do not underflow as shares do.

    Args:
        q: ``[B, H_q, D]``, one query a sequence.
        means: ``[B, H, C, D]``.
        limit: int64 ``[B]``; candidates are chunks ``0 ... limit[b] - 1``.
        scale: factor on the raw scores.

    Returns:
        fp32 ``[B, H, C]``; -inf for what is no candidate, or not a number.
    """
    batch, heads, chunks, dim = means.shape
    group = q.shape[1] // heads
    packed = q.reshape(batch, heads, group, dim).float()
    scores = (packed @ means.float().transpose(-1, -2)) * scale
    outside = torch.arange(chunks, device=q.device) >= limit[:, None]
    scores = scores.masked_fill(outside[:, None, None], -torch.inf)
    if group > 1:
        scores = scores.log_softmax(-1)
    return scores.amax(2).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """Choose the chunks a retrieval view shows: chunk 0 and those of greatest interest, per KV head.

    Args:
        q, means, limit, scale: see ``chunk_interest``; ``limit >= slots``.
        table: int32 ``[B, H, W]``; its first ``slots`` columns receive the chosen chunks, ascending.
        slots: how many are chosen, chunk 0 included; equal interests go to the lower chunk.
    """
    interest = chunk_interest(q, means, limit, scale)
    outside = torch.arange(means.shape[2], device=q.device) >= limit[:, None]
    # -inf ranks below every score, yet a candidate of that score must come before what is none.
    order = interest.clamp_min(torch.finfo(torch.float32).min)
    order = order.masked_fill(outside[:, None], -torch.inf)
    order[..., 0] = torch.inf
    least = order.topk(slots, sorted=False).values.amin(-1, keepdim=True)
    chosen = order >= least
    if chosen.sum() > slots * chosen.shape[0] * chosen.shape[1]:
        above, equal = order > least, order == least
        chosen = above | (equal & (equal.cumsum(-1) <= slots - above.sum(-1, keepdim=True)))
    table[..., :slots] = chosen.nonzero()[:, 2].view(*chosen.shape[:2], slots)


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's own choice as long as it was proposed.

    Args:
        tokens: int64 ``[B, N]``; node 0 is the root, whose token is not looked at; -1 marks a node that
            is not there.
        parents: int64 ``[B, N]``; -1 for the root, and a parent stands before its children.
        best: int64 ``[B, N]``, the target's choice at each node.
        depth: length of the longest path below the root; deeper nodes are not looked at.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, how many they are, the root included; next int64 ``[B]``, the token emitted after them.
    """
    paths, emitted = [], []
    for token, parent, choice in zip(tokens.tolist(), parents.tolist(), best.tolist(), strict=True):
        path = [0]
        while len(path) <= depth:
            node = path[-1]
            match = [
                i
                for i in range(node + 1, len(token))
                if parent[i] == node and token[i] == choice[node] and token[i] >= 0
            ]
            if not match:
                break
            path.append(match[0])
        paths.append(path)
        emitted.append(choice[path[-1]])
    return _packed(paths, emitted, depth, tokens)


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
    """Recursive rejection over siblings, the rule of ``verify.acceptance.accept_sampling``.

    A child to which its law (without the refused siblings) gives no probability cannot have been drawn
    from it and counts as absent. Children that were proposed deterministically, as by prompt lookup, have
    q(x) = 1: the i-th is accepted with probability p_i(x), and its refusal leaves p_{i+1}, which is p_i
    without x, renormalised, or p_i where that leaves nothing. A token that was refused already counts as
    absent. Both kinds of nodes may occur in one tree.

    Args:
        tokens, parents, depth: as for ``accept_greedy``; siblings stand in draw order.
        p: fp32 ``[B, N, V]``, the target's law at each node.
        q: fp32 ``[B, M, V]``, draft laws; M may be 0 where all proposals are deterministic.
        q_rows: int64 ``[B, N]``, the row of ``q`` that a node's children were drawn from, -1 where they
            were proposed deterministically; looked at for nodes with children only.
        uniforms: fp32 ``[B, N]`` in [0, 1); node x is accepted where ``uniforms[x] < p(x) / q(x)``.
        race: fp32 ``[B, V]`` of Exp(1) noise; the emitted token is the argmax of law / race, the lowest
            id among equals. A law that is NaN emits token 0.

    Returns:
        path, count, next: as ``accept_greedy``; next follows the residual where a child was refused.
    """
    return accept_drawn(NoiseDraws(race, uniforms), tokens, parents, p, q, q_rows, depth)


def accept_drawn(
    draws: Draws, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``accept_tree`` by any source of decisions, at places (sequence, node) and (sequence,)."""
    paths, emitted = [], []
    for b, (token, parent, row) in enumerate(
        zip(tokens.tolist(), parents.tolist(), q_rows.tolist(), strict=True)
    ):
        path, law = [0], p[b, 0]
        accepted = True
        while accepted:
            node, accepted = path[-1], False
            law = p[b, node]
            children = [i for i in range(node + 1, len(token)) if parent[i] == node and token[i] >= 0]
            fixed = bool(children) and row[node] == -1
            draft = torch.ones_like(law) if fixed or not children else q[b, row[node]]
            for child in children if len(path) <= depth else ():
                x = token[child]
                if not draft[x] > 0:
                    continue
                if draws.accept(law[x] / draft[x], b, child):
                    path.append(child)
                    accepted = True
                    break
                refused = torch.tensor(x, device=draft.device)
                left = law.index_fill(0, refused, 0.0) if fixed else (law - draft).clamp_min(0)
                law = left / left.sum() if left.sum() > 0 else law
                draft = draft.index_fill(0, refused, 0.0)
                draft = draft / draft.sum() if draft.sum() > 0 and not fixed else draft
        paths.append(path)
        emitted.append(max(0, int(draws.choose(law, b))))
    return _packed(paths, emitted, depth, tokens)


def _packed(
    paths: list[list[int]], emitted: list[int], depth: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    padded = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    return like.new_tensor(padded), like.new_tensor([len(path) for path in paths]), like.new_tensor(emitted)


def second_choice(laws: Tensor, chosen: Tensor, race: Tensor | None) -> Tensor:
    """The runner-up: the second outcome of an exponential race, or the second most probable token.

    Args:
        laws: fp32 ``[B, C, V]``.
        chosen: int64 ``[B, C]``, the token that is out; negative for none.
        race: fp32 ``[B, C, V]`` of Exp(1) noise: argmax of laws / race; None: argmax of laws, which may
            then be logits. The lowest id among equals.

    Returns:
        int64 ``[B, C]``; -1 where no other token is possible (no positive probability; without ``race``,
        nothing above -inf). NaN counts as impossible.
    """
    return second_drawn(None if race is None else NoiseDraws(race), laws, chosen)


def second_drawn(draws: Draws | None, laws: Tensor, chosen: Tensor) -> Tensor:
    """``second_choice`` by any source of decisions; None: the most probable other token."""
    out = torch.arange(laws.shape[-1], device=laws.device) == chosen[..., None]
    if draws is not None:
        return draws.choose(laws.masked_fill(out, 0.0))
    top, token = torch.where(laws > -torch.inf, laws, -torch.inf).masked_fill(out, -torch.inf).max(-1)
    return torch.where(top > -torch.inf, token, -1)


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
    """Say where a tree grows whose root is each text's token at ``end``; the first five are written.

    Args:
        ids: int64 ``[B, A]``, the text's newest tokens, the root the last.
        positions: int64 ``[B, C]``, where columns stand in a cache without the ``dropped`` tokens.
        root: int64 ``[B, N]``, whose first column receives the root.
        at: int64 ``[D, B]``, first new row of each forward.
        lengths: int32 ``[B]``, rows before those of ``ids``.
        tokens: int64 ``[B, S]``, the texts.
        end, dropped: int64 ``[B]``; ``end`` at least A - 1.
        offsets: int64 ``[C]``, of each column from the root; the first A are 1 - A ... 0.
        ahead: int64 ``[D]``, of each forward's first row from the root's.
    """
    newest, place = ids.shape[1], end - dropped
    ids.copy_(tokens.gather(1, (end[:, None] + offsets[:newest]).clamp_min(0)))
    positions.copy_(place[:, None] + offsets)
    root[:, 0] = ids[:, -1]
    at.copy_(place + ahead[:, None])
    lengths.copy_(place - newest + 1)


def expand_nodes(
    logits: Tensor, temperature: Tensor | None, race: Tensor | None, laws: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The laws at a tree's frontier, and the tokens that may be their children.

    Args:
        logits: ``[B, F, V]``.
        temperature: fp32 ``[]``; None for 1.
        race: fp32 ``[B, F, V]`` of Exp(1) noise: draws without replacement, by falling law / race; None:
            the most probable tokens. The lower id among equals.
        laws: fp32 ``[B, F, V]``, written: softmax of logits / temperature.
        count: K, draws of a node.

    Returns:
        int64 ``[B, F, K]``, the draws in their order, -1 where there are no more; fp32 ``[B, F, K]``, the K
        largest probabilities, which are the same whatever was drawn; 0 past V.
    """
    return expand_drawn(None if race is None else NoiseDraws(race), logits, temperature, laws, count)


def expand_drawn(
    draws: Draws | None, logits: Tensor, temperature: Tensor | None, laws: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """``expand_nodes`` by any source of decisions; None: the most probable tokens."""
    scores = logits.float() if temperature is None else logits.float() / temperature
    laws.copy_(scores.softmax(-1))
    return draw_tokens(draws, laws, count)


def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    words: Tensor,
    values: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    by_rank: Tensor,
    laws: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """Add W nodes behind their parents, the frontier ``first ... first + F - 1``; the first six are written.

    Which places they take depends on ``pairs``, or on ``values`` and ``by_rank``: on what was known before
    the draws at hand. The i-th largest probability stands for the chance of the i-th draw, whatever that is.

    Args:
        tokens, parents, words: int64 ``[B, N]``; bit j of a word: node j is the node or its ancestor.
        values: fp32 ``[B, N]``, products of the laws along the paths.
        ids: int64 ``[B, W]``, the new tokens as input of a forward, 0 for those that are not there.
        mask: int64 ``[B * W, 1]``, the new words behind ``before`` bits that are set; may be None.
        draws, by_rank, laws: of the frontier, see ``expand_nodes``.
        pairs: int64 ``[2, W]``, parents (counted from ``first``) and ranks of the new nodes, siblings by
            rank; None: the W likeliest, the lower (parent, rank) among equals.
    """
    batch, frontier, count = draws.shape
    old, new = slice(first, first + frontier), slice(first + frontier, first + frontier + ids.shape[1])
    if pairs is None:
        # Chances fall with the rank: a parent with n chosen places gets its first n draws.
        chances = (by_rank * values[:, old, None]).flatten(1)
        chosen = ranked(chances).topk(ids.shape[1]).indices.sort(1).values
    else:
        chosen = (pairs[0] * count + pairs[1]).expand(batch, -1)
    above, drawn = chosen // count, draws.flatten(1).gather(1, chosen)
    sequence = torch.arange(batch, device=draws.device)[:, None]
    chance = torch.where(drawn >= 0, laws[sequence, above, drawn.clamp_min(0)], 0.0)
    tokens[:, new], parents[:, new] = drawn, above + first
    values[:, new] = values[:, old].gather(1, above) * chance
    own = 1 << torch.arange(new.start, new.stop, device=draws.device)
    words[:, new] = words[:, old].gather(1, above) | own
    ids.copy_(drawn.clamp_min(0))
    if mask is not None:
        mask.copy_((words[:, new] << before | (1 << before) - 1).view(-1, 1))

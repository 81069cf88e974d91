"""The ops of a decoding cycle: CUDA tensors go to the Triton kernels, all others to the references.

See ``step_reference`` and ``acceptance_reference`` for what each does. Triton is imported at the first use
on a GPU.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from triforce_tree.kernels import acceptance_reference, step_reference


@cache
def _triton_op(name: str) -> Callable[..., Any]:
    from triforce_tree.kernels import accept, grow, rows, select

    operators: dict[str, Callable[..., Any]] = {
        "append_rows": rows.append_rows,
        "move_rows": rows.move_rows,
        "chunk_means": rows.chunk_means,
        "select_chunks": select.select_chunks,
        "accept_tree": accept.accept_tree,
        "accept_greedy": accept.accept_greedy,
        "second_choice": accept.second_choice,
        "begin_tree": grow.begin_tree,
        "expand_nodes": grow.expand_nodes,
        "place_nodes": grow.place_nodes,
    }
    return operators[name]


def append_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, ring: int = 0) -> None:
    """See ``step_reference.append_rows``."""
    op = _triton_op("append_rows") if k_cache.is_cuda else step_reference.append_rows
    op(k_cache, v_cache, k, v, start, ring)


def move_rows(rows: Tensor, index: Tensor, start: Tensor, ring: int = 0) -> None:
    """See ``step_reference.move_rows``."""
    op = _triton_op("move_rows") if rows.is_cuda else step_reference.move_rows
    op(rows, index, start, ring)


def chunk_means(means: Tensor, k: Tensor, first: Tensor, count: int, chunk: int) -> None:
    """See ``step_reference.chunk_means``."""
    op = _triton_op("chunk_means") if means.is_cuda else step_reference.chunk_means
    op(means, k, first, count, chunk)


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """See ``step_reference.select_chunks``."""
    op = _triton_op("select_chunks") if q.is_cuda else step_reference.select_chunks
    op(q, means, limit, table, slots, scale)


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
    """See ``acceptance_reference.accept_tree``."""
    op = _triton_op("accept_tree") if tokens.is_cuda else acceptance_reference.accept_tree
    return op(tokens, parents, p, q, q_rows, uniforms, race, depth)


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``acceptance_reference.accept_greedy``."""
    op = _triton_op("accept_greedy") if tokens.is_cuda else acceptance_reference.accept_greedy
    return op(tokens, parents, best, depth)


def second_choice(laws: Tensor, chosen: Tensor, race: Tensor | None) -> Tensor:
    """See ``acceptance_reference.second_choice``."""
    op = _triton_op("second_choice") if laws.is_cuda else acceptance_reference.second_choice
    return op(laws, chosen, race)


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
    """See ``step_reference.begin_tree``."""
    op = _triton_op("begin_tree") if tokens.is_cuda else step_reference.begin_tree
    op(ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead)


def expand_nodes(
    logits: Tensor, temperature: Tensor | None, race: Tensor | None, laws: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See ``step_reference.expand_nodes``."""
    op = _triton_op("expand_nodes") if logits.is_cuda else step_reference.expand_nodes
    return op(logits, temperature, race, laws, count)


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
    """See ``step_reference.place_nodes``."""
    op = _triton_op("place_nodes") if tokens.is_cuda else step_reference.place_nodes
    op(tokens, parents, words, values, ids, mask, draws, by_rank, laws, pairs, first, before)

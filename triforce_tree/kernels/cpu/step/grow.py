"""Growth of token trees on the CPU by ``grow.h``, for fp32 logits and dense buffers."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable
from triforce_tree.kernels.step import grow

_EXPAND = struct.Struct("17q")
_PLACE = struct.Struct("22q")
_BEGIN = struct.Struct("16q")


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
    """See ``kernels.step.begin_tree``."""
    compiled = usable()
    if compiled is None or not _dense(ids, positions, at, lengths, end, dropped, offsets, ahead):
        grow.begin_tree.definition(ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead)
        return
    compiled.begin_tree(
        _BEGIN.pack(
            ids.data_ptr(), positions.data_ptr(), root.data_ptr(), at.data_ptr(), lengths.data_ptr(),
            tokens.data_ptr(), end.data_ptr(), dropped.data_ptr(), offsets.data_ptr(), ahead.data_ptr(),
            *ids.shape, positions.shape[1], at.shape[0], root.stride(0), tokens.stride(0),
        )
    )  # fmt: skip


def expand_nodes(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See ``kernels.step.expand_nodes``."""
    compiled = usable(logits, probs, *(() if exponential is None else (exponential,)))
    if compiled is None:
        return grow.expand_nodes.definition(logits, temperature, exponential, probs, count)
    draws, by_rank = grow.empty_draws(logits, count)
    noise = (0, 0, 0) if exponential is None else (exponential.data_ptr(), *exponential.stride()[:2])
    compiled.expand_nodes(
        _EXPAND.pack(
            logits.data_ptr(), *logits.stride()[:2], *noise, probs.data_ptr(), *probs.stride()[:2],
            0 if temperature is None else temperature.data_ptr(), draws.data_ptr(), by_rank.data_ptr(),
            *logits.shape, count, torch.get_num_threads(),
        )
    )  # fmt: skip
    return draws, by_rank


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
    """See ``kernels.step.place_nodes``."""
    compiled = usable(probs, path_probs, by_rank)
    maybe = [t for t in (mask, pairs) if t is not None]
    if compiled is None or not _dense(tokens, parents, mask_words, path_probs, ids, draws, by_rank, *maybe):
        grow.place_nodes.definition(
            tokens, parents, mask_words, path_probs, ids, mask, draws, by_rank, probs, pairs, first, before
        )
        return
    batch, frontier, count = draws.shape
    compiled.place_nodes(
        _PLACE.pack(
            tokens.data_ptr(), parents.data_ptr(), mask_words.data_ptr(), path_probs.data_ptr(),
            ids.data_ptr(), 0 if mask is None else mask.data_ptr(), draws.data_ptr(), by_rank.data_ptr(),
            probs.data_ptr(), *probs.stride()[:2], 0 if pairs is None else pairs.data_ptr(), batch,
            tokens.shape[1], path_probs.shape[1], mask_words.shape[2], 0 if mask is None else mask.shape[1],
            frontier, count, ids.shape[1], first, before,
        )
    )  # fmt: skip


def _dense(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors)

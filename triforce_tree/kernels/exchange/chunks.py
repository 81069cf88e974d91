"""Slots that hold copies of chosen chunks: which come, which go, and fetching those that come.

A middle level far from its rows keeps copies of some chunks in slots on its device. A choice names the
chunks it wants; those that are not here take the places of chunks that are not wanted, in turn, so that
what was wanted lately stays. Nothing is asked of the host, and a captured graph serves any choice.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("exchange_chunks", writes=("held", "place", "hand", "moves", "counts"), triton=".chunks_kernels")
def exchange_chunks(
    held: Tensor, place: Tensor, wanted: Tensor, hand: Tensor, moves: Tensor, counts: Tensor
) -> None:
    """Give a slot to every wanted chunk that has none.

    Args:
        held: int32 ``[B, H, S]``, the chunk in each slot, all different; changed in place.
        place: int32 ``[B, H, C]``, the slot of each chunk, -1 for none; changed in place.
        wanted: int32 ``[B, H, W]``, chunks, all different, W at most S.
        hand: int32 ``[B, H]``, the slot where the search for the next one begins; changed in place.
        moves: int32 ``[B, H, 2, W]``, receives (slot, chunk) of those that must come, in front.
        counts: int32 ``[B, H]``, receives how many they are.
    """
    slots = held.shape[2]
    for b in range(held.shape[0]):
        for h in range(held.shape[1]):
            asked = wanted[b, h].tolist()
            here = set(held[b, h].tolist())
            missing = [chunk for chunk in asked if chunk not in here]
            start = int(hand[b, h])
            turn = [(start + i) % slots for i in range(slots)]
            idle = [slot for slot in turn if int(held[b, h, slot]) not in set(asked)]
            for at, (chunk, slot) in enumerate(zip(missing, idle, strict=False)):
                place[b, h, held[b, h, slot].long()] = -1
                place[b, h, chunk] = slot
                held[b, h, slot] = chunk
                moves[b, h, 0, at], moves[b, h, 1, at] = slot, chunk
                hand[b, h] = (slot + 1) % slots
            counts[b, h] = len(missing)


@operator("fetch_chunks", writes=("k", "v"), triton=".chunks_kernels")
def fetch_chunks(
    k: Tensor, v: Tensor, near: Tensor, far: Tensor, moves: Tensor, counts: Tensor, chunk: int
) -> None:
    """Bring chunks of one sequence into their slots.

    Args:
        k, v: ``[H, S * chunk or more, D]``, where slot s holds rows ``s * chunk ...``; changed in place.
        near: ``[R, 2, H, D]``, the first R rows (keys, then values), on the device of ``k``; R is a multiple
            of ``chunk``.
        far: ``[F, 2, H, D]``, the rows from R on, in host memory that the device can read.
        moves: int32 ``[H, 2, W]``, (slot, chunk) in front.
        counts: int32 ``[H]``.
        chunk: rows.
    """
    first = near.shape[0]
    for head, count in enumerate(counts.tolist()):
        for slot, number in zip(*moves[head, :, :count].tolist(), strict=True):
            start = number * chunk
            rows = near[start : start + chunk] if start < first else far[start - first :][:chunk]
            at = slice(slot * chunk, (slot + 1) * chunk)
            k[head, at], v[head, at] = rows[:, 0, head], rows[:, 1, head]


@operator("fetch_words", writes=("target",), triton=".chunks_kernels")
def fetch_words(target: Tensor, source: Tensor) -> None:
    """Copy from host memory that the device can read, without waiting for what the copy engine has to do.

    Args:
        target: int32 ``[n]``, on the device; changed in place.
        source: int32 ``[n]``, on the host.
    """
    target.copy_(source)


def place_of(held: Tensor, chunks: int) -> Tensor:
    """int32 ``[..., chunks]``: the slot of each chunk, -1 for none, of held chunks ``[..., S]``."""
    place = torch.full((*held.shape[:-1], chunks), -1, dtype=torch.int32, device=held.device)
    slots = torch.arange(held.shape[-1], dtype=torch.int32, device=held.device).expand_as(held)
    return place.scatter_(-1, held.long(), slots)

"""Cache of chunks of an offloaded KV cache in device slots, with eviction in clock order.

If the full KV cache is on the host, the retrieval level keeps copies of its selected chunks in slots on the
device. Missing chunks replace chunks that are not selected, in clock order, so that recently selected chunks
tend to stay. No operator synchronises with the host, and a captured graph serves any selection.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("exchange_chunks", writes=("held", "place", "hand", "moves", "counts"), triton=".chunks_kernels")
def exchange_chunks(
    held: Tensor, place: Tensor, wanted: Tensor, hand: Tensor, moves: Tensor, counts: Tensor
) -> None:
    """Assigns a slot to every wanted chunk that has none.

    Args:
        held: int32 ``[B, H, S]``, the chunk in each slot, all different; written.
        place: int32 ``[B, H, C]``, the slot of each chunk, -1 for none; written.
        wanted: int32 ``[B, H, W]``, chunks, all different, W at most S.
        hand: int32 ``[B, H]``, the clock hand, at which the search for a free slot begins; written.
        moves: int32 ``[B, H, 2, W]``; the first columns receive slot and chunk of the chunks to fetch.
        counts: int32 ``[B, H]``, receives the number of chunks to fetch.
    """
    slots = held.shape[2]
    for b in range(held.shape[0]):
        for h in range(held.shape[1]):
            chunks_wanted = wanted[b, h].tolist()
            present = set(held[b, h].tolist())
            missing = [chunk for chunk in chunks_wanted if chunk not in present]
            start = int(hand[b, h])
            clock_order = [(start + i) % slots for i in range(slots)]
            idle = [slot for slot in clock_order if int(held[b, h, slot]) not in set(chunks_wanted)]
            for at, (chunk, slot) in enumerate(zip(missing, idle, strict=False)):
                place[b, h, held[b, h, slot].long()] = -1
                place[b, h, chunk] = slot
                held[b, h, slot] = chunk
                moves[b, h, 0, at], moves[b, h, 1, at] = slot, chunk
                hand[b, h] = (slot + 1) % slots
            counts[b, h] = len(missing)


@operator("fetch_chunks", writes=("k", "v"), triton=".chunks_kernels")
def fetch_chunks(
    k: Tensor, v: Tensor, on_device: Tensor, on_host: Tensor, moves: Tensor, counts: Tensor, chunk: int
) -> None:
    """Copies chunks of one sequence into their slots.

    Args:
        k, v: ``[H, S * chunk or more, D]`` and ``[H, S * chunk or more, D_v]``, written; slot s begins at
            position ``s * chunk``.
        on_device: ``[R, H * (D + D_v)]``, the first R positions, on the device of ``k``. A row holds the keys
            of all heads, then the values. R is a multiple of ``chunk``.
        on_host: ``[F, H * (D + D_v)]``, the positions from R on, in host memory that the device can read.
        moves: int32 ``[H, 2, W]``, slot and chunk of each move, of which the first ``counts`` are used.
        counts: int32 ``[H]``, number of moves.
        chunk: positions per chunk.
    """
    first, (heads, _, dim) = on_device.shape[0], k.shape
    for head, count in enumerate(counts.tolist()):
        for slot, chunk_index in zip(*moves[head, :, :count].tolist(), strict=True):
            start = chunk_index * chunk
            rows = on_device[start : start + chunk] if start < first else on_host[start - first :][:chunk]
            target, values = slice(slot * chunk, (slot + 1) * chunk), rows[:, heads * dim :]
            k[head, target] = rows[:, head * dim : (head + 1) * dim]
            v[head, target] = values[:, head * v.shape[2] : (head + 1) * v.shape[2]]


@operator("fetch_words", writes=("target",), triton=".chunks_kernels")
def fetch_words(target: Tensor, source: Tensor) -> None:
    """Copies from host memory that the device can read, without waiting for transfers of the copy engine.

    Args:
        target: int32 ``[n]``, on the device; written.
        source: int32 ``[n]``, on the host.
    """
    target.copy_(source)


def place_of(held: Tensor, chunks: int) -> Tensor:
    """Returns the slot of each chunk, int32 ``[..., chunks]``, or -1, for ``held`` ``[..., S]``."""
    place = torch.full((*held.shape[:-1], chunks), -1, dtype=torch.int32, device=held.device)
    slots = torch.arange(held.shape[-1], dtype=torch.int32, device=held.device).expand_as(held)
    return place.scatter_(-1, held.long(), slots)

"""Sums and merged attention over ranks that read each other's memory, by one kernel instead of a collective.

Each rank writes its part into its own memory, increments counters of the other ranks, waits for their parts
and reads them. A message is divided into channels. Each channel has one program, which waits only for the
same channel of the other ranks. A channel alternates between two halves of its memory. So a rank that is one
call ahead does not overwrite a part that another rank still reads, and it waits before it could be two calls
ahead.

All ranks read the same values and combine them in the order of ranks, so all have the same result, bit for
bit.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.operators import fake, operator
from triforce_tree.runtime.peer_memory import ELEMENTS, Layout, layout, rows_of_channel


@operator("sum_with_peers", writes=("memories", "calls"), triton=".peers_kernels")
def sum_with_peers(x: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int) -> Tensor:
    """Returns the sum of the tensors of all ranks, computed in fp32 and rounded once.

    Args:
        x: contiguous, at most ``CHANNELS * ELEMENTS`` elements of at most 4 bytes.
        memories: uint8 ``[memory_bytes()]`` of each rank. The memory of this rank and the counters of the
            others are written.
        calls: int32 ``[CHANNELS]``, number of calls of each channel of this rank; incremented.
        rank: index of this process in ``memories``.
    """
    flat = x.reshape(-1)
    used = -(-flat.numel() // ELEMENTS)
    padded = torch.nn.functional.pad(flat, (0, used * ELEMENTS - flat.numel())).view(used, ELEMENTS)
    places = [layout(memory, x.dtype) for memory in memories]
    half = calls[:used] & 1
    channel = torch.arange(used, device=x.device)
    places[rank].data[half.long(), channel] = padded
    _meet(places, calls, used, rank)
    parts = torch.stack([place.data[half.long(), channel] for place in places])
    return parts.float().sum(0).to(x.dtype).view(-1)[: flat.numel()].view(x.shape)


@fake("sum_with_peers")
def _(x: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x)


@operator("merge_with_peers", writes=("memories", "calls"), triton=".peers_kernels")
def merge_with_peers(
    out: Tensor, lse: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int
) -> Tensor:
    """Merges the attention to the keys of each rank; see ``merge_states``.

    Args:
        out: contiguous ``[..., D]``, D at most ``ELEMENTS``, with elements of at most 4 bytes.
        lse: fp32, contiguous ``[...]``, log-sum-exps (natural logarithm); -inf if this rank has no keys.
        memories, calls, rank: as for :func:`sum_with_peers`. ``lse`` has at most ``CHANNELS`` times
            :func:`rows_of_channel` elements.

    Returns:
        ``[..., D]`` in the dtype of ``out``.
    """
    dim = out.shape[-1]
    rows, own = lse.numel(), rows_of_channel(dim)
    used = -(-rows // own)
    places = [layout(memory, out.dtype) for memory in memories]
    half, channel = (calls[:used] & 1).long(), torch.arange(used, device=out.device)
    more = used * own - rows
    outs = torch.nn.functional.pad(out.reshape(rows, dim), (0, 0, 0, more)).view(used, own * dim)
    lses = torch.nn.functional.pad(lse.reshape(rows), (0, more), value=-torch.inf).view(used, own)
    places[rank].data[half, channel, : own * dim] = outs
    places[rank].lse[half, channel, :own] = lses
    _meet(places, calls, used, rank)
    gathered = torch.stack([place.data[half, channel, : own * dim] for place in places])
    sums = torch.stack([place.lse[half, channel, :own] for place in places])
    merged, _ = merge_states(gathered.view(len(memories), -1, dim), sums.view(len(memories), -1))
    return merged[:rows].view(out.shape)


@fake("merge_with_peers")
def _(out: Tensor, lse: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int) -> Tensor:
    return torch.empty_like(out)


def _meet(places: Sequence[Layout], calls: Tensor, used: int, rank: int) -> None:
    """Tells the other ranks that the part of this rank is written, and waits for their parts."""
    calls[:used] += 1
    others = [number for number in range(len(places)) if number != rank]
    for number in others:
        places[number].arrived[:used, rank] += 1
    while bool((places[rank].arrived[:used, others] - calls[:used, None] < 0).any()):
        time.sleep(1e-4)

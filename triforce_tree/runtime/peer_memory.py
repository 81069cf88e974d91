"""Memory of the ranks of one machine that all of them read and write, for collectives of few bytes.

It is mapped through torch's symmetric memory, over NVLink or PCIe; multicast is not used. Where cards cannot
reach each other, or torch cannot map the memory, NCCL does what ``kernels/ranks`` would.
"""

import logging
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

VARIABLE = "TRIFORCE_TREE_PEER_MEMORY"
"""Environment variable that leaves all collectives to NCCL if it is 0."""
CHANNELS, MOST_RANKS = 1024, 8
# Elements of a channel, and log-sum-exps.
ELEMENTS = 512
_WORD = 4
_LOG = logging.getLogger(__name__)


class Layout(NamedTuple):
    """Views of one rank's memory.

    Attributes:
        arrived: int32 ``[CHANNELS, MOST_RANKS]``, calls for which each other rank has arrived.
        lse: fp32 ``[2, CHANNELS, ELEMENTS]``.
        data: ``[2, CHANNELS, ELEMENTS]`` in the dtype of the message.
    """

    arrived: Tensor
    lse: Tensor
    data: Tensor


class PeerMemory(NamedTuple):
    """The memories of a group's ranks, as this process sees them.

    Attributes:
        memories: uint8 ``[memory_bytes()]`` of each rank, of which the own one is ``rank``.
        calls: int32 ``[CHANNELS]``, calls that this rank has made.
        owner: keeps the mapping.
    """

    memories: list[Tensor]
    calls: Tensor
    rank: int
    owner: Any = None

    def takes(self, x: Tensor) -> bool:
        """Whether a message is small enough."""
        return x.numel() <= CHANNELS * ELEMENTS and x.itemsize <= _WORD and x.is_floating_point()

    def takes_rows(self, out: Tensor) -> bool:
        """Whether attention ``[..., D]`` is."""
        dim = out.shape[-1]
        return (
            dim <= ELEMENTS and out.itemsize <= _WORD and out.numel() <= CHANNELS * rows_of_channel(dim) * dim
        )


def rows_of_channel(dim: int) -> int:
    """Rows of attention, of ``dim`` elements, that a channel holds."""
    return ELEMENTS // (1 << (dim - 1).bit_length())


def memory_bytes() -> int:
    """Of one rank's memory, which is zero at first."""
    return _WORD * CHANNELS * (MOST_RANKS + 4 * ELEMENTS)


def layout(memory: Tensor, dtype: torch.dtype) -> Layout:
    """The parts of one rank's memory for messages of this dtype, of at most 4 bytes."""
    ends = _WORD * CHANNELS * MOST_RANKS, _WORD * CHANNELS * (MOST_RANKS + 2 * ELEMENTS)
    size = 2 * CHANNELS * ELEMENTS
    return Layout(
        memory[: ends[0]].view(torch.int32).view(CHANNELS, MOST_RANKS),
        memory[ends[0] : ends[1]].view(torch.float32).view(2, CHANNELS, ELEMENTS),
        memory[ends[1] : ends[1] + size * dtype.itemsize].view(dtype).view(2, CHANNELS, ELEMENTS),
    )


def map_memory(processes: Any, ranks: range, device: torch.device) -> PeerMemory | None:
    """Memory of all ranks of a group, zero; None where they do not read each other's. All of them call it.

    Args:
        processes: torch's process group; None for that of all processes.
        ranks: of its processes, among all.
        device: of this process.
    """
    size, local = len(ranks), int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    if device.type != "cuda" or not 1 < size <= MOST_RANKS or os.environ.get(VARIABLE) == "0":
        return None
    if ranks[0] // local != ranks[-1] // local:
        return None
    cards = [number % local for number in ranks if number % local != device.index]
    seen = torch.cuda.device_count()
    able = all(card < seen and torch.cuda.can_device_access_peer(device, card) for card in cards)
    if not _all(able, processes, device):
        return None
    group: Any = dist.group.WORLD if processes is None else processes
    rank = ranks.index(dist.get_rank())
    try:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(memory_bytes(), dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(own, group)
        memories = [handle.get_buffer(peer, (memory_bytes(),), torch.uint8) for peer in range(size)]
        made = PeerMemory(
            memories, torch.zeros(CHANNELS, dtype=torch.int32, device=device), rank, (own, handle)
        )
    except (ImportError, RuntimeError) as error:
        _LOG.warning("cards cannot map each other's memory (%s); collectives take NCCL", error)
        made = None
    # Also: no rank goes on before all memories are zero.
    torch.cuda.synchronize(device)
    return made if _all(made is not None, processes, device) else None


def _all(flag: bool, processes: Any, device: torch.device) -> bool:
    """Whether it is true on all ranks of the group."""
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN, group=processes)
    return bool(value.item())

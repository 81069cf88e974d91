"""Device memory that all ranks of one machine can read and write, for collectives of few bytes.

It is mapped through torch's symmetric memory over NVLink or PCIe, without multicast. If GPUs cannot access
each other's memory, or torch cannot map it, NCCL is used instead of the kernels in ``kernels/ranks``.
"""

import logging
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

VARIABLE = "TRIFORCE_TREE_PEER_MEMORY"
"""If this environment variable is 0, all collectives use NCCL."""
# A message is cut into parts, each of which is sent through one channel.
CHANNELS, MOST_RANKS = 1024, 8
# The number of elements, and of log-sum-exps of attention, that a channel has memory for.
ELEMENTS = 512
_WORD = 4
_LOG = logging.getLogger(__name__)


class Layout(NamedTuple):
    """Holds views of one rank's memory. Dimensions of 2 are double buffers, which alternate.

    Attributes:
        arrived: int32 ``[CHANNELS, MOST_RANKS]``, the number of the last call for which each rank has written
            its data.
        lse: fp32 ``[2, CHANNELS, ELEMENTS]``, log-sum-exps of attention.
        data: ``[2, CHANNELS, ELEMENTS]`` in the dtype of the message.
    """

    arrived: Tensor
    lse: Tensor
    data: Tensor


class PeerMemory(NamedTuple):
    """The memory of each rank of a group, mapped into this process.

    Attributes:
        memories: uint8 ``[memory_bytes()]`` of each rank.
        calls: int32 ``[CHANNELS]``, number of calls that this rank has made.
        rank: index of this process in the group.
        owner: an object that keeps the mapping alive.
    """

    memories: list[Tensor]
    calls: Tensor
    rank: int
    owner: Any = None

    def takes(self, x: Tensor) -> bool:
        """Returns whether a message is small enough."""
        return x.numel() <= CHANNELS * ELEMENTS and x.itemsize <= _WORD and x.is_floating_point()

    def takes_rows(self, out: Tensor) -> bool:
        """Returns whether attention outputs ``[..., D]`` and their log-sum-exps are small enough."""
        dim = out.shape[-1]
        return (
            dim <= ELEMENTS and out.itemsize <= _WORD and out.numel() <= CHANNELS * rows_of_channel(dim) * dim
        )


def rows_of_channel(dim: int) -> int:
    """Returns the number of attention outputs, of ``dim`` elements each, that a channel holds."""
    return ELEMENTS // (1 << (dim - 1).bit_length())


def memory_bytes() -> int:
    """Returns the size of one rank's memory, which must be zero at first."""
    return _WORD * CHANNELS * (MOST_RANKS + 4 * ELEMENTS)


def layout(memory: Tensor, dtype: torch.dtype) -> Layout:
    """Returns views of one rank's memory for messages of a dtype with at most 4 bytes per element."""
    ends = _WORD * CHANNELS * MOST_RANKS, _WORD * CHANNELS * (MOST_RANKS + 2 * ELEMENTS)
    size = 2 * CHANNELS * ELEMENTS
    return Layout(
        memory[: ends[0]].view(torch.int32).view(CHANNELS, MOST_RANKS),
        memory[ends[0] : ends[1]].view(torch.float32).view(2, CHANNELS, ELEMENTS),
        memory[ends[1] : ends[1] + size * dtype.itemsize].view(dtype).view(2, CHANNELS, ELEMENTS),
    )


def map_memory(processes: Any, ranks: range, device: torch.device) -> PeerMemory | None:
    """Allocates memory, filled with zeros, on all ranks of a group and maps it into each other.

    All ranks of the group must call it. Returns None if they cannot access each other's memory.

    Args:
        processes: torch's process group; None for the default group of all processes.
        ranks: the global ranks of the group.
        device: the device of this process.
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

        local_memory = symmetric.empty(memory_bytes(), dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(local_memory, group)
        memories = [handle.get_buffer(peer, (memory_bytes(),), torch.uint8) for peer in range(size)]
        mapped = PeerMemory(
            memories, torch.zeros(CHANNELS, dtype=torch.int32, device=device), rank, (local_memory, handle)
        )
    except (ImportError, RuntimeError) as error:
        _LOG.warning("GPUs cannot map each other's memory (%s); collectives use NCCL", error)
        mapped = None
    # Together with the collective in _all this ensures that no rank continues before all memories are zero.
    torch.cuda.synchronize(device)
    return mapped if _all(mapped is not None, processes, device) else None


def _all(flag: bool, processes: Any, device: torch.device) -> bool:
    """Returns whether ``flag`` is true on all ranks of the group."""
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN, group=processes)
    return bool(value.item())

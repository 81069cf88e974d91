"""Processes of one device each that decode together: the process group and its communication.

``torchrun`` starts the processes and sets their ranks in the environment. ``C`` of them split the KV slots of
each sequence (``kv/parallel``), and within each such part the others hold a share of the target's heads and
neurons (``models/tensor_parallel.py``). Values that every rank computes may differ in their last bits, so all
values that decisions depend on come from rank 0: logits, seeds, times, stopping criteria.
"""

import gc
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from triforce_tree.runtime.peer_memory import PeerMemory, map_memory

# Loading may take one process minutes longer than another; torchrun notices a process that dies.
_TIMEOUT = timedelta(minutes=10)
T = TypeVar("T")
# Its name from torch 2.13 on; the older one is deprecated there.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# What gloo says of a connection whose other end is gone.
_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|gloo.*(?:peer|Timed out)", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """Processes that decode together; all of them make the same calls of the engine.

    Attributes:
        processes: torch's process group; None for that of all processes.
        peers: memory that its ranks read from each other; None where they do not.
    """

    rank: int
    size: int
    device: torch.device
    processes: Any = field(default=None, compare=False, repr=False)
    peers: PeerMemory | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Grid:
    """One process's place among T x C: its ``tensor`` group of T adjacent ranks splits the heads, its
    ``context`` group of C ranks, T apart, the KV slots of every sequence, and ``every`` rank the neurons."""

    tensor: Group
    context: Group
    every: Group


@dataclass
class _Joined:
    group: Group
    hosts: Any
    """A gloo group: communication between hosts must not wait for the devices."""
    initialised: bool
    """Whether torch.distributed was initialised here, and not by the calling program."""
    grids: dict[int, Grid] = field(default_factory=dict)
    """By the size of the context groups."""


@dataclass
class Traffic:
    """Collectives of this process on devices, by name: calls, and bytes that each of them hands over.

    Replays of a captured graph run no Python and are not counted.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + tensor.nbytes

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


traffic = Traffic()
_joined: _Joined | None = None


def world_size() -> int:
    """Number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process has rank 0, which alone prints."""
    return world_size() == 1 or int(os.environ.get("RANK", "0")) == 0


def current() -> Group | None:
    """The group that this process has joined; None if it decodes alone."""
    return _joined.group if _joined is not None else None


def join(device: str | torch.device | None = None) -> Group | None:
    """Join the group of the processes that torchrun started; None without torchrun.

    Args:
        device: its type; by default CUDA if it is available. Each process takes the device of its
            ``LOCAL_RANK``.

    Raises:
        ValueError: there are fewer devices than processes, or ``device`` belongs to another process.
    """
    global _joined
    if world_size() == 1:
        return None
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    own = _own_device(wanted)
    if _joined is not None:
        if _joined.group.device != own:
            raise ValueError(
                f"device={str(own)!r}, but this process has joined the others with "
                f"{str(_joined.group.device)!r}; use one of them for all models of a process"
            )
        return _joined.group
    initialise = not dist.is_initialized()
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if initialise and own.type == "cuda":
        dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=own)
    elif initialise:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    needed = "nccl" if own.type == "cuda" else "gloo"
    if needed not in str(dist.get_backend_config()):
        raise ValueError(
            f"torch.distributed was initialised with {dist.get_backend_config()}, which has no {needed} for "
            f"{str(own)!r}; leave the initialisation to triforce_tree, or use {needed!r}"
        )
    hosts = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = map_memory(None, range(size), own)
    _joined = _Joined(Group(rank, size, own, peers=peers), hosts, initialise)
    return _joined.group


def arrange(context: int) -> Grid | None:
    """Divide all processes into context groups of ``context`` ranks, and tensor groups of the others.

    Every process must call it, with the same number; another call returns the same grid.

    Returns:
        None for ``context`` 1 in a process without others.

    Raises:
        ValueError: ``context`` does not divide the number of processes.
    """
    size = _joined.group.size if _joined is not None else 1
    if size % context:
        started = f"{size} processes" if size > 1 else "one process"
        raise ValueError(
            f"context_parallel={context} needs a multiple of {context} processes, and this is {started}; "
            f"start torchrun --nproc-per-node {context}, or leave context_parallel out"
        )
    if _joined is None:
        return None
    if context not in _joined.grids:
        tensor = size // context
        rows = [range(first, first + tensor) for first in range(0, size, tensor)]
        columns = [range(first, size, tensor) for first in range(tensor)]
        _joined.grids[context] = Grid(_part(rows), _part(columns), _joined.group)
    return _joined.grids[context]


def _part(parts: Sequence[range]) -> Group:
    """This process's group among those that all processes make."""
    assert _joined is not None
    everyone, found = _joined.group, None
    for ranks in parts:
        # One group is all; one of a single rank communicates with nobody.
        made = dist.new_group(list(ranks), timeout=_TIMEOUT) if 1 < len(ranks) < everyone.size else None
        if everyone.rank in ranks:
            peers = everyone.peers if len(ranks) == everyone.size else None
            if made is not None:
                # Communicators are made by their first collective, which no captured graph may be.
                dist.all_reduce(torch.zeros(1, device=everyone.device), group=made)
                peers = map_memory(made, ranks, everyone.device)
            found = Group(ranks.index(everyone.rank), len(ranks), everyone.device, made, peers)
    assert found is not None
    return found


def tensor_group(size: int = 0) -> Group | None:
    """The tensor group of ``size`` processes, by default that of all; None without any."""
    if _joined is None:
        return None
    made = grid(_joined.group.size // size) if size else None
    return made.tensor if made is not None else _joined.group


def grid(context: int) -> Grid | None:
    """What :func:`arrange` made for this number; None where it was not called."""
    return _joined.grids.get(context) if _joined is not None else None


def shares(context: int) -> dict[str, int] | None:
    """Over how many processes ``heads`` and ``positions`` are split; None for one process alone."""
    size = _joined.group.size if _joined is not None else 0
    return {"heads": size // context, "positions": context} if size else None


def lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended."""
    if _joined is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def leave() -> None:
    """Leave the group at the end of a program; every process must, with no communication under way."""
    global _joined
    if _joined is None:
        return
    initialised, _joined = _joined.initialised, None
    # A communicator is not destroyed while captured graphs refer to it.
    gc.collect()
    if initialised:
        dist.destroy_process_group()


def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Overwrite a contiguous tensor with rank 0's values; without a group return it as it is."""
    if _joined is not None:
        traffic.add("broadcast", tensor)
        dist.broadcast(tensor, 0)
    return tensor


def all_reduce_tensor(tensor: Tensor, group: Group | None) -> Tensor:
    """Overwrite a contiguous tensor with the sum over a group, by default over all ranks."""
    traffic.add("all_reduce", tensor)
    dist.all_reduce(tensor, group=group.processes if group is not None else None)
    return tensor


def all_gather_tensor(tensor: Tensor, group: Group) -> Tensor:
    """The contiguous tensors of all ranks of a group, ``[size, ...]``; capturable in a CUDA graph."""
    # gloo takes one dimension.
    out = tensor.new_empty(group.size * tensor.numel())
    traffic.add("all_gather", tensor)
    _all_gather(out, tensor.view(-1), group=group.processes)
    return out.view(group.size, *tensor.shape)


def broadcast_object(value: T) -> T:
    """Rank 0's value of any object on the host; waits for the hosts alone."""
    if _joined is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, group=_joined.hosts)
    return values[0]


def broadcast_flag(flag: bool) -> bool:
    """Rank 0's flag, in one small message where ``broadcast_object`` takes two: needed for every token."""
    if _joined is None:
        return flag
    value = torch.tensor([flag])
    dist.broadcast(value, 0, group=_joined.hosts)
    return bool(value)


def begin_broadcast(tensor: Tensor) -> Any:
    """Overwrite a contiguous tensor on the host with rank 0's values, in processes that have joined.

    Returns:
        ``torch.distributed.Work``; the values are there after its ``wait()``.
    """
    assert _joined is not None
    return dist.broadcast(tensor, 0, group=_joined.hosts, async_op=True)


def local_size() -> int:
    """Processes of the group on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))) if _joined is not None else 1


def all_reduce_min(values: Sequence[float]) -> list[float]:
    """The minimum of each value over all processes; exact for integers up to 2**53."""
    if _joined is None:
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, dist.ReduceOp.MIN, group=_joined.hosts)
    minima: list[float] = reduced.tolist()
    return minima


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, in the order of ranks."""
    if _joined is None:
        return [value]
    gathered: list[Any] = [None] * _joined.group.size
    dist.all_gather_object(gathered, value, group=_joined.hosts)
    return gathered


def agreed(values: Sequence[int]) -> list[int]:
    """Each of the values where all processes have the same one, else 0."""
    gathered = all_gather_object(list(values))
    return [own if len(set(of_all)) == 1 else 0 for own, *of_all in zip(values, *gathered, strict=True)]


def check_equal(what: str, value: object) -> None:
    """Check that ``value`` is the same on all processes; different values would make them hang later.

    Raises:
        ValueError: it differs; on every process, naming ``what``.
    """
    if current() is None:
        return
    digests = all_gather_object(hashlib.sha256(repr(value).encode()).hexdigest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise ValueError(
            f"{what} of rank {different[0]} differ from rank 0's; under torchrun all processes generate the "
            "same sequences together: give them the same, or start them without torchrun"
        )


def _own_device(wanted: torch.device) -> torch.device:
    if wanted.type != "cuda":
        return wanted
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"process {local} of this machine has no GPU of its own: torch sees {count}; start at most "
            f"--nproc-per-node {count}"
        )
    if wanted.index not in (None, local):
        raise ValueError(
            f"device={str(wanted)!r}, but under torchrun process {local} of a machine uses 'cuda:{local}'; "
            f"leave the device out, or use 'cuda'"
        )
    return torch.device("cuda", local)

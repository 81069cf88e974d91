"""The process group of several processes, with one device each, that decode together.

``torchrun`` starts the processes and sets their ranks in the environment. T x C ranks form a grid. In each
context group, C ranks split the KV slots of every sequence (``kv/parallel``); in each tensor group, T ranks
split the heads of the target (``models/tensor_parallel.py``). Values that every rank computes may differ in
their last bits, so all values that decisions depend on come from rank 0: logits, seeds, times, stop criteria.
"""

import gc
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from triforce_tree.runtime.peer_memory import PeerMemory, map_memory
from triforce_tree.runtime.rank_watch import LostRankError, RankWatch

# Loading may take one process minutes longer than another. ``RankWatch`` notices a process that ends. One
# that never answers is noticed after this time, by gloo and by torch's watchdog for NCCL.
_TIMEOUT = timedelta(minutes=10)
T = TypeVar("T")
# The function is renamed in torch 2.13, which deprecates the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Addresses in the representations of functions, which differ from process to process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate. All ranks make the same calls of the engine.

    Attributes:
        rank: the index of this process in the group.
        size: the number of processes in the group.
        device: the device of this process.
        processes: torch's process group; None for the default group of all processes.
        peers: memory through which the ranks exchange small tensors; None if they use NCCL alone.
    """

    rank: int
    size: int
    device: torch.device
    processes: Any = field(default=None, compare=False, repr=False)
    peers: PeerMemory | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Grid:
    """The groups of this process in a grid of T x C ranks.

    Attributes:
        tensor: T adjacent ranks, which split the target's attention heads.
        context: C ranks at distance T, which split the KV slots of every sequence.
        every: all ranks, which split the target's MLPs.
    """

    tensor: Group
    context: Group
    every: Group


@dataclass
class _Joined:
    group: Group
    hosts: Any
    """A gloo group of all ranks for host data, whose communication does not wait for the devices."""
    initialised: bool
    """Whether torch.distributed was initialised here, and not by the calling program."""
    watch: RankWatch
    grids: dict[int, Grid] = field(default_factory=dict)
    """The grids by the size C of their context groups."""


@dataclass
class Traffic:
    """Counts collectives of this process on devices by name: calls, and bytes of the tensors passed to them.

    Collectives in a replayed CUDA graph are not counted.
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
    """Returns the number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Returns whether this process has rank 0. Only rank 0 prints."""
    return world_size() == 1 or int(os.environ.get("RANK", "0")) == 0


def current() -> Group | None:
    """Returns the group that this process has joined; None if it decodes alone."""
    return _joined.group if _joined is not None else None


def join(device: str | torch.device | None = None) -> Group | None:
    """Joins the group of the processes that torchrun started; returns None without torchrun.

    Args:
        device: the type of the device; by default CUDA if it is available. The index of the device is the
            process's ``LOCAL_RANK``.

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

    def broadcast(value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, group=hosts)
        return values[0]

    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size))) == size
    watch = RankWatch(rank, size, broadcast, local)
    _joined = _Joined(Group(rank, size, own, peers=peers), hosts, initialise, watch)
    return _joined.group


@contextmanager
def together() -> Iterator[None]:
    """Is a context for a call that all ranks make, which ends if one of them fails; see :class:`RankWatch`.

    Raises:
        LostRankError: another rank has failed, or did not answer in time.
    """
    if _joined is None:
        yield
        return
    with _joined.watch.call():
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LostRankError) or "Timed out" not in str(error):
                raise
            raise LostRankError(
                f"another rank has not answered for {_TIMEOUT}, although its process lives; see what it does "
                "(py-spy dump --pid)",
                said=False,
            ) from error


def arrange(context: int) -> Grid | None:
    """Arranges all processes in a grid whose context groups have ``context`` ranks.

    Every process must call this with the same number. Further calls return the same grid.

    Returns:
        the grid; None if this process decodes alone.

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
        tensors = [range(first, first + tensor) for first in range(0, size, tensor)]
        contexts = [range(first, size, tensor) for first in range(tensor)]
        _joined.grids[context] = Grid(_part(tensors), _part(contexts), _joined.group)
    return _joined.grids[context]


def _part(parts: Sequence[range]) -> Group:
    """Creates a process group for each of ``parts``, and returns the group of this process.

    Every process must call this with the same ``parts``.
    """
    assert _joined is not None
    everyone, group = _joined.group, None
    for ranks in parts:
        # No process group is needed for a single rank, or for all ranks, which have one already.
        processes = dist.new_group(list(ranks), timeout=_TIMEOUT) if 1 < len(ranks) < everyone.size else None
        if everyone.rank in ranks:
            peers = everyone.peers if len(ranks) == everyone.size else None
            if processes is not None:
                # The first collective creates the communicator, which is not possible in a graph capture.
                dist.all_reduce(torch.zeros(1, device=everyone.device), group=processes)
                peers = map_memory(processes, ranks, everyone.device)
            group = Group(ranks.index(everyone.rank), len(ranks), everyone.device, processes, peers)
    assert group is not None
    return group


def tensor_group(size: int) -> Group | None:
    """Returns the tensor group with ``size`` ranks, or all ranks if 0; None if this process is alone."""
    if _joined is None:
        return None
    arranged = grid(_joined.group.size // size) if size else None
    return arranged.tensor if arranged is not None else _joined.group


def grid(context: int) -> Grid | None:
    """Returns the grid that :func:`arrange` made for this number; None if it was not called."""
    return _joined.grids.get(context) if _joined is not None else None


def shares(context: int) -> dict[str, int] | None:
    """Returns the numbers of ranks that split ``heads`` and ``positions``; None for one process alone."""
    size = _joined.group.size if _joined is not None else 0
    return {"heads": size // context, "positions": context} if size else None


def leave() -> None:
    """Leaves the group at the end of a program. Every process must call it when no communication runs."""
    global _joined
    if _joined is None:
        return
    _joined.watch.leave()
    initialised, _joined = _joined.initialised, None
    # Captured graphs refer to communicators, which can be destroyed only when the graphs are freed.
    gc.collect()
    if initialised:
        dist.destroy_process_group()


def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Overwrites a contiguous tensor with the values of rank 0, and returns it; unchanged without a group."""
    if _joined is not None:
        traffic.add("broadcast", tensor)
        dist.broadcast(tensor, 0)
    return tensor


def all_reduce_tensor(tensor: Tensor, group: Group | None) -> Tensor:
    """Overwrites a contiguous tensor with the sum over a group, by default all ranks, and returns it."""
    traffic.add("all_reduce", tensor)
    dist.all_reduce(tensor, group=group.processes if group is not None else None)
    return tensor


def all_gather_tensor(tensor: Tensor, group: Group) -> Tensor:
    """Returns the contiguous tensors of all ranks of a group, ``[size, ...]``. CUDA graphs can capture it."""
    # gloo requires tensors of one dimension.
    out = tensor.new_empty(group.size * tensor.numel())
    traffic.add("all_gather", tensor)
    _all_gather(out, tensor.view(-1), group=group.processes)
    return out.view(group.size, *tensor.shape)


def broadcast_object(value: T) -> T:
    """Returns rank 0's value of a host object. It waits for the other processes, but for no device."""
    if _joined is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, group=_joined.hosts)
    return values[0]


def broadcast_flag(flag: bool) -> bool:
    """Returns rank 0's flag. It sends one message where ``broadcast_object`` sends two."""
    if _joined is None:
        return flag
    value = torch.tensor([flag], device="cpu")
    dist.broadcast(value, 0, group=_joined.hosts)
    return bool(value)


def begin_broadcast(tensor: Tensor) -> Any:
    """Begins to overwrite a contiguous host tensor with the values of rank 0, in processes that have joined.

    Returns:
        a ``torch.distributed.Work``; the tensor has the values after its ``wait()``.
    """
    assert _joined is not None
    return dist.broadcast(tensor, 0, group=_joined.hosts, async_op=True)


def local_size() -> int:
    """Returns the number of processes of the group on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))) if _joined is not None else 1


def all_reduce_min(values: Sequence[float]) -> list[float]:
    """Returns the minimum of each value over all processes; exact for integers up to 2**53."""
    if _joined is None:
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(reduced, dist.ReduceOp.MIN, group=_joined.hosts)
    minima: list[float] = reduced.tolist()
    return minima


def all_gather_object(value: T) -> list[T]:
    """Returns the values of all ranks, in the order of ranks."""
    if _joined is None:
        return [value]
    gathered: list[Any] = [None] * _joined.group.size
    dist.all_gather_object(gathered, value, group=_joined.hosts)
    return gathered


def agreed(values: Sequence[int]) -> list[int]:
    """Returns ``values``, in which each value that is not equal on all processes is replaced by 0."""
    if _joined is None:
        return list(values)
    gathered = all_gather_object(list(values))
    return [value if len(set(of_all)) == 1 else 0 for value, *of_all in zip(values, *gathered, strict=True)]


def check_equal(values: Mapping[str, object]) -> None:
    """Checks that values are equal on all processes. Different values would make them hang later.

    Args:
        values: by their plural names, for the message.

    Raises:
        ValueError: values differ. It is raised on every process.
    """
    if _joined is None:
        return
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in values.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    first, *others = all_gather_object(digests)
    for rank, other in enumerate(others, 1):
        if other == first:
            continue
        name = next((n for n in first if n in other and first[n] != other[n]), "calls")
        raise ValueError(
            f"{name} of rank {rank} differ from rank 0's; under torchrun all processes generate the same "
            "sequences together: give them the same, or start them without torchrun"
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

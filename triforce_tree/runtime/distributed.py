"""Several cards, one process each, that write one text: who takes part, and what they tell each other.

``torchrun`` starts the processes and says in the environment who they are. Each holds a share of the
target's heads and neurons (``sharding.py``). Numbers that every card computes for itself may differ in the
last bits, so whatever decides comes from rank 0: logits, seeds, measured times, stopping criteria.
"""

import gc
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# Loading may take one process minutes longer than another; a process that dies is torchrun's to notice.
_PATIENCE = timedelta(minutes=10)
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The processes that decode together; all of them call the engine alike."""

    rank: int
    size: int
    device: torch.device


@dataclass
class _Joined:
    group: Group
    hosts: Any
    """Gloo's own group: what hosts tell each other must not wait for the devices."""
    begun: bool
    """Whether torch.distributed was initialised here, and not by the program around."""


_joined: _Joined | None = None


def world_size() -> int:
    """Processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return world_size() == 1 or int(os.environ.get("RANK", "0")) == 0


def current() -> Group | None:
    """The group that this process has joined."""
    return _joined.group if _joined is not None else None


def join(device: str | torch.device | None = None) -> Group | None:
    """Meet the other processes that torchrun started; None where there are none.

    Args:
        device: what kind of it; by default CUDA where there is one. Each process takes the card of its
            ``LOCAL_RANK``.

    Raises:
        ValueError: there are fewer cards than processes, or ``device`` is another process's.
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
    begun = not dist.is_initialized()
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if begun and own.type == "cuda":
        dist.init_process_group("nccl", timeout=_PATIENCE, device_id=own)
    elif begun:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    needed = "nccl" if own.type == "cuda" else "gloo"
    if needed not in str(dist.get_backend_config()):
        raise ValueError(
            f"torch.distributed was initialised with {dist.get_backend_config()}, which has no {needed} for "
            f"{str(own)!r}; leave initialising it to triforce_tree, or do it with {needed!r}"
        )
    hosts = dist.new_group(backend="gloo", timeout=_PATIENCE)
    _joined = _Joined(Group(dist.get_rank(), dist.get_world_size(), own), hosts, begun)
    return _joined.group


def leave() -> None:
    """Part from the others, at the end of a program; every process must, and none may be waiting."""
    global _joined
    if _joined is None:
        return
    begun, _joined = _joined.begun, None
    # A communicator does not end while captured graphs refer to it.
    gc.collect()
    if begun:
        dist.destroy_process_group()


def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Rank 0's values of a contiguous tensor, in its own place; the tensor itself where nobody joined."""
    if _joined is not None:
        dist.broadcast(tensor, 0)
    return tensor


def broadcast_object(value: T) -> T:
    """Rank 0's value of anything that the host decides by; it waits for hosts alone."""
    if _joined is None:
        return value
    held = [value]
    dist.broadcast_object_list(held, 0, group=_joined.hosts)
    return held[0]


def all_true(flag: bool) -> bool:
    """Rank 0's word on a question that is asked for every token: one small message, not ``told``'s two."""
    if _joined is None:
        return flag
    held = torch.tensor([flag])
    dist.broadcast(held, 0, group=_joined.hosts)
    return bool(held)


def local_size() -> int:
    """Processes of the group on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))) if _joined is not None else 1


def all_reduce_min(values: Sequence[float]) -> list[float]:
    """The smallest of each number over all processes; exact for whole numbers up to 2**53."""
    if _joined is None:
        return list(values)
    held = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MIN, group=_joined.hosts)
    found: list[float] = held.tolist()
    return found


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, in the order of ranks."""
    if _joined is None:
        return [value]
    found: list[Any] = [None] * _joined.group.size
    dist.all_gather_object(found, value, group=_joined.hosts)
    return found


def check_alike(what: str, value: object) -> None:
    """Raise on every process where ``value`` is not the same on all of them, rather than hang later.

    Raises:
        ValueError: naming ``what``.
    """
    found = all_gather_object(hashlib.sha256(repr(value).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise ValueError(
            f"{what} of rank {others[0]} differ from rank 0's; under torchrun all processes write one text "
            "together: give them the same, or start them without torchrun"
        )


@torch.library.custom_op("triforce_tree::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """The sum over all processes; opaque to compilers, and possible inside a CUDA graph."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out)
    return out


@all_reduce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _own_device(wanted: torch.device) -> torch.device:
    if wanted.type != "cuda":
        return wanted
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"process {local} of this machine has no card of its own: torch sees {count}; start at most "
            f"--nproc-per-node {count}"
        )
    if wanted.index not in (None, local):
        raise ValueError(
            f"device={str(wanted)!r}, but under torchrun process {local} of a machine works on "
            f"'cuda:{local}'; leave the device out, or give 'cuda'"
        )
    return torch.device("cuda", local)

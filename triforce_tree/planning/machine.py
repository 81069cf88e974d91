"""What this machine has: memory that can be had now, and how fast bytes move."""

import time
from dataclasses import replace
from functools import cache
from math import prod

import torch

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.cpu.host_rows import attend, kernel
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import SPARE, HostMemory, available, usable
from triforce_tree.planning.memory_map import HostRate, Machine
from triforce_tree.runtime import distributed

_PIECE = 64 << 20
# Query rows that attention on the CPU is measured at, from plain decoding to long chains; seconds for each.
_QUERIES, _SECONDS = (1, 16, 48, 96), 0.06
# Bytes that it goes through: more than the largest caches of processors hold.
_ATTENDED = 512 << 20


def bound_memory(device: torch.device, size: int) -> None:
    """Let torch's allocator take at most ``size`` bytes of a GPU; off the GPU nothing happens."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), index)


def available_device_bytes(device: torch.device, gpu_bytes: int | None) -> int | None:
    """Bytes of the device that an engine which is to be made can have; None where nothing bounds them.

    Of several cards the least.
    """
    rooms = [gpu_bytes] if gpu_bytes is not None else []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        rooms.append(torch.cuda.mem_get_info(device)[0])
    return int(distributed.all_reduce_min([min(rooms)])[0]) if rooms else None


def measured(
    device: torch.device,
    own: int,
    gpu_bytes: int | None = None,
    on_host: int = 0,
    host_bytes: int | None = None,
) -> Machine:
    """Memory and bandwidths, the latter measured once a process; of several cards the least of each.

    Args:
        own: bytes of the engine's tensors that are on the device already; ``on_host``: page-locked ones.
        gpu_bytes: the engine's share of the device; None for all that is free.
        host_bytes: the engine's share of host memory, of all ranks together; None for all but what is left
            to the system.
    """
    # The ranks of one machine share its memory.
    ranks = distributed.local_size()
    most = max(0, available()[0] - SPARE) // ranks + on_host
    # What is there already counts towards what the user allows.
    allowed = None if host_bytes is None else max(0, host_bytes - ranks * on_host)
    size, name = usable(allowed)
    bus, read = bandwidths(device)
    host = size // ranks + on_host
    free, limit, others = _device(device, own, host)
    machine = Machine(free, host, bus, read, others, limit, name, free, most, ranks)
    if gpu_bytes is not None and (gpu_bytes < free or device.type != "cuda"):
        machine = replace(machine, device=gpu_bytes, limit="gpu_memory")
    return _least(machine)


def _least(machine: Machine) -> Machine:
    """What every rank has, so that all plan alike."""
    sizes = (machine.device, machine.host, -machine.others, machine.most_device, machine.most_host)
    bus, read, *least = distributed.all_reduce_min((machine.bus, machine.read, *sizes))
    device, host, others, most_device, most_host = map(int, least)
    return replace(
        machine, device=device, host=host, bus=bus, read=read, others=-others,
        most_device=most_device, most_host=most_host,
    )  # fmt: skip


def _device(device: torch.device, own: int, host: int) -> tuple[int, str, int]:
    """Bytes that the engine can have of this rank's device, its name, and bytes that others have of them."""
    if device.type != "cuda":
        # There is one memory, and cache and rows "on the device" lie in it as well.
        return host + own, "the host", 0
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return free, torch.cuda.get_device_name(device), max(0, allocated - own)


def host_rate(heads: Heads, dtype: torch.dtype, device: torch.device) -> HostRate:
    """How fast the CPU attends to rows of its memory while the bus copies.

    Measured once for each of these and the number of torch's threads.

    On several cards all ranks measure at once, each its own heads, and have the least of it.

    Args:
        heads, dtype: of the attention.
        device: that rows are copied to meanwhile; off the GPU nothing is, and less memory does.

    Raises:
        HostMemoryError: host memory is short.
    """
    return _host_rate(heads, dtype, device, torch.get_num_threads())


@cache
def _host_rate(heads: Heads, dtype: torch.dtype, device: torch.device, threads: int) -> HostRate:
    on_gpu = device.type == "cuda"
    size, piece = (_ATTENDED, _PIECE) if on_gpu else (_ATTENDED >> 4, _PIECE >> 4)
    shape = (2, heads.kv, heads.dim)
    row = prod(shape) * dtype.itemsize
    memory = HostMemory(locked=on_gpu, what="measuring attention on the CPU")
    memory.check(size)
    answer, stream, speeds = kernel(heads, dtype) or attend, CopyStream(device), []
    try:
        # Written, or all of it would be one page of zeros.
        rows = memory.take((size // row, *shape), dtype).fill_(0.5)
        near = torch.empty((piece // row, *shape), dtype=dtype, device=device)
        for queries in _QUERIES:
            q = torch.full((queries, heads.query, heads.dim), 0.5, dtype=dtype)
            part = rows[: -(-len(rows) // 16)]
            answer(q, part)
            start = time.perf_counter()
            answer(q, part)
            # All of them would take a slow processor seconds, long after the copies.
            served = _SECONDS / 2 / (time.perf_counter() - start)
            some = rows[: max(1, min(len(rows), int(len(part) * served)))]
            answer(q, some)
            copies = int(2 * _SECONDS * bandwidths(device)[0] / near.nbytes) if on_gpu else 0
            for _ in range(copies):
                stream.copy(near, rows[: len(near)])
            start, seconds, count = time.perf_counter(), 0.0, 0
            while seconds < _SECONDS:
                answer(q, some)
                count += some.nbytes
                seconds = time.perf_counter() - start
            stream.synchronize()
            speeds.append(count / seconds)
        del rows
    finally:
        memory.release()
    return HostRate(tuple(zip(_QUERIES, distributed.all_reduce_min(speeds), strict=True)))

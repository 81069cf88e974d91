"""Measures this machine: memory that is available now, bandwidths, and the CPU's speed of attention."""

import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.cpu.offload_attention import attend, kernel
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import SPARE, HostMemory, available, usable
from triforce_tree.planning.memory_map import HostRate, Machine
from triforce_tree.runtime import distributed

_PIECE = 64 << 20
# Numbers of queries at which attention on the CPU is measured, from autoregressive decoding to long chains;
# seconds for each.
_QUERIES, _SECONDS = (1, 16, 48, 96), 0.06
# Bytes of keys and values that are read: more than the largest processor caches hold.
_KV_BYTES = 512 << 20


def bound_memory(device: torch.device, size: int) -> None:
    """Limits torch's allocator to ``size`` bytes of a GPU; on other devices nothing happens."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), index)


def available_device_bytes(device: torch.device, gpu_bytes: int | None) -> int | None:
    """Returns the device bytes that a new engine may use, the minimum over all ranks, or None without a
    limit.
    """
    limits = [gpu_bytes] if gpu_bytes is not None else []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        limits.append(torch.cuda.mem_get_info(device)[0])
    return int(distributed.all_reduce_min([min(limits)])[0]) if limits else None


def measured(
    device: torch.device,
    own: int,
    gpu_bytes: int | None = None,
    on_host: int = 0,
    host_bytes: int | None = None,
) -> Machine:
    """Returns memory and bandwidths, the minimum over all ranks. Bandwidths are measured once per process.

    Args:
        own: bytes of the engine's tensors that are already on the device.
        gpu_bytes: device memory that the engine may use; None for all that is free.
        on_host: bytes of the engine's tensors that are already in page-locked memory.
        host_bytes: host memory that all ranks together may use; None for all except a reserve for the system.
    """
    # The ranks of one machine share its memory.
    ranks = distributed.local_size()
    most = max(0, available()[0] - SPARE) // ranks + on_host
    # Memory that the engine has already taken counts towards the user's limit.
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
    """Returns the minimum over all ranks, so that all make the same plan; limits name the rank that has
    least.
    """
    all_ranks = distributed.all_gather_object(machine)

    def least(name: str) -> Any:
        return min(getattr(each, name) for each in all_ranks)

    def limit(size: str, name: str) -> str:
        sizes = [getattr(each, size) for each in all_ranks]
        rank = sizes.index(min(sizes))
        said: str = getattr(all_ranks[rank], name)
        return said if min(sizes) == max(sizes) else f"{said} of rank {rank}"

    return Machine(
        **{name: least(name) for name in ("device", "host", "bus", "read", "most_device", "most_host")},
        others=max(each.others for each in all_ranks), ranks=machine.ranks,
        limit=limit("device", "limit"), host_limit=limit("host", "host_limit"),
    )  # fmt: skip


def _device(device: torch.device, own: int, host: int) -> tuple[int, str, int]:
    """Returns (device bytes that the engine of this rank may use, name of their limit, bytes used by
    others).
    """
    if device.type != "cuda":
        # Device and host share one memory.
        return host + own, "the host", 0
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return free, torch.cuda.get_device_name(device), max(0, allocated - own)


def host_rate(heads: Heads, dtype: torch.dtype, device: torch.device) -> HostRate:
    """Returns how fast the CPU attends to keys and values in host memory during copies from host to device.

    It is measured once for each combination of these arguments and the number of torch's threads. With
    several ranks all measure at the same time, each with its own heads, and get the slowest result.

    Args:
        heads, dtype: shape and dtype of the attention.
        device: destination of the copies. Without a GPU nothing is copied, and less memory is read.

    Raises:
        HostMemoryError: there is too little host memory.
    """
    return _host_rate(heads, dtype, device, torch.get_num_threads())


@cache
def _host_rate(heads: Heads, dtype: torch.dtype, device: torch.device, threads: int) -> HostRate:
    on_gpu = device.type == "cuda"
    size, piece = (_KV_BYTES, _PIECE) if on_gpu else (_KV_BYTES >> 4, _PIECE >> 4)
    slot_bytes = heads.row * dtype.itemsize
    memory = HostMemory(locked=on_gpu, what="measuring attention on the CPU")
    memory.check(size)
    attention, stream, rates = kernel(heads, dtype) or attend, CopyStream(device), []
    try:
        # Filled, as untouched memory is one shared page of zeros.
        kv = memory.take((size // slot_bytes, heads.row), dtype).fill_(0.5)
        on_device = torch.empty((piece // slot_bytes, heads.row), dtype=dtype, device=device)
        for queries in _QUERIES:
            q = torch.full((queries, heads.query, heads.dim), 0.5, dtype=dtype, device="cpu")
            probe = kv[: -(-len(kv) // 16)]
            attention(q, *heads.split(probe))
            start = time.perf_counter()
            attention(q, *heads.split(probe))
            # A slow processor would take seconds for all of it, long after the copies have ended.
            repeats = _SECONDS / 2 / (time.perf_counter() - start)
            part = kv[: max(1, min(len(kv), int(len(probe) * repeats)))]
            attention(q, *heads.split(part))
            copies = int(2 * _SECONDS * bandwidths(device)[0] / on_device.nbytes) if on_gpu else 0
            for _ in range(copies):
                stream.copy(on_device, kv[: len(on_device)])
            start, seconds, read = time.perf_counter(), 0.0, 0
            while seconds < _SECONDS:
                attention(q, *heads.split(part))
                read += part.nbytes
                seconds = time.perf_counter() - start
            stream.synchronize()
            rates.append(read / seconds)
        del kv
    finally:
        memory.release()
    return HostRate(tuple(zip(_QUERIES, distributed.all_reduce_min(rates), strict=True)))

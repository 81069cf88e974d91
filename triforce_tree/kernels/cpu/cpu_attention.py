"""Attention on the CPU by the C kernel ``cpu_attention.c``, which is compiled at its first use."""

import ctypes
import logging
import os
from collections import deque
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.build import shared_library

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c")
# Linux's names of the CPU flags that each instruction set needs; the fastest set is first.
_BF16_INSTRUCTIONS = {
    "AMX": (*_AVX512, "amx_tile", "amx_bf16"),
    "AVX-512 BF16": (*_AVX512, "avx512_bf16"),
}
_FP32_INSTRUCTIONS = {"AVX-512": _AVX512, "AVX2": ("avx2", "fma", "f16c")}
_INSTRUCTIONS = {torch.bfloat16: _BF16_INSTRUCTIONS | _FP32_INSTRUCTIONS, torch.float16: _FP32_INSTRUCTIONS}
_ALIGNMENT = 64
_MOST_DIM = 512
_P, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Request(ctypes.Structure):
    """The struct ``Request`` of the C file."""

    _fields_: ClassVar = [
        ("q", _P), ("keys", _P), ("values", _P), ("work", _P), ("out", _P), ("lse", _P),
        ("count", _LONG), ("stride", _LONG), ("heads", _INT), ("group", _INT), ("queries", _INT),
        ("dim", _INT), ("value_dim", _INT), ("threads", _INT), ("scale", ctypes.c_float),
    ]  # fmt: skip


class Call(NamedTuple):
    """The addresses of a C function ``void f(void *)`` and of its argument."""

    function: int
    argument: int


def instructions(dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    """Returns the instruction sets of this processor that the kernel can use, fastest first.

    They are "AMX", "AVX-512 BF16", "AVX-512" and "AVX2". The first two multiply in bf16. The others convert
    keys and values to fp32, and also support fp16.
    """
    available = [way for way, needed in _INSTRUCTIONS.get(dtype, {}).items() if _flags().issuperset(needed)]
    if vendor() == "GenuineIntel":
        # On Intel, bf16 dot products are slower than fp32 (docs/offloaded_passes.md), so they come last.
        available.sort(key="AVX-512 BF16".__eq__)
    return tuple(available)


def fp32_instructions() -> dict[str, tuple[str, ...]]:
    """Returns this processor's instruction sets for fp32 products, fastest first, with their CPU flags."""
    return {way: needed for way, needed in _FP32_INSTRUCTIONS.items() if _flags().issuperset(needed)}


def supports(dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernel runs on this processor for keys or values of this width and dtype.

    The first call on a suitable processor compiles the kernel. If that fails, it warns once and returns
    False.
    """
    return _fits(dim) and bool(instructions(dtype)) and _usable(dtype)


def _fits(dim: int) -> bool:
    return not dim % 32 and 0 < dim <= _MOST_DIM


@cache
def _usable(dtype: torch.dtype) -> bool:
    try:
        _library(None, dtype)
    except OSError as error:
        _LOG.warning("the C kernel for attention on the CPU is not used: %s", error)
        return False
    return True


class CpuAttention:
    """Attention to keys and values in host memory, with sums in fp32.

    Results do not depend on the number of threads, bit for bit.

    Args:
        threads: number of threads.
        waiting: largest number of prepared calls that have not run yet.
        way: instruction set, one of :func:`instructions`; None for the fastest.
        dtype: dtype of queries, keys, values and outputs, bf16 or fp16.

    Raises:
        OSError: the kernel cannot be built or used here.
    """

    def __init__(
        self, threads: int, waiting: int = 1, way: str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._library, self._threads, self._dtype = _library(way, dtype), threads, dtype
        self._function = ctypes.cast(self._library.host_attention, _P).value or 0
        self._work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pending: deque[tuple[_Request, Tensor]] = deque(maxlen=waiting)

    def call(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> Call:
        """Prepares a C call that computes the attention when it runs.

        Prepared calls may run on any thread, but only one at a time and in order. All tensors must be in host
        memory, and the caller must keep them alive until the call has run.

        Args:
            q: ``[T, H_q, D]``, dense, in the dtype of the kernel; D is a multiple of 32 up to 512.
            k: ``[n, H_kv, D]`` in the dtype of the kernel, where n may be 0. The heads of a position must be
                dense.
            v: ``[n, H_kv, D_v]``, with the same conditions and the same stride between positions as ``k``.
            scale: factor on the scores.
            out: ``[T, H_q, D_v]``, dense, in the dtype of the kernel; written.
            lse: log-sum-exps (natural logarithm), fp32 ``[T, H_q]``, dense; written; -inf if n is 0.

        Raises:
            ValueError: shapes, dtypes or layouts do not match.
        """
        (queries, heads, dim), (count, kv, value_dim) = q.shape, v.shape
        shapes_fit = k.shape == (count, kv, dim) and heads % kv == 0 and _fits(dim) and _fits(value_dim)
        outs_fit = out.shape == (queries, heads, value_dim) and lse.shape == (queries, heads)
        if not shapes_fit or not outs_fit or not queries:
            raise ValueError(
                f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, out {list(out.shape)} and lse "
                f"{list(lse.shape)} must be [T, H_q, D], [n, H_kv, D], [n, H_kv, D_v], [T, H_q, D_v] and "
                f"[T, H_q] with T of at least 1, H_q a multiple of H_kv, and D and D_v a multiple of 32 up "
                f"to {_MOST_DIM}"
            )
        dtypes_fit = all(t.dtype == self._dtype for t in (q, k, v, out)) and lse.dtype == torch.float32
        on_host = all(t.device.type == "cpu" for t in (q, k, v, out, lse))
        dense = on_host and all(t.is_contiguous() for t in (q, out, lse))
        rows_fit = k.stride(0) == v.stride(0) and all(t.stride()[1:] == (t.shape[2], 1) for t in (k, v))
        if not dtypes_fit or not dense or (count > 1 and not rows_fit):
            raise ValueError(
                f"q, k, v and out must be {self._dtype}, lse fp32, and all of them dense and in host memory, "
                "k and v with equal strides between positions; convert them, and call .contiguous()"
            )
        group = heads // kv
        work_bytes = (
            self._library.host_attention_work(count, kv, group * queries, dim, value_dim, self._threads)
            + _ALIGNMENT
        )
        if self._work.numel() < work_bytes:
            # The size is rounded up to a power of 2, because sequences grow; untouched memory pages cost
            # nothing.
            self._work = torch.empty(1 << (work_bytes - 1).bit_length(), dtype=torch.uint8, device="cpu")
        work = -(-self._work.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        request = _Request(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), work, out.data_ptr(), lse.data_ptr(),
            count, k.stride(0) * k.itemsize, kv, group, queries,
            dim, value_dim, self._threads, scale,
        )  # fmt: skip
        self._pending.append((request, self._work))
        return Call(self._function, ctypes.addressof(request))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Computes the attention at once; see ``offload_attention.attend``."""
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device="cpu")
        call = self.call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, out, lse)
        self._library.host_attention(call.argument)
        return out, lse


def _flags() -> frozenset[str]:
    """Returns Linux's names of the features of the processor."""
    return frozenset(_cpuinfo("flags").split())


def vendor() -> str:
    return _cpuinfo("vendor_id")


@cache
def _cpuinfo(name: str) -> str:
    """Returns a field of the first core in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    entry = next((line for line in lines if line.partition(":")[0].rstrip() == name), "")
    return entry.partition(":")[2].strip()


@cache
def _library(way: str | None, dtype: torch.dtype) -> ctypes.CDLL:
    """Returns the compiled kernel with instruction set ``way``, or with the fastest one that works.

    Raises:
        OSError: the processor lacks the instructions, no compiler is found, the compiler fails, or the system
            denies the use of tile registers.
    """
    available = instructions(dtype)
    if not available or (way or available[0]) not in available:
        wanted = way or " or ".join(_INSTRUCTIONS.get(dtype, {})) or "another dtype"
        raise OSError(
            f"the kernel for {dtype} needs {wanted}, and this processor has "
            f"{' and '.join(available) or 'none of them'}"
        )
    failed: OSError | None = None
    more = ("-DFP16",) if dtype == torch.float16 else ()
    for each in (way,) if way else available:
        try:
            library = _loaded(shared_library(_SOURCE, _INSTRUCTIONS[dtype][each], more))
        except OSError as error:
            failed = failed or error
            continue
        if failed is not None:
            _LOG.warning("attention on the CPU falls back to %s: %s", each, failed)
        return library
    assert failed is not None
    raise failed


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.host_attention_work.argtypes = [_LONG, *[_INT] * 5]
    library.host_attention_work.restype = _LONG
    library.host_attention.argtypes, library.host_attention.restype = [_P], None
    denied = library.host_attention_init()
    if denied:
        raise OSError(denied, f"the system denies AMX tile registers: {os.strerror(denied)}")
    return library

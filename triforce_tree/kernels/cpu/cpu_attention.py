"""Our kernel for attention on the CPU (``cpu_attention.c``): where it runs, how it is built and called.

It is compiled on first use by the machine's own C compiler, which Triton needs as well, into
``~/.cache/triforce-tree/kernels`` (or below ``XDG_CACHE_HOME``), once for each version of it.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from triforce_tree.runtime.user_folders import user_cache

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".c")
_HEADERS = ("cpu_shared.h", "cpu_tiles.h", "cpu_block_bf16.h", "cpu_block_fp32.h")
_SOURCES = (_SOURCE, *map(_SOURCE.with_name, _HEADERS))
_FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c")
# Each way's instructions, fastest first, by the names of Linux.
_BF16_WAYS = {
    "AMX": (*_AVX512, "amx_tile", "amx_bf16"),
    "AVX-512 BF16": (*_AVX512, "avx512_bf16"),
}
_FP32_WAYS = {"AVX-512": _AVX512, "AVX2": ("avx2", "fma", "f16c")}
_WAYS = {torch.bfloat16: _BF16_WAYS | _FP32_WAYS, torch.float16: _FP32_WAYS}
_COMPILERS = ("cc", "gcc", "clang")
_ALIGNMENT = 64
_MOST_DIM = 256
_P, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Question(ctypes.Structure):
    """``Question`` in the C file."""

    _fields_: ClassVar = [
        ("q", _P), ("rows", _P), ("work", _P), ("out", _P), ("lse", _P), ("seconds", _P), ("count", _LONG),
        ("heads", _INT), ("group", _INT), ("queries", _INT), ("dim", _INT), ("threads", _INT),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Call(NamedTuple):
    """Addresses of a C function ``void f(void *)`` and of its argument."""

    function: int
    argument: int


def instructions(dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    """The kernel's ways that this processor has: "AMX", "AVX-512 BF16", "AVX-512", "AVX2", fastest first.

    AMX and AVX-512 BF16 have products of bf16. The others widen keys and values to fp32, and take fp16 as
    well.
    """
    found = [way for way, needed in _WAYS.get(dtype, {}).items() if _flags().issuperset(needed)]
    if _vendor() == "GenuineIntel":
        # Its dot products of bf16 are slower than fp32 (docs/offloading.md), and AMX may be denied.
        found.sort(key="AVX-512 BF16".__eq__)
    return tuple(found)


def supports(dim: int, dtype: torch.dtype) -> bool:
    """Whether this processor has the instructions, and the kernel heads of such a size and dtype.

    The first call on a processor that has them compiles the kernel; without a working compiler there is one
    warning, and False.
    """
    known = not dim % 32 and dim <= _MOST_DIM
    return known and bool(instructions(dtype)) and _usable(dtype)


@cache
def _usable(dtype: torch.dtype) -> bool:
    try:
        _library(None, dtype)
    except OSError as error:
        _LOG.warning("the CPU does not help with attention, %s", error)
        return False
    return True


class CpuAttention:
    """Attention of queries to rows in host memory, with sums in fp32.

    The same rows give the same bits, whatever the number of threads.

    Args:
        threads: to work on.
        waiting: calls that are made before the first of them has run, at most.
        way: one of :func:`instructions`; None for the fastest.
        dtype: of queries, rows and outputs, bf16 or fp16.

    Attributes:
        seconds: that all answers so far took.

    Raises:
        OSError: the kernel cannot be built or used here.
    """

    def __init__(
        self, threads: int, waiting: int = 1, way: str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._library, self._threads, self._dtype = _library(way, dtype), threads, dtype
        self._function = ctypes.cast(self._library.host_attention, _P).value or 0
        self._work = torch.empty(0, dtype=torch.uint8)
        self._seconds = ctypes.c_double()
        self._asked: deque[tuple[_Question, Tensor]] = deque(maxlen=waiting)

    @property
    def seconds(self) -> float:
        return self._seconds.value

    def call(self, q: Tensor, rows: Tensor, scale: float, out: Tensor, lse: Tensor) -> Call:
        """What answers, once it is called: from any thread, but one call at a time, in their order.

        Args:
            q: ``[T, H_q, D]``, D a multiple of 32 up to 256. Like all tensors here in host memory, dense,
                and kept by the caller until the answer is there; like all but ``lse`` in the kernel's dtype.
            rows: ``[n, 2, H_kv, D]``, of which there may be none.
            scale: of the scores.
            out: ``[T, H_q, D]``, written.
            lse: fp32 ``[T, H_q]``, natural logarithms, written; -inf without rows.

        Raises:
            ValueError: other tensors.
        """
        queries, heads, dim = q.shape
        count, _, kv, _ = rows.shape
        fits = rows.shape == (count, 2, kv, dim) and heads % kv == 0 and not dim % 32 and dim <= _MOST_DIM
        if not fits or not queries or out.shape != q.shape or lse.shape != (queries, heads):
            raise ValueError(
                f"q {list(q.shape)}, rows {list(rows.shape)}, out {list(out.shape)} and lse "
                f"{list(lse.shape)} must be [T, H_q, D], [n, 2, H_kv, D], [T, H_q, D] and [T, H_q] with T of "
                f"at least 1, H_q a multiple of H_kv, and D one of 32 up to {_MOST_DIM}"
            )
        typed = all(t.dtype == self._dtype for t in (q, rows, out)) and lse.dtype == torch.float32
        if not typed or not all(t.is_contiguous() and t.device.type == "cpu" for t in (q, rows, out, lse)):
            raise ValueError(
                f"q, rows and out must be {self._dtype}, lse fp32, and all of them dense and in host memory"
            )
        group = heads // kv
        need = self._library.host_attention_work(count, kv, group * queries, dim, self._threads) + _ALIGNMENT
        if self._work.numel() < need:
            # Rows become more with every text: what is not touched of a power of 2 costs nothing.
            self._work = torch.empty(1 << (need - 1).bit_length(), dtype=torch.uint8)
        work = -(-self._work.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        question = _Question(
            q.data_ptr(), rows.data_ptr(), work, out.data_ptr(), lse.data_ptr(),
            ctypes.addressof(self._seconds), count, kv, group, queries, dim, self._threads, scale,
        )  # fmt: skip
        self._asked.append((question, self._work))
        return Call(self._function, ctypes.addressof(question))

    def __call__(self, q: Tensor, rows: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """The answer at once; see ``host_rows.attend``."""
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
        call = self.call(q, rows, q.shape[-1] ** -0.5 if scale is None else scale, out, lse)
        self._library.host_attention(call.argument)
        return out, lse


def _flags() -> frozenset[str]:
    """What the processor can, by Linux's names."""
    return frozenset(_told("flags").split())


def _vendor() -> str:
    return _told("vendor_id")


@cache
def _told(name: str) -> str:
    """What Linux says of the first core; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.partition(":")[0].rstrip() == name), "")
    return found.partition(":")[2].strip()


@cache
def _library(way: str | None, dtype: torch.dtype) -> ctypes.CDLL:
    """The compiled kernel, by this way or the fastest that compiler and system let it go.

    Raises:
        OSError: a processor without the instructions, no compiler, a compiler that fails, or a system that
            grants no tile registers.
    """
    found = instructions(dtype)
    if not found or (way or found[0]) not in found:
        wanted = way or " or ".join(_WAYS.get(dtype, {})) or "another dtype"
        raise OSError(
            f"its kernel for {dtype} needs {wanted}, and this processor has "
            f"{' and '.join(found) or 'none of them'}"
        )
    failed: OSError | None = None
    for each in (way,) if way else found:
        try:
            library = _loaded(_built(_WAYS[dtype][each], dtype))
        except OSError as error:
            failed = failed or error
            continue
        if failed is not None:
            _LOG.warning("attention on the CPU goes by %s only, %s", each, failed)
        return library
    assert failed is not None
    raise failed


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.host_attention_work.argtypes = [_LONG, _INT, _INT, _INT, _INT]
    library.host_attention_work.restype = _LONG
    library.host_attention.argtypes, library.host_attention.restype = [_P], None
    denied = library.host_attention_init()
    if denied:
        raise OSError(denied, f"the system grants no tile registers: {os.strerror(denied)}")
    return library


def _built(instructions: Sequence[str], dtype: torch.dtype) -> Path:
    # Compilers have nearly the names of Linux.
    named = (name.replace("avx512_", "avx512").replace("amx_", "amx-") for name in instructions)
    flags = (*_FLAGS, *(f"-m{name}" for name in named), *(("-DFP16",) if dtype == torch.float16 else ()))
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), ""))
    if not compiler:
        raise OSError(
            f"its kernel needs a C compiler, and there is none of {', '.join(_COMPILERS)}; install gcc"
        )
    known = hashlib.sha256(
        b"\0".join([*(f.read_bytes() for f in _SOURCES), *(word.encode() for word in (*compiler, *flags))])
    )
    folder = user_cache("kernels")
    path = folder / f"{_SOURCE.stem}-{known.hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Under its name only once it is whole: another process may build the same.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / path.name
        command = [*compiler, *flags, str(_SOURCE), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(
                f"its kernel cannot be compiled: {' '.join(command)} ended with {done.returncode}: "
                f"{done.stderr.strip()[-500:]}; it takes gcc 11 or clang 12, or newer ones (CC names another)"
            )
        built.replace(path)
    return path

"""Our kernel for attention on the CPU (``amx_attention.c``): where it runs, how it is built and called.

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
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = (
    *("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mamx-tile", "-mamx-bf16"),
)
_NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "amx_tile", "amx_bf16"})
_COMPILERS = ("cc", "gcc", "clang")
_ALIGNMENT = 64
_MOST_DIM = 256
_P, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def supports(dim: int, dtype: torch.dtype) -> bool:
    """Whether this processor has the instructions, and the kernel heads of such a size and dtype.

    The first call on a processor that has them compiles the kernel; without a working compiler there is a
    warning, and False.
    """
    if dtype != torch.bfloat16 or dim % 32 or dim > _MOST_DIM or not _flags() >= _NEEDED:
        return False
    try:
        _library()
    except OSError as error:
        _LOG.warning("the CPU does not help with attention, %s", error)
        return False
    return True


class AmxAttention:
    """Attention of queries to rows in host memory, in bf16 products with fp32 sums.

    The same rows give the same bits, whatever the number of threads. One call at a time: memory for
    intermediate states is kept for the next one.

    Args:
        threads: to work on.

    Raises:
        OSError: the kernel cannot be built or used here.
    """

    def __init__(self, threads: int) -> None:
        self._library, self._threads = _library(), threads
        self._work = torch.empty(0, dtype=torch.uint8)

    def __call__(self, q: Tensor, rows: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """See ``host_rows.attend``, for bf16 and head sizes that :func:`supports` knows.

        Raises:
            ValueError: other tensors.
            MemoryError: host memory is short.
        """
        heads, queries, dim = q.shape
        count = rows.shape[0]
        if rows.shape != (count, 2, heads, dim) or not count or not queries or dim % 32 or dim > _MOST_DIM:
            raise ValueError(
                f"q {list(q.shape)} and rows {list(rows.shape)} must be [H_kv, R, D] and [n, 2, H_kv, D] "
                f"with R and n of at least 1, and D a multiple of 32 up to {_MOST_DIM}"
            )
        if q.dtype != torch.bfloat16 or rows.dtype != torch.bfloat16 or not rows.is_contiguous():
            raise ValueError("q and rows must be bf16, and rows dense")
        q = q.contiguous()
        need = self._library.host_attention_work(count, heads, queries, dim) + _ALIGNMENT
        if self._work.numel() < need:
            self._work = torch.empty(need, dtype=torch.uint8)
        work = -(-self._work.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        out = torch.empty(heads, queries, dim, dtype=torch.float32)
        lse = torch.empty(heads, queries, dtype=torch.float32)
        failed = self._library.host_attention(
            q.data_ptr(), rows.data_ptr(), count, heads, queries, dim, dim**-0.5 if scale is None else scale,
            self._threads, work, out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"attention on the CPU found no memory: {os.strerror(failed)}")
        return out, lse


@cache
def _flags() -> frozenset[str]:
    """What the processor can, as Linux says it; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


@cache
def _library() -> ctypes.CDLL:
    """The compiled kernel.

    Raises:
        OSError: no compiler, a compiler that fails, or a system that grants no tile registers.
    """
    library = ctypes.CDLL(str(_built()))
    library.host_attention_work.argtypes = [_LONG, _INT, _INT, _INT]
    library.host_attention_work.restype = _LONG
    library.host_attention.argtypes = [
        _P, _P, _LONG, _INT, _INT, _INT, ctypes.c_float, _INT, _P, _P, _P,
    ]  # fmt: skip
    denied = library.host_attention_init()
    if denied:
        raise OSError(denied, f"the system grants no AMX tile registers: {os.strerror(denied)}")
    return library


def _built() -> Path:
    source = _SOURCE.read_bytes()
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), ""))
    if not compiler:
        raise OSError(
            f"its kernel needs a C compiler, and there is none of {', '.join(_COMPILERS)}; install gcc"
        )
    known = hashlib.sha256(b"\0".join([source, *(word.encode() for word in (*compiler, *_FLAGS))]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triforce-tree" / "kernels"
    path = folder / f"{_SOURCE.stem}-{known.hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Under its name only once it is whole: another process may build the same.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / path.name
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(
                f"its kernel cannot be compiled: {' '.join(command)} ended with {done.returncode}: "
                f"{done.stderr.strip()[-500:]}; it takes gcc 11 or clang 12, or newer ones (CC names another)"
            )
        built.replace(path)
    return path

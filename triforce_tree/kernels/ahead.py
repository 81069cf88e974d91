"""Compiles the Triton kernels that a function launches together, in threads, instead of one after another."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from triforce_tree.runtime import distributed
from triforce_tree.runtime.packed import ALIGNMENT

# The thread whose launches only compile their kernels.
_compiles: int | None = None
_one = threading.Lock()


def compile_together(run: Callable[[], None], device: torch.device) -> None:
    """Calls ``run`` with every launch of this package's kernels replaced by a compilation.

    Triton compiles without Python's lock, so the compilations use all cores. Operators with a definition in
    plain torch return what it computes, so that indices are valid. Others, such as attention and linear
    layers, return zeros. A kernel that cannot be compiled raises its error at its first launch. Without a
    GPU, in Triton's interpreter, and with several ranks, which wait for each other in kernels, this does
    nothing.
    """
    if device.type != "cuda" or distributed.world_size() > 1:
        return
    import triton

    if triton.knobs.runtime.interpret:
        return
    threads = ThreadPoolExecutor(min(32, os.cpu_count() or 1))
    compiled = triton.AsyncCompileMode(threads, ignore_errors=True)
    with threads, _launches_compile(), compiled, torch.no_grad():
        run()


def compiles_only() -> bool:
    """Returns whether launches in this thread only compile."""
    return _compiles == threading.get_ident()


def _kind(argument: Any) -> object:
    """Returns what Triton may specialise a kernel for: the dtype and alignment of a tensor, or a value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    if hasattr(argument, "block_shape"):  # a descriptor of a tensor
        sizes = (*argument.shape, *argument.strides, *argument.block_shape)
        return _kind(argument.base), sizes
    return argument


@contextmanager
def _launches_compile() -> Iterator[None]:
    """Is a context in which launches of this package's kernels in this thread only compile."""
    from triton.runtime.jit import JITFunction

    global _compiles
    launch = JITFunction.run
    # Triton looks for a kernel that is being compiled for a millisecond, and layers have the same ones.
    found: dict[object, Any] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not compiles_only() or not kernel.module.startswith("triforce_tree."):
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        key = id(kernel), *map(_kind, args), *((name, _kind(value)) for name, value in options.items())
        if key not in found:
            found[key] = launch(kernel, *args, grid=grid, warmup=True, **options)
        return found[key]

    with _one:
        JITFunction.run, _compiles = run, threading.get_ident()
        try:
            yield
        finally:
            JITFunction.run, _compiles = launch, None

"""Kernels that are compiled together before their first launch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.compilations import compiled
from triforce_tree.kernels.ahead import compile_together
from triforce_tree.kernels.norm.reference import row_rms_norm
from triforce_tree.kernels.pointwise.reference import gated

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def norm(columns: int) -> tuple[Tensor, Tensor]:
    """Returns normed rows and what they must be; columns between other powers of two have another kernel."""
    x = torch.randn(3, columns, device=CUDA)
    expected = torch.nn.functional.rms_norm(x, (columns,), None, 1e-6)
    return row_rms_norm(x, torch.ones(columns, device=CUDA), 1e-6, 0.0, True), expected


@contextmanager
def launched() -> Iterator[list[str]]:
    """Yields a list that gets the names of the kernels that Triton launches inside the context."""
    from triton import knobs

    names: list[str] = []

    def hook(launch: Any) -> None:
        names.append(launch.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield names
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


def test_nothing_is_launched_and_nothing_is_compiled_twice() -> None:
    made: list[Tensor] = []
    with compiled() as names, launched() as begun:
        compile_together(lambda: made.extend(norm(1000)), CUDA)
    assert names
    assert not begun
    # The operator's definition has computed the result.
    torch.testing.assert_close(*made)
    with compiled() as names, launched() as begun:
        out, expected = norm(1000)
    assert not names
    assert begun
    torch.testing.assert_close(out, expected)


def test_each_specialisation_is_compiled() -> None:
    """Launches of one kernel with other sizes, dtypes, and tensors that begin at other addresses."""
    memory, weight = torch.randn(4001, device=CUDA), torch.ones(1200, device=CUDA)

    def run() -> None:
        for start, columns in ((0, 1200), (1, 1200), (0, 1008), (0, 1001), (0, 1200)):
            x = memory[start : start + 3 * columns].view(3, columns)
            for dtype in (torch.float32, torch.bfloat16):
                row_rms_norm(x.to(dtype), weight[:columns].to(dtype), 1e-6, 0.0, True)

    compile_together(run, CUDA)
    with compiled() as names:
        run()
    assert not names


def test_other_threads_launch_as_always() -> None:
    found: list[tuple[Tensor, Tensor]] = []

    def run() -> None:
        other = threading.Thread(target=lambda: found.append(norm(2000)))
        other.start()
        other.join()
        norm(2000)

    compile_together(run, CUDA)
    torch.testing.assert_close(*found[0])


def test_an_error_ends_the_mode() -> None:
    def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        compile_together(fail, CUDA)
    torch.testing.assert_close(*norm(3000))


def test_several_kernels_are_compiled() -> None:
    from triforce_tree.kernels.norm.launch import row_rms_norm_kernel
    from triforce_tree.kernels.pointwise.launch import gated_kernel

    for kernel in (row_rms_norm_kernel, gated_kernel):
        kernel.device_caches.clear()

    def run() -> None:
        norm(5000)
        gated(*torch.randn(2, 2, 4000, device=CUDA), "silu")

    with compiled() as names:
        compile_together(run, CUDA)
    assert len(names) > 1

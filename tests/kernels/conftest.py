"""What tests of several kernels need."""

from types import SimpleNamespace

import pytest

from tests.support.kernels import triton_ops
from triforce_tree.kernels.cpu import cpu_attention
from triforce_tree.kernels.cpu.fp32 import library as fp32_library


@pytest.fixture(params=list(cpu_attention.fp32_instructions()) or ["none"])
def each_instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats a test with the C library for every instruction set that this processor has."""
    if fp32_library.library() is None:
        pytest.skip("needs a processor with AVX2, and a C compiler")
    own = fp32_library.library(request.param)
    monkeypatch.setattr(fp32_library, "library", lambda: own)


@pytest.fixture
def ops() -> SimpleNamespace:
    """The Triton implementations of the step operators, by name."""
    return triton_ops.step_kernels()

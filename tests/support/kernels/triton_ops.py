"""Triton kernels in tests: on a GPU, else in the interpreter; tests skip where neither is available."""

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.kernels import quick_interpreter
from triforce_tree.kernels import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

runs_kernels = pytest.mark.kernels
"""Marks tests whose kernels run on ``DEVICE``."""


def require_triton() -> None:
    """Skips the test, or the module that is being imported, where kernels cannot run."""
    pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
    from triton import knobs

    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        pytest.skip("Triton was loaded without TRITON_INTERPRET=1", allow_module_level=True)
    if knobs.runtime.interpret:
        # Before the test's own call, which would otherwise be the first to import it.
        importlib.import_module("triton.runtime.interpreter")
        quick_interpreter.install_if_loaded()


def step_kernels() -> SimpleNamespace:
    """Returns the Triton implementations of the step operators, by name."""
    require_triton()
    from triforce_tree.kernels.step import (
        accept_kernels,
        grow_kernels,
        kv_slots_kernels,
        place_kernels,
        select_kernels,
        traversal_kernels,
    )

    modules = (
        kv_slots_kernels,
        select_kernels,
        accept_kernels,
        traversal_kernels,
        grow_kernels,
        place_kernels,
    )
    return _named(step.__all__, *modules)


def _named(names: list[str], *modules: ModuleType) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(m, name) for m in modules for name in names if name in vars(m)})

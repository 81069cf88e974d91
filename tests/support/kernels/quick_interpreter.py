"""A faster interpreter for Triton kernels: skips redundant work that takes most of its time.

A launch patches ``triton.language`` and ``.core`` with interpreted functions and restores them at its end.
Triton 3.9 scans both modules again at every call of a function inside a kernel, where everything is already
patched. It also computes integer overflow for a check of its debug mode, even outside that mode, and rebuilds
a table of all dtypes for each lookup.

Products in fp32 have the bits that a GPU's have in one respect: those of a row do not depend on its place in
the tile. numpy's do on processors whose BLAS computes the last rows of a tile by other instructions.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from tests.support.kernels import bounds


class _Nothing:
    """The patch of a call that changed nothing."""

    def restore(self) -> None: ...


class _Launch:
    """The patch of a launch, which restores the modules at its end."""

    def __init__(self, scope: Any, done: set[int]) -> None:
        self._scope, self._done = scope, done

    def restore(self) -> None:
        self._done.clear()
        self._scope.restore()


def _kept(look_up: Callable[[Any], Any], scalar: type) -> Callable[[Any], Any]:
    """Caches the look-up for scalar types; types of blocks and pointers cannot be hashed."""
    found = cache(look_up)
    return lambda dtype: (found if type(dtype) is scalar else look_up)(dtype)


def _dot_by_rows(dot: Callable[..., Any], float64: Any) -> Callable[..., Any]:
    """``create_dot`` with sums in fp64, whose order does not show in fp32."""

    def by_rows(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, *how)
        wide = type(d)(np.zeros_like(d.data, dtype=np.float64), float64)
        product = dot(self, a, b, wide, *how).data.astype(np.float32)
        return type(d)(product + d.data, d.dtype.scalar)

    return by_rows


def install_if_loaded() -> None:
    """Patches Triton's interpreter where it is imported, by this module and :mod:`bounds`."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        install(interpreter)
        bounds.install(interpreter)


def install(interpreter: ModuleType) -> None:
    """Patches ``triton.runtime.interpreter`` so that it skips the redundant work, and products of tiles."""
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(patch, "once_a_launch", False):
        return
    builder = interpreter.interpreter_builder
    made = type(builder)
    made.create_dot = _dot_by_rows(made.create_dot, interpreter.tl.float64)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype, interpreter.tl.dtype)  # type: ignore[attr-defined]
    modules = (interpreter.tl, interpreter.tl.core)
    done: set[int] = set()
    seen: dict[int, tuple[dict[str, Any], frozenset[int]]] = {}

    def once(fn: FunctionType) -> Any:
        scope = fn.__globals__
        if id(scope) not in seen:
            # All functions of a module share its globals.
            used = {id(value) for value in scope.values() if any(value is module for module in modules)}
            seen[id(scope)] = scope, frozenset(used)
        used = seen[id(scope)][1]
        if used <= done:
            return _Nothing()
        first = not done
        done.update(used)
        made = patch(fn)
        return _Launch(made, done) if first else made

    once.once_a_launch = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once  # type: ignore[attr-defined]

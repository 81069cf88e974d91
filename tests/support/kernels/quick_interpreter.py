"""Triton's interpreter, without what takes most of its time to no effect.

A launch puts interpreted functions in the place of Triton's own, in ``triton.language`` and ``.core``, and
takes them away at its end. Triton 3.9 looks through both modules again at every call of a function inside a
kernel, where nothing is left to exchange. It also computes whether integers overflow, for a check that it
makes in its debug mode alone, and makes a table of all dtypes each time that it looks one up.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any


class _Nothing:
    """The changes of a call that made none."""

    def restore(self) -> None: ...


class _Launch:
    """The changes of a launch; at its end modules are as they were."""

    def __init__(self, scope: Any, done: set[int]) -> None:
        self._scope, self._done = scope, done

    def restore(self) -> None:
        self._done.clear()
        self._scope.restore()


def _kept(look_up: Callable[[Any], Any], scalar: type) -> Callable[[Any], Any]:
    """The same look-up, once for each scalar type; types of blocks and pointers cannot be hashed."""
    found = cache(look_up)
    return lambda dtype: (found if type(dtype) is scalar else look_up)(dtype)


def install(interpreter: ModuleType) -> None:
    """Let ``triton.runtime.interpreter`` do no work twice, and none that nobody sees."""
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(patch, "once_a_launch", False):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype, interpreter.tl.dtype)  # type: ignore[attr-defined]
    modules = (interpreter.tl, interpreter.tl.core)
    done: set[int] = set()
    seen: dict[int, tuple[dict[str, Any], frozenset[int]]] = {}

    def once(fn: FunctionType) -> Any:
        scope = fn.__globals__
        if id(scope) not in seen:
            # The names of a module are those of all its functions.
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

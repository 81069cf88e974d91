"""Triton's interpreter, without the half of its time that goes to what it has done already.

A launch puts interpreted functions in the place of Triton's own, in ``triton.language`` and ``.core``, and takes
them away at its end. Triton 3.9 looks through both modules again at every call of a function inside a kernel,
where nothing is left to exchange.
"""

from collections.abc import Callable
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


def install(interpreter: ModuleType) -> None:
    """Let ``triton.runtime.interpreter`` patch each module once a launch."""
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(patch, "once_a_launch", False):
        return
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

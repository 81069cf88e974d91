"""Bounds of memory in Triton's interpreter: a kernel that leaves the tensors it was given fails its test.

On a GPU such a read mostly finds memory of another tensor, and only rarely ends in an illegal access.
Elements that a mask leaves out may be anywhere.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np


class _Memory:
    """The memory of the tensors of one launch."""

    def __init__(self) -> None:
        self._starts = self._stops = np.empty(0, np.uint64)

    def allow(self, given: Any) -> None:
        """Allow what tensors among the arguments of a launch are stored in, and nothing else."""
        bounds = sorted({bounds for argument in given for bounds in _storages(argument)})
        self._starts, self._stops = np.array(bounds, dtype=np.uint64).reshape(-1, 2).T

    def check(self, pointers: Any, mask: Any, access: str) -> None:
        """Raises IndexError where an element that is not masked lies outside, whole or in part."""
        places = pointers.data
        if not mask.data.all():
            places = places[np.broadcast_to(mask.data, places.shape)]
        if not places.size:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        # Mostly all elements are in one tensor.
        ends = np.array([places.min(), places.max()], dtype=np.uint64)
        at = np.searchsorted(self._starts, ends, "right")
        if at[0] == at[1] > 0 and ends[1] + size <= self._stops[at[0] - 1]:
            return
        places = places.astype(np.uint64)
        at = np.searchsorted(self._starts, places, "right")
        outside = places + size > np.concatenate([np.zeros(1, np.uint64), self._stops])[at]
        if outside.any():
            far = np.abs(self._starts[:, None].astype(np.int64) - places[outside].astype(np.int64)).min()
            raise IndexError(
                f"{access} of {int(outside.sum())} of {places.size} elements outside the kernel's tensors, "
                f"the nearest {int(far)} bytes from the start of one"
            )


def _storages(argument: Any) -> Iterator[tuple[int, int]]:
    if isinstance(argument, tuple | list):
        for each in argument:
            yield from _storages(each)
    elif hasattr(argument, "block_shape"):
        yield from _storages(argument.base)
    elif hasattr(argument, "untyped_storage"):
        storage = argument.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def install(interpreter: ModuleType) -> None:
    """Patches ``triton.runtime.interpreter`` so that launches check the addresses they use."""
    executor: Any = interpreter.GridExecutor
    if getattr(executor, "checks_bounds", False):
        return
    memory = _Memory()
    arguments = executor._init_args_hst

    def with_bounds(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = arguments(self, args, kwargs)
        memory.allow([*on_host[0], *on_host[1].values()])
        return on_host

    executor._init_args_hst, executor.checks_bounds = with_bounds, True
    builder: Any = interpreter.InterpreterBuilder
    # Where a method's arguments have pointers and mask.
    for name, pointers, mask in (("masked_load", 0, 1), ("masked_store", 0, 2), ("atomic_rmw", 1, 3)):
        method = getattr(builder, f"create_{name}")
        setattr(builder, f"create_{name}", _checked(method, memory, pointers, mask, name))


def _checked(
    method: Callable[..., Any], memory: _Memory, pointers: int, mask: int, access: str
) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **how: Any) -> Any:
        memory.check(args[pointers], args[mask], access)
        return method(self, *args, **how)

    return checked

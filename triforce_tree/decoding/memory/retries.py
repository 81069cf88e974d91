"""Work that is tried again with less memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from triforce_tree.runtime.executor import free_memory

Made = TypeVar("Made")
Kept = TypeVar("Kept")


def with_or_without(kept: list[Kept], make: Callable[[Kept | None], Made]) -> Made:
    """What ``make`` makes of the object in ``kept``, or of None if there is none.

    Where the device cannot hold it beside what is made, it is dropped: no other reference to it may be left.
    """
    if kept:
        try:
            return make(kept[0])
        except torch.OutOfMemoryError as error:
            # The traceback's frames hold tensors.
            error.__traceback__ = None
    kept.clear()
    free_memory()
    return make(None)


def retried(work: Callable[..., Made], smaller: Callable[[], bool], *given: Any) -> Made:
    """What ``work`` returns; where device memory runs out in it, it is called again after ``smaller``.

    Args:
        smaller: frees what the failed call has made, and reduces the memory plan; False where it cannot be
            reduced further.
        given: arguments of ``work``.

    Raises:
        torch.OutOfMemoryError: memory is short, and the plan cannot be reduced.
    """
    while True:
        try:
            return work(*given)
        except torch.OutOfMemoryError as error:
            out_of_memory = error
        # The traceback's frames hold tensors; graphs and their buffers are freed by the collector alone.
        out_of_memory.__traceback__ = None
        if not smaller():
            raise out_of_memory
        free_memory()

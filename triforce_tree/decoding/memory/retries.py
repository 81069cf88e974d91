"""What is tried again with less memory after device memory has run out."""

from collections.abc import Callable
from typing import TypeVar

import torch

from triforce_tree.runtime.executor import free_memory

Made = TypeVar("Made")
Kept = TypeVar("Kept")


def with_or_without(kept: list[Kept], make: Callable[[Kept | None], Made]) -> Made:
    """Returns the result of ``make`` for the object in ``kept``, or for None if there is none.

    If the device cannot hold both that object and the result, the object is dropped and ``make`` runs again.

    No other reference to the object may exist.
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


def retried(attempt: Callable[[], Made], shrink: Callable[[], bool]) -> Made:
    """Returns the result of ``attempt``, which is repeated after device memory has run out.

    Args:
        shrink: frees what the attempt has used, and returns whether the next attempt needs less memory.

    Raises:
        torch.OutOfMemoryError: memory is short, and ``shrink`` has returned False.
    """
    while True:
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            out_of_memory = error
        # The traceback's frames hold tensors; graphs and their buffers are freed by the collector alone.
        out_of_memory.__traceback__ = None
        if not shrink():
            raise out_of_memory
        free_memory()

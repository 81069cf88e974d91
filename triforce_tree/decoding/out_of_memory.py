"""Repeats work with less memory after device memory has run out."""

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
    if not kept:
        return make(None)
    try:
        return make(kept[0])
    except torch.OutOfMemoryError as error:
        # The traceback's frames hold tensors.
        error.__traceback__ = None
    kept.clear()
    free_memory()
    return make(None)


def give_way(error: torch.OutOfMemoryError, shrink: Callable[[], bool]) -> None:
    """Frees memory after an attempt has failed, so that it can be repeated. Call it outside of ``except``.

    Args:
        error: the error of the attempt.
        shrink: drops what the attempt has used, and returns whether the next attempt needs less memory.

    Raises:
        torch.OutOfMemoryError: ``error``, if ``shrink`` has returned False.
    """
    # The traceback's frames hold tensors; graphs and their buffers are freed by the collector alone.
    error.__traceback__ = None
    if not shrink():
        raise error
    free_memory()

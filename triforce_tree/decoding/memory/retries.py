"""Making something beside what is kept, or without it."""

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

"""Making something beside what is kept, or without it."""

from collections.abc import Callable
from typing import TypeVar

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

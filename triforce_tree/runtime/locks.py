"""Locks on models, which allow one thread at a time, and one generation at a time within a thread.

A lock belongs to a model object, so all engines with this model share it. Locks are always taken in the order
of their numbers, so that two threads cannot deadlock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


@dataclass(eq=False)
class _ModelLock:
    number: int
    lock: Any = field(default_factory=threading.RLock)
    generating: bool = False


_numbers = count()
_table_lock = threading.Lock()
_table: WeakKeyDictionary[nn.Module, _ModelLock] = WeakKeyDictionary()


def _locks_of(model: nn.Module, other: nn.Module | None) -> tuple[_ModelLock, _ModelLock]:
    """Returns the locks of two models in the order of their numbers; twice the same one for one model."""
    with _table_lock:
        locks = [_table.setdefault(m, _ModelLock(next(_numbers))) for m in (model, other or model)]
    first, second = sorted(locks, key=attrgetter("number"))
    return first, second


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Holds the lock of a model inside the context. The same thread may enter repeatedly."""
    with _locks_of(model, None)[0].lock:
        yield


@contextmanager
def generation(model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
    """Holds the locks of one or two models for one generation. Generations of other threads are waited for.

    Raises:
        RuntimeError: this thread is already generating with one of the models, so a callback of that
            generation has started this one.
    """
    first, second = _locks_of(model, other)
    # One with statement instead of a loop, so that Ctrl-C cannot leave an acquired lock without release.
    with first.lock, second.lock:
        if first.generating or second.generating:
            raise RuntimeError(
                "a generation with these models is running, and one of its callbacks (streamer, stopping "
                "criterion, logits processor, progress) called their engine; call it after the generation"
            )
        try:
            first.generating = second.generating = True
            yield
        finally:
            first.generating = second.generating = False

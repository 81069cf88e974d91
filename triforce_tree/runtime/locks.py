"""Locks on models, which allow one thread at a time, and one generation at a time within a thread.

A lock belongs to a model object, so all engines with this model share it. Locks are always taken in the order
of their numbers, so that two threads cannot deadlock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
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


def _lock_of(model: nn.Module) -> _ModelLock:
    with _table_lock:
        if model not in _table:
            _table[model] = _ModelLock(next(_numbers))
        return _table[model]


@contextmanager
def held(model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
    """Holds the locks of one or two models inside the context. The same thread may enter repeatedly."""
    locks = sorted((_lock_of(m) for m in (model, other or model)), key=lambda lock: lock.number)
    # One with statement instead of a loop, so that Ctrl-C cannot leave an acquired lock without release.
    with locks[0].lock, locks[1].lock:
        yield


@contextmanager
def generation(model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
    """Holds the locks of one or two models for one generation. Generations of other threads are waited for.

    Raises:
        RuntimeError: this thread is already generating with one of the models, so a callback of that
            generation has started this one.
    """
    with held(model, other):
        locks = [_lock_of(m) for m in (model, other or model)]
        if any(lock.generating for lock in locks):
            raise RuntimeError(
                "a generation with these models is running, and one of its callbacks (streamer, stopping "
                "criterion, logits processor, progress) called their engine; call it after the generation"
            )
        try:
            for lock in locks:
                lock.generating = True
            yield
        finally:
            for lock in locks:
                lock.generating = False

"""Locks on models: one thread at a time, and one generation at a time within a thread.

The lock belongs to the model object, so all engines over a model share it. An engine's target and draft are
always locked in the same order, so that two threads cannot deadlock.
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
    """Hold the locks of these models, waiting for other threads; a thread may enter repeatedly."""
    locks = sorted((_lock_of(m) for m in (model, other or model)), key=lambda lock: lock.number)
    # Not in a loop: Ctrl-C cannot come between acquiring a lock and registering its release.
    with locks[0].lock, locks[1].lock:
        yield


@contextmanager
def generation(model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
    """Hold the locks of these models for one generation, waiting for the generations of other threads.

    Raises:
        RuntimeError: this thread holds them already: a callback of a generation started another one.
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

"""Who may use a model now: one thread at a time, and one generation at a time within a thread.

The lock belongs to the model object, so that all engines over it share it. An engine's target and draft are
always locked in the same order, which rules out that two threads wait for each other.
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
    """Inside, no other thread is inside with one of these models; a thread may enter repeatedly."""
    locks = sorted((_lock_of(m) for m in (model, other or model)), key=lambda lock: lock.number)
    # Not in a loop: Ctrl-C cannot come between taking a lock and noting that it must be given back.
    with locks[0].lock, locks[1].lock:
        yield


@contextmanager
def generation(model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
    """Inside, these models write one text; waits for other threads to finish theirs.

    Raises:
        RuntimeError: this thread is inside already: a callback of a generation asked for another one.
    """
    with held(model, other):
        locks = [_lock_of(m) for m in (model, other or model)]
        if any(lock.generating for lock in locks):
            raise RuntimeError(
                "a generation with these models is under way, and one of its callbacks (streamer, stopping "
                "criterion, logits processor, progress) called their engine; call it after the generation"
            )
        try:
            for lock in locks:
                lock.generating = True
            yield
        finally:
            for lock in locks:
                lock.generating = False

"""Says what long work is being done, by the log ``triforce_tree.loading`` at level INFO.

The command line shows these lines; in Python they are shown by ``logging.basicConfig(level=logging.INFO)``.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("triforce_tree.loading")
# Work that takes less is not mentioned; longer work is, again and again.
_FIRST, _EVERY = 1.0, 10.0


@contextmanager
def shown() -> Iterator[None]:
    """Inside, these lines go to stderr, of the first rank alone."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    before = LOG.level, LOG.propagate
    lines = _Lines()
    LOG.addHandler(lines)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(lines)
        LOG.level, LOG.propagate = before


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(record.getMessage() + "\n")
        sys.stderr.flush()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Around work: a line after a second, one every ten seconds, and one at the end if there was any.

    Args:
        what: is done, as in ``reading weights``.
    """
    if not LOG.isEnabledFor(logging.INFO):
        yield
        return
    start, ended, said = time.perf_counter(), threading.Event(), threading.Event()

    def tell() -> None:
        wait = _FIRST
        while not ended.wait(wait):
            wait = _EVERY
            passed = f", {time.perf_counter() - start:.0f} s so far" if said.is_set() else ""
            said.set()
            LOG.info("%s%s ...", what, passed)

    teller = threading.Thread(target=tell, name="triforce_tree telling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        if said.is_set():
            LOG.info("%s: %.1f s", what, time.perf_counter() - start)

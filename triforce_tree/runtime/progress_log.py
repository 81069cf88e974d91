"""Reports the progress of long work in the log ``triforce_tree.loading`` at level INFO.

The command line shows these lines; in Python ``logging.basicConfig(level=logging.INFO)`` shows them.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("triforce_tree.loading")
# Work is reported after _FIRST seconds, and then every _EVERY seconds.
_FIRST, _EVERY = 1.0, 10.0


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Writes the log's lines to stderr inside the context, on rank 0 only."""
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
def logged(what: str) -> Iterator[None]:
    """Logs the work inside the context: a line after 1 s, one every 10 s, and one at the end.

    Work of less than 1 s is not logged.

    Args:
        what: description of the work, such as ``reading weights``.
    """
    if not LOG.isEnabledFor(logging.INFO):
        yield
        return
    start, ended, reported = time.perf_counter(), threading.Event(), threading.Event()

    def report() -> None:
        wait = _FIRST
        while not ended.wait(wait):
            wait = _EVERY
            passed = f", {time.perf_counter() - start:.0f} s so far" if reported.is_set() else ""
            reported.set()
            LOG.info("%s%s ...", what, passed)

    reporter = threading.Thread(target=report, name="triforce_tree progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
        if reported.is_set():
            LOG.info("%s: %.1f s", what, time.perf_counter() - start)

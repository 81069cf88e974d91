"""Reports the progress of work on the stages of a program."""

import logging
import time

from triforce_tree.runtime import distributed

# The progress is logged after this many seconds.
_PATIENCE = 1.0
_LOG = logging.getLogger(__name__)


class StageProgress:
    """Logs which stage is being prepared if this takes long.

    Args:
        count: the number of stages, if it is known.
        doing: what is done with them.
        why: the reason, which the first line names.
    """

    def __init__(
        self,
        count: int | None,
        doing: str = "preparing",
        why: str = "kernels are compiled, once on a machine, and later taken from caches",
    ) -> None:
        self._start, self._count, self._begun, self._told = time.perf_counter(), count, 0, False
        self._doing, self._why = doing, why

    def next(self, name: str) -> None:
        self._begun += 1
        seconds = time.perf_counter() - self._start
        if seconds < _PATIENCE or not distributed.is_first_rank():
            return
        why, self._told = "" if self._told else f": {self._why}", True
        of = f" of {self._count}" if self._count else ""
        at = self._begun, of, name, seconds
        _LOG.warning("%s stage %d%s (%s), %.0f s so far%s", self._doing, *at, why)

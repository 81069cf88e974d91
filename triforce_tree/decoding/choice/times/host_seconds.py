"""Seconds of a pass beyond those of its stages: the host chooses, launches and learns while the device waits.

A pass of a large model hides them. Where a plain pass takes less than a millisecond they are a good part of
it, and a drafting pass has more of them: compared by their stages alone, it would seem faster than it is.
"""

import statistics
from collections import deque

from triforce_tree.decoding.choice.passes import PLAIN, PassKind

# Passes that count, the newest ones: few enough to follow a machine that becomes busy.
_NEWEST = 15


class HostSeconds:
    """Medians of measured times, for plain passes and for those that draft or verify matched tokens.

    Two passes without such time are counted beside the measured ones: the first passes of a process, which
    load libraries, do not decide what later ones are. Drafting passes take as long as plain ones at least,
    also as long as none was measured.
    """

    def __init__(self) -> None:
        self._newest = {plain: deque[float](maxlen=_NEWEST) for plain in (True, False)}
        self._plain = self._drafting = 0.0

    def add(self, kind: PassKind, seconds: float) -> None:
        """Take up a pass.

        Args:
            seconds: of the whole pass, less those of its stages; where clocks differ, it may be below 0.
        """
        newest = self._newest[kind == PLAIN]
        newest.append(max(0.0, seconds))
        median = statistics.median_low([0.0, 0.0, *newest])
        if kind == PLAIN:
            self._plain = median
        else:
            self._drafting = median

    def of(self, kind: PassKind) -> float:
        """What is expected of a pass; 0 where nothing was measured."""
        return self._plain if kind == PLAIN else max(self._plain, self._drafting)

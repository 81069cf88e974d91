"""Measuring until the time is up, and beginning nothing that would not end before."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any


class Deadline:
    """Time that is left, and what the longest step so far took."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._longest = 0.0

    def steps(self, items: Sequence[Any], keep: float = 0.0) -> Iterator[Any]:
        """The items, until the next one and ``keep`` seconds would not fit any more."""
        for number, item in enumerate(items):
            left = self._end - time.perf_counter()
            if left < self._longest + keep:
                print(f"{left:.0f} s are left: {len(items) - number} steps wait for the next call",
                      file=sys.stderr)  # fmt: skip
                return
            start = time.perf_counter()
            yield item
            # The first one also compiles and warms up.
            share = 1.1 if number else 0.4
            self._longest = max(self._longest, share * (time.perf_counter() - start))

    def left(self) -> float:
        return self._end - time.perf_counter()

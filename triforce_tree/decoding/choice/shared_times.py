"""Shares the measured times of passes, so that all ranks know the same ones.

Ranks that chose different passes would wait for each other forever.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.policy.passes import PassKind
from triforce_tree.runtime import distributed


class PassTimes(NamedTuple):
    """Holds the measured times of a pass.

    Attributes:
        kind: the kind of the pass.
        gathered: draft tokens per sequence that its rounds added; None if no sequence was running.
        seconds: the seconds of its stages, by name.
        resumed: whether the pass before it was plain.
        before: the previous pass, and its seconds less those of its stages; None for the first pass.
    """

    kind: PassKind
    gathered: float | None
    seconds: Mapping[str, float]
    resumed: bool
    before: tuple[PassKind, float] | None


class SharedTimes:
    """Gives all ranks the times of rank 0, one pass late.

    The message is sent while the next pass runs, so no rank waits for it.

    A process that decodes alone has its own times at once.
    """

    def __init__(self) -> None:
        self._sent: tuple[PassTimes, Tensor, Any] | None = None

    def share(self, times: PassTimes) -> PassTimes | None:
        """Takes this rank's times of a pass, and returns rank 0's times of the pass before (None at first).

        All ranks call it after each pass. Everything that is not a time is equal on all ranks.
        """
        if distributed.current() is None:
            return times
        received = self.rest()
        last = [] if times.before is None else [times.before[1]]
        numbers = torch.tensor([*times.seconds.values(), *last], dtype=torch.float64)
        self._sent = times, numbers, distributed.begin_broadcast(numbers)
        return received

    def rest(self) -> PassTimes | None:
        """Returns rank 0's times of the last pass, at the end of a request."""
        if self._sent is None:
            return None
        (times, numbers, work), self._sent = self._sent, None
        work.wait()
        values = numbers.tolist()
        before = times.before and (times.before[0], values[-1])
        return times._replace(seconds=dict(zip(times.seconds, values, strict=False)), before=before)

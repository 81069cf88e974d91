"""What passes took, the same on all ranks: those that chose different passes would wait forever."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.policy.passes import PassKind
from triforce_tree.runtime import distributed


class PassTimes(NamedTuple):
    """Measured times of a pass.

    Attributes:
        kind: of the pass.
        gathered: draft tokens of a sequence that its rounds added; None where no sequence was running.
        seconds: of its stages, by name.
        resumed: whether the pass before it was plain.
        before: the pass before it, and its seconds beyond those of its stages; None for the first pass.
    """

    kind: PassKind
    gathered: float | None
    seconds: Mapping[str, float]
    resumed: bool
    before: tuple[PassKind, float] | None


class SharedTimes:
    """Rank 0's times on all ranks, one pass late: no rank waits for the message, which the next pass hides.

    A process that decodes alone has its own times at once.
    """

    def __init__(self) -> None:
        self._sent: tuple[PassTimes, Tensor, Any] | None = None

    def share(self, times: PassTimes) -> PassTimes | None:
        """Give this rank's times of a pass, and get rank 0's of the pass before; None for the first pass.

        All ranks call it after each pass. What is no time is equal on all of them.
        """
        if distributed.current() is None:
            return times
        received = self.rest()
        last = [] if times.before is None else [times.before[1]]
        numbers = torch.tensor([*times.seconds.values(), *last], dtype=torch.float64)
        self._sent = times, numbers, distributed.begin_broadcast(numbers)
        return received

    def rest(self) -> PassTimes | None:
        """Rank 0's times of the last pass, at the end of a request."""
        if self._sent is None:
            return None
        (times, numbers, work), self._sent = self._sent, None
        work.wait()
        values = numbers.tolist()
        before = times.before and (times.before[0], values[-1])
        return times._replace(seconds=dict(zip(times.seconds, values, strict=False)), before=before)

"""Ranks learn from rank 0's times, one pass late, without waiting for the message."""

import pytest
from torch import Tensor

from triforce_tree.decoding.choice.shared_times import PassTimes, SharedTimes
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime import distributed

DRAFTING = PassKind(3, 2)
FIRST = PassTimes(PLAIN, 1.0, {"target": 0.5}, False, None)
SECOND = PassTimes(DRAFTING, 4.0, {"draft": 0.1, "target": 0.6}, True, (PLAIN, 0.02))


class Message:
    """Stands for the message of rank 0: twice the times of this rank, available after a wait."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        self.tensor *= 2


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "current", lambda: object())
    monkeypatch.setattr(distributed, "begin_broadcast", Message)


def test_a_process_alone_has_its_times_at_once() -> None:
    times = SharedTimes()
    assert times.share(FIRST) is FIRST
    assert times.rest() is None


@pytest.mark.usefixtures("several")
def test_ranks_get_the_times_of_rank_0_one_pass_late() -> None:
    times = SharedTimes()
    assert times.share(FIRST) is None
    assert times.share(SECOND) == FIRST._replace(seconds={"target": 1.0})
    rest = times.rest()
    assert rest is not None
    assert rest.seconds == pytest.approx({"draft": 0.2, "target": 1.2})
    assert rest.before == (PLAIN, pytest.approx(0.04))
    assert rest[:2] == SECOND[:2], "what is no time is every rank's own"
    assert times.rest() is None

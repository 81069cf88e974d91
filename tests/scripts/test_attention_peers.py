"""Tests what the benchmark of tree attention does with the results of peers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from scripts.benchmarks.attention.peers import compared


def test_a_wrong_result_gets_no_time() -> None:
    expected = torch.randn(3, 4)

    def calls(out: Tensor) -> list[Callable[[], Tensor]]:
        return [lambda: out]

    assert isinstance(compared(partial(calls, expected.clone()), expected), float)
    assert str(compared(partial(calls, expected * 1.1), expected)).startswith("another result: relative")

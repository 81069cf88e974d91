"""The measured rate of attention on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.planning import machine
from triforce_tree.planning.machine import host_rate


def test_the_cpus_rate_is_measured_once() -> None:
    heads = Heads(4, 2, 8)
    rate = host_rate(heads, torch.float32, torch.device("cpu"))
    assert [queries for queries, _ in rate.points] == [1, 16, 48, 96]
    assert all(bytes_a_second > 0 for _, bytes_a_second in rate.points)
    assert host_rate(heads, torch.float32, torch.device("cpu")) is rate


def test_a_slow_cpu_is_measured_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated clock gives attention 0.1 GB/s."""
    seconds = [0.0]

    def attention(_: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        seconds[0] += (k.nbytes + v.nbytes) / 1e8

    monkeypatch.setattr(machine, "kernel", lambda *_: attention)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    rate = host_rate(Heads(6, 3, 8), torch.float32, torch.device("cpu"))
    assert [bytes_a_second for _, bytes_a_second in rate.points] == pytest.approx([1e8] * 4)
    assert seconds[0] < 1.0

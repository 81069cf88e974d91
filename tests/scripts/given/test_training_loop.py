"""The loop of all trainings: its schedule, what it writes, and where it stops."""

import argparse
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Recorded:
    """A run that keeps what the loop logs and saves."""

    def __init__(self, steps: int, spent: float = 0.0) -> None:
        self.args = argparse.Namespace(
            muon_rate=0.1, adam_rate=0.05, decay=0.0, steps=steps, log_every=1, save_every=1e9
        )
        self.spent, self.rows, self.saved = spent, [], []

    def log(self, **row: Any) -> None:
        self.rows.append(row)

    def save(self, model: nn.Module, spent: float) -> None:
        self.saved.append(spent)

    def load(self, model: nn.Module) -> float:
        return self.spent


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def losses_of(net: nn.Module, factor: float = 1.0) -> Any:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def losses(progress: float) -> tuple[Tensor, dict[str, Any]]:
        return factor * (net(x) - x.sum(1, keepdim=True)).square().mean(), {"length": 32}

    return losses


def test_rates_rise_hold_and_fall(script: Any) -> None:
    schedule = script("train_pair.loop").Schedule(0.5, warm_up=4, least=0.1)
    assert [schedule.rate(0.2, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [schedule.rate(progress, 9) for progress in (0.5, 0.75, 1.0)] == [1.0, 0.5, 0.1]


def test_a_training_of_some_steps_is_saved_with_its_seconds(script: Any) -> None:
    loop, net, run = script("train_pair.loop"), model(), Recorded(20)
    assert loop.fit(run, net, losses_of(net), 1e6, loop.Schedule(0.5, 1)) == 20
    assert [row["step"] for row in run.rows[:-1]] == list(range(20))
    assert run.rows[-2]["loss"] < 0.7 * run.rows[0]["loss"]
    [spent] = run.saved
    assert 0 < spent < 1e6


def test_a_finished_training_is_not_repeated(script: Any) -> None:
    loop, net, run = script("train_pair.loop"), model(), Recorded(20, spent=5.0)
    assert loop.fit(run, net, losses_of(net), 5.0, loop.Schedule(0.5)) == 0
    assert not run.saved


def test_a_loss_that_is_not_finite_ends_a_training(script: Any) -> None:
    loop, net, run = script("train_pair.loop"), model(), Recorded(20)
    with pytest.raises(FloatingPointError, match="at step 0; lower --muon-rate"):
        loop.fit(run, net, losses_of(net, math.inf), 1e6, loop.Schedule(0.5))
    assert not run.saved

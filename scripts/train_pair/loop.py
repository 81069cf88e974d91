"""The loop of a training: a budget of seconds, a schedule of learning rates, and checkpoints."""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from scripts.benchmarks.common.timing import synchronize
from scripts.train_pair.optim import PairOptimizer

# The clock is read after so many steps, since the device is waited for.
_EACH = 8
# From the share of the budget that is spent: the loss, and figures for the log, "length" among them.
Losses = Callable[[float], tuple[Tensor, dict[str, Any]]]


class TrainingRun(Protocol):
    """Lists what the loop needs of a process."""

    args: argparse.Namespace

    def log(self, **row: object) -> None: ...

    def save(self, model: Any, spent: float) -> None: ...

    def load(self, model: Any) -> float:
        """Restores a checkpoint, if there is one to go on from; the seconds already spent."""


@dataclass(frozen=True)
class Schedule:
    """Learning rates: linear warm-up, then the peak, then linear decay to the end of the budget.

    Attributes:
        hold: share of the budget before the decay.
        warm_up: steps.
        least: lowest share of the peak rates.
    """

    hold: float
    warm_up: int = 60
    least: float = 0.01

    def rate(self, progress: float, step: int) -> float:
        """Returns the share of the peak rates."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return warm * min(1.0, max(self.least, (1 - progress) / (1 - self.hold)))


def fit(
    run: TrainingRun,
    model: nn.Module,
    losses: Losses,
    seconds: float,
    schedule: Schedule,
    until: float = math.inf,
) -> int:
    """Trains a model for its seconds, or the steps in ``run.args``; returns the steps made.

    Args:
        until: the seconds after which this call ends, those of earlier calls included.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    args, spent, step = run.args, run.load(model), 0
    until = min(seconds, until)
    if spent >= until:
        return step
    optimizer = PairOptimizer(model, args.muon_rate, args.adam_rate, args.decay)
    # What is compiled now, the seconds do not include.
    losses(0.0)[0].backward()
    synchronize(optimizer.flat.device)
    optimizer.flat.zero_()
    begin, clock, saved = time.monotonic() - spent, spent, time.monotonic()
    while clock < until and step < args.steps:
        progress = clock / seconds
        loss, figures = losses(progress)
        loss.backward()
        if step % _EACH == 0:
            synchronize(optimizer.flat.device)
            clock = time.monotonic() - begin
        optimizer.step(schedule.rate(progress, step))
        if step % args.log_every == 0:
            values = {"loss": loss.item(), "progress": progress, **figures}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"loss {values['loss']} at step {step}; lower --muon-rate")
            run.log(what="step", step=step, **{key: round(float(value), 4) for key, value in values.items()})
        step += 1
        if time.monotonic() - saved > args.save_every:
            run.save(model, clock)
            saved = time.monotonic()
    # Of a training that --steps or ``until`` ended, the seconds that it did not take are left.
    run.save(model, seconds if clock >= seconds else clock)
    run.log(what="steps", steps=step)
    return step

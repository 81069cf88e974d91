"""Clocks and logits of a captured cycle, wherever its full cache lives."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.rows import TreeRows
from triforce_tree.stats import LevelStats

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it is one that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """What the work returns, and its seconds, those of the device included."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def rounds_per_pass(cycle: Cycle, levels: Sequence[LevelStats]) -> float:
    """Trees that level 0 grew for each pass of level 2; 0 after plain decoding."""
    if cycle.growth is None:
        return 0.0
    return levels[0].forwards / cycle.growth.depth / levels[-1].forwards


def last_logits(model: StepModel, rows: TreeRows, texts: Sequence[Sequence[int]], width: int) -> Tensor:
    """``[B, width, V]`` at the last ``width`` tokens of each text, in one forward.

    Args:
        model: the full target.
        rows: for ``width`` new rows, each of which sees those before it; all rows before them are there.
        texts: as long as what is fed, the last tokens included.
    """
    starts = torch.tensor([len(text) - width for text in texts], device=model.device)
    rows.begin(starts)
    tokens = torch.tensor([list(text[-width:]) for text in texts], device=model.device)
    positions = starts[:, None] + torch.arange(width, device=model.device)
    return model(tokens, positions, rows)

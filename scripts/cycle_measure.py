"""Rounds and logits of a captured cycle, wherever its full cache lives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.rows import TreeRows
from triforce_tree.cycle.shapes import Extent
from triforce_tree.stats import LevelStats


def rounds_per_pass(cycle: Cycle, levels: Sequence[LevelStats]) -> float:
    """Trees that level 0 grew for each pass of level 2; 0 after plain decoding."""
    if cycle.drafter is None:
        return 0.0
    forwards = 1 if cycle.drafter.deterministic else Extent.of(cycle.config, cycle.levels).depth
    return levels[0].forwards / forwards / levels[-1].forwards


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

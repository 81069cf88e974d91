"""How well a drafter agrees with its target on a text that it was not trained on."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from scripts.benchmarks.common.results import Record
from scripts.train_drafters.segments import Segments
from scripts.train_drafters.teacher import Teacher
from triforce_tree.bench.texts import evenly_spaced


@torch.no_grad()
def by_context(
    network: Any, teacher: Teacher, ids: Sequence[int], context: int, windows: int, new: int
) -> Record:
    """Returns means by depth at the last ``new`` positions of prompts of ``context`` tokens, given that the
    text itself was drafted up to there.

    ``overlap_N`` is the sum of min(p, q), the probability that a token is accepted at T = 1, and
    ``agreement_N`` the share of positions at which drafter and target have the same likeliest token.

    Args:
        ids: the text, repeated if it is short.
        windows: how many prompts, evenly spaced in the text.
    """
    device, depths = teacher.head.device, network.depths
    start = torch.tensor([context - new - depths], device=device)
    segments = Segments(network.cache, torch.zeros_like(start), start, new, network.every)
    overlaps, agreements = torch.zeros(2, depths, device=device)
    repeated = [*ids] * (1 + 2 * context // len(ids))
    for window in evenly_spaced(repeated, context, windows):
        tokens = torch.tensor([window], device=device)
        hidden = teacher.states(tokens, network.features)
        for depth, made in enumerate(network(tokens, hidden, segments)):
            final = segments.take_own(hidden[teacher.layers], 1 + depth)
            p = F.linear(final.to(teacher.head.dtype), teacher.head).float().softmax(-1)
            q = F.linear(made, network.head.to(made.dtype)).float().softmax(-1)
            overlaps[depth] += torch.minimum(p, q).sum(-1).mean() / windows
            agreements[depth] += (p.argmax(-1) == q.argmax(-1)).float().mean() / windows
    return {
        f"{name}_{context}": [round(float(x), 4) for x in values]
        for name, values in (("overlap", overlaps), ("agreement", agreements))
    }

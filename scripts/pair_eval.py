"""Held-out evaluation of the pair: loss, needles, overlap of draft and target.

Every function splits its work over the processes of ``torch.distributed`` and returns the same
figures on all of them. The needle test is teacher-forced: greedy decoding gives the six digits
exactly when each of them is the argmax behind the true ones.
"""

import numpy as np
import torch
import torch.distributed as dist
from pair_data import Facts
from pair_distill import SEGMENT, SINKS, WINDOW, StreamingForward, cut, laws
from pair_model import Llama
from torch import Tensor

from triforce_tree.pair import needle


def held_out_text() -> str:
    """Python's own help topics, in alphabetical order, three line ends between two of them."""
    from pydoc_data.topics import topics

    return "\n\n\n".join(topics[name] for name in sorted(topics))


def _share(device: torch.device, *values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def _mine(count: int) -> range:
    if not dist.is_initialized():
        return range(count)
    return range(dist.get_rank(), count, dist.get_world_size())


@torch.no_grad()
def loss_at(model: Llama, text: Tensor, length: int, dtype: torch.dtype) -> dict[str, float]:
    """Mean NLL in nats over non-overlapping windows of ``length`` tokens of ``text`` [N].

    ``loss`` is over all positions, ``last_quarter`` over each window's last quarter. A rest shorter
    than a window is left out.
    """
    total = last = windows = 0.0
    for i in _mine((len(text) - 1) // length):
        row = text[i * length : (i + 1) * length + 1][None]
        losses = model.losses(row[:, :-1].contiguous(), row[:, 1:].contiguous(), dtype)
        total += losses.mean().item()
        last += losses[:, -(length // 4) :].mean().item()
        windows += 1
    total, last, windows = _share(text.device, total, last, windows)
    return {"loss": total / max(windows, 1), "last_quarter": last / max(windows, 1)}


@torch.no_grad()
def needle_at(
    model: Llama, facts: Facts, text: Tensor, length: int, trials: int, seed: int, dtype: torch.dtype
) -> float:
    """Share of trials whose six digits are all the argmax, one fact in ``length`` tokens of text.

    Trial i plants its fact at depth (i + 0.5) / trials of the haystack and asks at the end.
    """
    right = done = 0.0
    for i in _mine(trials):
        rng = np.random.default_rng((seed, length, i))
        name = int(rng.integers(len(facts.heads)))
        number = facts.number(rng)
        planted = facts.heads[name] + number + facts.tail_ids
        asked = facts.questions[name] + number
        room = length - len(planted) - len(asked)
        start = int(rng.integers(len(text)))
        hay = text.roll(-start).repeat(1 + room // len(text))[:room]
        depth = int(room * (i + 0.5) / trials)
        pieces = hay[:depth], text.new_tensor(planted), hay[depth:], text.new_tensor(asked)
        row = torch.cat(pieces)
        hidden = model.hidden_states(row[None], dtype)[-needle.DIGITS - 1 : -1]
        guess = model.logits(hidden).argmax(-1)
        right += float((guess == text.new_tensor(number)).all())
        done += 1
    right, done = _share(text.device, right, done)
    return right / max(done, 1)


@torch.no_grad()
def overlap_at(
    target: Llama, streaming: StreamingForward, text: Tensor, length: int, dtype: torch.dtype
) -> dict[str, float]:
    """Mean sum(min(p, q)) and greedy match, target on ``length`` tokens, draft on its cache."""
    draft, total, match, count = streaming.draft, 0.0, 0.0, 0.0
    step = SEGMENT - WINDOW
    for i in _mine(len(text) // length):
        row = text[i * length : (i + 1) * length][None]
        hidden = target.hidden_states(row, dtype).unflatten(0, (1, -1))
        starts = torch.arange(SINKS, length - SEGMENT + 1, step, device=text.device)[None]
        inputs, teacher = cut(row, hidden, starts)
        student = streaming(inputs, dtype)[:, WINDOW:].flatten(0, 1)
        teacher = teacher[:, WINDOW:].flatten(0, 1)
        _, overlap = laws(student, *draft.head, teacher, *target.head)
        same = draft.logits(student).argmax(-1) == target.logits(teacher).argmax(-1)
        total, match = total + overlap.sum().item(), match + same.sum().item()
        count += len(overlap)
    total, match, count = _share(text.device, total, match, count)
    return {"overlap": total / max(count, 1), "greedy_match": match / max(count, 1)}

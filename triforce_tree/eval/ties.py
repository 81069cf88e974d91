"""Two greedy texts of one model part: a tie between logits, or a failure?

A forward of many rows rounds otherwise than one of a single row. Where the two best logits lie closer
together than that difference, either token is the argmax of a right computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.decoding.forced_tokens import target_logits
from triforce_tree.engine import Engine
from triforce_tree.models.length_rope import LengthRope

NOISE_ROWS = 16
_CHUNK = 2048  # tokens of a prompt that the model's own forward reads at once


@dataclass(frozen=True)
class Parting:
    """Where two texts part.

    Attributes:
        gap: between the best logit and the lower one of the two tokens.
        noise: largest difference of a logit between a forward of many rows and one of a single row.
        exact: the arithmetic leaves no room for ties (32 bits or more).
    """

    gap: float
    noise: float
    exact: bool

    @property
    def tie(self) -> bool:
        return not self.exact and self.gap < self.noise


def parting(
    engine: Engine, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Parting | None:
    """Judge where two greedy continuations of a prompt part; None where neither says another token.

    It takes a few forwards of the model over the prompt, and memory for a cache of it.
    """
    at = common(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return None
    target = engine.hierarchy.target
    tokens = [*prompt, *ours[:at]]
    logits = last_logits(target.model, tokens)
    gap = float(logits.max() - torch.minimum(logits[ours[at]], logits[theirs[at]]))
    return Parting(gap, forward_noise(engine, [*tokens, theirs[at]]), target.dtype.itemsize >= 4)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the beginning that two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def forward_noise(engine: Engine, tokens: Sequence[int]) -> float:
    """Largest difference of a logit between a forward of many rows and the model's own of one row each.

    Measured on the last rows of ``tokens``, at most ``NOISE_ROWS``; 0 for a single token.
    """
    model = engine.hierarchy.target.model
    rows = min(NOISE_ROWS, len(tokens) - 1)
    if rows == 0:
        return 0.0
    start = len(tokens) - rows
    many = chain_logits(engine, tokens[:start], tokens[start:-1]).float()
    with torch.no_grad():
        cache = _read(model, tokens[: start - 1])
        worst = 0.0
        for row, place in enumerate(range(start - 1, len(tokens) - 1)):
            out = model(as_ids(model, tokens[place : place + 1]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            worst = max(worst, float((out.logits[0, -1].float() - many[row]).abs().max()))
    return worst


def chain_logits(engine: Engine, prompt: Sequence[int], more: Sequence[int]) -> Tensor:
    """``[T + 1, V]`` after a prompt, and after each of T more tokens, by one pass of the engine's level 2."""
    with engine.program([list(prompt)], len(more) + 1, None, 0.0) as program:
        program.prefill([prompt])
        return target_logits(program, [prompt[-1], *more])


def last_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """fp32 ``[V]`` after the last token, by the model's own forward of it alone."""
    with torch.no_grad():
        cache = _read(model, tokens[:-1])
        out = model(as_ids(model, tokens[-1:]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits
    return logits[0, -1].float()


def as_ids(model: Any, tokens: Sequence[int]) -> Tensor:
    """int64 ``[1, L]`` where the model is."""
    return torch.tensor([list(tokens)], device=model.device)


def _read(model: Any, tokens: Sequence[int]) -> Any:
    """transformers' cache of these tokens; None for none."""
    cache = None
    # Where frequencies depend on the length, transformers chooses them by the tokens of each forward.
    chunk = _CHUNK if LengthRope.of(model) is None else max(1, len(tokens))
    for start in range(0, len(tokens), chunk):
        ids = as_ids(model, tokens[start : start + chunk])
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
    return cache

"""Where two greedy texts of one model differ: a tie between logits, or a failure.

A forward over many positions rounds otherwise than one over a single position. Where the two best logits are
closer together than that difference, either token is the argmax of a correct computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.decoding.forced_tokens import target_logits
from triforce_tree.engine import Engine
from triforce_tree.eval.own_forward import as_ids, last_logits, prefilled
from triforce_tree.kv.cached_tokens import common_prefix

NOISE_POSITIONS = 16


@dataclass(frozen=True)
class Difference:
    """Where two texts differ for the first time.

    Attributes:
        gap: between the best logit and the lower one of the two tokens.
        noise: largest difference of a logit between a forward over many positions and one over a single one.
        exact: the dtype has 32 bits or more, and no two logits tie.
    """

    gap: float
    noise: float
    exact: bool

    @property
    def tie(self) -> bool:
        return not self.exact and self.gap < self.noise


def first_difference(
    engine: Engine, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Difference | None:
    """Judge the first difference of two greedy continuations of a prompt; None where there is none.

    It takes a few forwards of the model over the prompt, and memory for a KV cache of it.
    """
    at = common_prefix(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return None
    target = engine.hierarchy.target
    tokens = [*prompt, *ours[:at]]
    logits = last_logits(engine, tokens)
    gap = float(logits.max() - torch.minimum(logits[ours[at]], logits[theirs[at]]))
    return Difference(gap, forward_noise(engine, [*tokens, theirs[at]]), target.dtype.itemsize >= 4)


def forward_noise(engine: Engine, tokens: Sequence[int]) -> float:
    """Largest difference of a logit between one forward over many positions and the model's own one by one.

    Measured on the last positions of ``tokens``, at most ``NOISE_POSITIONS``; 0 for a single token.
    """
    model = engine.hierarchy.target.model
    positions = min(NOISE_POSITIONS, len(tokens) - 1)
    if positions == 0:
        return 0.0
    start = len(tokens) - positions
    many = chain_logits(engine, tokens[:start], tokens[start:-1]).float()
    with torch.no_grad():
        cache = prefilled(engine, tokens[: start - 1])
        worst = 0.0
        for i, at in enumerate(range(start - 1, len(tokens) - 1)):
            out = model(as_ids(model, tokens[at : at + 1]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            worst = max(worst, float((out.logits[0, -1].float() - many[i]).abs().max()))
    return worst


def chain_logits(engine: Engine, prompt: Sequence[int], more: Sequence[int]) -> Tensor:
    """``[T + 1, V]`` after a prompt, and after each of T more tokens, by one pass of the engine's level 2."""
    with engine.program([list(prompt)], len(more) + 1, None, 0.0) as program:
        program.prefill([prompt])
        return target_logits(program, [prompt[-1], *more])

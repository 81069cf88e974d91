"""Judges where two greedy texts of one model differ: a tie between scores, or a failure.

A forward over many positions rounds differently from a forward over a single position. If the two best scores
are closer together than that difference, either token is the argmax of a correct computation. Scores are
logits after the generation's logits processors (``repetition_penalty`` and others), which may turn logits
that are far apart into equal scores, and the other way round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.check.own_forward import as_ids, greedy_scores, last_logits, prefilled
from triforce_tree.drafters.base import TokenTree
from triforce_tree.engine import Engine
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.trees.ancestors import ancestor_mask
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.verify.sampling import ProbsFromLogits

NOISE_POSITIONS = 16


@dataclass(frozen=True)
class Difference:
    """The first position at which two texts differ.

    Attributes:
        gap: the best score minus the lower score of the two tokens.
        noise: the largest difference of a score between a forward over many positions and a forward over a
            single position.
        exact: whether the dtype has 32 bits or more, in which a difference is never a tie.
    """

    gap: float
    noise: float
    exact: bool

    @property
    def tie(self) -> bool:
        return not self.exact and self.gap < self.noise


def first_difference(
    engine: Engine,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    to_scores: ProbsFromLogits | None = None,
) -> Difference | None:
    """Judges the first difference of two greedy continuations of a prompt; returns None if there is none.

    It runs a few forwards of the model over the prompt, and needs memory for a KV cache of it.

    Args:
        to_scores: the logits processors of both texts; by default those of a greedy generation without
            options. :func:`triforce_tree.check.own_forward.greedy_scores` makes those of a generation with
            options.
    """
    at = common_prefix(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return None
    target = engine.target
    tokens = [*prompt, *ours[:at]]
    to_scores = to_scores or greedy_scores(engine, prompt, max(len(ours), len(theirs)))
    scores = scores_after(to_scores, last_logits(engine, tokens), tokens)
    gap = float(scores.max() - torch.minimum(scores[ours[at]], scores[theirs[at]]))
    noise = forward_noise(engine, [*tokens, theirs[at]], to_scores)
    return Difference(gap, noise, target.model.dtype.itemsize >= 4)


def scores_after(to_scores: ProbsFromLogits, logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Returns the scores fp32 ``[V]`` of the token after ``tokens``, given its logits ``[V]``."""
    return to_scores.scores(logits[None], lambda: [tokens])[0]


def forward_noise(engine: Engine, tokens: Sequence[int], to_scores: ProbsFromLogits) -> float:
    """Returns the largest difference of a score between one forward over many positions and the model's
    forwards of single positions.

    It is measured at the last positions of ``tokens``, at most ``NOISE_POSITIONS``, and 0 for a single token.
    Tokens that a processor forbids do not count.
    """
    model = engine.target.model
    positions = min(NOISE_POSITIONS, len(tokens) - 1)
    if positions == 0:
        return 0.0
    start = len(tokens) - positions
    many = chain_logits(engine, tokens[:start], tokens[start:-1]).float()
    with torch.no_grad():
        cache = prefilled(engine, tokens[: start - 1])
        worst = 0.0
        for i, at in enumerate(range(start - 1, len(tokens) - 1)):
            out = model(as_ids(model, tokens[at : at + 1]), use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            ours, own = (
                scores_after(to_scores, logits, tokens[: at + 1])
                for logits in (many[i], out.logits[0, -1].float())
            )
            allowed = ours.isfinite() & own.isfinite()
            worst = max(worst, float((own - ours)[allowed].abs().max()) if allowed.any() else 0.0)
    return worst


def chain_logits(engine: Engine, prompt: Sequence[int], more: Sequence[int]) -> Tensor:
    """Returns logits ``[T + 1, V]`` after a prompt, and after each of T more tokens, by one pass of the
    engine's level 2. Nothing is committed.
    """
    count, shape = len(more) + 1, DeviceTreeShape((1,) * len(more), (((0, 0),),) * len(more))
    with engine.program([list(prompt)], count, None) as program:
        program.prefill([prompt])
        tree = TokenTree.of(shape, 1, 0, program.device)
        tree.tokens.copy_(torch.tensor([[prompt[-1], *more]], device=program.device))
        view = program.full_view(count, ancestor_mask(list(range(-1, count - 1))), list(range(count)))
        root = program.state.length.clone()
        view.begin(root)
        logits = program.full(
            tree.tokens, root[:, None] + tree.depths, view, states=view.recurrent, indexed=view.indexed
        )
        return logits[0]

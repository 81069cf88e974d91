"""Overlaps of the retrieval level and the draft with the target on a given text (teacher forcing).

Everything is measured through the levels and KV slots that generation uses: every pass feeds the next tokens
of the text to all levels, then commits them.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.train_pair.given import forced_tokens
from triforce_tree.bench.texts import evenly_spaced
from triforce_tree.check.ties import target_logits
from triforce_tree.engine import Engine
from triforce_tree.verify.sampling import ProbsFromLogits

# Tokens after each prompt.
NEW = 128
# Tokens in one forward of level 1, about as many as it accepts from the embedded draft's trees: chunks are
# selected by the root of a forward, so the distance to the root matters.
_LEVEL_1_STEP = 3


class LevelProbs(NamedTuple):
    """Distributions of the next token at T positions of a text, fp32 ``[T, V]`` each."""

    draft: Tensor
    retrieval: Tensor
    target: Tensor


def teacher_forced(engine: Engine, text: Sequence[int], prompt_tokens: int) -> Iterator[LevelProbs]:
    """Yields the distributions of three levels over ``text[prompt_tokens:]``, one pass at a time.

    Args:
        engine: models and settings, with a draft model. Three levels are used whatever its ``levels`` is.
    """
    at, to_probs = prompt_tokens, ProbsFromLogits.at(1.0)
    generator = torch.Generator(engine.target.device)
    generator.manual_seed(0)
    with engine.with_options(levels=3).program([list(text[:at])], len(text) - at, to_probs) as program:
        program.prefill([list(text[:at])])
        while at < len(text):
            stop = min(at + program.max_draft_tokens + 1, len(text))
            chain = list(text[at - 1 : stop - 1])
            forced_tokens.offer(program, text[:at], chain[1:])
            draft = forced_tokens.draft_probs(program, len(chain), generator)
            assert draft is not None, "the draft is a model"
            retrieval = to_probs(forced_tokens.retrieval_logits(program, chain, _LEVEL_1_STEP), list)
            yield LevelProbs(draft, retrieval, to_probs(target_logits(program, chain), list))
            forced_tokens.commit(program, text[at:stop])
            at = stop


def overlaps(engine: Engine, ids: Sequence[int], length: int, budget: int, count: int) -> tuple[float, float]:
    """Returns the overlaps (retrieval level, draft) with the target over ``NEW`` tokens after each prompt.

    The overlap is the mean of sum(min(p, q)) at temperature 1, the probability that a token drawn from q is
    accepted under p. The ``count`` prompts have ``length`` tokens and are evenly spaced in the text.

    Raises:
        ValueError: the text is too short.
    """
    engine = engine.with_options(budget=budget)
    retrieval, draft = list[float](), list[float]()
    for window in evenly_spaced(ids, length + NEW, count):
        for probs in teacher_forced(engine, window, length):
            retrieval += torch.minimum(probs.retrieval, probs.target).sum(-1).tolist()
            draft += torch.minimum(probs.draft, probs.target).sum(-1).tolist()
    return statistics.fmean(retrieval), statistics.fmean(draft)

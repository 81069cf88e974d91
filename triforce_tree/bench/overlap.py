"""How well each level stands in for the next: overlap of laws, acceptance by sibling rank.

Everything is measured through the engine's own levels and caches, on given text: every pass feeds a
chain of tokens of that text to all levels, then commits it, so the retrieval cache is refreshed as it is
while generating.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree import sampling
from triforce_tree.drafters import HierarchicalDrafter, ModelDrafter
from triforce_tree.engine import Engine
from triforce_tree.sampling import Random, TokenLaw
from triforce_tree.stats import Progress
from triforce_tree.token_tree import Context, chain

# Tokens that one forward of level 1 settles, about what the trees of the embedded draft bring it: a
# retrieval cache chooses by the root of each forward, so how far the root is behind matters.
LEVEL_1_STEP = 3


@dataclass(frozen=True)
class Laws:
    """Laws of the next token, fp32 ``[T, V]`` each, at T places of a text; ``tokens``: what came there."""

    draft: Tensor | None
    retrieval: Tensor
    target: Tensor
    tokens: list[int]


def teacher_forced(
    engine: Engine,
    tokens: Sequence[int],
    prompt_tokens: int,
    law: TokenLaw,
    progress: Progress | None = None,
) -> Iterator[Laws]:
    """Laws of all three levels over ``tokens[prompt_tokens:]``, one pass at a time.

    Args:
        engine: models and settings; the hierarchy is used whatever its ``levels`` says.
        tokens: a text of more than ``prompt_tokens`` tokens.
        prompt_tokens: how many are read before the first pass.
        law: logits to law.
        progress: of reading.
    """
    hierarchy = engine.with_options(levels=3).hierarchy
    with hierarchy.active():
        decoder = hierarchy.decoder(law, 0, prompt_tokens, len(tokens) - prompt_tokens, frozenset())
        decoder.prefill(tokens[:prompt_tokens], progress)
        drafter = decoder.drafter
        assert isinstance(drafter, HierarchicalDrafter), "levels=3 makes one"
        draft = drafter.inner.level if isinstance(drafter.inner, ModelDrafter) else None
        at = prompt_tokens
        while at < len(tokens):
            stop = min(at + engine.hierarchy.config.gamma + 1, len(tokens))

            def laws(level: Level, step: int, at: int = at, stop: int = stop) -> Tensor:
                """Laws of ``tokens[at:stop]``, by forwards of ``step`` rows."""
                parts = []
                for first in range(at, stop, step):
                    rows = tokens[first - 1 : min(first + step, stop) - 1]
                    logits = level.forward_tree(Context(list(tokens[:first])), chain(rows))
                    parts.append(law(logits, list))
                return torch.cat(parts)

            yield Laws(
                laws(draft, stop - at) if draft is not None else None,
                laws(drafter.verifier.level, LEVEL_1_STEP),
                laws(decoder.verifier.level, stop - at),
                list(tokens[at:stop]),
            )
            at = stop
            decoder.verifier.commit(Context(list(tokens[:at])))
            drafter.commit(Context(list(tokens[:at])))


def overlap(p: Tensor, q: Tensor) -> float:
    """Mean of the sum of min(p, q): the chance that a draw from q is accepted under p. ``[T, V]`` each."""
    return float(torch.minimum(p, q).sum(-1).mean())


def greedy_ranks(p: Tensor, q: Tensor, ranks: int) -> Tensor:
    """Share of places ``[ranks]`` where p's most probable token is the r-th of q."""
    best = p.argmax(-1, keepdim=True)
    return (q.topk(ranks, dim=-1).indices == best).float().mean(0)


def sampling_ranks(p: Tensor, q: Tensor, ranks: int, random: Random) -> Tensor:
    """Chance ``[ranks]`` that the accepted sibling is the r-th, siblings drawn from q without replacement.

    The siblings are drawn, the acceptances are not: their probabilities are added up, which leaves less
    noise than counting would.
    """
    drawn = random.choose_distinct(q, [ranks] * len(q))
    total = torch.zeros(ranks)
    for p_here, q_here, tokens in zip(p, q, drawn, strict=True):
        reached, left, proposing = 1.0, p_here, q_here
        for rank, token in enumerate(tokens):
            chance = min(1.0, float(left[token] / proposing[token]))
            total[rank] += reached * chance
            reached *= 1 - chance
            rest = sampling.without(proposing, token)
            if reached <= 0 or rest is None:
                break
            left, proposing = sampling.residual(left, proposing), rest
    return total / len(p)


def acceptance_by_rank(
    steps: Sequence[Laws], ranks: int, greedy: bool, seed: int = 0
) -> dict[str, list[float]]:
    """Sequoia's acceptance vectors, for a draft's tree under level 1 and for level 1's under level 2."""
    random = Random(seed, steps[0].target.device)

    def measure(p: Tensor, q: Tensor) -> list[float]:
        found = greedy_ranks(p, q, ranks) if greedy else sampling_ranks(p, q, ranks, random)
        return [round(x, 4) for x in found.tolist()]

    retrieval = torch.cat([s.retrieval for s in steps])
    target = torch.cat([s.target for s in steps])
    result = {"retrieval -> target": measure(target, retrieval)}
    drafts = [s.draft for s in steps if s.draft is not None]
    if drafts:
        result = {"draft -> retrieval": measure(retrieval, torch.cat(drafts)), **result}
    return result

"""Measures how close each level is to the next: the overlap of distributions, and the acceptance by sibling
rank.

Everything is measured through the levels and KV slots that generation uses, on a given text
(teacher forcing): every pass feeds the next tokens of that text to all levels, then commits them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.decoding import forced_tokens
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.engine import Engine
from triforce_tree.kernels.step.draws import NoiseDraws
from triforce_tree.verify.sampling import ProbsFromLogits

# Tokens in one forward of level 1, about as many as it accepts from the embedded draft's trees: chunks are
# selected by the root of a forward, so the distance to the root matters.
LEVEL_1_STEP = 3


@dataclass(frozen=True)
class LevelProbs:
    """Distributions of the next token, fp32 ``[T, V]`` each, at T positions of a text, and its ``tokens``.

    ``draft`` is None if the drafter is deterministic or does not run.
    """

    draft: Tensor | None
    retrieval: Tensor
    target: Tensor
    tokens: list[int]


def teacher_forced(
    engine: Engine,
    tokens: Sequence[int],
    prompt_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[LevelProbs]:
    """Yields the distributions of all three levels over ``tokens[prompt_tokens:]``, one pass at a time.

    Args:
        engine: models and settings. Three levels are used whatever its ``levels`` is.
        tokens: a text of more than ``prompt_tokens`` tokens.
        prompt_tokens: number of tokens that are prefilled before the first pass.
        temperature: the temperature of the distributions; above 0.
        seed: the seed of the drafter's draws, on which its trees below the root depend.
    """
    text, to_probs = list(tokens), ProbsFromLogits.at(temperature)
    generator = torch.Generator(engine.target.device)
    generator.manual_seed(seed)
    at = prompt_tokens
    with engine.with_options(levels=3).program([text[:at]], len(text) - at, to_probs) as program:
        program.prefill([text[:at]])
        yield from forced_passes(program, text, at, to_probs, generator)


def forced_passes(
    program: DecodingProgram,
    text: Sequence[int],
    at: int,
    to_probs: ProbsFromLogits,
    generator: torch.Generator | None = None,
) -> Iterator[LevelProbs]:
    """Yields the distributions as :func:`teacher_forced` does, in a program of three levels that holds the
    first ``at`` tokens of the text.

    Args:
        generator: draws the drafter's random numbers. With None the drafter does not run.
    """
    while at < len(text):
        stop = min(at + program.max_draft_tokens + 1, len(text))
        chain = list(text[at - 1 : stop - 1])
        forced_tokens.offer(program, text[:at], chain[1:])
        draft = None if generator is None else forced_tokens.draft_probs(program, len(chain), generator)
        retrieval = to_probs(forced_tokens.retrieval_logits(program, chain, LEVEL_1_STEP), list)
        target = to_probs(forced_tokens.target_logits(program, chain), list)
        yield LevelProbs(draft, retrieval, target, list(text[at:stop]))
        forced_tokens.commit(program, text[at:stop])
        at = stop


def overlap(p: Tensor, q: Tensor) -> float:
    """Returns the mean sum of min(p, q), for p and q ``[T, V]``: the probability that a draw from q is
    accepted under p.
    """
    return float(torch.minimum(p, q).sum(-1).mean())


def greedy_ranks(p: Tensor, q: Tensor, ranks: int) -> Tensor:
    """Returns the share of positions ``[ranks]`` where p's most probable token is the r-th of q."""
    best = p.argmax(-1, keepdim=True)
    return (q.topk(ranks, dim=-1).indices == best).float().mean(0)


def sampling_ranks(p: Tensor, q: Tensor, ranks: int, generator: torch.Generator) -> Tensor:
    """Returns the probability ``[ranks]`` that the r-th of siblings drawn from q is accepted.

    The siblings are drawn without replacement. Probabilities of acceptance are summed, which has a smaller
    variance than counting acceptances. A sibling x is accepted with the probability min(1, p(x) / q(x)). If
    it is rejected, p becomes max(p - q, 0) and q loses x, both renormalised, for the next sibling.
    """
    count = min(ranks, q.shape[-1])
    exponential = torch.empty_like(q).exponential_(generator=generator)
    drawn = NoiseDraws(exponential[:, None]).choose_distinct(q[:, None], count)[:, 0]
    accepted = torch.zeros(len(p), ranks, dtype=torch.float32, device=p.device)
    refused = torch.ones(len(p), dtype=torch.float32, device=p.device)
    for rank, token in enumerate(drawn.split(1, dim=1)):
        proposed = q.gather(1, token.clamp_min(0))
        # A token of probability 0 was not drawn.
        present = (token >= 0) & (proposed > 0)
        chance = torch.where(present, p.gather(1, token.clamp_min(0)) / proposed, 0.0).clamp(max=1)[:, 0]
        accepted[:, rank] = refused * chance
        refused = refused * (1 - chance)
        left, others = (p - q).clamp_min(0), q.scatter(1, token.clamp_min(0), 0.0)
        totals = left.sum(1, keepdim=True), others.sum(1, keepdim=True)
        p = torch.where(present & (totals[0] > 0), left / totals[0], p)
        q = torch.where(present, others / totals[1].clamp_min(torch.finfo(q.dtype).tiny), q)
    return accepted.cpu().mean(0)


def acceptance_by_rank(
    steps: Sequence[LevelProbs], ranks: int, greedy: bool, seed: int = 0
) -> dict[str, list[float]]:
    """Returns Sequoia's acceptance vectors for the draft's tokens under level 1, and for the tokens of level
    1 under level 2.
    """
    generator = torch.Generator(steps[0].target.device)
    generator.manual_seed(seed)

    def measure(p: Tensor, q: Tensor) -> list[float]:
        found = greedy_ranks(p, q, ranks) if greedy else sampling_ranks(p, q, ranks, generator)
        return [round(x, 4) for x in found.tolist()]

    retrieval = torch.cat([s.retrieval for s in steps])
    target = torch.cat([s.target for s in steps])
    result = {"retrieval -> target": measure(target, retrieval)}
    drafts = [s.draft for s in steps if s.draft is not None]
    if drafts:
        result = {"draft -> retrieval": measure(retrieval, torch.cat(drafts)), **result}
    return result

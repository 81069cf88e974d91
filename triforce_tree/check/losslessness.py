"""Tests on any pair of models whether the output follows the target's own distribution.

Logits after a prompt, which is prefilled as for a generation, must equal those of transformers' own forward.
Greedy decoding must give the target's own tokens. Sampling is tested level by level: after one prefilled
context many independent first tokens are drawn, each by a pass that starts from the same state, and compared
with the exact distribution. All tests run the stages that a generation runs, with its settings.

The first tokens are tested in three ways. A chi-square test over all tokens finds any large error. The shift
towards the draft is the direction of a wrong residual and of too many acceptances. And no pass may emit a
token that it has refused, because a correct residual gives such a token no probability. With the embedded
pair and a planted fault (the residual is p itself), a quarter of the default draws found the fault with each
of ten seeds; the chi-square test alone found it with none. If nearly everything is accepted (levels that
overlap by 0.99), an error may not be noticed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from triforce_tree.check.goodness_of_fit import chi_square, chi_square_p, detectable, shift, shift_p
from triforce_tree.check.own_forward import (
    as_ids,
    greedy_scores,
    last_logits,
    last_position_logits,
    own_decoding,
)
from triforce_tree.check.ties import (
    NOISE_POSITIONS,
    chain_logits,
    forward_noise,
    scores_after,
)
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage, TreeVerifyStage
from triforce_tree.drafters.base import TokenTree
from triforce_tree.engine import Engine
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.loading.rounding import NOISE, explained_error, noisy_embeddings, relative_error
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits
from triforce_tree.verify.verifier import Acceptance

# A correct implementation has a smaller p-value once in ten thousand tests.
SIGNIFICANCE = 1e-4
MOST_FAILURES = 3  # after so many failures greedy decoding is not compared any further
LAST_POSITIONS = 512  # contexts of the sampling test end at one of the last so many positions


@dataclass(frozen=True)
class Forward:
    """Logits of the last ``positions`` tokens of a prompt, from our forwards and from transformers' own.

    ``error`` is their difference relative to the logits' size, and may be ``limit`` at most.
    """

    prompt_tokens: int
    positions: int
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding of one prompt, compared with transformers' own.

    ``ties``: positions where the tokens differ and the target's two best scores are closer together than
    ``noise`` (:func:`triforce_tree.check.ties.forward_noise`). After each the comparison continues from the
    target's own tokens. ``failures``: positions where they differ by more.
    """

    prompt_tokens: int
    levels: int
    compared: int
    ties: int
    failures: int
    noise: float
    widest_gap: float

    @property
    def passed(self) -> bool:
        return self.failures == 0


@dataclass(frozen=True)
class Sampling:
    """First tokens of one level, with ``levels`` levels, compared with its exact distribution.

    ``shift`` is the mean shift of the draws towards the draft
    (:func:`triforce_tree.check.goodness_of_fit.shift`), and ``shift_p_value`` an upper bound of its p-value.
    ``refused_emitted`` is the number of passes that emitted a token which they had refused at the same
    position.
    """

    level: str
    levels: int
    draws: int
    contexts: int
    bins: int
    chi_square: float
    p_value: float
    shift: float
    shift_p_value: float
    refused_emitted: int

    @property
    def passed(self) -> bool:
        return min(self.p_value, self.shift_p_value) >= SIGNIFICANCE and not self.refused_emitted

    @property
    def detectable(self) -> float:
        """Returns the total variation distance from which on the chi-square test alone finds nine errors in
        ten.
        """
        return detectable(self.draws * self.contexts, self.bins, SIGNIFICANCE)


@dataclass
class _FirstTokens:
    """The first tokens that the passes of one level emitted after one context.

    Attributes:
        probs: the exact distribution, fp32 ``[V]``.
        draft: the distribution that proposals were drawn from, fp32 ``[V]``; None without a drafter.
        counts: how often each token was the first one.
        refused_emitted: see :class:`Sampling`.
    """

    probs: Tensor | None = None
    draft: Tensor | None = None
    counts: Counter[int] = field(default_factory=Counter)
    refused_emitted: int = 0


def forward(engine: Engine, prompt: Sequence[int]) -> Forward:
    """Prefill a prompt in chunks, verify its last tokens as a chain, and compare with one forward of
    transformers'.

    Logits are compared, so that no tie between two tokens can hide a difference.
    """
    model = engine.target.model
    positions = min(NOISE_POSITIONS, len(prompt))
    own = last_position_logits(engine, prompt, positions)
    start = len(prompt) - positions + 1
    ours = chain_logits(engine, prompt[:start], prompt[start:]).float()
    error = relative_error(ours, own)

    def with_noise() -> Tensor:
        with noisy_embeddings(model, NOISE):
            return last_position_logits(engine, prompt, positions)

    limit = explained_error(engine.target, error, own, with_noise)
    return Forward(len(prompt), positions, error, limit)


def greedy(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    levels: int,
    stop: StoppingCriteriaList | None = None,
) -> Greedy:
    """Compares with transformers' own greedy decoding of the same model."""
    expected = own_decoding(engine, prompt, new_tokens, stop)
    to_scores = greedy_scores(engine, prompt, new_tokens)
    noise = forward_noise(engine, [*prompt, *expected], to_scores)
    runner = engine.with_options(levels=levels)
    at = ties = failures = 0
    widest = 0.0
    while at < len(expected):
        so_far = [*prompt, *expected[:at]]
        out = runner.generate(
            so_far, do_sample=False, max_new_tokens=len(expected) - at, stopping_criteria=stop, seed=0
        )
        ours = out.sequences[0, len(so_far) :].tolist()
        same = common_prefix(ours, expected[at:])
        at += same
        if at == len(expected) or same == len(ours):
            break
        tokens = [*prompt, *expected[:at]]
        scores = scores_after(to_scores, last_logits(engine, tokens), tokens)
        gap = float(scores.max() - scores[ours[same]])
        widest = max(widest, gap)
        if gap < noise:
            ties += 1
        else:
            failures += 1
            if failures == MOST_FAILURES:
                break
        at += 1
    return Greedy(len(prompt), levels, at, ties, failures, noise, widest)


def sampling_checks(
    engine: Engine,
    contexts: Sequence[Sequence[int]],
    draws: int,
    levels: int,
    temperature: float = 1.0,
    seed: int = 0,
    each: Callable[[], None] = lambda: None,
) -> list[Sampling]:
    """Test each verifying level's first tokens, over several contexts together.

    Args:
        engine: models and settings.
        contexts: prompts; each has bins of its own.
        draws: first tokens for each context and level.
        levels: number of levels, as in :func:`triforce_tree.load`.
        temperature: the temperature of the distributions.
        seed: the seed of all draws.
        each: called after every draw; it may raise an exception to end the test.

    Raises:
        ValueError: the model returned NaN logits.
    """
    to_probs, runner = ProbsFromLogits.at(temperature), engine.with_options(levels=levels)
    generator = torch.Generator(engine.target.device)
    generator.manual_seed(seed)
    found: dict[str, list[_FirstTokens]] = {}
    for prompt in contexts:
        with runner.program([list(prompt)], 1, to_probs) as program:
            program.prefill([prompt])
            for level, tokens in _first_tokens(program, prompt, temperature, draws, generator, each).items():
                found.setdefault(level, []).append(tokens)
    return [_tested(level, levels, draws, parts) for level, parts in found.items()]


def _tested(level: str, levels: int, draws: int, parts: Sequence[_FirstTokens]) -> Sampling:
    statistics, shifts = [], [(0.0, 0.0)]
    for part in parts:
        assert part.probs is not None
        statistics.append(chi_square(part.counts, part.probs))
        if part.draft is not None:
            shifts.append(shift(part.counts, part.probs, part.draft))
    statistic, freedom = sum(x for x, _ in statistics), sum(free for _, free in statistics)
    return Sampling(
        level,
        levels,
        draws,
        len(parts),
        freedom + len(parts),
        statistic,
        chi_square_p(statistic, freedom),
        sum(total for total, _ in shifts) / (draws * len(parts)),
        shift_p(shifts),
        sum(part.refused_emitted for part in parts),
    )


def _first_tokens(
    program: DecodingProgram,
    prompt: Sequence[int],
    temperature: float,
    draws: int,
    generator: torch.Generator,
    each: Callable[[], None],
) -> dict[str, _FirstTokens]:
    """Returns the first tokens of each verifying level after a prefilled prompt, by level.

    Each pass starts from the same state; KV slots that it writes after the prompt are not committed.
    """
    if program.drafter is not None:
        program.drafter.prepare([prompt], resumed=False)
    start = program.state.save()

    def run(*stages: str) -> None:
        program.state.restore(start)
        for stage in stages:
            program.run(stage, generator)
        program.cache.committed([[]])

    def root(stage: str) -> Tensor:
        return (program.verifier(stage).emitted_logits(1)[0, 0] / temperature).softmax(-1)

    run("plain")
    verifying = {1: ["plain"], 2: ["target"], 3: ["retrieval_refresh", "target"]}[program.levels]
    stages = ["draft", *verifying] if program.drafter is not None else verifying
    found = {stage: _FirstTokens() for stage in verifying}
    found[verifying[-1]].probs = root("plain")
    for _ in range(draws):
        run(*stages)
        for stage, tokens in found.items():
            acceptance = program.verifier(stage).acceptance
            tokens.counts[int(acceptance.emitted[0, 0])] += 1
            # The probs are the same in every pass, because level 1 selects its chunks by the root, which no
            # draw has changed.
            if tokens.probs is None:
                tokens.probs = root(stage)
            if stage != "plain":
                judged = program.stage(stage)
                assert isinstance(judged, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage)
                tree = judged.tree
                tokens.refused_emitted += _emits_refused(tree, acceptance)
                if tokens.draft is None:
                    tokens.draft = _root_draft(tree, len(tokens.probs))
        each()
    if program.state.has_nan:
        raise ValueError(NAN_LOGITS)
    levels = {"retrieval_refresh": "retrieval", "target": "target", "plain": "target"}
    return {levels[stage]: tokens for stage, tokens in found.items()}


def _root_draft(tree: TokenTree, vocabulary: int) -> Tensor:
    """Returns the distribution ``[V]`` that the root's children were drawn from; 1 at each deterministic
    child.
    """
    row = int(tree.probs_rows[0, 0])
    if row >= 0:
        return tree.probs[0, row].clone()
    return torch.zeros(vocabulary, dtype=torch.float32, device=tree.tokens.device).index_fill(
        0, _children(tree, 0), 1.0
    )


def _emits_refused(tree: TokenTree, acceptance: Acceptance) -> bool:
    """Returns whether the token after the accepted path is one of the children that were refused there."""
    last = int(acceptance.counts[0]) - 1
    return bool((_children(tree, int(acceptance.path[0, last])) == acceptance.emitted[0, last]).any())


def _children(tree: TokenTree, node: int) -> Tensor:
    """Returns the tokens of a node's children, int64 ``[n]``."""
    return tree.tokens[0, (tree.parents[0] == node) & (tree.tokens[0] >= 0)]


def uncertain_contexts(engine: Engine, tokens: Sequence[int], count: int) -> list[list[int]]:
    """Returns the ``count`` prefixes of a text after which the target's next-token entropy is largest.

    A test of distributions that are almost deterministic would find nothing wrong. Only the text's last
    positions, at most half of it, are considered.
    """
    model = engine.target.model
    positions = min(LAST_POSITIONS, max(count, len(tokens) // 2))
    with torch.no_grad():
        logits = model(as_ids(model, tokens), logits_to_keep=positions).logits[0].float()
    probs = logits.softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-30).log()).sum(-1)
    first = len(tokens) - len(entropy)
    best = entropy.topk(min(count, len(entropy))).indices.tolist()
    return [list(tokens[: first + position + 1]) for position in sorted(best)]


def as_dicts(results: Sequence[Forward | Greedy | Sampling]) -> list[dict[str, Any]]:
    return [{**asdict(r), "passed": r.passed} for r in results]

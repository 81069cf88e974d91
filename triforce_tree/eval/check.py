"""Is the output really the target's own? The proof, run on any pair of models.

The logits behind a prompt, fed as generation feeds it, must be those of transformers' own forward. Greedy
decoding must give the target's own tokens. Sampling is tested level by level: after one prefilled context
many independent first tokens are drawn, each by a pass that starts from the same state, and compared with the
exact distribution by a chi-square test. All of it runs the stages that generation runs, under its settings.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.engine import Engine
from triforce_tree.eval.ties import NOISE_ROWS, as_ids, chain_logits, common, forward_noise, last_logits
from triforce_tree.loading.load_guard import relative_error
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits

# A right implementation falls below it once in ten thousand runs; a wrong residual lies far below.
SIGNIFICANCE = 1e-4
LEAST_EXPECTED = 5.0  # of a bin, the usual rule for chi-square
MOST_FAILURES = 3  # enough to know
# A share of the logits' size: rounding in all layers of a model stays below, a wrong forward is far above.
ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
ROUNDING_16 = 0.2
PLACES = 512  # where contexts of the sampling test may end


@dataclass(frozen=True)
class Forward:
    """Logits of the last ``rows`` tokens of a prompt, from our forwards and from transformers' own.

    ``error`` is their difference as a share of the logits' size, and must stay below ``limit``.
    """

    prompt_tokens: int
    rows: int
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Greedy:
    """One prompt decoded both ways.

    ``ties``: places where the texts parted and the target's two best logits lay closer together than
    ``noise`` (:func:`triforce_tree.eval.ties.forward_noise`). After each the comparison went on from the
    target's own text. ``failures``: places with no such excuse.
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
class Law:
    """First tokens of one level, in a hierarchy of so many ``levels``, against its exact law."""

    level: str
    levels: int
    draws: int
    contexts: int
    bins: int
    chi_square: float
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= SIGNIFICANCE


def forward(engine: Engine, prompt: Sequence[int]) -> Forward:
    """Feed a prompt in chunks, and its last tokens as a chain to verify, and compare with one forward of
    transformers'.

    Ties cannot excuse a difference here, as they may in texts.
    """
    model = engine.hierarchy.target.model
    rows = min(NOISE_ROWS, len(prompt))
    own = _tail_logits(model, prompt, rows)
    start = len(prompt) - rows + 1
    ours = chain_logits(engine, prompt[:start], prompt[start:]).float()
    limit = ROUNDING.get(model.dtype, ROUNDING_16)
    return Forward(len(prompt), rows, relative_error(ours, own), limit)


def greedy(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    levels: int,
    stop: StoppingCriteriaList | None = None,
) -> Greedy:
    """Compare with transformers' own greedy decoding of the same model."""
    model = engine.hierarchy.target.model
    expected = _own_decoding(model, prompt, new_tokens, stop)
    noise = forward_noise(engine, [*prompt, *expected])
    runner = engine.with_options(levels=levels)
    at = ties = failures = 0
    widest = 0.0
    while at < len(expected):
        so_far = [*prompt, *expected[:at]]
        out = runner.generate(
            so_far, do_sample=False, max_new_tokens=len(expected) - at, stopping_criteria=stop, seed=0
        )
        ours = out.sequences[0, len(so_far) :].tolist()
        same = common(ours, expected[at:])
        at += same
        if at == len(expected) or same == len(ours):
            break
        logits = last_logits(model, [*prompt, *expected[:at]])
        gap = float(logits.max() - logits[ours[same]])
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
) -> list[Law]:
    """Chi-square of each verifying level's first tokens, over several contexts together.

    Args:
        engine: models and settings.
        contexts: prompts; each contributes its own bins.
        draws: first tokens for each context and level.
        levels: of the hierarchy, as :func:`triforce_tree.load` takes them.
        temperature: of the law.
        seed: of all draws.
        each: called after every draw; may raise to end the test.

    Raises:
        ValueError: the model returned NaN logits.
    """
    to_probs, runner = ProbsFromLogits.at(temperature), engine.with_options(levels=levels)
    generator = torch.Generator(engine.hierarchy.target.device)
    generator.manual_seed(seed)
    totals: dict[str, list[tuple[float, int]]] = {}
    for prompt in contexts:
        with runner.program([list(prompt)], 1, to_probs, temperature) as program:
            program.prefill([prompt])
            for name, (count, expected) in _first_tokens(program, prompt, draws, generator, each).items():
                totals.setdefault(name, []).append(chi_square(count, expected))
    return [
        Law(
            name,
            levels,
            draws,
            len(parts),
            sum(free + 1 for _, free in parts),
            sum(x for x, _ in parts),
            p_value(sum(x for x, _ in parts), sum(free for _, free in parts)),
        )
        for name, parts in totals.items()
    ]


def _first_tokens(
    program: DecodingProgram,
    prompt: Sequence[int],
    draws: int,
    generator: torch.Generator,
    each: Callable[[], None],
) -> dict[str, tuple[Counter[int], Tensor]]:
    """First tokens of each verifying level behind a prompt that was fed, and their exact law ``[V]``.

    Each pass starts from the same state; KV slots that it writes behind the prompt count for none.
    """
    if program.drafter is not None:
        program.drafter.prepare([prompt], resumed=False)
    start = program.state.save()

    def run(*stages: str) -> None:
        program.state.restore(start)
        for stage in stages:
            program.run(stage, generator)
        program.committed([0])

    def root(stage: str) -> Tensor:
        return program.verdict(stage).scores[0, 0].clone()

    run("plain")
    verifying = {1: ["plain"], 2: ["target"], 3: ["retrieval_refresh", "target"]}[program.levels]
    stages = ["draft", *verifying] if program.drafter is not None else verifying
    counts: dict[str, Counter[int]] = {stage: Counter() for stage in verifying}
    exact = {verifying[-1]: root("plain")}
    for _ in range(draws):
        run(*stages)
        for stage in verifying:
            counts[stage][int(program.verdict(stage).emitted[0, 0])] += 1
        if "retrieval_refresh" in stages:
            # The same each time: level 1 chooses by its root, which no draw has changed.
            exact.setdefault("retrieval_refresh", root("retrieval_refresh"))
        each()
    if program.state.has_nan:
        raise ValueError(NAN_LOGITS)
    names = {"retrieval_refresh": "retrieval", "target": "target", "plain": "target"}
    return {names[stage]: (counts[stage], exact[stage]) for stage in verifying}


def uncertain_contexts(engine: Engine, tokens: Sequence[int], count: int) -> list[list[int]]:
    """The ``count`` beginnings of a text after which the target is least sure of what follows.

    A test of laws that are all but certain would find nothing wrong. Only the text's last places, at most
    half of it, are looked at.
    """
    model = engine.hierarchy.target.model
    places = min(PLACES, max(count, len(tokens) // 2))
    with torch.no_grad():
        logits = model(as_ids(model, tokens), logits_to_keep=places).logits[0].float()
    probs = logits.softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-30).log()).sum(-1)
    first = len(tokens) - len(entropy)
    best = entropy.topk(min(count, len(entropy))).indices.tolist()
    return [list(tokens[: first + place + 1]) for place in sorted(best)]


def chi_square(counts: Counter[int], probs: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of draws against a probs ``[V]``; rare tokens share bins."""
    draws = sum(counts.values())
    probabilities, tokens = (probs.double() / probs.double().sum()).cpu().sort()
    left = (1 - probabilities.cumsum(0)) * draws
    statistic, bins = 0.0, 0
    expected = observed = 0.0
    # Rare tokens come first and fill bins together; what is left must be enough for one more bin.
    for token, probability, rest in zip(tokens.tolist(), probabilities.tolist(), left.tolist(), strict=True):
        expected += draws * probability
        observed += counts[token]
        if expected >= LEAST_EXPECTED and (rest >= LEAST_EXPECTED or rest < 1e-6):
            statistic += (observed - expected) ** 2 / expected
            bins += 1
            expected = observed = 0.0
    return statistic, max(0, bins - 1)


def p_value(statistic: float, freedom: int) -> float:
    """Chance of a chi-square at least this large under the probs; 1 where there is nothing to test."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def as_dicts(results: Sequence[Forward | Greedy | Law]) -> list[dict[str, Any]]:
    return [{**asdict(r), "passed": r.passed} for r in results]


def _own_decoding(
    model: Any, prompt: Sequence[int], new_tokens: int, stop: StoppingCriteriaList | None
) -> list[int]:
    ids = as_ids(model, prompt)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        stopping_criteria=stop,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _tail_logits(model: Any, tokens: Sequence[int], rows: int) -> Tensor:
    """fp32 ``[rows, V]`` of the last tokens, by one forward of transformers' over all."""
    with torch.no_grad():
        logits: Tensor = model(as_ids(model, tokens), use_cache=False, logits_to_keep=rows).logits
    return logits[0, -rows:].float()

"""Tests where a text ends, also inside an accepted block, with any drafter; the statistics of each level."""

from functools import cache
from typing import Any

import pytest

from tests.support.distributions.generation_cases import Case
from tests.support.distributions.generation_distributions import Generations, stranger, target_distribution
from tests.support.models.program_cases import finished, sequences_of
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.sequence import Ending
from triforce_tree.verify.sampling import ProbsFromLogits

GREEDY, VOCABULARY = ProbsFromLogits(greedy=True), 5
PROMPT = Case(1, VOCABULARY, 1).prompt
# Caches that hold all of a text: a draft with the target's weights is then always right.
EVERYTHING = {"window": 64, "budget": 40, "chunk": 20, "recent": 20}
# levels, whether the draft is the target, options
KINDS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "plain": (1, False, {}),
    "perfect": (2, True, {"tree": "chain:4", **EVERYTHING}),
    "tree": (2, False, {"tree": "best-first:3,2"}),
    "hierarchy": (3, True, {"tree": "chain:4", "gamma": 10, "rounds": 2, "runner_ups": True, **EVERYTHING}),
    "strangers": (3, False, {"tree": "best-first:2,2", "gamma": 6, "rounds": 2, "runner_ups": True}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def generations(kind: str) -> Generations:
    levels, perfect, options = KINDS[kind]
    target = stranger(VOCABULARY, 0)
    draft = target if perfect else stranger(VOCABULARY, 3)
    return Generations(target, draft, levels, PROMPT, batch=1, **options)


def loop_of(kind: str) -> DecodingLoop:
    return DecodingLoop.over(generations(kind).program, GREEDY, 0)


def blocks(kind: str, ending: Ending) -> tuple[list[list[int]], str | None]:
    """Returns what each pass of level 2 yields, and why the text ended."""
    loop, [sequence] = loop_of(kind), sequences_of([PROMPT], [ending])
    loop.begin([sequence], cached=True)
    return [new for [(_, new)] in loop.decode()], sequence.finish_reason


@cache
def expected(count: int) -> list[int]:
    """The target's greedy continuation."""
    [text] = target_distribution(generations("plain").target, GREEDY, PROMPT, count)
    return list(text)


def flat(result: list[list[int]]) -> list[int]:
    return [token for block in result for token in block]


@kinds
@pytest.mark.parametrize("count", [1, 2, 5, 7, 12])
def test_exactly_as_many_tokens_as_asked_for(kind: str, count: int) -> None:
    result, reason = blocks(kind, Ending(count))
    assert flat(result) == expected(12)[:count]
    assert reason == "length"


@kinds
def test_an_eos_token_inside_a_block_ends_the_text_and_is_part_of_it(kind: str) -> None:
    text = expected(12)
    for stop in sorted(set(text)):
        result, reason = blocks(kind, Ending(12, frozenset({stop})))
        assert flat(result) == text[: text.index(stop) + 1]
        assert reason == "eos"


@kinds
@pytest.mark.parametrize("length", [1, 3, 8])
def test_criteria_are_asked_after_every_single_token(kind: str, length: int) -> None:
    asked: list[int] = []

    def stop(tokens: list[int]) -> bool:
        assert tokens[: len(PROMPT)] == PROMPT
        asked.append(len(tokens) - len(PROMPT))
        return len(tokens) == len(PROMPT) + length

    result, reason = blocks(kind, Ending(12, stop=stop))
    assert flat(result) == expected(12)[:length]
    assert asked == list(range(1, length + 1))
    assert reason == "stop"


def test_blocks_come_as_they_are_committed() -> None:
    assert [len(block) for block in blocks("perfect", Ending(12))[0]] == [5, 5, 2]
    assert [len(block) for block in blocks("plain", Ending(3))[0]] == [1, 1, 1]


def test_only_tokens_of_the_text_count_as_emitted() -> None:
    loop = loop_of("hierarchy")
    [new] = finished(loop, [PROMPT], [4], again=True)
    target = loop.levels[-1]
    assert (len(new), target.emitted, target.accepted) == (4, 4, 10)


def test_counts_of_each_level() -> None:
    loop = loop_of("hierarchy")
    [out] = finished(loop, [PROMPT], [11], again=True)
    draft, retrieval, target = loop.levels
    assert [level.name for level in loop.levels] == ["draft", "retrieval", "target"]
    assert target.forwards == 1, "ten tokens of level 1 and a bonus token"
    assert retrieval.forwards == 2
    assert (retrieval.proposed, retrieval.accepted, retrieval.emitted) == (8, 8, 10)
    assert (target.proposed, target.accepted, target.emitted) == (10, 10, 11)
    assert draft.emitted == 8
    assert target.acceptance_rate == 1.0
    assert target.mean_accepted_length == 11
    assert len(out) == 11
    assert set(target.as_dict()) >= {"name", "forwards", "acceptance_rate", "mean_accepted_length"}


def test_a_level_that_did_nothing_has_no_rates() -> None:
    [target] = loop_of("plain").levels
    assert target.acceptance_rate is None
    assert target.mean_accepted_length is None


@pytest.mark.parametrize(("gamma", "rounds"), [(1, 1), (2, 1), (7, 2), (10, 3)])
def test_level_1_gathers_what_its_rounds_bring_up_to_gamma(gamma: int, rounds: int) -> None:
    """Whole blocks of an accepted chain and the token after it, cut at gamma; a runner-up beside each."""
    target = stranger(VOCABULARY, 0)
    options = {"tree": "chain:3", "gamma": gamma, "rounds": rounds, "runner_ups": True, **EVERYTHING}
    program = Generations(target, target, 3, PROMPT, batch=1, **options).program
    loop = DecodingLoop.over(program, GREEDY, 0)
    loop.begin(sequences_of([PROMPT], [12]), cached=True)
    for done in range(rounds):
        for stage in ("draft", "retrieval" if done else "retrieval_refresh"):
            program.run(stage, *loop.draws.generators)
    state, count = program.state, min(gamma, 4 * rounds)
    assert int(state.chain) == count
    chain = state.tokens[0, len(PROMPT) : len(PROMPT) + count].tolist()
    assert chain == expected(12)[:count]
    for at in range(count):
        context = [*PROMPT, *chain[:at]]
        following = target_distribution(target, ProbsFromLogits(), context, 1)
        ranked = sorted(((probability, token) for (token,), probability in following.items()), reverse=True)
        assert [chain[at], int(state.runner_ups[0, at])] == [token for _, token in ranked[:2]]

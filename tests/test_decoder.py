"""Where a text ends, also inside an accepted block; what each level counts."""

import pytest
from tables import (
    MakeDrafter,
    TableDecoding,
    TableModel,
    autoregressive,
    hierarchical,
    lookup,
    model,
)

from triforce_tree.cycle.endings import Ending
from triforce_tree.sampling import Random

CASE = TableDecoding(vocab_size=5, new_tokens=12, greedy=True)
# A draft with the target's own table is right every time, so blocks are as long as they can be.
PERFECT = model("chain:4", seed=CASE.seed)
DRAFTERS = {
    "autoregressive": autoregressive(),
    "lookup": lookup(4),
    "perfect": PERFECT,
    "tree": model("best-first:3,2"),
    "hierarchy": hierarchical(PERFECT, gamma=6, leaves=True, seed=CASE.seed),
}


def blocks(make: MakeDrafter, ending: Ending) -> tuple[list[list[int]], str | None]:
    """What each level-2 pass yields, and why the text ended."""
    decoder = CASE.decoder(make, Random(0))
    result = list(decoder.decode(decoder.prefill(CASE.prompt), ending))
    return result, decoder.finish_reason


def expected(count: int) -> list[int]:
    """The target's greedy continuation."""
    table, tokens = TableModel(CASE.vocab_size, CASE.seed), list(CASE.prompt)
    for _ in range(count):
        tokens.append(int(table.logits(tokens).argmax()))
    return tokens[len(CASE.prompt) :]


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("count", [1, 2, 5, 7, 12])
def test_exactly_as_many_tokens_as_asked_for(make: MakeDrafter, count: int) -> None:
    result, reason = blocks(make, Ending(count))
    assert [token for block in result for token in block] == expected(count)
    assert reason == "length"


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_an_end_token_inside_a_block_ends_the_text_and_belongs_to_it(make: MakeDrafter) -> None:
    text = expected(12)
    for stop in sorted(set(text)):
        result, reason = blocks(make, Ending(40, frozenset({stop})))
        flat = [token for block in result for token in block]
        assert flat == text[: text.index(stop) + 1]
        assert reason == "eos"


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("length", [1, 3, 8])
def test_criteria_are_asked_after_every_single_token(make: MakeDrafter, length: int) -> None:
    asked: list[int] = []

    def stop(tokens: list[int]) -> bool:
        assert tokens[: len(CASE.prompt)] == list(CASE.prompt)
        asked.append(len(tokens) - len(CASE.prompt))
        return len(tokens) == len(CASE.prompt) + length

    result, reason = blocks(make, Ending(40, stop=stop))
    assert [token for block in result for token in block] == expected(length)
    assert asked == list(range(1, length + 1))
    assert reason == "stop"


def test_only_tokens_of_the_text_count_as_emitted() -> None:
    decoder = CASE.decoder(DRAFTERS["hierarchy"], Random(0))
    new = [t for block in decoder.decode(decoder.prefill(CASE.prompt), Ending(4)) for t in block]
    target = decoder.levels[-1]
    assert (len(new), target.emitted, target.accepted) == (4, 4, 10)


def test_blocks_come_as_they_are_settled() -> None:
    assert [len(block) for block in blocks(PERFECT, Ending(12))[0]] == [5, 5, 2]
    assert [len(block) for block in blocks(autoregressive(), Ending(3))[0]] == [1, 1, 1]


def test_counts_of_each_level() -> None:
    decoder = CASE.decoder(DRAFTERS["hierarchy"], Random(0))
    out = [t for block in decoder.decode(decoder.prefill(CASE.prompt), Ending(11)) for t in block]
    draft, middle, target = decoder.levels
    assert [level.name for level in decoder.levels] == ["draft", "middle", "target"]
    assert target.forwards == 1, "ten drafted by the middle level, one bonus"
    assert middle.forwards == 2
    assert (middle.proposed, middle.accepted, middle.emitted) == (8, 8, 10)
    assert (target.proposed, target.accepted, target.emitted) == (10, 10, 11)
    assert draft.emitted == 8
    assert target.acceptance_rate == 1.0
    assert target.mean_accepted_length == 11
    assert len(out) == 11
    assert set(target.as_dict()) >= {"name", "forwards", "acceptance_rate", "mean_accepted_length"}


def test_a_level_that_did_nothing_has_no_rates() -> None:
    decoder = CASE.decoder(autoregressive(), Random(0))
    decoder.prefill(CASE.prompt)
    [target] = decoder.levels
    assert target.acceptance_rate is None
    assert target.mean_accepted_length is None

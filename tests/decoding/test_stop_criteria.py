"""Tests how the sequences of a batch end, each on its own, and what the statistics count."""

from collections.abc import Callable

import pytest
import torch

from tests.support.models.program_cases import (
    COVERED,
    EVERYTHING,
    GREEDY,
    NEW,
    PROMPTS,
    decoded,
    draft_of,
    model,
    program_of,
    reference,
    references,
    sequences_of,
)
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.sequence import Ending

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_an_end_token_cuts_the_block_that_holds_it(levels: int) -> None:
    target = model("llama-gqa")
    program = program_of(target, target, levels, 3, **EVERYTHING, tree="chain:3")
    expected = [reference(target, prompt, 20) for prompt in COVERED]
    stops = [tokens[place] for tokens, place in zip(expected, (11, 1, 7), strict=True)]
    endings = [Ending(20, frozenset({stop})) for stop in stops]
    new, loop = decoded(program, COVERED, endings)
    assert new == [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(expected, stops, strict=True)]
    assert [row and row.finish_reason for row in loop.sequences] == ["eos"] * 3
    target_level = loop.levels[-1]
    assert target_level.emitted == sum(map(len, new))
    if levels > 1:
        assert target_level.accepted + target_level.forwards > target_level.emitted, "it is inside a block"


def test_stop_criteria_are_called_for_every_token_of_their_own_sequence() -> None:
    calls: list[list[list[int]]] = [[], [], []]

    def stop(b: int) -> Callable[[list[int]], bool]:
        def ask(tokens: list[int]) -> bool:
            calls[b].append(list(tokens))
            return len(tokens) == len(PROMPTS[b]) + 5 + b

        return ask

    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    new, loop = decoded(program, PROMPTS, [Ending(n, stop=stop(b)) for b, n in enumerate(NEW)])
    assert [row and row.finish_reason for row in loop.sequences] == ["stop"] * 3
    for b, tokens in enumerate(references()):
        assert new[b] == tokens[: 5 + b]
        assert calls[b] == [[*PROMPTS[b], *tokens[: n + 1]] for n in range(5 + b)]


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_sequences_that_have_ended_do_not_change(levels: int) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    loop = DecodingLoop.over(program, GREEDY, 0)
    sequences = sequences_of(PROMPTS, [40, 3, 40])
    loop.begin(sequences)
    frozen = None
    passes = 0
    for fresh in loop.decode():
        if sequences[1].finish_reason is None:
            continue
        length = int(program.state.length[1])
        slots = [part[:, 1, :, :length] for part in program.store.kv]
        state = (program.state.tokens[1, : length + 1], *slots)
        if frozen is None:
            frozen = [length, *(t.clone() for t in state)]
            continue
        passes += 1
        assert sequences[1] not in dict(fresh)
        assert length == frozen[0]
        for now, before in zip(state, frozen[1:], strict=True):
            assert torch.equal(now, before)
    assert passes > 5
    assert [sequence.new for sequence in sequences] == references(new=[40, 3, 40])


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("tree", ["chain:1", "best-first:4,3,2"])
def test_sequences_may_fill_the_buffers_exactly(levels: int, tree: str) -> None:
    """The last one ends long before the others, whose passes continue."""
    target = model("llama-gqa")
    program = program_of(target, target, levels, 3, max_seq_len=90, window=200, tree=tree, rounds=3)
    prompts = [PROMPTS[0][:60], PROMPTS[1], PROMPTS[2][:89]]
    new, _ = decoded(program, prompts, [30, 47, 1])
    assert [len(p) + len(t) for p, t in zip(prompts, new, strict=True)] == [90, 90, 90]
    for prompt, tokens in zip(prompts, new, strict=True):
        assert tokens == reference(target, prompt, len(tokens))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_statistics_add_up(levels: int) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    new, loop = decoded(program, PROMPTS, NEW)
    target = loop.levels[-1]
    committed = sum(int(end) + 1 - len(p) for end, p in zip(program.state.length, PROMPTS, strict=True))
    assert committed == target.accepted + target.forwards
    assert target.emitted == sum(map(len, new)), "tokens after the end do not count"
    assert 0 <= committed - target.emitted <= 3 * 5
    names = ["draft", "target"] if levels == 2 else ["draft", "retrieval", "target"]
    assert [level.name for level in loop.levels] == (["target"] if levels == 1 else names)
    for level in loop.levels:
        assert level.accepted <= level.proposed
        assert level.seconds > 0
    if levels == 3:
        draft, retrieval = loop.levels[:2]
        assert retrieval.emitted == retrieval.accepted + retrieval.forwards
        assert retrieval.forwards == 2 * target.forwards
        assert target.proposed <= retrieval.emitted
        assert retrieval.proposed == 3 * retrieval.forwards == draft.forwards
    assert loop.prefill_seconds > 0
    assert loop.decode_seconds > 0


def test_prefill_reports_every_token_fed() -> None:
    fed: list[int] = []
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    DecodingLoop.over(program, GREEDY, 0, progress=fed.append).begin(sequences_of(PROMPTS, NEW))
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert max(fed) == 16

"""Passes with suffix-matched tokens: index, proposals, and the draft's window afterwards."""

import random
from collections.abc import Sequence

import pytest
import torch

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import GREEDY, draft_of, model, program_of, reference, sequences_of
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.suffix_index import LENGTHS, SuffixIndex
from triforce_tree.policy.matched_tokens import LONGEST, Match
from triforce_tree.policy.passes import PLAIN, PassKind


def by_search(text: list[int]) -> tuple[int, int]:
    """Finds the latest earlier occurrence of the text's last tokens by brute force, first of many tokens."""
    for length in LENGTHS:
        ends = [e for e in range(length, len(text)) if text[e - length : e] == text[-length:]]
        if len(text) > length and ends:
            at = ends[-1]
            common = next((n for n in range(at) if text[at - 1 - n] != text[-1 - n]), at)
            return at, min(LONGEST, common)
    return 0, 0


@pytest.mark.parametrize("vocabulary", [2, 3, 40])
def test_the_index_finds_what_a_search_finds(vocabulary: int) -> None:
    rng, matches = random.Random(vocabulary), 0
    longest, shortest = LENGTHS
    for start in (0, 1, shortest, longest, longest + 1, 90):
        text = [rng.randrange(vocabulary) for _ in range(start)]
        index = SuffixIndex(text)
        for _ in range(60):
            assert index.match() == by_search(text)
            matches += index.match()[1] >= longest
            more = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 4))]
            # Passages are copied, since random tokens of a large vocabulary do not repeat.
            if len(text) > 30 and rng.random() < 0.3:
                more = text[10 : 12 + longest]
            text = text + more
            assert index.grows_to(text) == (4 * len(more) < len(text)), "few tokens are added one by one"
            index.extend(text)
    assert matches > 20
    assert index.grows_to(text)
    assert not index.grows_to(text[:-1])
    assert not index.grows_to([vocabulary, *text[1:], 0])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were indexed anew."""
    lengths = list[int]()

    class Counted(SuffixIndex):
        def __init__(self, tokens: Sequence[int]) -> None:
            lengths.append(len(tokens))
            super().__init__(tokens)

    monkeypatch.setattr("triforce_tree.drafters.matching.SuffixIndex", Counted)
    return lengths


def test_another_number_of_places_takes_the_indices_over(built: list[int]) -> None:
    programs = [lookup_program(batch) for batch in (2, 3)]
    few, many = (program.drafter for program in programs)
    first, second, third = prompt_of(40), prompt_of(41), prompt_of(42)
    few.start([first, second])
    built.clear()
    many.take_over(few)
    many.start([[*second, 7], third, [*first, 5]])
    assert built == [42]
    few.take_over(many)
    few.start([[*first, 5], [*first, 5]])
    assert built == [42, 41], "places with equal texts have an index each"
    matches = few.match([[*first, 5, *first[:9]], [*first, 5, 1, 2, 3]])
    assert matches[0][:2] == (9, 9)
    assert matches[1][1] < 9


def test_the_next_turn_extends_what_is_known(built: list[int]) -> None:
    program = lookup_program()
    built.clear()
    first, other = prompt_of(40), prompt_of(41)
    assert other[:40] != first
    drafter = program.drafter
    drafter.start([first])
    drafter.start([[*first, 1, 2, 3]])
    drafter.match([[*first, 1, 2, 3, 4]])
    assert built == [40]
    drafter.start([other])
    assert built == [40, 41]
    [match] = drafter.match([[*other, *other[:9]]])
    assert match[:2] == (9, 9), "a dictionary holds what came later"


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    text = [1, 2, 3] * 4
    index = SuffixIndex(text)
    end, common = index.match()
    assert (end, common) == (9, 9)
    assert index.continuation(end, 7) == [1, 2, 3, 1, 2, 3, 1]


def lookup_program(batch: int = 1, levels: int = 2, **options: object) -> DecodingProgram:
    """Makes a program whose passes may verify suffix-matched tokens."""
    options = {"tree": "best-first:2,1", "other_trees": ("lookup:5",), "rounds": None, **options}
    return program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, batch, **options)


def decoded(
    program: DecodingProgram, prompts: list[list[int]], count: int, kinds: list[PassKind]
) -> tuple[list[list[int]], int]:
    """Returns the new tokens of these passes and of plain passes after them, and the accepted matched tokens.

    All matched tokens are proposed.
    """
    left, accepted = list(kinds), 0
    loop = DecodingLoop.over(program, GREEDY, 0)

    def choose(_: float, matches: Sequence[Match | None] = ()) -> PassKind:
        kind = left.pop(0) if left else PLAIN
        loop.policy.proposed = [program.shapes[kind.shape].depth if m and m.common else 0 for m in matches]
        return kind

    loop.policy.choose = choose
    sequences = sequences_of(prompts, [count] * len(prompts))
    loop.begin(sequences)
    for fresh in loop.decode():
        last = max(loop.passes, key=lambda kind: kind.shape)
        accepted += sum(len(new) - 1 for _, new in fresh) if last.shape else 0
        loop.passes.clear()
    return [sequence.new for sequence in sequences], accepted


@pytest.mark.parametrize("levels", [2, 3])
def test_greedy_text_is_the_targets_whatever_passes_are_made(levels: int) -> None:
    """The second prompt repeats itself, and its matched tokens are accepted where the target repeats too."""
    prompts = [prompt_of(40), [*prompt_of(20), *prompt_of(20), *prompt_of(20)]]
    expected = [reference(model("llama-gqa"), prompt, 24) for prompt in prompts]
    for prompt, wanted in zip(prompts, expected, strict=True):
        # The prompt contains what the target will generate, so the prompt's end occurs twice.
        prompt[:0] = [*prompt[-LENGTHS[0] :], *wanted]
    expected = [reference(model("llama-gqa"), prompt, 24) for prompt in prompts]
    program, accepted = lookup_program(2, levels, other_trees=("lookup:5", "lookup:11")), 0
    every = [PLAIN, PassKind(levels, 1), PassKind(2, 1), PassKind(2, 1, 1), PassKind(2, 1, 2)]
    for seed in range(3):
        rng = random.Random(seed)
        kinds = [rng.choice(every) for _ in range(60)]
        made, matched = decoded(program, prompts, 24, kinds)
        assert made == expected
        accepted += matched
    assert accepted > 10


def test_the_drafts_window_catches_up_with_tokens_of_other_passes() -> None:
    """Its keys and values equal those of a recomputed window of the same tokens."""
    program = lookup_program(window=40)
    drafter = program.drafter.drafter
    window = drafter.window
    sequence = prompt_of(60)
    drafter.start([sequence])
    for more in (3, 1, 17, 9):
        drafter.prepare([sequence], resumed=False)
        final = len(sequence) - drafter.refeed_tokens
        # These are the tokens that the first forward of a tree processes.
        window._prefill(0, sequence[final:], final - int(window.dropped[0]))
        sequence = [*sequence, *prompt_of(more)]
        drafter.prepare([sequence], resumed=True)
        dropped, final = int(window.dropped[0]), len(sequence) - drafter.refeed_tokens
        held = final - dropped
        caught_up = [part[:, 0, :, :held].clone() for part in window.store.kv]
        sinks = window.config.sinks
        window._prefill(0, [*sequence[:sinks], *sequence[dropped + sinks : final]])
        for part, before in zip(window.store.kv, caught_up, strict=True):
            torch.testing.assert_close(part[:, 0, :, :held], before)


def test_short_prompts_catch_up_too() -> None:
    """A prompt shorter than the tokens that a tree processes again is padded in the window."""
    target = model("llama-gqa")
    for count in (1, 2, 5):
        program = lookup_program()
        prompt = prompt_of(count)
        kinds = [PLAIN] * 7 + [PassKind(2, 1)] * 2 + [PassKind(2, 1, 1)] * 2 + [PassKind(2, 1)] * 40
        assert decoded(program, [prompt], 24, kinds)[0] == [reference(target, prompt, 24)]


def test_texts_that_copy_take_few_passes() -> None:
    """In a batch the policy chooses matches. Here the verification of a token takes no time."""
    target = tiny("llama-gqa")
    prompts = [prompt_of(60), prompt_of(60)[::-1]]
    written = [reference(target, prompt, 60) for prompt in prompts]
    engine = triforce_tree.load(
        target, perturbed(target, 3.0), tree="chain:2", levels=2, advanced={"other_trees": "lookup:8"}
    )
    # After the same prompt and half of its answer, the target generates the other half again.
    again = [[*p, *new, *p, *new[:30]] for p, new in zip(prompts, written, strict=True)]
    expected = [reference(target, prompt, 60) for prompt in again]
    out = engine.generate(again, max_new_tokens=60, temperature=0)
    assert [row[len(again[0]) :] for row in out.sequences.tolist()] == expected
    assert out.levels[-1].accepted > 0, out.levels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "lookup:4"}, r"tree='lookup:4' is no tree but a chain.*name it in other_trees"),
        ({"other_trees": "lookup:4 lookup:4"}, r"asks for suffix-matched tokens twice"),
        ({"other_trees": "lookup:4 lookup:5 lookup:6 lookup:7 lookup:8"}, r"tokens 5 times; name at most 4"),
        ({"other_trees": "lookup:0"}, r"lookup:0.*at least 1"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HierarchyConfig.from_options(**options)


def test_matched_tokens_come_last_and_need_passes_of_two_levels() -> None:
    config = HierarchyConfig(other_trees="lookup:4 chain:2")
    assert config.other_trees == ("chain:2", "lookup:4")
    assert HierarchyConfig(other_trees="lookup:4 chain:2", levels=3).shapes == (config.tree, "chain:2")
    both = HierarchyConfig(other_trees="lookup:9 chain:2 lookup:4")
    assert both.other_trees == ("chain:2", "lookup:4", "lookup:9"), "the longest one last"
    assert HierarchyConfig(other_trees=both.other_trees, levels=3).shapes == (config.tree, "chain:2")

"""Explanations of passes that verify matched tokens: their counts, by length of the match."""

import json
from pathlib import Path

import pytest

from tests.support.models.families import perturbed
from tests.support.models.program_cases import GREEDY, PROMPTS, model, program_of, reference
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run
from triforce_tree.decoding.choice.lookup_choice import match_class
from triforce_tree.decoding.choice.passes import PassKind
from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.decoding.explain.matched import MatchTally
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.drafters.suffix_index import SuffixIndex
from triforce_tree.drafters.with_lookup import Match

NEW = 30
OTHERS = ("chain:2", "lookup:5")


def program(levels: int = 2, other_trees: tuple[str, ...] = OTHERS, **options: object) -> DecodingProgram:
    # A draft that foresees nothing.
    made = program_of(
        model("llama-gqa"), perturbed(model("llama-gqa"), 3.0), levels, 1, 260, tree="best-first:2,1",
        other_trees=other_trees, **{"rounds": None, **options},
    )  # fmt: skip
    made.prepare(GREEDY)
    return made


LENGTHS = (60, 7, 30, 64)


def foresee(monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Matches of changing lengths whose continuation is that of ``text``, but for every seventh token."""

    def match(self: SuffixIndex) -> tuple[int, int]:
        return 9, LENGTHS[len(self._text) % len(LENGTHS)]

    def continuation(self: SuffixIndex, end: int, count: int) -> list[int]:
        first = len(self._text)
        return [text[n % len(text)] ^ (n % 7 == 0) for n in range(first, first + count)]

    monkeypatch.setattr(SuffixIndex, "match", match)
    monkeypatch.setattr(SuffixIndex, "continuation", continuation)


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A prompt whose continuation is matched."""
    foresee(monkeypatch, [*PROMPTS[0], *reference(model("llama-gqa"), PROMPTS[0], NEW + 8)])
    return PROMPTS[0]


@pytest.mark.parametrize("levels", [2, 3])
def test_counts_are_those_of_the_verified_paths(levels: int, foreseen: list[int]) -> None:
    """By length of the match beside depth by depth, and the statistics of the whole text."""
    found = explained(program(levels), GREEDY, foreseen, NEW, 0)
    assert found.trees == ["best-first:2,1", *OTHERS]
    matched = found.matched
    assert matched is not None
    assert matched.setting == "lookup:5"
    assert 0 < matched.passes == found.passes["2 levels, matched tokens"]
    assert not any("tree 3" in kind for kind in found.passes)
    depths = found.acceptance["target, matched tokens"]
    assert depths[0].tried == matched.passes
    counts = matched.by_length
    assert sum(c.accepted for c in counts) == sum(d.accepted.total() for d in depths) > 0
    assert sum(c.judged for c in counts) == sum(d.tried for d in depths)
    assert sum(c.accepted for c in counts) <= sum(c.proposed for c in counts)
    assert all((c.acceptance is None) == (not c.passes) for c in counts)
    assert sum(c.passes > 0 for c in counts) > 1
    assert any(0 < c.acceptance < 1 for c in counts if c.acceptance is not None)
    assert [(c.least, c.most) for c in counts] == [(6, 11), (12, 23), (24, 47), (48, 64)]
    assert matched.tokens <= found.new_tokens == NEW
    others = sum(found.passes.values()) - matched.passes
    assert found.new_tokens - matched.tokens >= others
    # What a tree drafted is shown as a tree, matched tokens are not.
    assert len(found.tree) in (0, *(1 + n for n in (3, 2)))


def test_classes_are_of_the_matches_that_were_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is accepted; the last pass brings no more than the text's end allows."""
    decoder = Decoder(program(), GREEDY, 0, repeatable=True)
    tally, lookup = MatchTally(decoder), decoder.lookup
    assert lookup is not None
    lengths = iter([7, 60, 13, *[6] * 40])
    expected: dict[int, list[tuple[int, int]]] = {}

    def choose(sequences: object) -> PassKind:
        match = Match(9, next(lengths))
        count = 1 + match.common % 4
        lookup.taken = [(match, count)]
        decoder.program.drafter.match(decoder._running(lambda sequence: sequence))
        decoder.program.drafter.take([match], [count])
        return PassKind(2, 1, 2)

    monkeypatch.setattr(lookup, "choose", choose)
    decoder.prefill(PROMPTS[:1])
    total = 0
    for [block] in decoder.decode(PROMPTS[:1], [Ending(12)]):
        tally.add(len(block))
        total += len(block)
        match, count = lookup.taken[0]
        expected.setdefault(match_class(match), []).append((count, len(block)))
    matched = tally.found("lookup:5")
    assert matched is not None
    assert matched.tokens == total == 12
    for counts in matched.by_length:
        seen = expected.get(counts.least, [])
        assert (counts.passes, counts.proposed) == (len(seen), sum(count for count, _ in seen))
        assert counts.tokens == sum(new for _, new in seen)
        assert counts.expected == pytest.approx(lookup.acceptance.by_class[counts.least])
    assert [bool(counts.passes) for counts in matched.by_length] == [True, True, False, True]


def test_without_the_setting_nothing_is_said() -> None:
    for made in (program(other_trees=("chain:2",)), program(rounds=1)):
        found = explained(made, GREEDY, PROMPTS[0], 8, 0)
        assert found.matched is None
        assert found.as_dict()["matched"] is None
        assert not any("matched" in kind for kind in (*found.passes, *found.acceptance))


def test_as_json(foreseen: list[int]) -> None:
    found: Explanation = explained(program(), GREEDY, foreseen, NEW, 0)
    held = json.loads(json.dumps(found.as_dict()))
    assert found.matched is not None
    assert held["options"]["other_trees"] == list(OTHERS)
    assert held["matched"]["setting"] in held["options"]["other_trees"]
    assert held["matched"]["passes"] == held["passes"]["2 levels, matched tokens"]
    assert held["matched"]["tokens"] == found.matched.tokens
    last = held["matched"]["by_match_length"][-1]
    assert last["acceptance"] == found.matched.by_length[-1].acceptance
    assert last.keys() == {
        "least", "most", "expected", "passes", "proposed", "accepted", "judged", "tokens", "acceptance",
    }  # fmt: skip


def test_the_command_shows_it(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(monkeypatch, [7])
    (tmp_path / "text").write_text("the first of all the words that are in this text " * 6)
    words = ["explain", str(tmp_path / "text"), *pair.options, "--max-new-tokens", "12", "--json"]
    words += ["--other-trees", "chain:2 lookup:6 lookup:3"]
    code, out, err = run(capsys, *words)
    assert code == 0
    held = json.loads(out.splitlines()[-1])
    said = f"matched tokens (lookup:3 lookup:6 in other_trees): {held['matched']['passes']} of "
    assert said in " ".join(err.split())
    assert "tree 2: chain:2" in err
    assert "tree 3" not in err
    assert held["matched"]["passes"] > 0
    # Those of both lengths together.
    assert held["passes"]["2 levels, matched tokens"] == held["matched"]["passes"]
    assert sum(held["passes"].values()) * held["tokens_per_pass"] == pytest.approx(held["new_tokens"])
    assert "matched tokens, by length of the match" in err

"""Explanations of passes that verify matched tokens."""

import json
from pathlib import Path

import pytest

from tests.support.models.families import perturbed
from tests.support.models.program_cases import GREEDY, PROMPTS, model, program_of, reference
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run
from triforce_tree.decoding.explain.explanation import MATCHED_PASSES, explained
from triforce_tree.decoding.explain.tally import MATCHED_TOKENS
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.suffix_index import SuffixIndex

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
    found = explained(program(levels), GREEDY, foreseen, NEW, 0)
    assert found.trees == ["best-first:2,1", *OTHERS]
    passes = found.passes[MATCHED_PASSES]
    assert passes > 0
    assert not any("tree 3" in kind for kind in found.passes)
    depths = found.acceptance[MATCHED_TOKENS]
    assert depths[0].tried == passes
    accepted = sum(depth.accepted.total() for depth in depths)
    # The last pass may accept tokens beyond the end of the text.
    assert 0 <= accepted - found.origins["lookup"] <= 5
    assert found.origins["lookup"] > 0
    # What a tree drafted is shown as a tree, matched tokens are not.
    assert len(found.tree) in (0, *(1 + n for n in (3, 2)))


def test_without_the_setting_nothing_is_said() -> None:
    for made in (program(other_trees=("chain:2",)), program(rounds=1)):
        found = explained(made, GREEDY, PROMPTS[0], 8, 0)
        assert not any("matched" in kind for kind in (*found.passes, *found.acceptance))
        assert "lookup" not in found.origins


def test_the_command_shows_it(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(monkeypatch, [7])
    (tmp_path / "text").write_text("the first of all the words that are in this text " * 6)
    words = ["explain", str(tmp_path / "text"), *pair.options, "--max-new-tokens", "12", "--json"]
    words += ["--advanced", "other_trees=chain:2 lookup:6 lookup:3"]
    code, out, err = run(capsys, *words)
    assert code == 0
    held = json.loads(out.splitlines()[-1])
    assert "tree 2: chain:2" in err
    # Passes of both lengths are counted together.
    assert f"{held['passes'][MATCHED_PASSES]} of {MATCHED_PASSES}" in " ".join(err.split())
    assert sum(held["passes"].values()) * held["tokens_per_pass"] == pytest.approx(held["new_tokens"])
    assert sum(held["origins"].values()) == held["new_tokens"] == 12

"""Several levels and the target alone in turns: same text, whole pieces, the level of each token."""

import io
from collections import Counter

import pytest
from rich.console import Console

from tests.support.distributions.wrong_acceptance import accept_all_proposals
from tests.support.models.families import perturbed
from tests.support.models.program_cases import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    draft_of,
    finished,
    model,
    program_of,
    reference,
)
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.cli.console import LevelText
from triforce_tree.decoding.explain.side_by_side import Piece, SideBySide, Speeds
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.suffix_index import SuffixIndex
from triforce_tree.verify.sampling import ProbsFromLogits

PROMPT, NEW = PROMPTS[0], 40


def prefilled(levels: int = 3) -> DecodingProgram:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 1, rounds=2)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    return program


def decoded(to_probs: ProbsFromLogits, seed: int) -> list[int]:
    """Returns the new tokens of one decoding without interruptions, by the same settings."""
    program = prefilled()
    loop = DecodingLoop.over(program, to_probs, seed, repeatable=True)
    [new] = finished(loop, [PROMPT], [NEW], again=True)
    return new


def test_greedy_pieces_make_the_text_of_one_generation() -> None:
    pair = SideBySide(prefilled(), GREEDY, 0)
    pieces = list(pair.pieces(PROMPT, NEW, 8))
    assert [t for piece in pieces for t in piece.tokens] == decoded(GREEDY, 0)
    assert all(piece.alone == piece.tokens for piece in pieces)
    assert len(pieces) >= 3
    assert all(len(piece.tokens) >= 8 for piece in pieces[:-1])
    assert pair.trees
    assert all(tree[0].parent == -1 for tree in pair.trees)


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("levels", [2, 3])
def test_every_token_has_the_level_that_proposed_it(levels: int, to_probs: ProbsFromLogits) -> None:
    pair = SideBySide(prefilled(levels), to_probs, 1)
    pieces = list(pair.pieces(PROMPT, NEW, NEW))
    assert [len(piece.origins) for piece in pieces] == [len(piece.tokens) for piece in pieces]
    seen = Counter(name for piece in pieces for name in piece.origins)
    # The target adds the last token of every pass; a text may end before that of its last one.
    passes = pair.levels[-1].forwards
    assert seen["target"] in (passes - 1, passes)
    assert seen["draft"] > 0
    assert (seen["retrieval"] > 0) == (levels == 3)


def test_matched_tokens_in_the_place_of_a_tree_are_not_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All matched tokens are right, because the continuation is known; the draft foresees nothing."""
    text = [*PROMPT, *reference(model("llama-gqa"), PROMPT, NEW + 8)]
    monkeypatch.setattr(SuffixIndex, "match", lambda self: (9, 64))
    monkeypatch.setattr(SuffixIndex, "continuation", lambda self, end, count: text[len(self._text) :][:count])
    bad = perturbed(model("llama-gqa"), 3.0)
    program = program_of(model("llama-gqa"), bad, 2, 1, rounds=None, other_trees=("lookup:3",))
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    pair = SideBySide(program, GREEDY, 1)
    assert pair.origins == ["draft", "lookup", "target"]
    origins = [name for piece in pair.pieces(PROMPT, NEW, NEW) for name in piece.origins]
    matched = sum(n for kind, n in pair._ours.passes.items() if pair._ours.policy.matched(kind))
    assert origins.count("lookup") >= 3 * matched - 3 > 0
    assert "draft" not in origins


def test_a_sampled_text_goes_on_from_its_own_draws() -> None:
    first, again, other = (
        [t for piece in SideBySide(prefilled(), SAMPLED, seed).pieces(PROMPT, NEW, 8) for t in piece.tokens]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == NEW
    assert decoded(SAMPLED, 1)[:8] == first[:8]


def test_the_first_wrong_piece_ends_a_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_all_proposals(monkeypatch)
    pieces = list(SideBySide(prefilled(), GREEDY, 0).pieces(PROMPT, NEW, 8))
    assert pieces[-1].alone != pieces[-1].tokens
    assert all(piece.alone == piece.tokens for piece in pieces[:-1])


def test_a_stop_ends_it_between_passes() -> None:
    asked = iter([False, False, True, True, True])
    pair = SideBySide(prefilled(), GREEDY, 0, stop=lambda: next(asked, True))
    assert sum(len(piece.tokens) for piece in pair.pieces(PROMPT, NEW, 8)) < NEW


def test_speeds_are_medians_of_the_pieces_after_the_first() -> None:
    # A first piece that warms up, and one that another program slowed.
    times = [(9.0, 1.0), (0.1, 0.2), (0.1, 0.3), (0.1, 0.2), (0.1, 8.0)]
    pieces = [Piece([1, 2], ["draft", "target"], ours, [1, 2], alone) for ours, alone in times]
    speeds = Speeds.of(pieces)
    assert speeds is not None
    assert (speeds.speedup, speeds.ms_per_token, speeds.pieces) == (pytest.approx(2.5), pytest.approx(50), 4)
    assert Speeds.of(pieces[:1]) is not None
    assert Speeds.of([]) is None


@pytest.mark.parametrize("colour", [False, True])
def test_coloured_tokens_are_the_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: TinyPair, colour: bool
) -> None:
    tokenizer = pair.load().tokenizer
    assert tokenizer is not None
    text = "The [bold] class — naïve 😀 :smile: ends.\n  So it does."
    tokens = tokenizer(text)["input_ids"]
    out = LevelText(tokenizer, ["draft", "retrieval", "target"])
    if colour:
        written = io.StringIO()
        out._console = Console(
            file=written, force_terminal=True, color_system="standard", soft_wrap=True, no_color=False
        )
    out.put(tokens, (["draft", "target"] * len(tokens))[: len(tokens)])
    out.end()
    if not colour:
        assert capsys.readouterr().out == text + "\n"
        assert not out.legend
    else:
        assert "\x1b[32m" in written.getvalue()
        assert Console(file=io.StringIO()).render_str(out.legend.plain).plain.split() == [
            *["tokens", "proposed", "by:", "draft", "retrieval", "target"]
        ]

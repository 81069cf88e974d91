"""Explanations: what is counted, shown and written."""

import json
import re
from collections import Counter
from itertools import cycle, pairwise
from pathlib import Path

import pytest
import torch

from tests.support.models.program_cases import GREEDY, PROMPTS, SAMPLED, draft_of, finished, model, program_of
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run
from triforce_tree import Engine
from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.decoding.explain.tally import AcceptanceTally, Node, as_lines, draw_probabilities
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels.step.accept import FIXED
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.verify.sampling import ProbsFromLogits

TREE = [
    Node(5, -1, 0, 1.0, True),
    Node(7, 0, 0, 0.6, False),
    Node(8, 0, 1, 0.25, True),
    Node(9, 2, 0, 0.5, True),
]
WORDS = ["the", " cat", " $dog", "\n"]


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_counts_are_those_of_the_statistics(to_probs: ProbsFromLogits) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, rounds=None)
    loop = DecodingLoop.over(program, to_probs, 3)
    kinds = cycle([PassKind(3, 2), PassKind(2, 1), PLAIN])
    loop.policy.choose = lambda *_: next(kinds)
    loop.after_stage = tally = AcceptanceTally(program)
    finished(loop, PROMPTS[:1], [40])
    _, retrieval, target = loop.levels
    counts = {name: [d.accepted.total() for d in depths] for name, depths in tally.depths.items()}
    assert sum(counts["retrieval"]) == retrieval.accepted > 0
    assert sum(counts["target"]) + sum(counts["target, trees"]) == target.accepted > 0
    first = {name: depths[0].tried for name, depths in tally.depths.items()}
    assert first["retrieval"] == retrieval.forwards
    assert first["target, trees"] == loop.passes[PassKind(2, 1)]
    for depths in tally.depths.values():
        assert all(after.tried <= d.accepted.total() <= d.tried for d, after in pairwise(depths))
        assert max(max(d.accepted, default=0) for d in depths) <= 2
    assert tally.tree[0].parent == -1
    assert len(tally.tree) == 7, "best-first:3,2,1 and the root"
    ranks = Counter((node.parent, node.rank) for node in tally.tree)
    assert max(ranks.values()) == 1
    assert to_probs.greedy or all(0 < node.probability <= 1 for node in tally.tree)


def test_an_explanation_names_choices_times_and_origins() -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, rounds=None)
    program.prepare(GREEDY)
    found = explained(program, GREEDY, PROMPTS[0], 30, 0)
    assert isinstance(found, Explanation)
    assert (found.prompt_tokens, found.new_tokens, found.text) == (61, 30, None)
    assert found.passes
    assert sum(c.made for c in found.choices) <= sum(found.passes.values())
    rates = [choice.ms_per_token for choice in found.choices]
    assert rates == sorted(rates)
    assert found.stages.keys() == {"plain", "draft", "retrieval", "chain", "root", "tree", "prepare"}
    assert all(ms > 0 for ms in found.stages.values())
    assert sum(found.origins.values()) == 30
    assert found.origins.keys() <= {"draft", "retrieval", "target"}
    assert "fastest" in found.why()
    held = json.loads(json.dumps(found.as_dict()))
    assert held["options"]["levels"] == 3
    assert len(held["choices"]) == len(found.choices)
    again = explained(program, GREEDY, PROMPTS[0], 30, 0)
    assert again.passes == found.passes, "it follows from seed and table"


def test_given_rounds_leave_nothing_to_explain() -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 2, 1, rounds=1)
    program.prepare(GREEDY)
    found = explained(program, GREEDY, PROMPTS[0], 12, 0)
    assert not found.choices
    assert "nothing was chosen" in found.why()
    assert found.acceptance["target"][0].tried == found.passes["2 levels"]


def test_a_fixed_node_was_not_drawn() -> None:
    """The last child of the root and its own child are fixed; the other two children were drawn."""
    shape = device_tree_shape(parse_shape("static:2;2.0"))
    tree = TokenTree.of(shape, 1, 8, torch.device("cpu"))
    tree.tokens.copy_(torch.tensor([[7, 1, 2, 3, 4]]))
    tree.probs[0, 0] = torch.tensor([0.0, 0.25, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0])
    tree.probs_rows.copy_(torch.tensor([[0, 1, 2, FIXED, FIXED]]))
    assert draw_probabilities(tree) == [1.0, 0.25, 0.75, 1.0, 1.0]


def test_a_tree_as_text() -> None:
    assert as_lines(TREE, WORDS) == [
        "'the'",
        "├─ ' cat'  0.60",
        "└─ ' $dog'  0.25  accepted",
        "   └─ '\\n'  0.50  accepted",
    ]
    assert as_lines([], []) == []


def test_the_engine_explains_a_prompt(engine: Engine, ids: list[int]) -> None:
    found = engine.explain(ids[:200], max_new_tokens=8)
    assert found.new_tokens == 8
    assert found.text
    out = engine.generate(ids[:200], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found.text == out.text
    with pytest.raises(ValueError, match=r"one prompt is needed, and 2 were given"):
        engine.explain(torch.tensor([ids[:20], ids[:20]]))


def test_wrong_numbers_are_refused(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        engine.explain(ids, max_new_tokens=0)
    with pytest.raises(ValueError, match="temperature=-1 must be a finite number of at least 0"):
        engine.explain(ids, temperature=-1)


def test_the_command_shows_it(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the first of all the words that are in this text " * 6)
    words = ["explain", str(tmp_path / "text"), *pair.options, "--max-new-tokens", "12", "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0
    held = json.loads(out.splitlines()[-1])
    assert held["new_tokens"] == 12
    assert sum(held["passes"].values()) <= 12
    for title in ("what each kind of pass is expected to bring", "time of each stage", "acceptance"):
        assert title in err
    counts = held["acceptance"]
    first = next(iter(counts.values()))[0]
    shares = [f"{100 * n / first['tried']:.0f}" for n in first["accepted_by_rank"]]
    row = " ".join(["1", str(first["tried"]), r"\d+", "%", *shares])
    assert re.search(f" {row} ", " ".join(err.split())), "every rank in its place"
    # Plain decoding proposes nothing, and a table without rows says nothing.
    code, _, err = run(capsys, *words, "--levels", "1")
    assert code == 0
    assert "acceptance" not in err

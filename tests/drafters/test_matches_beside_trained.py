"""Matched tokens beside trained drafters: their text, what drafters know after them, and their choice."""

from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.block_folders import block, block_folder, spark_folder
from tests.support.distributions.head_folders import eagle, eagle_folder, medusa, mtp
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler


def repeating() -> PreTrainedModel:
    """Returns a target that goes on with what followed the newest token before, most of the time."""
    model = tiny("llama-gqa", num_hidden_layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
    return model


TARGET = repeating()
NEW = 28
PROMPT = [*prompt_of(60), *greedy(TARGET, prompt_of(60), 16)]
EXPECTED = greedy(TARGET, PROMPT, NEW)
TREE = "best-first:2,2"
KINDS: dict[str, Callable[[], Drafter]] = {
    "medusa": partial(medusa, TARGET, TREE),
    "eagle": partial(eagle, TARGET, TREE, fc_norm=True),
    "eagle, the whole text": partial(eagle, TARGET, TREE, 2, 200),
    "mtp": partial(mtp, TARGET, TREE),
    # States of the second layer depend on the window when they were computed.
    "two mtp layers": partial(mtp, TARGET, TREE, 2, 2, 200),
    "block": partial(block, TARGET, TREE),
    "DSpark": partial(block, TARGET, TREE, 2, 200, folder=spark_folder, kind="rnn"),
}


def recorded(drafter: Drafter) -> list[tuple[list[int], Tensor]]:
    """Returns a list that gets the text and the distributions of each tree that a drafter proposes."""
    seen, propose = list[tuple[list[int], Tensor]](), drafter.propose

    def noted(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        propose(state, tree, sampler)
        if not state.made_up:
            seen.append((state.sequence(0), tree.probs[0].clone()))

    drafter.propose = noted  # type: ignore[method-assign]
    return seen


def of_plan(monkeypatch: pytest.MonkeyPatch, *kinds: PassKind) -> None:
    """Makes passes of these kinds, again and again, with all matched tokens that there are."""
    plan = cycle(kinds)

    def choose(policy: PassPolicy, remaining: float, common: Any = (), most: Any = None) -> PassKind:
        policy.proposed = [9 if each else 0 for each in common]
        return next(plan)

    monkeypatch.setattr(PassPolicy, "choose", choose)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [2, 3])
def test_a_drafter_knows_what_matched_tokens_have_added(
    kind: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its distributions equal those of a drafter that begins with the text so far."""
    drafter = KINDS[kind]()
    seen = recorded(drafter)
    more: dict[str, Any] = {"levels": "auto", "budget": 32} if levels == 3 else {"levels": 2}
    own = {"other_trees": "lookup:9", "gamma": 3, "chunk": 4, "recent": 8}
    matched, tree = PassKind(2, 1, 1), PassKind(levels, 1)
    of_plan(monkeypatch, tree, matched, tree, PLAIN, matched, tree)
    engine = triforce_tree.load(TARGET, drafter=drafter, **more, advanced=own)
    out = engine.generate(PROMPT, max_new_tokens=NEW, temperature=0)
    assert out.sequences[0, len(PROMPT) :].tolist() == EXPECTED
    lengths = [len(text) for text, _ in seen]
    assert max(b - a for a, b in pairwise(lengths)) > 6, "matched tokens were accepted"
    of_plan(monkeypatch, PassKind(2, 1))
    for text, probs in seen[1:]:
        again = KINDS[kind]()
        anew = recorded(again)
        triforce_tree.load(TARGET, drafter=again, levels=2).generate(text, max_new_tokens=1, temperature=0)
        assert anew[0][0] == text
        torch.testing.assert_close(probs, anew[0][1], rtol=1e-3, atol=1e-4)


def test_copies_are_chosen_where_they_are_accepted(tmp_path: Path) -> None:
    """A random head is rarely accepted, and the text repeats what the prompt contains."""
    folder = eagle_folder(tmp_path, TARGET)
    engine = triforce_tree.load(TARGET, drafter=folder, levels=2)
    out = engine.generate(PROMPT, max_new_tokens=NEW, temperature=0)
    assert out.sequences[0, len(PROMPT) :].tolist() == EXPECTED
    assert engine.config.trees[1:] == ("best-first:2,2,1", "best-first:6,6,5,4,3", "lookup:31")
    assert out.levels[-1].accepted > 0, out.levels


# Beside the chain, which is first on a CPU.
TREES = ("best-first:2,2", "best-first:8,8")


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, (*TREES, "lookup:31")),
        ({"other_trees": "lookup:4"}, ("lookup:4",)),
        ({"other_trees": "chain:1 lookup:4"}, ("chain:1", "lookup:4")),
        ({"other_trees": "none"}, ()),
    ],
)
def test_options_of_a_folder(options: dict[str, Any], others: tuple[str, ...], tmp_path: Path) -> None:
    folder = block_folder(tmp_path, TARGET, block=3)
    engine = triforce_tree.load(TARGET, drafter=folder, levels=2, advanced=options)
    out = engine.generate(PROMPT, max_new_tokens=NEW, temperature=0)
    assert engine.config.other_trees == others
    assert out.sequences[0, len(PROMPT) :].tolist() == EXPECTED

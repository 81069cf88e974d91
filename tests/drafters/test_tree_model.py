"""The trees that the device cycle grows: their places, tokens and laws, up to the largest."""

import pytest
import torch
from families import perturbed, prompt_of, tiny
from program_cases import GREEDY, PROMPTS, SAMPLED, decoded, draft_of, exact, model, program_of, reference

from triforce_tree.decoding.loop import Decoder
from triforce_tree.drafters.base import TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import BestFirst, parse_shape
from triforce_tree.verify.probs import Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(
    "tree", ["best-first:30,29", "best-first:30,30", "best-first:60,50,30", "sequoia:150x9", "chain:40"]
)
def test_trees_of_one_and_more_words(tree: str) -> None:
    """Root, nodes and the tokens fed again share words of 64 bits."""
    exact(2, tree=tree)


def test_a_tree_of_1024_nodes() -> None:
    """The largest: 128 tokens deep, where the draft feeds 130 tokens again."""
    program = program_of(
        model("llama-gqa"), draft_of("llama-gqa"), 2, tree="best-first:" + ",".join(["8"] * 128)
    )
    assert program.drafter.nodes == 1025
    prompt = prompt_of(140)
    assert decoded(program, [prompt], [8])[0] == [reference(model("llama-gqa"), prompt, 8)]


@pytest.mark.parametrize("tree", ["best-first:6,2", "static:0.0;0.1;0.2;0.3;0.4;1", "static:0;1;2;3;4;5"])
@pytest.mark.parametrize("to_probs", [GREEDY, ProbsFromLogits()], ids=["greedy", "sampled"])
def test_more_siblings_than_tokens(tree: str, to_probs: ProbsFromLogits) -> None:
    """A vocabulary of 4: places that no draw can fill stay empty."""
    target = tiny("llama", vocab_size=4)
    program = program_of(target, perturbed(target, 0.5), 2, 2, tree=tree)
    prompts = [prompt_of(40, 4), prompt_of(33, 4)]
    decoder = Decoder(program, to_probs, 0)
    decoder.prefill(prompts)
    grow = program.stage("draft")
    program.run("draft", decoder._generator)
    for tokens, parents in zip(grow.tree.tokens.tolist(), grow.tree.parents.tolist(), strict=True):
        children: dict[int, list[int]] = {}
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            if token >= 0:
                children.setdefault(parent, []).append(token)
        assert all(len(family) == len(set(family)) for family in children.values()), children
    if to_probs.greedy:
        assert decoded(program, prompts, [20, 20])[0] == [reference(target, p, 20) for p in prompts]


@pytest.mark.parametrize("tree", ["best-first:4,3,2", "chain:3", "sequoia:9x3", "static:0;0.1;1"])
@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_have_the_places_that_the_shape_asks_for(tree: str, to_probs: ProbsFromLogits) -> None:
    """Children of each node as the shape counts them, or the tree's own laws do; words are ancestors."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 2, 3, tree=tree)
    decoder = Decoder(program, to_probs, 0)
    decoder.prefill(PROMPTS)
    program.run("draft", decoder._generator)
    grown, shape = program.stage("draft").tree, parse_shape(tree)
    for b in range(3):
        tokens, parents, words = (t[b].tolist() for t in (grown.tokens, grown.parents, grown.words[..., 0]))
        probs, depths = grown.probs[b], grown.depths.tolist()
        ranks: list[tuple[int, ...]] = [()]
        values = [1.0]
        for node in range(1, len(tokens)):
            parent = parents[node]
            rank = parents[:node].count(parent)
            ranks.append((*ranks[parent], rank))
            values.append(values[parent] * float(probs[parent, tokens[node]]))
            assert depths[node] == depths[parent] + 1
            assert words[node] == words[parent] | 1 << node
            if to_probs.greedy:
                assert tokens[node] == int(probs[parent].topk(rank + 1).indices[rank])
        for depth in range(max(depths)):
            nodes = [n for n, d in enumerate(depths) if d == depth]
            if isinstance(shape, BestFirst):
                likeliest = (
                    torch.tensor([values[n] for n in nodes])[:, None] * probs[nodes].sort(-1, True).values
                )
                taken = likeliest.flatten().topk(shape.widths[depth]).indices // probs.shape[1]
                counts = taken.bincount(minlength=len(nodes)).tolist()
            else:
                counts = [shape.counts.get(ranks[n], 0) for n in nodes]
            assert counts == [parents.count(n) for n in nodes]


@torch.no_grad()
@pytest.mark.parametrize("levels", [2, 3])
def test_draft_laws_are_those_of_the_window(levels: int) -> None:
    """While windows are renewed: laws of a tree against plain forwards over sinks, window and a path."""
    draft = draft_of("llama-gqa")
    program = program_of(model("llama-gqa"), draft, levels, 2, tree="best-first:4,3,2", budget=40)
    growth, prompts = program.drafter, [prompt_of(61), prompt_of(72)]
    propose, trees, dropped = growth.propose, 0, set()

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        tokens, end = state.tokens, state.end
        trees += 1
        for b in range(2):
            text = tokens[b, : int(end[b]) + 1].tolist()
            out = int(growth.dropped[b])
            dropped.add((b, out))
            seen = [*text[:2], *text[2 + out :]]
            assert 2 + 6 <= len(seen) <= growth.store.rows - growth.nodes + 1
            for node in (0, 1 + trees % 4, 5 + trees % 3):
                path: list[int] = []
                above = node
                while above > 0:
                    path.insert(0, int(tree.tokens[b, above]))
                    above = int(tree.parents[b, above])
                logits = draft(torch.tensor([[*seen, *path]]), use_cache=False).logits[0, -1]
                expected = (logits / 0.8).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, atol=2e-5, rtol=1e-4)

    growth.propose = checked
    decoded(program, prompts, [70, 70], SAMPLED)
    assert len(dropped) >= 6, "windows were renewed several times"

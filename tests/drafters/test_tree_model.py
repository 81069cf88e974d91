"""Trees of a draft model up to the largest size: shapes, tokens and distributions."""

import pytest
import torch

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    decoded,
    draft_of,
    exact,
    model,
    program_of,
    reference,
    sequences_of,
)
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.mask_token import mask_token
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import BestFirst, parse_shape
from triforce_tree.verify.probs import Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(
    "tree", ["best-first:30,29", "best-first:30,30", "best-first:60,50,30", "sequoia:150x9", "chain:40"]
)
def test_trees_of_one_and_more_mask_words(tree: str) -> None:
    """The root, the nodes and the tokens that are processed again share mask words of 64 bits."""
    exact(2, tree=tree)


def test_a_tree_of_1024_nodes() -> None:
    """The largest tree has depth 128, so that the draft processes 130 tokens again."""
    program = program_of(
        model("llama-gqa"), draft_of("llama-gqa"), 2, tree="best-first:" + ",".join(["8"] * 128)
    )
    assert program.drafter.nodes == 1025
    prompt = prompt_of(140)
    assert decoded(program, [prompt], [8])[0] == [reference(model("llama-gqa"), prompt, 8)]


@pytest.mark.parametrize("tree", ["best-first:6,2", "static:0.0;0.1;0.2;0.3;0.4;1", "static:0;1;2;3;4;5"])
@pytest.mark.parametrize("to_probs", [GREEDY, ProbsFromLogits()], ids=["greedy", "sampled"])
def test_more_siblings_than_tokens(tree: str, to_probs: ProbsFromLogits) -> None:
    """With a vocabulary of 4, siblings beyond the fourth are unused."""
    target = tiny("llama", vocab_size=4)
    program = program_of(target, perturbed(target, 0.5), 2, 2, tree=tree)
    prompts = [prompt_of(40, 4), prompt_of(33, 4)]
    loop = DecodingLoop.over(program, to_probs, 0)
    loop.begin(sequences_of(prompts, [20, 20]))
    tree = program.stage("draft").tree
    program.run("draft", *loop.draws.generators)
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        children: dict[int, list[int]] = {}
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            if token >= 0:
                children.setdefault(parent, []).append(token)
        assert all(len(family) == len(set(family)) for family in children.values()), children
    if to_probs.greedy:
        assert decoded(program, prompts, [20, 20])[0] == [reference(target, p, 20) for p in prompts]


def chances_of(probs: torch.Tensor, greedy: bool) -> list[float]:
    """Returns the chances of the first five children of a node with these draft probs."""
    largest: list[float] = probs.sort(descending=True).values[:5].tolist()
    if greedy:
        return largest
    first = 0.45 + 0.55 * largest[0] ** 3
    later = (0.3, 0.7 * 0.2, 0.7 * 0.8 * 0.15, 0.7 * 0.8 * 0.85 * 0.12)
    return [first, *((1 - first) * chance for chance in later)]


@pytest.mark.parametrize("tree", ["best-first:4,3,2", "chain:3", "sequoia:9x3", "static:0;0.1;1"])
@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_have_the_shape_they_should(tree: str, to_probs: ProbsFromLogits) -> None:
    """Children are those of the shape, or by the distributions for best-first; masks mark ancestors."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 2, 3, tree=tree)
    loop = DecodingLoop.over(program, to_probs, 0)
    loop.begin(sequences_of(PROMPTS, NEW))
    program.run("draft", *loop.draws.generators)
    grown, shape = program.stage("draft").tree, parse_shape(tree)
    for b in range(3):
        tokens, parents = grown.tokens[b].tolist(), grown.parents[b].tolist()
        masks = grown.mask_words[b, :, 0].tolist()
        probs, depths = grown.probs[b], grown.depths.tolist()
        ranks: list[tuple[int, ...]] = [()]
        path_chances = [1.0]
        for node in range(1, len(tokens)):
            parent = parents[node]
            rank = parents[:node].count(parent)
            ranks.append((*ranks[parent], rank))
            path_chances.append(path_chances[parent] * chances_of(probs[parent], to_probs.greedy)[rank])
            assert depths[node] == depths[parent] + 1
            assert masks[node] == masks[parent] | 1 << node
            if to_probs.greedy:
                assert tokens[node] == int(probs[parent].topk(rank + 1).indices[rank])
        for depth in range(max(depths)):
            nodes = [n for n, d in enumerate(depths) if d == depth]
            if isinstance(shape, BestFirst):
                candidates = torch.tensor(
                    [
                        [path_chances[n] * chance for chance in chances_of(probs[n], to_probs.greedy)]
                        for n in nodes
                    ]
                )
                chosen = candidates.flatten().topk(shape.widths[depth]).indices // candidates.shape[1]
                counts = chosen.bincount(minlength=len(nodes)).tolist()
            else:
                counts = [shape.counts.get(ranks[n], 0) for n in nodes]
            assert counts == [parents.count(n) for n in nodes]


@torch.no_grad()
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("levels", [2, 3])
def test_draft_probs_are_those_of_the_window(levels: int, masks: bool) -> None:
    """A tree's distributions equal plain forwards over sinks, window and path, also in recomputed windows.
    With mask tokens these take the place of the path.
    """
    draft = perturbed(draft_of("llama-gqa"), 0.01)
    if masks:
        draft.config.pard_token = 5
    program = program_of(model("llama-gqa"), draft, levels, 2, tree="best-first:4,3,2", budget=40)
    drafter, prompts = program.drafter, [prompt_of(61), prompt_of(72)]
    propose, trees, dropped = drafter.propose, 0, set()

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        tokens, end = state.tokens, state.end
        trees += 1
        for b in range(2):
            sequence = tokens[b, : int(end[b]) + 1].tolist()
            hidden = int(drafter.window.dropped[b])
            dropped.add((b, hidden))
            visible = [*sequence[:2], *sequence[2 + hidden :]]
            assert 2 + 6 <= len(visible) <= drafter.window.store.slots - drafter.nodes + 1
            for node in (0, 1 + trees % 4, 5 + trees % 3):
                path: list[int] = []
                ancestor = node
                while ancestor > 0:
                    path.insert(0, int(tree.tokens[b, ancestor]))
                    ancestor = int(tree.parents[b, ancestor])
                path = [5] * len(path) if masks else path
                logits = draft(torch.tensor([[*visible, *path]]), use_cache=False).logits[0, -1]
                expected = (logits / 0.8).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, atol=2e-5, rtol=1e-4)

    drafter.propose = checked
    decoded(program, prompts, [70, 70], SAMPLED)
    assert len(dropped) >= 6, "windows were recomputed several times"


@pytest.mark.parametrize("tree", ["best-first:4,3,2", "chain:3", "static:0;0.1;1", "chain:1"])
@pytest.mark.parametrize("levels", [2, 3])
def test_drafts_with_mask_tokens_give_the_targets_text(tree: str, levels: int) -> None:
    draft = perturbed(draft_of("llama-gqa"), 0.01)
    draft.config.pard_token = 5
    program = program_of(model("llama-gqa"), draft, levels, 3, tree=tree)
    expected = [reference(model("llama-gqa"), p, n) for p, n in zip(PROMPTS, NEW, strict=True)]
    assert decoded(program, PROMPTS, NEW)[0] == expected


@pytest.mark.parametrize(("settings", "message"), [
    ({"pard_token": 64}, "pard_token=64 of the draft .* must be one of its 64 tokens"),
    ({"pard_token": -1}, "pard_token=-1 of the draft .* must be one of its 64 tokens"),
    ({"pard_token": 5, "spd_type": "pard2"}, "is a PARD-2 model, which reads hidden states of its target"),
])  # fmt: skip
def test_mask_tokens_that_cannot_be_used_are_refused(settings: dict[str, object], message: str) -> None:
    draft = perturbed(draft_of("llama-gqa"), 0.01)
    for name, value in settings.items():
        setattr(draft.config, name, value)
    with pytest.raises(ValueError, match=message):
        triforce_tree.load(model("llama-gqa"), draft)


def test_a_mask_token_is_read_through_a_token_map() -> None:
    draft = HFModel(perturbed(draft_of("llama-gqa"), 0.01))
    draft.model.config.pard_token = 5
    ids = torch.arange(64)
    assert mask_token(draft, TokenMap((ids + 1) % 64, ids)) == 4
    with pytest.raises(ValueError, match=r"pard_token=5 of the draft .* stands for no token of the target"):
        mask_token(draft, TokenMap(torch.where(ids == 5, 0, ids), ids))

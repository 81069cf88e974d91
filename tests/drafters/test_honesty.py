"""Every drafter is honest: the tokens that it proposes follow the distributions that it reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributions.block_folders import DFLASH2, block, spark_folder
from tests.support.distributions.enumerated_noise import EnumeratedNoise
from tests.support.distributions.enumeration import NOISE, exact_distribution, summed, total_variation
from tests.support.distributions.generation_cases import BOTH, TOKENS, Case
from tests.support.distributions.generation_distributions import Generations, stranger
from tests.support.distributions.head_folders import eagle, medusa, mtp
from tests.support.models.own_drafters import DrawnThenFixed, FixedSiblings, FixedThenDrawn, TableDraws
from triforce_tree.decoding.stages import ChainVerifyStage, DraftStage
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.kernels.step.accept import FIXED
from triforce_tree.kernels.step.draws import draw_tokens
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler


@dataclass(frozen=True)
class Proposal:
    """A token tree, whose node 0 is the root and whose siblings are in the order of their draws.

    ``probs`` has the reported distribution ``[V]`` of each node's children; None if they are deterministic.
    ``fixed`` are nodes that are deterministic even after drawn siblings.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[Tensor | None]
    fixed: frozenset[int] = frozenset()

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node and self.tokens[i] >= 0]

    def path(self, node: int) -> tuple[tuple[int, int], ...]:
        """Returns token and rank of every node on the path from the root to ``node``."""
        if node == 0:
            return ()
        parent = self.parents[node]
        return (*self.path(parent), (self.tokens[node], self.children(parent).index(node)))

    def depth(self, node: int) -> int:
        return len(self.path(node))


Propose = Callable[[Generations], Sequence[Proposal]]


def trees(generations: Generations) -> list[Proposal]:
    """Returns the trees that the drafter proposes."""
    program = generations.program
    program.run("draft", torch.Generator())
    stage = program.stage("draft")
    assert isinstance(stage, DraftStage)
    return [proposal(stage.tree, b) for b in range(program.batch)]


def proposal(tree: TokenTree, b: int) -> Proposal:
    """Returns the tree of sequence b. Nodes of the last depth have no distribution."""
    rows, known = tree.probs_rows[b].tolist(), tree.probs.shape[1]
    probs = [tree.probs[b, row].clone() if 0 <= row < known else None for row in rows]
    fixed = frozenset(node for node, row in enumerate(rows) if row == FIXED)
    return Proposal(tree.tokens[b].tolist(), tree.parents[b].tolist(), probs, fixed)


def chains(generations: Generations) -> list[Proposal]:
    """Returns the retrieval model's chains with their runner-ups as trees."""
    program, state = generations.program, generations.program.state
    for round in range(program.config.rounds or 1):
        program.run("draft", torch.Generator())
        program.run("retrieval" if round else "retrieval_refresh", torch.Generator())
    proposals = []
    for b in range(program.batch):
        count, root = int(state.chain[b]), int(state.length[b])
        chain = state.tokens[b, root : root + count + 1].tolist()
        runner_ups = state.runner_ups[b, :count].tolist() if program.runner_ups else []
        probs = [row.clone() for row in state.chain_probs[b, :count]]
        parents = [-1, *range(count), *range(len(runner_ups))]
        childless = [None] * (1 + len(runner_ups))
        proposals.append(Proposal([*chain, *runner_ups], parents, [*probs, *childless]))
    return proposals


def chains_with_tails(generations: Generations) -> list[Proposal]:
    """Returns the trees that the target verifies: chains of the retrieval model with a tree at their end."""
    chains(generations)
    stage = generations.program.stage("target")
    assert isinstance(stage, ChainVerifyStage)
    assert stage.tail is not None
    for noise in stage.tail.noise:
        noise.draw(torch.Generator())
    for step in stage.tail.steps():
        step.run()
    stage.laid_out.fill()
    return [proposal(stage.tree, b) for b in range(generations.program.batch)]


def drafting(
    levels: int,
    vocabulary: int,
    propose: Propose,
    drafter: Callable[[], Drafter] | None = None,
    **options: Any,
) -> tuple[Case, Propose]:
    return Case(levels, vocabulary, 1, options=options, drafter=drafter), propose


DRAFTERS: dict[str, tuple[Case, Propose]] = {
    "chain": drafting(2, 3, trees, tree="chain:3"),
    "siblings": drafting(2, 4, trees, tree="static:2"),
    "more siblings than tokens": drafting(2, 3, trees, tree="static:4"),
    "static": drafting(2, 3, trees, tree="static:1;0.1;1.0"),
    "sequoia": drafting(2, 3, trees, tree="sequoia:4x2"),
    "best-first": drafting(2, 3, trees, tree="best-first:3,2"),
    "best-first, deep": drafting(2, 2, trees, tree="best-first:2,2,2"),
    **{
        name: (Case(2, 4, 1, options={"tree": "static:1;0.0"}, token_map=ids), trees)
        for name, ids in TOKENS.items()
    },
    "lookup": drafting(2, 3, trees, partial(SuffixMatching, 3)),
    "fixed siblings": drafting(2, 3, trees, partial(FixedSiblings, "static:0;1;2;0.0;0.1", 3)),
    "drawn by a table": drafting(2, 3, trees, partial(TableDraws, "static:1;0.1;1.0", 3)),
    "drawn below fixed": drafting(2, 3, trees, partial(FixedThenDrawn, "static:0;1;0.0;0.1", 3)),
    **{
        f"{name}, {tree}": (Case(2, 3, 1, layers=2, drafter=partial(kind, stranger(3, 0, 2), tree)), trees)
        for name, kind in (
            ("medusa", medusa),
            ("eagle", partial(eagle, draft_vocabulary=2)),
            ("block", partial(block, inputs=(0,))),
            ("two mtp layers", partial(mtp, layers=2)),
            ("DSpark", partial(block, folder=spark_folder, inputs=(0,), kind="rnn")),
            ("DFlash2", partial(block, inputs=(0,), dflash={**DFLASH2, "selector_top_k": 2})),
        )
        for tree in ("static:1;0.1", "best-first:2,2")
    },
    "drawn, then fixed": drafting(2, 4, trees, partial(DrawnThenFixed, "static:2;0.0;1.0", 4)),
    "level 1, drawn, then fixed": drafting(
        3, 3, chains, partial(DrawnThenFixed, "static:0;1", 3), runner_ups=False
    ),
    "level 1, lookup": drafting(3, 3, chains, partial(SuffixMatching, 2), runner_ups=True, rounds=1, gamma=2),
    "level 1, fixed siblings": drafting(
        3, 3, chains, partial(FixedSiblings, "static:0;1;0.0", 3), runner_ups=False
    ),
    "level 1, drawn by a table": drafting(
        3, 3, chains, partial(TableDraws, "static:0;1", 3), runner_ups=True, gamma=1
    ),
    "level 1, chain": drafting(3, 3, chains, tree="chain:1", runner_ups=False, rounds=2),
    "level 1, best-first": drafting(3, 2, chains, tree="best-first:2,2", runner_ups=False, rounds=2),
    "level 1, runner-ups": drafting(3, 3, chains, **BOTH),
    "level 1, four tokens": drafting(3, 4, chains, tree="chain:1", runner_ups=False),
    # In chains of equal length, nodes after the same tokens have the same distribution.
    **{
        f"level 1 and a tail, {name}": drafting(3, 3, chains_with_tails, tail_tree=True, gamma=1, **options)
        for name, options in (
            ("chain", {"tree": "chain:2", "runner_ups": False}),
            ("siblings", {"tree": "static:0;1", "runner_ups": True}),
            ("best-first", {"tree": "best-first:2,1", "runner_ups": False}),
        )
    },
    "level 1, runner-ups, two rounds": drafting(3, 2, chains, tree="chain:2", runner_ups=True, rounds=2),
}


@cache
def proposals(name: str, **how: Any) -> list[tuple[Proposal, float]]:
    """Enumerates all proposals that a drafter can make, with their probabilities."""
    return enumerate_proposals(*DRAFTERS[name], **how)


def enumerate_proposals(case: Case, propose: Propose, **how: Any) -> list[tuple[Proposal, float]]:
    generations = case.generations(**how)
    generations.program.prepare(case.to_probs)

    def run(_: int) -> Sequence[Proposal]:
        generations.program.rewind([case.prompt] * generations.batch)
        return propose(generations)

    return list(generations.outcomes(run))


def dishonesty(proposals: list[tuple[Proposal, float]]) -> float:
    """Returns the largest distance, over all nodes, of drawn siblings from the reported distribution.

    Given a node's path and its number of children, the children must be draws without replacement. So their
    number does not depend on the draws. A deterministic sibling of drawn ones must be the same in each
    proposal, unless it was drawn.
    """
    reported: dict[tuple[Any, ...], Tensor | None] = {}

    def families():
        for tree, chance in proposals:
            for node in range(len(tree.tokens)):
                children = tree.children(node)
                drawn = tuple(tree.tokens[i] for i in children if i not in tree.fixed)
                assert [i in tree.fixed for i in children] == sorted(i in tree.fixed for i in children)
                if children:
                    prefix = tuple(token for token, _ in tree.path(node))
                    certain = {tree.tokens[i] for i in children if i in tree.fixed}
                    after.setdefault(prefix, []).append((certain, set(drawn)))
                if not drawn:
                    continue
                key, probs = (tree.path(node), len(drawn)), tree.probs[node]
                known = reported.setdefault(key, probs)
                assert (known is None) == (probs is None)
                assert probs is None or torch.allclose(known, probs, atol=1e-6), "one path, one distribution"
                yield (key, drawn), chance

    after: dict[tuple[int, ...], list[tuple[set[int], set[int]]]] = {}
    masses, worst = summed(families()), 0.0
    assert masses
    for found in after.values():
        certain = set().union(*(fixed for fixed, _ in found))
        absent = any(not fixed and not certain <= drawn for fixed, drawn in found)
        worst = max(worst, float(len(certain) > 1 or absent))
    for key, probs in reported.items():
        drawn = {tokens: mass for (other, tokens), mass in masses.items() if other == key}
        total = sum(drawn.values())
        conditional = {tokens: mass / total for tokens, mass in drawn.items()}
        if probs is None:
            worst = max(worst, float(len(conditional) > 1))
            continue
        expected = exact_distribution(lambda walk, p=probs, n=key[1]: walk.choose_distinct(p[None], [n])[0])
        worst = max(worst, total_variation(conditional, expected))
    return worst


@pytest.mark.parametrize("name", DRAFTERS)
def test_siblings_are_drawn_from_the_reported_distribution(name: str) -> None:
    made = proposals(name)
    assert sum(chance for _, chance in made) == pytest.approx(1.0)
    # Conditional probabilities at rare paths are quotients of small numbers.
    assert dishonesty(made) < 2 * NOISE


@pytest.mark.parametrize("name", [name for name, (_, propose) in DRAFTERS.items() if propose is trees])
def test_the_shape_of_a_tree_does_not_depend_on_the_draws_it_places(name: str) -> None:
    """The numbers of drawn children at one depth depend only on the nodes down to that depth."""
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for tree, _ in proposals(name):
        nodes = [i for i, token in enumerate(tree.tokens) if token >= 0]
        for depth in range(max(map(tree.depth, nodes))):
            above = [i for i in nodes if tree.depth(i) <= depth]
            key = (depth, tuple((tree.tokens[i], tree.parents[i]) for i in above))
            shape = tuple(len(set(tree.children(i)) - tree.fixed) for i in above)
            assert shapes.setdefault(key, shape) == shape


class WeakDrawsDropped(EnumeratedNoise):
    """Drops improbable draws, so that the number of children depends on the draws."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        tokens, chances = super().expand_nodes(logits, heat, probs, *rest)
        return torch.where(probs.gather(2, tokens.clamp_min(0)) > 0.3, tokens, -1), chances


class BestDraws(EnumeratedNoise):
    """Proposes the most probable tokens, reported as drawn."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        super().expand_nodes(logits, heat, probs, *rest)
        return draw_tokens(None, probs, rest[0])


class BestRunnerUps(EnumeratedNoise):
    """Takes the most probable runner-ups, reported as drawn."""

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        return probs.scatter(2, chosen[..., None], 0.0).argmax(-1)


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("siblings", WeakDrawsDropped),
        ("best-first", BestDraws),
        ("chain", BestDraws),
        ("level 1, runner-ups", BestRunnerUps),
        ("drawn by a table", BestDraws),
        ("level 1, lookup", BestRunnerUps),
    ],
)
def test_dishonest_drafters_are_detected(name: str, noise: type[EnumeratedNoise]) -> None:
    assert dishonesty(proposals(name, noise=noise)) > 0.01


class OtherTable(TableDraws):
    """Draws from a sharper distribution than it reports."""

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        super().propose(state, tree, sampler)
        tree.probs.copy_(tree.probs.sqrt() / tree.probs.sqrt().sum(-1, keepdim=True).clamp_min(1e-9))


def test_custom_drafters_that_report_wrong_distributions_are_detected() -> None:
    """Both the proposals and the distribution of the generated tokens reveal them."""
    case = Case(2, 3, 2, 1, drafter=partial(OtherTable, "static:0;1", 3))
    assert dishonesty(enumerate_proposals(case, trees)) > 0.01
    assert case.distance(case.generations()) > 0.01

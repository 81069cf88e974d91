"""Every drafter is honest: the tokens that it proposes follow the distributions that it reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from enumerated_noise import EnumeratedNoise
from enumeration import NOISE, exact_law, summed, total_variation
from generation_cases import BOTH, Case
from generation_laws import Generations
from own_drafters import FixedSiblings, FixedThenDrawn, TableDraws
from torch import Tensor

from triforce_tree.decoding.stages import DraftStage
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.prompt_lookup import PromptLookup
from triforce_tree.kernels.step.draws import draw_tokens
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler


@dataclass(frozen=True)
class Proposal:
    """A token tree; node 0 is the root, and siblings stand in the order of their draws.

    ``probs``: the reported distribution ``[V]`` of each node's children; None where they are deterministic.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[Tensor | None]

    def children(self, node: int) -> list[int]:
        return [i for i, above in enumerate(self.parents) if above == node and self.tokens[i] >= 0]

    def place(self, node: int) -> tuple[tuple[int, int], ...]:
        """Token and rank of every node from the root to this one."""
        if node == 0:
            return ()
        above = self.parents[node]
        return (*self.place(above), (self.tokens[node], self.children(above).index(node)))

    def depth(self, node: int) -> int:
        return len(self.place(node))


Propose = Callable[[Generations], Sequence[Proposal]]


def trees(generations: Generations) -> list[Proposal]:
    """What level 0 proposes."""
    program = generations.program
    program.run("draft", torch.Generator())
    stage = program.stage("draft")
    assert isinstance(stage, DraftStage)
    return [proposal(stage.tree, b) for b in range(program.batch)]


def proposal(tree: TokenTree, b: int) -> Proposal:
    """The tree of sequence b. Nodes of the last depth have no children, and no distribution either."""
    rows, known = tree.probs_rows[b].tolist(), tree.probs.shape[1]
    probs = [tree.probs[b, row].clone() if 0 <= row < known else None for row in rows]
    return Proposal(tree.tokens[b].tolist(), tree.parents[b].tolist(), probs)


def chains(generations: Generations) -> list[Proposal]:
    """What level 1 gathers for level 2, runner-ups included."""
    program, texts = generations.program, generations.program.state
    for round in range(program.config.rounds or 1):
        program.run("draft", torch.Generator())
        program.run("retrieval" if round else "retrieval_refresh", torch.Generator())
    proposals = []
    for b in range(program.batch):
        count, root = int(texts.chain[b]), int(texts.length[b])
        line = texts.tokens[b, root : root + count + 1].tolist()
        beside = texts.runner_ups[b, :count].tolist() if program.runner_ups else []
        probs = [row.clone() for row in texts.chain_probs[b, :count]]
        parents = [-1, *range(count), *range(len(beside))]
        proposals.append(Proposal([*line, *beside], parents, [*probs, None, *[None] * len(beside)]))
    return proposals


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
    "live tree": drafting(2, 3, trees, tree="best-first:3,2"),
    "live tree, deep": drafting(2, 2, trees, tree="best-first:2,2,2"),
    "lookup": drafting(2, 3, trees, partial(PromptLookup, 3)),
    "fixed siblings": drafting(2, 3, trees, partial(FixedSiblings, "static:0;1;2;0.0;0.1", 3)),
    "drawn by a table": drafting(2, 3, trees, partial(TableDraws, "static:1;0.1;1.0", 3)),
    "drawn below fixed": drafting(2, 3, trees, partial(FixedThenDrawn, "static:0;1;0.0;0.1", 3)),
    "level 1, lookup": drafting(3, 3, chains, partial(PromptLookup, 2), runner_ups=True, rounds=1, gamma=2),
    "level 1, fixed siblings": drafting(
        3, 3, chains, partial(FixedSiblings, "static:0;1;0.0", 3), runner_ups=False
    ),
    "level 1, drawn by a table": drafting(
        3, 3, chains, partial(TableDraws, "static:0;1", 3), runner_ups=True, gamma=1
    ),
    "level 1, chain": drafting(3, 3, chains, tree="chain:1", runner_ups=False, rounds=2),
    "level 1, live tree": drafting(3, 2, chains, tree="best-first:2,2", runner_ups=False, rounds=2),
    "level 1, runner-ups": drafting(3, 3, chains, **BOTH),
    "level 1, four tokens": drafting(3, 4, chains, tree="chain:1", runner_ups=False),
    "level 1, runner-ups, two rounds": drafting(3, 2, chains, tree="chain:2", runner_ups=True, rounds=2),
}


def proposals(name: str, **how: Any) -> list[tuple[Proposal, float]]:
    """All that a drafter may propose, with probabilities."""
    return made_of(*DRAFTERS[name], **how)


def made_of(case: Case, propose: Propose, **how: Any) -> list[tuple[Proposal, float]]:
    generations = case.generations(**how)
    generations.program.prepare(case.to_probs)

    def run(_: int) -> Sequence[Proposal]:
        generations.program.rewind([case.prompt] * generations.batch)
        return propose(generations)

    return list(generations.outcomes(run))


def dishonesty(made: list[tuple[Proposal, float]]) -> float:
    """The largest distance, at any place, of drawn siblings from the reported distribution.

    Given where a node stands and how many children it has, these are draws without replacement. So their
    number does not depend on them either.
    """
    reported: dict[tuple[Any, ...], Tensor | None] = {}

    def families():
        for tree, chance in made:
            for node in range(len(tree.tokens)):
                drawn = tuple(tree.tokens[i] for i in tree.children(node))
                if not drawn:
                    continue
                place, probs = (tree.place(node), len(drawn)), tree.probs[node]
                known = reported.setdefault(place, probs)
                assert (known is None) == (probs is None)
                assert probs is None or torch.allclose(known, probs, atol=1e-6), "one place, one distribution"
                yield (place, drawn), chance

    masses, worst = summed(families()), 0.0
    assert masses
    for place, probs in reported.items():
        drawn = {key: mass for (where, key), mass in masses.items() if where == place}
        total = sum(drawn.values())
        share = {key: mass / total for key, mass in drawn.items()}
        if probs is None:
            worst = max(worst, float(len(share) > 1))
            continue
        expected = exact_law(lambda walk, p=probs, n=place[1]: walk.choose_distinct(p[None], [n])[0])
        worst = max(worst, total_variation(share, expected))
    return worst


@pytest.mark.parametrize("name", DRAFTERS)
def test_siblings_are_drawn_from_what_is_reported(name: str) -> None:
    made = proposals(name)
    assert sum(chance for _, chance in made) == pytest.approx(1.0)
    # Shares of rare places are quotients of small numbers.
    assert dishonesty(made) < 2 * NOISE


@pytest.mark.parametrize("name", [name for name, (_, propose) in DRAFTERS.items() if propose is trees])
def test_the_shape_of_a_tree_does_not_depend_on_the_draws_at_hand(name: str) -> None:
    """Who gets children, and how many, is a function of what stands above."""
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for tree, _ in proposals(name):
        nodes = [i for i, token in enumerate(tree.tokens) if token >= 0]
        for depth in range(max(map(tree.depth, nodes))):
            above = [i for i in nodes if tree.depth(i) <= depth]
            key = (depth, tuple((tree.tokens[i], tree.parents[i]) for i in above))
            shape = tuple(len(tree.children(i)) for i in above)
            assert shapes.setdefault(key, shape) == shape


class WeakDrawsDropped(EnumeratedNoise):
    """A count that looks at the draws."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        tokens, by_rank = super().expand_nodes(logits, heat, probs, *rest)
        return torch.where(probs.gather(2, tokens.clamp_min(0)) > 0.3, tokens, -1), by_rank


class BestDraws(EnumeratedNoise):
    """The most probable tokens, reported as drawn."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        super().expand_nodes(logits, heat, probs, *rest)
        return draw_tokens(None, probs, rest[0])


class BestRunnerUps(EnumeratedNoise):
    """Most probable runner-ups, reported as drawn."""

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        return probs.scatter(2, chosen[..., None], 0.0).argmax(-1)


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("siblings", WeakDrawsDropped),
        ("live tree", BestDraws),
        ("chain", BestDraws),
        ("level 1, runner-ups", BestRunnerUps),
        ("drawn by a table", BestDraws),
        ("level 1, lookup", BestRunnerUps),
    ],
)
def test_dishonest_drafters_are_found_out(name: str, noise: type[EnumeratedNoise]) -> None:
    assert dishonesty(proposals(name, noise=noise)) > 0.01


class OtherTable(TableDraws):
    """Draws from a sharper distribution than it reports."""

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        super().propose(state, tree, sampler)
        tree.probs.copy_(tree.probs.sqrt() / tree.probs.sqrt().sum(-1, keepdim=True).clamp_min(1e-9))


def test_own_drafters_that_report_what_is_not_so_are_found_out() -> None:
    """By what they propose, and by the text that comes of it."""
    case = Case(2, 3, 2, 1, drafter=partial(OtherTable, "static:0;1", 3))
    assert dishonesty(made_of(case, trees)) > 0.01
    assert case.distance(case.generations()) > 0.01

"""The law of one acceptance, by enumeration: whatever the tree, if its tokens were drawn as it says."""

import itertools

import pytest
import torch
from enumeration import NOISE, exact_law, outcomes, total_variation
from tables import TableModel
from triforce_tree.verify.acceptance import accept_sampling

from triforce_tree import sampling
from triforce_tree.kernels import step_reference
from triforce_tree.token_tree import TokenTree, chain


def laws_of(rows: int, vocab_size: int = 3, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return (1.5 * logits).softmax(-1)


def law_after(tree_of, target: TableModel, length: int) -> float:
    """Distance from the target's law of the first ``length`` tokens after one acceptance.

    ``tree_of(random)`` makes a tree; shorter outputs are continued by the target itself.
    """

    def law(path: tuple[int, ...]) -> torch.Tensor:
        return target.logits(path).softmax(-1)

    def run(random):
        tree = tree_of(random)
        paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        accepted = accept_sampling(tree, torch.stack([law(path) for path in paths]), random)
        new = [*(tree.tokens[i] for i in accepted.path[1:]), accepted.next_token]
        while len(new) < length:
            new.append(random.choose(law((0, *new))))
        return new[:length]

    expected = {
        tokens: float(torch.tensor([law((0, *tokens[:i]))[t] for i, t in enumerate(tokens)]).double().prod())
        for tokens in itertools.product(range(target.vocab_size), repeat=length)
    }
    return total_variation(exact_law(run), expected)


def test_a_chain_is_accepted_losslessly() -> None:
    q = laws_of(2)

    def tree(random):
        return chain([0, *(random.choose(row) for row in q)], q)

    assert law_after(tree, TableModel(3, seed=1), length=3) < NOISE


def test_siblings_drawn_without_replacement_are_accepted_losslessly() -> None:
    q = laws_of(2)

    def tree(random):
        [siblings] = random.choose_distinct(q[:1], [3])
        below = [random.choose(q[1]) for _ in siblings]
        return TokenTree([0, *siblings, *below], [-1, 0, 0, 0, 1, 2, 3], q, {0: 0, 1: 1, 2: 1, 3: 1})

    assert law_after(tree, TableModel(3, seed=1), length=2) < NOISE


@pytest.mark.parametrize("tokens", [[0, 1], [0, 1, 2], [0, 2, 0, 1]])
def test_deterministic_siblings_are_accepted_losslessly(tokens: list[int]) -> None:
    """Fixed tokens under the root, and one below the first of them."""
    tree = TokenTree([*tokens, 1], [-1, *[0] * (len(tokens) - 1), 1])
    assert law_after(lambda random: tree, TableModel(3, seed=1), length=3) < NOISE


class Coins:
    """Stands for ``uniforms`` of ``step_reference.accept_tree``: every comparison is a branching."""

    def __init__(self, random) -> None:
        self.random = random

    def __getitem__(self, place: tuple[int, int]) -> "Coins":
        return self

    def __lt__(self, chance: torch.Tensor) -> bool:
        return self.random.accept(float(chance))


class Race(Coins):
    """Stands for ``race``: a law divided by it has its largest entry at the token that is drawn."""

    def __getitem__(self, place: int) -> "Race":
        return self

    def __rtruediv__(self, law: torch.Tensor) -> torch.Tensor:
        return torch.eye(len(law))[self.random.choose(law)]


TREES = {
    # tokens, parents, rows of q by node; -1 for children that are drawn, or proposed deterministically.
    "siblings": ([0, 2, 0, 1], [-1, 0, 0, 0], [-1] * 4),
    "some": ([0, 2, 1], [-1, 0, 0], [-1] * 3),
    "equal siblings": ([0, 1, 1, 2], [-1, 0, 0, 0], [-1] * 4),
    "below": ([0, 2, 0, 1, 1, 0], [-1, 0, 0, 1, 1, 2], [-1] * 6),
    "drawn below": ([0, 2, 0, None, None, 1], [-1, 0, 0, 1, 1, 3], [-1, 0, -1, -1, -1, -1]),
    "below drawn": ([0, None, None, 1, 2, 0], [-1, 0, 0, 1, 1, 2], [1, -1, -1, -1, -1, -1]),
}


@pytest.mark.parametrize("name", TREES)
def test_the_ops_acceptance_is_lossless(name: str) -> None:
    """``accept_tree`` over deterministic siblings, alone and beside drawn ones in one tree."""
    proposed, parents, rows = TREES[name]
    q, target, length = laws_of(2), TableModel(3, seed=1), 3 if len(proposed) > 4 else 2

    def law(path: tuple[int, ...]) -> torch.Tensor:
        return target.logits(path).softmax(-1)

    def run(random):
        tokens = list(proposed)
        for parent in range(len(tokens)):
            children = [i for i, above in enumerate(parents) if above == parent]
            if children and tokens[children[0]] is None:
                [drawn] = random.choose_distinct(q[rows[parent]][None], [len(children)])
                for child, token in zip(children, drawn, strict=True):
                    tokens[child] = token
        paths: list[tuple[int, ...]] = [(0,)]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]))
        path, count, following = step_reference.accept_tree(
            torch.tensor([tokens]), torch.tensor([parents]), torch.stack([law(path) for path in paths])[None],
            q[None] if max(rows) >= 0 else q[None, :0], torch.tensor([rows]), Coins(random), Race(random), 3,
        )  # fmt: skip
        new = [*(tokens[i] for i in path[0, 1 : int(count)].tolist()), int(following)]
        while len(new) < length:
            new.append(random.choose(law((0, *new))))
        return new[:length]

    expected = {
        tokens: float(torch.tensor([law((0, *tokens[:i]))[t] for i, t in enumerate(tokens)]).double().prod())
        for tokens in itertools.product(range(3), repeat=length)
    }
    assert total_variation(exact_law(run), expected) < NOISE


def test_a_draft_law_that_equals_the_targets_is_always_accepted() -> None:
    target = TableModel(3, seed=1)
    q = target.logits((0,)).softmax(-1)[None]

    def accepted(random):
        return accept_sampling(chain([0, random.choose(q[0])], q), q.repeat(2, 1), random).path

    assert {tuple(path) for path, _ in outcomes(accepted)} == {(0, 1)}


def test_disjoint_supports_are_lossless() -> None:
    """A draft that proposes only what the target never says: all residual."""
    p = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])

    def run(random):
        accepted = accept_sampling(chain([1, random.choose(q[0])], q), p, random)
        return (len(accepted.path), accepted.next_token)

    assert exact_law(run) == {(1, 1): 0.25, (1, 2): 0.75}


def test_siblings_drawn_with_replacement_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The i-th sibling must be judged by the law without the earlier ones."""
    monkeypatch.setattr(sampling, "without", lambda law, token: law)
    q = laws_of(1)

    def tree(random):
        return TokenTree([0, *(random.choose(q[0]) for _ in range(2))], [-1, 0, 0], q, {0: 0})

    assert law_after(tree, TableModel(3, seed=1), length=1) < NOISE, "consistent, if wasteful"
    monkeypatch.undo()
    assert law_after(tree, TableModel(3, seed=1), length=1) > 0.01

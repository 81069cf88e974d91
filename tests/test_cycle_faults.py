"""Faults planted into the device cycle change the law of its text, and the test of that law finds them."""

from collections.abc import Callable
from typing import Any

import batched_ops
import pytest
import torch
from batched_ops import share_windows, use_batched_ops
from cycle_law_cases import FAULTY, VOCABULARY, prepared, sampled
from torch import Tensor

from triforce_tree.cycle.growth import Growth, Tree
from triforce_tree.cycle.laws import DeviceLaw
from triforce_tree.cycle.noise import Noise
from triforce_tree.cycle.rows import RetrievalRows
from triforce_tree.cycle.texts import Texts
from triforce_tree.kernels import step

Fault = Callable[[pytest.MonkeyPatch], None]
TREE_LAWS = 4  # the most of a draft's tree here; a chain of gamma = 3 has more


def accepting(change: Callable[..., tuple[Tensor, ...]], levels: str = "all") -> Fault:
    """Acceptance with a fault, at all levels or only where drafts are "trees" or the "chain" of level 1."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = step.accept_tree

        def faulty(*args: Tensor) -> tuple[Tensor, ...]:
            here = "chain" if args[3].shape[1] > TREE_LAWS else "trees"
            return change(sound, *args) if levels in ("all", here) else sound(*args)

        patch.setattr(step, "accept_tree", faulty)

    return plant


def always(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """The first child is accepted whatever the laws say."""
    first = torch.zeros_like(uniforms)
    for node in range(tokens.shape[1]):
        elder = (parents[:, :node] == parents[:, node, None]).any(1)
        first[:, node] = torch.where(elder, uniforms[:, node], 0.0)
    return sound(tokens, parents, p, q, q_rows, first, race, depth)


def no_residual(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """TriForce's public code: after a refusal the token is drawn from p."""
    path, count, _ = sound(tokens, parents, p, q, q_rows, uniforms, race, depth)
    node = path.gather(1, count[:, None] - 1)
    law = p.gather(1, node[..., None].expand(-1, 1, p.shape[2]))[:, 0]
    return path, count, (law / race).argmax(-1)


def one_uniform(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """One uniform for the decisions at all nodes."""
    return sound(tokens, parents, p, q, q_rows, uniforms[:, :1].expand_as(uniforms), race, depth)


def wrong_rows(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Children are judged by the draft law of the node before theirs."""
    return sound(tokens, parents, p, q, (q_rows - 1).clamp_min(0), uniforms, race, depth)


def wrong_target_rows(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Every node has the target's law of the one before it."""
    return sound(tokens, parents, p.roll(1, 1), q, q_rows, uniforms, race, depth)


def with_replacement(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Refused siblings stay in the law that the later ones are judged by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_ops, "without", lambda laws, tokens: laws)
        return sound(tokens, parents, p, q, q_rows, uniforms, race, depth)


def stale_noise(patch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn once and used for every pass."""
    draw, drawn = Noise.draw, set()

    def once(self: Noise, generator: torch.Generator) -> None:
        if id(self) not in drawn:
            drawn.add(id(self))
            draw(self, generator)

    patch.setattr(Noise, "draw", once)


def best_runner_up(patch: pytest.MonkeyPatch) -> None:
    """Leaves are the most probable other token, though judged as drawn."""
    sound = step.second_choice
    patch.setattr(step, "second_choice", lambda laws, chosen, race: sound(laws, chosen, None))


def runner_up_of_the_next(patch: pytest.MonkeyPatch) -> None:
    """Leaves are drawn from the law of the place after theirs."""
    sound = step.second_choice
    patch.setattr(step, "second_choice", lambda laws, chosen, race: sound(laws.roll(-1, 1), chosen, race))


def weak_draws_dropped(patch: pytest.MonkeyPatch) -> None:
    """The draft proposes only what it finds likely: a count that looks at the draws."""
    grow = Growth.grow

    def likely(self: Growth, *args: Any) -> Tree:
        tree = grow(self, *args)
        laws = tree.laws.gather(1, tree.parents[:, 1:, None].expand(-1, -1, VOCABULARY))
        chance = laws.gather(2, tree.tokens[:, 1:, None].clamp_min(0))[..., 0]
        tree.tokens[:, 1:] = torch.where(chance > 0.3, tree.tokens[:, 1:], -1)
        return tree

    patch.setattr(Growth, "grow", likely)


def best_draws(patch: pytest.MonkeyPatch) -> None:
    """The draft's trees hold its most probable tokens, though judged as drawn."""
    grow = Growth.grow

    def certain(self: Growth, tokens: Tensor, end: Tensor, law: DeviceLaw, noise: Noise) -> Tree:
        noise.race.fill_(1)
        return grow(self, tokens, end, law, noise)

    patch.setattr(Growth, "grow", certain)


def chain_laws_late(patch: pytest.MonkeyPatch) -> None:
    """The laws of the chain's tokens are kept one place late."""
    lengthen = Texts.lengthen

    def late(self: Texts, emitted: Tensor, count: Tensor, laws: Tensor | None) -> None:
        lengthen(self, emitted, count, None if laws is None else laws.roll(1, 1))

    patch.setattr(Texts, "lengthen", late)


def other_chunks_than_the_roots(patch: pytest.MonkeyPatch) -> None:
    """Level 1's law depends on the children that it judges, by way of what their queries select."""
    attend = RetrievalRows.__call__

    def by_the_child(self: RetrievalRows, layer: int, q: Tensor, *rest: Any) -> Tensor:
        if self.choosing:
            select = step.select_chunks
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(step, "select_chunks", lambda _, *more: select(q[:, :, 1], *more))
                return attend(self, layer, q, *rest)
        return attend(self, layer, q, *rest)

    patch.setattr(RetrievalRows, "__call__", by_the_child)


LEAVES = "hierarchy, leaves"
FAULTS: dict[str, tuple[str, Fault]] = {
    "always accepted, chain": ("chain", accepting(always)),
    "always accepted by level 1": (LEAVES, accepting(always, "trees")),
    "no residual, siblings": ("siblings", accepting(no_residual)),
    "no residual at level 1": ("hierarchy, chain", accepting(no_residual, "trees")),
    "no residual at level 2": (LEAVES, accepting(no_residual, "chain")),
    "one uniform, chain": ("chain", accepting(one_uniform)),
    "one uniform at level 2": (LEAVES, accepting(one_uniform, "chain")),
    "rows of q at level 2": (LEAVES, accepting(wrong_rows, "chain")),
    "rows of p at level 1": (LEAVES, accepting(wrong_target_rows, "trees")),
    "with replacement": ("siblings", accepting(with_replacement)),
    "stale noise, plain": ("plain", stale_noise),
    "stale noise, hierarchy": ("hierarchy, chain", stale_noise),
    "best runner-up": ("hierarchy, refresh 0", best_runner_up),
    "runner-up of the next": (LEAVES, runner_up_of_the_next),
    "weak draws dropped, hierarchy": (LEAVES, weak_draws_dropped),
    "best draws": ("live tree", best_draws),
    "chain laws late": (LEAVES, chain_laws_late),
    "other chunks": ("hierarchy, chain", other_chunks_than_the_roots),
}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ops for large batches of equal prompts."""
    use_batched_ops(monkeypatch)
    share_windows(monkeypatch)
    return monkeypatch


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, many: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    cycle = prepared(name)
    plant(many)
    chance, _ = sampled(name)
    # Stages hold no trace of a fault, for the tests that share the cycle.
    cycle._programs.clear()
    assert chance < FAULTY

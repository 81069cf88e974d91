"""Faults planted into decoding change the output distribution, and the enumeration finds every one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributions.enumerated_noise import CraftedDraws, EnumeratedNoise
from tests.support.distributions.enumeration import NOISE, Walk
from tests.support.distributions.generation_cases import BOTH, Case
from tests.support.models.own_drafters import DrawnThenFixed
from triforce_tree.kernels import step
from triforce_tree.kernels.step import accept, traversal
from triforce_tree.kernels.step.draws import draw_tokens
from triforce_tree.kv.tree_attention_view import PagedRetrievalView
from triforce_tree.runtime.sequence_state import SequenceState

FOUND = 100 * NOISE
TREE_PROBS = 2  # most distributions that a draft's tree reports here; a chain of gamma = 3 has more
CASES = {
    "chain": Case(2, 3, 2, 1, {"tree": "chain:1", "runner_ups": False}),
    "longer chain": Case(2, 3, 3, 1, {"tree": "chain:2", "runner_ups": False}),
    "siblings": Case(2, 3, 2, 1, {"tree": "static:2", "runner_ups": False}),
    "live tree": Case(2, 3, 2, 1, {"tree": "best-first:2", "runner_ups": False}),
    "hierarchy": Case(3, 3, 2, 1, {"tree": "chain:1", "runner_ups": False}),
    "runner-ups": Case(3, 3, 2, 1, BOTH),
    "hierarchy, four tokens": Case(3, 4, 1, 1, {"tree": "chain:1", "runner_ups": False, "budget": 12}),
    "runner-ups, four tokens": Case(3, 4, 1, 1, BOTH),
    "two rounds": Case(3, 2, 3, 1, {**BOTH, "rounds": 2}),
    # The target can draw the fixed token after it has rejected the drawn one.
    "drawn, then fixed": Case(
        2, 5, 2, 1, {"runner_ups": False}, drafter=partial(DrawnThenFixed, "static:1;0.0", 5)
    ),
}

Noisy = type[EnumeratedNoise]


def judged(change: Callable[..., tuple[Any, ...]], level: str = "all") -> Noisy:
    """Acceptance of changed arguments: at all levels, or where drafts are "trees", or level 1's "chain"."""

    class Faulty(EnumeratedNoise):
        def traverse_tree(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            here = "chain" if args[3].shape[1] > TREE_PROBS else "trees"
            return super().traverse_tree(*(change(*args) if level in ("all", here) else args))

    return Faulty


def shifted_q(tokens, parents, p, q, q_rows, depth):
    """Children are judged by the draft distribution of the node before their parent."""
    return tokens, parents, p, q, (q_rows - 1).clamp_min(0), depth


def shifted_p(tokens, parents, p, q, q_rows, depth):
    """Every node has the target distribution of the one before it."""
    return tokens, parents, p.roll(1, 1), q, q_rows, depth


def none_fixed(tokens, parents, p, q, q_rows, depth):
    """A fixed token is judged as if it had been drawn like its siblings."""
    return tokens, parents, p, q, q_rows.where(q_rows != accept.FIXED, -1), depth


def decided(draws: type[CraftedDraws], level: str = "all") -> Noisy:
    """Acceptance by faulty decisions."""

    class Faulty(EnumeratedNoise):
        def traverse_tree(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            here = "chain" if args[3].shape[1] > TREE_PROBS else "trees"
            self.draws = draws if level in ("all", here) else CraftedDraws
            return super().traverse_tree(*args)

    return Faulty


class FirstAlways(CraftedDraws):
    """The first child is accepted whatever its probability."""

    def __init__(self, walks: list[Walk], *rest: Any) -> None:
        super().__init__(walks, *rest)
        self.before: set[int] = set()

    def accept(self, chance: Tensor, *place: int) -> bool:
        if place[0] in self.before:
            return super().accept(chance, *place)
        self.before.add(place[0])
        return super().accept(torch.ones(()), *place)


class OneUniform(CraftedDraws):
    """One uniform for the decisions at all nodes: what is known of it are bounds."""

    def __init__(self, walks: list[Walk], *rest: Any) -> None:
        super().__init__(walks, *rest)
        self.bounds = [(0.0, 1.0)] * len(walks)

    def accept(self, chance: Tensor, *place: int) -> bool:
        low, high = self.bounds[place[0]]
        sure = min(max(float(chance), low), high)
        accepted = super().accept(torch.tensor((sure - low) / (high - low)), *place)
        self.bounds[place[0]] = (low, sure) if accepted else (sure, high)
        return accepted


class BestRunnerUp(EnumeratedNoise):
    """Runner-ups are the most probable other token, though judged as drawn."""

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        return accept.second_drawn(None, probs, chosen)


class RunnerUpOfTheNext(EnumeratedNoise):
    """Runner-ups are drawn from the distribution of the next position."""

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        return super().second_choice(probs.roll(-1, 1), chosen)


class WeakDrawsDropped(EnumeratedNoise):
    """The draft proposes only what it finds likely: a count that looks at the draws."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        tokens, chances = super().expand_nodes(logits, heat, probs, *rest)
        return torch.where(probs.gather(2, tokens.clamp_min(0)) > 0.4, tokens, -1), chances


class BestDraws(EnumeratedNoise):
    """The draft's trees hold its most probable tokens, though judged as drawn."""

    def expand_nodes(self, logits: Tensor, heat: Tensor | None, probs: Tensor, *rest: Any) -> Any:
        super().expand_nodes(logits, heat, probs, *rest)
        return draw_tokens(None, probs, rest[0])


def sound(patch: pytest.MonkeyPatch) -> None:
    """The fault is in the noise alone."""


def refusal(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        rule = traversal.residual
        patch.setattr(traversal, "residual", lambda *args: change(args, *rule(*args)))

    return plant


no_residual = refusal(lambda args, weight, target: (weight, args[1]))
kept_weight = refusal(lambda args, weight, target: (args[0], target))


def with_replacement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(traversal, "without", lambda draft, token: draft)


def no_residual_at(level: str) -> Noisy:
    """TriForce's public code at one level: after a refusal the token is drawn from p."""

    class Faulty(EnumeratedNoise):
        def traverse_tree(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            here = "chain" if args[3].shape[1] > TREE_PROBS else "trees"
            with pytest.MonkeyPatch.context() as patch:
                if here == level:
                    no_residual(patch)
                return super().traverse_tree(*args)

    return Faulty


def chain_probs_late(patch: pytest.MonkeyPatch) -> None:
    """The distributions of the chain's tokens are stored one position late."""
    lengthen = SequenceState.append_drafted

    def late(self: SequenceState, emitted: Tensor, count: Tensor, probs: Tensor | None) -> None:
        lengthen(self, emitted, count, None if probs is None else probs.roll(1, 1))

    patch.setattr(SequenceState, "append_drafted", late)


def weak_ends_dropped(patch: pytest.MonkeyPatch) -> None:
    """The chain ends before a token that level 1 finds improbable: an end that looks at the next draw."""
    lengthen = SequenceState.append_drafted

    def shortened(self: SequenceState, emitted: Tensor, count: Tensor, probs: Tensor) -> None:
        lengthen(self, emitted, count, probs)
        end = (self.chain - 1).clamp_min(0)[:, None]
        token = self.tokens.gather(1, self.length[:, None] + 1 + end)
        chance = self.chain_probs.gather(1, end[..., None].expand(-1, 1, probs.shape[2]))[:, 0].gather(
            1, token
        )
        self.chain -= ((chance[:, 0] < 0.4) & (self.chain > 0)).long()

    patch.setattr(SequenceState, "append_drafted", shortened)


def chunks_of_the_children(patch: pytest.MonkeyPatch) -> None:
    """Level 1's distribution depends on the children that it judges: their queries retrieve the chunks."""
    attend = PagedRetrievalView.__call__

    def by_the_child(self: PagedRetrievalView, layer: int, q: Tensor, *rest: Any) -> Tensor:
        if self.refreshing:
            select = step.select_chunks
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(step, "select_chunks", lambda _, *more: select(q[:, :, 1], *more))
                return attend(self, layer, q, *rest)
        return attend(self, layer, q, *rest)

    patch.setattr(PagedRetrievalView, "__call__", by_the_child)


Fault = tuple[str, Noisy, Callable[[pytest.MonkeyPatch], None]]
FAULTS: dict[str, Fault] = {
    "always accepted, chain": ("chain", decided(FirstAlways), sound),
    "always accepted by level 1": ("runner-ups", decided(FirstAlways, "trees"), sound),
    "always accepted by level 2": ("runner-ups", decided(FirstAlways, "chain"), sound),
    "no residual, chain": ("chain", EnumeratedNoise, no_residual),
    "no residual, siblings": ("siblings", EnumeratedNoise, no_residual),
    "no residual, live tree": ("live tree", EnumeratedNoise, no_residual),
    "no residual, hierarchy": ("hierarchy", EnumeratedNoise, no_residual),
    "no residual at level 1": ("hierarchy", no_residual_at("trees"), sound),
    "no residual at level 2": ("runner-ups", no_residual_at("chain"), sound),
    "weights stay, chain": ("longer chain", EnumeratedNoise, kept_weight),
    "weights stay, hierarchy": ("two rounds", EnumeratedNoise, kept_weight),
    "weak ends dropped": ("two rounds", EnumeratedNoise, weak_ends_dropped),
    "one uniform, chain": ("longer chain", decided(OneUniform), sound),
    "one uniform, siblings": ("siblings", decided(OneUniform), sound),
    "one uniform at level 2": ("two rounds", decided(OneUniform, "chain"), sound),
    "shifted q at level 2": ("two rounds", judged(shifted_q, "chain"), sound),
    "shifted p at level 1": ("runner-ups", judged(shifted_p, "trees"), sound),
    "shifted p, siblings": ("siblings", judged(shifted_p), sound),
    "a fixed sibling judged as drawn": ("drawn, then fixed", judged(none_fixed), sound),
    "no residual, then fixed": ("drawn, then fixed", EnumeratedNoise, no_residual),
    "with replacement": ("siblings", EnumeratedNoise, with_replacement),
    "best runner-up": ("runner-ups, four tokens", BestRunnerUp, sound),
    "runner-up of the next": ("runner-ups, four tokens", RunnerUpOfTheNext, sound),
    "weak draws dropped": ("siblings", WeakDrawsDropped, sound),
    "weak draws dropped, hierarchy": ("hierarchy", WeakDrawsDropped, sound),
    "best draws": ("live tree", BestDraws, sound),
    "chain distributions late": ("two rounds", EnumeratedNoise, chain_probs_late),
    "other chunks": ("hierarchy, four tokens", EnumeratedNoise, chunks_of_the_children),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, noise, plant = FAULTS[fault]
    plant(monkeypatch)
    assert CASES[name].distance(CASES[name].generations(noise=noise)) > FOUND


@pytest.mark.parametrize("name", CASES)
def test_the_same_cases_without_a_fault(name: str) -> None:
    assert CASES[name].distance(CASES[name].generations()) < NOISE

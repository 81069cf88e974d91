"""Noise whose decisions are enumerated: the definitions of the ops, with decisions from scripts."""

import torch
from torch import Tensor

from tests.support.distributions.enumeration import Walk
from triforce_tree.kernels.step import accept, grow, traversal
from triforce_tree.verify.noise import Noise, NoiseFactory


class WalkDraws:
    """The decisions of one op for a batch; each sequence follows its own walk."""

    def __init__(self, walks: list[Walk]) -> None:
        self.walks = walks

    def accept(self, chance: Tensor, *place: int) -> bool:
        probability = min(1.0, float(chance)) if chance > 0 else 0.0
        return self.walks[place[0]].branch([1 - probability, probability]) == 1

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        if place:
            return weights.new_tensor(self._one(place[0], weights.tolist()), dtype=torch.int64)
        rows = [[self._one(b, row) for row in sequence] for b, sequence in enumerate(weights.tolist())]
        return torch.tensor(rows, device=weights.device)

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        rows = [[self._distinct(b, row, count) for row in rows] for b, rows in enumerate(probs.tolist())]
        return torch.tensor(rows, device=probs.device)

    def _distinct(self, b: int, weights: list[float], count: int) -> list[int]:
        drawn = []
        for _ in range(count):
            drawn.append(self._one(b, weights))
            weights = [0.0 if token == drawn[-1] else weight for token, weight in enumerate(weights)]
        return drawn

    def _one(self, b: int, weights: list[float]) -> int:
        return self.walks[b].branch(weights) if any(weight > 0 for weight in weights) else -1


class CraftedDraws(WalkDraws):
    """Random numbers with which an op must make the decisions of the walks.

    Attributes:
        exponential: fp32 ``[B, rows, V]``, or ``[B, V]`` for ``traverse_tree``.
        uniform: fp32 ``[B, N]``.
    """

    def __init__(self, walks: list[Walk], exponential: Tensor, uniform: Tensor | None = None) -> None:
        super().__init__(walks)
        # Drawn tokens get small numbers and all others huge ones, so probabilities do not change the order.
        self.exponential, self.uniform = torch.full_like(exponential, _LATE), uniform

    def accept(self, chance: Tensor, *place: int) -> bool:
        accepted = super().accept(chance, *place)
        assert self.uniform is not None
        self.uniform[place] = 0.0 if accepted else _BELOW_ONE
        return accepted

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        token = super().choose(weights, *place)
        self.exponential[place].scatter_(-1, token.clamp_min(0)[..., None], 1.0)
        return token

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        tokens = super().choose_distinct(probs, count)
        for rank in reversed(range(count)):
            self.exponential.scatter_(-1, tokens[..., rank, None].clamp_min(0), _LATE ** (rank / count))
        return tokens


_LATE, _BELOW_ONE = 1e30, 1 - 2**-24


class EnumeratedNoise(Noise):
    """Runs the definitions of the ops with the decisions of the walks.

    Args:
        walks: one for each sequence; the list is read again at every decision.
        operators: also run the operators, with random numbers crafted to give the same decisions, and compare
            the results. On a GPU the operators are the Triton kernels.
    """

    capturable = False

    def __init__(
        self,
        walks: list[Walk],
        operators: bool,
        batch: int,
        rows: int,
        vocabulary: int,
        uniforms: int,
        device: torch.device,
    ) -> None:
        super().__init__(batch, rows, vocabulary, uniforms, device)
        self.walks, self.operators, self.greedy = walks, operators, rows == 0
        self.draws = CraftedDraws

    def draw(self, generator: torch.Generator) -> None:
        """Nothing is random."""

    def _mark_still(self) -> None:
        for b, walk in enumerate(self.walks):
            walk.still = b in self.still

    def traverse_tree(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._mark_still()
        draws = self.draws(self.walks, self.exponential[:, 0].cpu(), self.uniform.cpu())
        on_host = (x.cpu() for x in (tokens, parents, p, q, q_rows))
        decided = traversal.traverse_drawn(draws, *on_host, depth)
        if self.operators:
            self.exponential[:, 0], self.uniform[:] = draws.exponential, draws.uniform
            _equal(decided, super().traverse_tree(tokens, parents, p, q, q_rows, depth))
        path, count, last = (x.to(p.device) for x in decided)
        return path, count, last

    def expand_nodes(
        self, logits: Tensor, temperature: Tensor | None, probs: Tensor, count: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        if self.greedy:
            return super().expand_nodes(logits, temperature, probs, count, first)
        self._mark_still()
        rows = slice(first, first + probs.shape[1])
        draws = self.draws(self.walks, self.exponential[:, rows].cpu())
        heat = None if temperature is None else temperature.cpu()
        written = torch.empty(probs.shape)
        tokens, by_rank = grow.expand_drawn(draws, logits.cpu(), heat, written, count)
        if self.operators:
            self.exponential[:, rows] = draws.exponential
            made = super().expand_nodes(logits, temperature, probs, count, first)
            _equal((tokens, by_rank, written), (*made, probs))
        probs.copy_(written)
        return tokens.to(probs.device), by_rank.to(probs.device)

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        if self.greedy:
            return super().second_choice(probs, chosen)
        self._mark_still()
        draws = self.draws(self.walks, self.exponential.cpu())
        tokens = accept.second_drawn(draws, probs.cpu(), chosen.cpu())
        if self.operators:
            self.exponential.copy_(draws.exponential)
            _equal((tokens,), (super().second_choice(probs, chosen),))
        return tokens.to(probs.device)


def _equal(decided: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> None:
    """Checks that operators decide as the definitions do; probabilities may differ by rounding.

    Those after texts that have ended may be NaN, because nobody has written what the draft reads there.
    """
    for a, b in zip(decided, made, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-7, equal_nan=True)


def enumerated(
    walks: list[Walk], operators: bool = False, noise: type[EnumeratedNoise] = EnumeratedNoise
) -> NoiseFactory:
    """Returns a factory of :class:`EnumeratedNoise` over the same walks, for all stages of a program."""

    def make(batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device) -> Noise:
        return noise(walks, operators, batch, rows, vocabulary, uniforms, device)

    return make

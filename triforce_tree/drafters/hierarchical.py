"""A drafter and a verifier, seen as one drafter: TriForce's hierarchy (arXiv 2404.11912, algorithm 1).

The verifier's tokens follow exactly its own law, given those before them, so a chain of them with those
laws is an honest proposal for the level above; the construction nests to any depth.
"""

import torch

from triforce_tree import sampling
from triforce_tree.drafters.base import Drafter
from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree
from triforce_tree.verify.verifier import Verifier


class HierarchicalDrafter:
    """Gathers ``gamma`` tokens that ``verifier`` accepted or drew itself.

    Args:
        inner: proposes to the verifier.
        verifier: a cheaper stand-in for the level above.
        gamma: γ2, tokens to gather at least; the last verification may bring a few more.
        leaves: add one runner-up token at each depth, drawn from the same law without the chain's token.
        stop_tokens: ids that end the text; nothing is gathered after one of them.
    """

    def __init__(
        self,
        inner: Drafter,
        verifier: Verifier,
        gamma: int,
        leaves: bool = True,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.inner = inner
        self.verifier = verifier
        self.gamma = gamma
        self.leaves = leaves
        self.stop_tokens = stop_tokens

    @property
    def stats(self) -> list[LevelStats]:
        return [*self.inner.stats, self.verifier.stats]

    def prefill(self, context: Context) -> None:
        self.verifier.prefill(context)
        self.inner.prefill(context)

    def commit(self, context: Context) -> None:
        self.verifier.commit(context)
        self.inner.commit(context)

    def propose(self, context: Context) -> TokenTree:
        chain: list[int] = []
        rows = []
        while len(chain) < self.gamma and not self.stop_tokens.intersection(chain):
            here = context.plus(chain)
            verdict = self.verifier.verify(here, self.inner.propose(here))
            chain += verdict.tokens
            rows.append(verdict.rows)
        return self._tree(context[-1], chain, torch.cat(rows))

    def _tree(self, root: int, chain: list[int], rows: torch.Tensor) -> TokenTree:
        """The chain below ``root``; ``rows[i]`` is the law (or score) row that ``chain[i]`` came from."""
        greedy = self.verifier.law.greedy
        tokens, parents = [root, *chain], list(range(-1, len(chain)))
        if self.leaves:
            for node, token in enumerate(chain):
                runner_up = self._runner_up(rows[node], token, greedy)
                if runner_up is not None:
                    tokens.append(runner_up)
                    parents.append(node)
        if greedy:
            return TokenTree(tokens, parents)
        return TokenTree(tokens, parents, rows, {i: i for i in range(len(chain))})

    def _runner_up(self, row: torch.Tensor, token: int, greedy: bool) -> int | None:
        if greedy:
            best: list[int] = row.topk(2).indices.tolist()
            return best[1] if best[0] == token else best[0]
        rest = sampling.without(row, token)
        return None if rest is None else self.verifier.random.choose(rest)

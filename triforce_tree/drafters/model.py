"""A small model that grows token trees."""

from functools import partial

import torch
from torch import Tensor

from triforce_tree.level import Level
from triforce_tree.sampling import Random, TokenLaw, top_tokens
from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree
from triforce_tree.tree_search import Ranks, Shape


class ModelDrafter:
    """Level 0: draws a tree depth by depth, one forward for all nodes of a depth.

    Args:
        level: the draft model and its (streaming) cache.
        shape: which nodes get how many children.
        law: logits to law, the same as the verifier's.
        random: this level's draws.
    """

    def __init__(self, level: Level, shape: Shape, law: TokenLaw, random: Random) -> None:
        self.level = level
        self.shape = shape
        self.law = law
        self.random = random
        self._stats = LevelStats("draft")

    @property
    def stats(self) -> list[LevelStats]:
        return [self._stats]

    def prefill(self, context: Context) -> None:
        with self._stats.clock():
            self.level.prefill(context)

    def commit(self, context: Context) -> None:
        with self._stats.clock():
            self.level.commit(context)

    def propose(self, context: Context) -> TokenTree:
        with self._stats.clock():
            before = self.level.forwards
            tree = self._grow(context)
            self._stats.forwards += self.level.forwards - before
            self._stats.emitted += len(tree) - 1
        return tree

    def _grow(self, context: Context) -> TokenTree:
        logits, root_row = self.level.catch_up(context)
        grown = _Growing(context, root_row)
        frontier, logits = [0], logits[None]
        while True:
            values = [grown.values[n] for n in frontier]
            ranks = [grown.ranks[n] for n in frontier]
            laws = self.law(logits, partial(grown.paths, frontier))
            counts = self.shape.branch(ranks, values, laws)
            fresh = grown.add(frontier, laws, self._draw(laws, counts))
            frontier = [n for n in fresh if self.shape.expands(grown.ranks[n])]
            if not frontier:
                return grown.tree(deterministic=self.law.greedy)
            tokens = [grown.tokens[n] for n in frontier]
            first_row = self.level.tail
            logits = self.level.extend(tokens, [grown.rows[grown.parents[n]] for n in frontier])
            grown.rows.update({n: first_row + i for i, n in enumerate(frontier)})

    def _draw(self, laws: Tensor, counts: list[int]) -> list[list[int]]:
        if self.law.greedy:
            return top_tokens(laws, counts)
        return self.random.choose_distinct(laws, counts)


class _Growing:
    """A tree under construction."""

    def __init__(self, context: Context, root_row: int) -> None:
        self.context = context
        self.tokens = [context[-1]]
        self.parents = [-1]
        self.ranks: list[Ranks] = [()]
        self.values = [1.0]  # product of the draft's probabilities along the path
        self.rows = {0: root_row}  # node -> tail row of the draft's cache
        self._laws: list[Tensor] = []
        self._law_rows: dict[int, int] = {}

    def add(self, frontier: list[int], laws: Tensor, drawn: list[list[int]]) -> list[int]:
        """Append the drawn children of the frontier nodes; returns the new nodes."""
        start = len(self.tokens)
        for i, (node, tokens) in enumerate(zip(frontier, drawn, strict=True)):
            if not tokens:
                continue
            self._law_rows[node] = len(self._laws)
            self._laws.append(laws[i])
            chances = laws[i, tokens].tolist()
            for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
                self.tokens.append(token)
                self.parents.append(node)
                self.ranks.append((*self.ranks[node], rank))
                self.values.append(self.values[node] * chance)
        return list(range(start, len(self.tokens)))

    def paths(self, nodes: list[int]) -> list[list[int]]:
        result = []
        for node in nodes:
            below = []
            while node > 0:
                below.append(self.tokens[node])
                node = self.parents[node]
            result.append(list(self.context.plus(below[::-1])))
        return result

    def tree(self, deterministic: bool) -> TokenTree:
        if deterministic or not self._laws:
            return TokenTree(self.tokens, self.parents)
        return TokenTree(self.tokens, self.parents, torch.stack(self._laws), self._law_rows)

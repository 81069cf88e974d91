"""Token trees: who follows whom, which tokens, and the laws they were drawn from.

Node 0 is the *root*: the context's last token, which is in no cache yet. Every other node is a proposed
token. A chain is a tree in which every node has one child.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """A proposal.

    Attributes:
        tokens: N token ids; ``tokens[0]`` is the root.
        parents: N node indices; ``parents[0] == -1`` and parents precede their children. Siblings stand
            in the order in which they were drawn.
        laws: fp32 ``[M, V]``, the law q each expanded node's children were drawn from, without
            replacement, in sibling order; None where the tokens are deterministic.
        law_rows: node -> row of ``laws``; nodes without children may be absent.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    laws: Tensor | None = None
    law_rows: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError("parents[0] must be -1 and every later parent must precede its child")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of every node, in draw order."""
        result: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                result[parent].append(node)
        return result

    @cached_property
    def depths(self) -> list[int]:
        """Depth of every node; the root has 0. Position of node i = position of the root + depth."""
        result = [0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            result[node] = result[self.parents[node]] + 1
        return result

    @property
    def depth(self) -> int:
        """Length of the longest path below the root: the most a verification can accept."""
        return max(self.depths)

    @cached_property
    def intervals(self) -> tuple[list[int], list[int]]:
        """Euler tour (enter, leave): a is an ancestor-or-self of b iff enter[a] <= enter[b] < leave[a]."""
        sizes = [1] * len(self.tokens)
        for node in range(len(self.tokens) - 1, 0, -1):
            sizes[self.parents[node]] += sizes[node]
        enter = [0] * len(self.tokens)
        for node, children in enumerate(self.children):
            at = enter[node] + 1
            for child in children:
                enter[child] = at
                at += sizes[child]
        return enter, [e + s for e, s in zip(enter, sizes, strict=True)]

    def law(self, node: int) -> Tensor | None:
        """The law q at a node ``[V]``, or None where its children are deterministic."""
        return None if self.laws is None else self.laws[self.law_rows[node]]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        result = [node]
        while (node := self.parents[node]) >= 0:
            result.append(node)
        return result[::-1]


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """bool ``[N, N]``: row t marks t itself and its ancestors; a parent of -1 starts a new root."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return torch.from_numpy(mask)


def chain(tokens: Sequence[int], laws: Tensor | None = None) -> TokenTree:
    """A chain below ``tokens[0]``; ``laws[i]`` ``[V]`` is the law that ``tokens[i + 1]`` came from."""
    parents = range(-1, len(tokens) - 1)
    return TokenTree(tokens, parents, laws, {i: i for i in range(len(tokens) - 1)})


class Context(Sequence[int]):
    """The tokens so far, with a cheap way to look a few tokens ahead.

    ``plus`` shares the long part, so a drafter may ask about a continuation of a 100,000-token context
    at the price of the continuation alone.
    """

    def __init__(self, tokens: list[int], ahead: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._ahead = list(ahead)

    def plus(self, tokens: Sequence[int]) -> "Context":
        return Context(self._tokens, [*self._ahead, *tokens])

    def since(self, start: int) -> list[int]:
        """Tokens from position ``start`` to the end."""
        base = len(self._tokens)
        if start >= base:
            return self._ahead[start - base :]
        return [*self._tokens[start:], *self._ahead]

    def __len__(self) -> int:
        return len(self._tokens) + len(self._ahead)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self.since(start)[: max(0, stop - start) : step]
        base = len(self._tokens)
        if index < 0:
            index += len(self)
        return self._tokens[index] if index < base else self._ahead[index - base]

    def __iter__(self) -> Iterator[int]:
        yield from self._tokens
        yield from self._ahead

"""Nodes of a tree of texts."""

from collections.abc import Iterator, Sequence

import numpy as np

from triforce_tree.kv.pool.pages import slots_in


class Node:
    """A piece of text. Each child continues the text in its own way.

    Nodes are made by :meth:`TextTree.fork`. A node without children can be extended.

    Attributes:
        parent: the node before; None for the root, which begins with the prompt, and for pruned nodes.
        children: the nodes that continue the text, in the order in which they were made.
        tokens: the node's own token ids.
        start: the number of tokens of all earlier nodes, which is the position of the first own token.
        logprobs: the log-probabilities of the own tokens under the target; None where they are not known.
        alive: whether the node is in a tree.
        pages: the pages of KV slots of the own tokens.
        stored: how many own tokens have keys and values, counted from the first one.
    """

    __slots__ = ("alive", "children", "logprobs", "pages", "parent", "start", "stored", "tokens")

    def __init__(self, parent: "Node | None", tokens: Sequence[int] = ()) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.tokens = list(tokens)
        self.start: int = 0 if parent is None else parent.stop
        self.logprobs: list[float | None] = [None] * len(self.tokens)
        self.alive = True
        self.pages: list[int] = []
        self.stored = 0

    def __repr__(self) -> str:
        state = "" if self.alive else ", pruned"
        return f"Node({len(self.tokens)} tokens from {self.start}, {len(self.children)} children{state})"

    @property
    def stop(self) -> int:
        """Returns the number of tokens of the whole text up to the node's end."""
        return self.start + len(self.tokens)

    def _upwards(self) -> "Iterator[Node]":
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def path(self) -> "list[Node]":
        """Returns the nodes from the root to this one."""
        return [*self._upwards()][::-1]

    @property
    def text_tokens(self) -> list[int]:
        """Returns the token ids of the whole text up to the node's end."""
        return [token for node in self.path for token in node.tokens]

    @property
    def tip(self) -> "Node":
        """Returns the node with the last token of the text: this one, or an ancestor if it is empty."""
        return next(node for node in self._upwards() if node.tokens)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Adds tokens whose keys and values are not stored yet."""
        self.tokens += tokens
        self.logprobs += [None] * len(tokens) if logprobs is None else logprobs

    def slots(self, first: int, stop: int, page: int) -> np.ndarray:
        """Returns the KV slots of own tokens ``first`` to ``stop``, int64, in pages of ``page`` slots."""
        return slots_in(self.pages, first, stop, page)

    def path_slots(self, stop: int, count: int, page: int) -> np.ndarray:
        """Returns the KV slots of the last ``count`` tokens of the text before own token ``stop``, oldest
        first.
        """
        parts: list[np.ndarray] = []
        for node in self._upwards():
            end = stop if node is self else len(node.tokens)
            first = max(0, end - count)
            parts.append(node.slots(first, end, page))
            count -= end - first
            if not count:
                break
        return np.concatenate(parts[::-1])

"""Nodes of a tree of texts."""

from collections.abc import Iterator, Sequence

import numpy as np


class Node:
    """A piece of text that follows its parent's; its children follow it, each in its own way.

    Made by :meth:`TextTree.fork`; a node without children can be extended.

    Attributes:
        parent: None for the root, which begins with the prompt, and for nodes that were pruned.
        children: in the order in which they were made.
        tokens: the node's own token ids.
        start: position of the first of them: tokens of all nodes before it.
        logprobs: of the own tokens under the target, as far as they are known; else None.
        alive: whether the node is still in its tree.
    """

    __slots__ = ("alive", "children", "logprobs", "pages", "parent", "start", "stored", "tokens")

    def __init__(self, parent: "Node | None", tokens: Sequence[int] = ()) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.tokens = list(tokens)
        self.start: int = 0 if parent is None else parent.stop
        self.logprobs: list[float | None] = [None] * len(self.tokens)
        self.alive = True
        # Pages of the own tokens, and how many of these are stored: at least all but the last one of
        # a node that has been continued.
        self.pages: list[int] = []
        self.stored = 0

    def __repr__(self) -> str:
        state = "" if self.alive else ", pruned"
        return f"Node({len(self.tokens)} tokens from {self.start}, {len(self.children)} children{state})"

    @property
    def stop(self) -> int:
        """Returns the number of tokens of the whole text up to the node's end."""
        return self.start + len(self.tokens)

    @property
    def path(self) -> "list[Node]":
        """Returns the nodes from the root to this one."""
        return [*self._upwards()][::-1]

    @property
    def text_tokens(self) -> list[int]:
        """Returns the token ids of the whole text up to the node's end."""
        return [token for node in self.path for token in node.tokens]

    def _upwards(self) -> "Iterator[Node]":
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def tip(self) -> "Node":
        """Returns the nearest node with tokens among this node and its ancestors; its last token precedes the
        next token of this node.
        """
        return next(node for node in self._upwards() if node.tokens)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Add tokens, whose keys and values are not stored yet."""
        self.tokens += tokens
        self.logprobs += [None] * len(tokens) if logprobs is None else logprobs

    def slots(self, first: int, stop: int, page: int) -> np.ndarray:
        """Returns the slots of own tokens ``first`` to ``stop``, in pages of so many slots; int64."""
        tokens = np.arange(first, stop)
        pages = np.asarray(self.pages, dtype=np.int64)
        return pages[tokens // page] * page + tokens % page

    def path_slots(self, stop: int, count: int, page: int) -> np.ndarray:
        """Returns the slots of the last ``count`` tokens before own token ``stop``, oldest first."""
        parts: list[np.ndarray] = []
        for node in self._upwards():
            end = stop if node is self else len(node.tokens)
            first = max(0, end - count)
            parts.append(node.slots(first, end, page))
            count -= end - first
            if not count:
                break
        return np.concatenate(parts[::-1])

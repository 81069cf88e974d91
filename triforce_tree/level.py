"""A model run over one cache: knows which token each uncommitted row holds.

Drafters and verifiers name tokens, caches name rows; this is where the two meet. A level never needs to
be told what was accepted: shown a context, it keeps the tail rows that spell it and feeds what is
missing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.caches.base import KVCache, Rows
from triforce_tree.hf_model import HFModel
from triforce_tree.token_tree import Context, TokenTree

Progress = Callable[[int], None]


class Level:
    """A causal LM and its cache.

    Args:
        model: the checked model.
        cache: its cache; several levels may share one model, each with a cache of its own.
        prefill_chunk: tokens per forward while catching up with a long context.
    """

    def __init__(self, model: HFModel, cache: KVCache, prefill_chunk: int = 1024) -> None:
        self.model = model
        self.cache = cache
        self.forwards = 0
        self._prefill_chunk = prefill_chunk
        self._tokens: list[int] = []  # of the tail rows
        self._parents: list[int] = []  # tail row each follows; -1 the committed end
        self._depths: list[int] = []
        self._mask = np.zeros((64, 64), dtype=bool)  # ancestor-or-self among tail rows

    @property
    def tail(self) -> int:
        """Uncommitted rows."""
        return len(self._tokens)

    def prefill(self, context: Context, progress: Progress | None = None) -> None:
        """Feed and commit all of ``context`` but its last token, the root."""
        self._keep([])
        missing = context.since(self.cache.length)[:-1]
        while missing:
            skip, take = self.cache.prefill_step(len(missing))
            take = min(take, self._prefill_chunk)
            part, missing = missing[skip : skip + take], missing[skip + take :]
            depths = torch.arange(take, device=self.model.device)
            self.model.forward(part, Rows(depths, None, depths, take), self.cache, last_only=True)
            self.cache.commit(take)
            if progress:
                progress(skip + take)
        self.commit(context)

    def catch_up(self, context: Context) -> tuple[Tensor, int]:
        """Feed what the cache lacks of ``context``, its last token included.

        Returns:
            the logits ``[V]`` after the whole context, and the tail row of its last token.
        """
        missing, end = self._sync(context)
        parents = [end, *range(self.tail, self.tail + len(missing) - 1)]
        logits = self.extend(missing, parents, len(missing))
        return logits[-1], self.tail - 1

    def extend(self, tokens: Sequence[int], parents: Sequence[int], context: int = 0) -> Tensor:
        """One forward of T rows behind the tail.

        Args:
            tokens: T ids.
            parents: the tail row that each follows, -1 for the committed end; a new row may follow an
                earlier new one.
            context: leading ones among the T that belong to the context, not to a proposal.

        Returns:
            logits ``[T, V]``.
        """
        start, count = self.tail, len(tokens)
        self._reserve(start + count)
        for row, parent in enumerate(parents, start):
            self._mask[row] = self._mask[parent] if parent >= 0 else False
            self._mask[row, row] = True
            self._depths.append(self._depths[parent] + 1 if parent >= 0 else 0)
        self._tokens += tokens
        self._parents += parents
        stop = start + count
        device = self.model.device
        depths = torch.tensor(self._depths, device=device)
        mask = torch.from_numpy(self._mask[start:stop, :stop].copy()).to(device)
        self.forwards += 1
        rows = Rows(depths[start:], mask, depths, context)
        return self.model.forward(list(tokens), rows, self.cache)

    def forward_tree(self, context: Context, tree: TokenTree) -> Tensor:
        """One forward of a whole tree, after whatever of ``context`` is still missing.

        Args:
            context: ends with the tree's root.
            tree: N nodes.

        Returns:
            logits ``[N, V]``.
        """
        missing, end = self._sync(context)
        before = self.tail + len(missing) - 1  # the root's row; missing always ends with it
        parents = [end, *range(self.tail, before)]
        parents += [before + parent for parent in tree.parents[1:]]
        logits = self.extend([*missing, *tree.tokens[1:]], parents, len(missing))
        return logits[len(missing) - 1 :]

    def commit(self, context: Context) -> None:
        """Make permanent the rows of ``context``, as far as they are here; its last token has none."""
        self._sync(context)
        self.cache.commit(self.tail)
        self._forget()

    def _sync(self, context: Context) -> tuple[list[int], int]:
        """Keep the tail rows that spell the context; (tokens still missing, row they follow)."""
        wanted = context.since(self.cache.length)
        path: list[int] = []
        end = -1
        for token in wanted[:-1]:
            rows = range(end + 1, self.tail)
            end = next((r for r in rows if self._parents[r] == end and self._tokens[r] == token), -2)
            if end == -2:
                break
            path.append(end)
        self._keep(path)
        return wanted[len(path) :], len(path) - 1

    def _keep(self, path: list[int]) -> None:
        if path != list(range(self.tail)):
            self.cache.keep(path)
        self._tokens = [self._tokens[r] for r in path]
        self._parents = list(range(-1, len(path) - 1))
        self._depths = list(range(len(path)))
        self._reserve(len(path))
        if path:
            self._mask[: len(path)] = np.tri(len(path), self._mask.shape[1], dtype=bool)

    def _forget(self) -> None:
        self._tokens, self._parents, self._depths = [], [], []

    def _reserve(self, rows: int) -> None:
        if rows > len(self._mask):
            grown = np.zeros((2 * rows, 2 * rows), dtype=bool)
            held = len(self._mask)
            grown[:held, :held] = self._mask
            self._mask = grown

"""Masks of the tokens that grammars allow after each node of token trees.

The host follows the grammar of each sequence along the paths of its tree, and writes the masks into a buffer
of fixed address on the device, so that the stage that applies them can be captured. The mask of a state of a
grammar is computed once in a pass, though the draft, level 1 and level 2 ask for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.grammar.matching import Matcher, words_of
from triforce_tree.kernels.probs.masked import mask_logits
from triforce_tree.verify.paths import NodePaths

# Masks that are allocated at first; more are allocated when a pass reaches more states.
_FIRST_ROWS = 64
# If a grammar allows this share of the tokens now, as within a string of JSON, the draft proposes tokens
# without masks. It seldom proposes others, and with masks it waits for the host at each depth.
_FREE = 0.9
# Words of a mask that are searched first for a token: most have one there, as single bytes have low ids.
_FIRST_WORDS = 32


class _State:
    """A state of a grammar that the current pass has reached.

    Attributes:
        matcher: the state.
        row: the row of its mask; None before the mask was computed.
        following: the states after further tokens, None where the grammar does not allow the token.
    """

    __slots__ = ("following", "matcher", "row")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        # Nothing is decided after the end of a text, so that all tokens are allowed there.
        self.row = 0 if matcher.ended else None
        self.following: dict[int, _State | None] = {}

    def after(self, token: int) -> "_State | None":
        """Returns the state after one more token, or None if the grammar does not allow it."""
        if token not in self.following:
            matcher = self.matcher.after(token)
            self.following[token] = None if matcher is None else _State(matcher)
        return self.following[token]


class GrammarMasks:
    """Follows the grammars of a batch.

    Args:
        batch: B.
        vocabulary: V.
        device: the device of the logits.

    Attributes:
        pool: int32 ``[R, W]`` in host memory, the masks of the states that the present pass has reached, see
            ``mask_logits``. Row 0 allows all tokens.
        free: bool ``[B]`` in host memory, for which sequences the draft proposes tokens without masks in this
            pass. It follows from the committed tokens of the sequence alone.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self.batch, self.words, self.device = batch, words_of(vocabulary), device
        self.pool = torch.full((_FIRST_ROWS, self.words), -1, dtype=torch.int32, device="cpu")
        self.clear()

    def begin_pass(self, matchers: Sequence[Matcher | None]) -> None:
        """Begins a pass.

        Args:
            matchers: the state of each sequence's grammar after its committed tokens; None for a sequence
                without a grammar, or that has ended.
        """
        self._roots = [None if matcher is None else _State(matcher) for matcher in matchers]
        self._used = 1
        states = [root for root in self._roots if root is not None and root.row is None]
        self._compute(states)
        self.free = torch.tensor([root is None or self._is_free(root) for root in self._roots], device="cpu")

    def _is_free(self, root: _State) -> bool:
        return not root.row or root.matcher.share(self.pool[root.row]) >= _FREE

    def clear(self) -> None:
        """Removes the grammars of all sequences."""
        self.begin_pass([None] * self.batch)

    def rows(self, chains: list[list[int]], tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """Returns which masks are those of the tokens after each node of a tree for each sequence.

        Args:
            chains: the tokens between the committed ones and the root's children, the root included if it is
                not committed.
            tokens, parents: of the N nodes of each tree, parents before children. Node 0 is the root.

        Returns:
            int64 ``[B, N]`` in host memory, rows of :attr:`pool`. All tokens are allowed after a node that
            the grammar does not allow, or whose text has ended: it decides nothing.
        """
        places = [self._places(*each) for each in zip(self._roots, chains, tokens, parents, strict=True)]
        unknown = {id(each): each for own in places for each in own if each is not None and each.row is None}
        self._compute([*unknown.values()])
        rows = [[0 if state is None or state.row is None else state.row for state in own] for own in places]
        return torch.tensor(rows, device="cpu")

    def _places(
        self, root: _State | None, chain: list[int], tokens: list[int], parents: list[int]
    ) -> list[_State | None]:
        """Returns the state after each node of a tree, or None where the grammar does not allow the node."""
        for token in chain:
            root = None if root is None else root.after(token)
        states = [root]
        if root is None:
            return states * len(tokens)
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = states[parent] if token >= 0 else None
            states.append(None if above is None else above.after(token))
        return states

    def _compute(self, states: list[_State]) -> None:
        """Computes the masks of states."""
        if not states:
            return
        first, self._used = self._used, self._used + len(states)
        if (missing := self._used - len(self.pool)) > 0:
            more = self.pool.new_full((max(missing, len(self.pool)), self.words), -1)
            self.pool = torch.cat([self.pool, more])
        rows = range(first, self._used)
        Matcher.fill([state.matcher for state in states], self.pool, rows)
        some = self.pool[first : self._used, :_FIRST_WORDS].any(1).tolist()
        for state, row, found in zip(states, rows, some, strict=True):
            allowed = found or bool(self.pool[row].any())
            # Softmax of a row without a token would be NaN. If such a state is committed, the token after it
            # is not allowed by the grammar, which the sequence's matcher reports.
            state.row = row if allowed else 0


class StageMasks:
    """The masks of the trees of one stage.

    Args:
        masks: the masks of the batch.
        nodes: most nodes of a tree.
    """

    def __init__(self, masks: GrammarMasks, nodes: int) -> None:
        self._masks, size = masks, masks.batch * nodes * masks.words
        # The words of the nodes that were read last, without gaps, so that one copy suffices.
        self._words = torch.full((size,), -1, dtype=torch.int32, device=masks.device)
        self._on_gpu = masks.device.type == "cuda"
        self._staged = (
            torch.empty(size, dtype=torch.int32, pin_memory=True, device="cpu")
            if self._on_gpu
            else self._words
        )
        # Whether all of them allow all tokens.
        self._free = True
        self._first, self._count, self._chain = 0, nodes, 0
        self._read = torch.empty(0, device="cpu")
        if self._on_gpu:
            self._event = torch.cuda.Event()

    def draft(self, paths: NodePaths) -> None:
        """Writes the masks of nodes of a tree that is being drafted."""
        if not self._masks.free.all():
            self.read(paths)
            self.mark()
            self.fill(drafting=True)
            return
        self._first, self._count, _ = paths.nodes.indices(paths.tokens.shape[1])
        if not self._free:
            self._words.fill_(-1)
            self._free = True

    def read(self, paths: NodePaths) -> None:
        """Copies the tokens of trees to host memory. A CUDA graph can capture it."""
        first, stop, _ = paths.nodes.indices(paths.tokens.shape[1])
        chain, drafted = paths.chain()
        found = torch.cat([drafted[:, None], chain, paths.tokens[:, :stop], paths.parents[:, :stop]], 1)
        self._first, self._count, self._chain = first, stop, chain.shape[1]
        if self._on_gpu:
            # The last copy into this buffer has ended, because ``fill`` has waited for it.
            if self._read.shape != found.shape:
                self._read = torch.empty(found.shape, dtype=found.dtype, pin_memory=True, device="cpu")
            self._read.copy_(found, non_blocking=True)
        else:
            self._read = found

    def mark(self) -> None:
        """Marks the end of :meth:`read`, for which :meth:`fill` waits."""
        if self._on_gpu:
            self._event.record()

    def fill(self, drafting: bool = False) -> None:
        """Writes the masks of the nodes of the trees that were read.

        Args:
            drafting: whether the trees are being drafted.
        """
        if self._on_gpu:
            # The last copy from ``_staged``, which was started before, has ended then, too.
            self._event.synchronize()
        chains, tokens, parents = [], [], []
        for drafted, *rest in self._read.tolist():
            chains.append(rest[:drafted])
            tokens.append(rest[self._chain : self._chain + self._count])
            parents.append(rest[self._chain + self._count :])
        self._free = False
        rows = self._masks.rows(chains, tokens, parents)[:, self._first :]
        if drafting:
            rows[self._masks.free] = 0
        rows = rows.flatten()
        used = slice(len(rows) * self._masks.words)
        torch.index_select(self._masks.pool, 0, rows, out=self._staged[used].view(len(rows), -1))
        if self._on_gpu:
            self._words[used].copy_(self._staged[used], non_blocking=True)

    def applied(self, logits: Tensor) -> Tensor:
        """Returns the logits of the first nodes that were read, ``[B, F, V]``, with -inf for tokens that are
        not allowed.
        """
        if self._free and not self._on_gpu:
            return logits
        batch, nodes, words = self._masks.batch, self._count - self._first, self._masks.words
        found = self._words[: batch * nodes * words].view(batch, nodes, words)
        return mask_logits(logits, found[:, : logits.shape[1]])

"""Holds the states of recurrent layers: buffers made once, and what forwards read and write of them.

A layer of a hybrid model keeps the newest inputs of a convolution and a matrix per head (Mamba, gated delta
rule), which hold everything that it knows of a sequence. Unlike KV slots they cannot be cut: a pass that
proposes T tokens must leave them as they were, and the accepted tokens are applied to them afterwards. The
buffers hold the states after all committed tokens, and there is no second copy. A verifying pass keeps what
the recurrences read for each token, which is small (no weights are applied to it any more), and
:meth:`RecurrentView.move` repeats the recurrences alone for the accepted tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams, unpack_mask
from triforce_tree.kernels.recurrent import linear_recurrence
from triforce_tree.kv.view import KVView
from triforce_tree.models.running_forward import RecurrentPass, ScanInputs, StateShapes


class RecurrentStates:
    """Holds the states of B sequences after their committed tokens.

    Args:
        shapes: the shapes of the states of one sequence.
        batch: B.
        dtype: the dtype of the convolutions' inputs; recurrences are fp32.

    Attributes:
        convolutions: ``[B, channels, columns]`` of each convolution.
        recurrences: ``[B, H, V, K]`` of each recurrence.
        lengths: tokens of each sequence that they hold; None where the host does not know.
    """

    def __init__(self, shapes: StateShapes, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        self.batch, self._shapes, self._dtype = batch, shapes, dtype
        self.convolutions = [
            torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in shapes.convolutions
        ]
        self.recurrences = [
            torch.zeros(batch, *shape, dtype=torch.float32, device=device) for shape in shapes.recurrences
        ]
        self.ones = torch.ones(batch, dtype=torch.int64, device=device)
        self.lengths: list[int | None] = [None] * batch

    def like(self) -> "RecurrentStates":
        """Returns other states of the same shapes, of sequences without tokens."""
        return RecurrentStates(self._shapes, self.batch, self.ones.device, self._dtype)

    @property
    def buffers(self) -> list[Tensor]:
        """Returns all buffers."""
        return [*self.convolutions, *self.recurrences]

    def clear(self, sequence: int) -> None:
        """Sets the state of a sequence without tokens."""
        for state in self.buffers:
            state[sequence] = 0

    def grown(self, counts: Sequence[int]) -> None:
        """Records how many tokens of each sequence a pass committed; 0 for one that has ended.

        Passes of one token each apply it to every sequence, also to one that has ended.
        """
        self.lengths = [
            length + count if length is not None and count else None
            for length, count in zip(self.lengths, counts, strict=True)
        ]

    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Copies states of the same shapes; ``lengths`` are left to the caller."""
        for own, state in zip(self.buffers, buffers, strict=True):
            own.copy_(state)

    def take(self, kept: "RecurrentStates") -> None:
        """Copies the states of the first sequences from another cache with at most as many sequences."""
        for own, state in zip(self.buffers, kept.buffers, strict=True):
            own[: kept.batch].copy_(state)
        self.lengths[: kept.batch] = kept.lengths

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Restores the states at the end of the context."""
        before = [state.clone() for state in self.buffers]
        try:
            yield
        finally:
            self.restore(before)

    def invalidate(self) -> None:
        """Records that passes may have changed the states, by how many tokens only the device knows."""
        self.lengths = [None] * self.batch


class TokenPass:
    """A ``RecurrentPass`` over tokens of each sequence, all of which are committed at once.

    Args:
        states: the states of all sequences.
        sequences: which of them the pass is over.
    """

    def __init__(self, states: RecurrentStates, sequences: slice = slice(None)) -> None:
        self._states, self._own = states, sequences

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        return _appended(self._states.convolutions[number][self._own], new)

    def windows(self, number: int, width: int) -> None:
        return None

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        counts = self._states.ones[self._own] * inputs.v.shape[1]
        return _scanned(self._states.recurrences[number][self._own], inputs, counts)


class PromptPass(TokenPass):
    """A ``ChunkPass`` over a part of one sequence's prompt."""

    def __init__(self, states: RecurrentStates, sequence: int) -> None:
        super().__init__(states, slice(sequence, sequence + 1))

    def state(self, number: int) -> Tensor | None:
        return self._states.recurrences[number][self._own]

    def keep(self, number: int, state: Tensor) -> None:
        self._states.recurrences[number][self._own].copy_(state)


class ProposedPass:
    """A ``RecurrentPass`` over T tokens of each sequence, of which :meth:`commit` applies the first ones.

    What it keeps are copies: torch.compile reuses the memory of all that passes through its graphs.
    """

    def __init__(self, states: RecurrentStates) -> None:
        self._states = states
        self._inputs: dict[int, Tensor] = {}
        self._scans: dict[int, ScanInputs] = {}

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        self._inputs[number] = new.clone()
        return torch.cat([self._states.convolutions[number], new], 2)

    def windows(self, number: int, width: int) -> None:
        return None

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        rates, beta = (None if t is None else t.clone() for t in (inputs.rates, inputs.beta))
        key = inputs.k.clone()
        # A commit only advances the state and reads no queries: keys fill their place.
        self._scans[number] = ScanInputs(key, key, inputs.v.clone(), inputs.decay.clone(), rates, beta)
        return _scanned(self._states.recurrences[number], inputs, None)

    def commit(self, counts: Tensor) -> None:
        """Applies the first ``counts`` tokens, int64 ``[B]``, of the last pass; 0 changes nothing."""
        _advance(self._states, self._inputs, self._scans, counts)

    def accept(self, path: Tensor) -> None:
        """Applies the tokens of the last pass up to the end of ``path``, int64 ``[B, R]``, as in
        :meth:`TreePass.accept`.
        """
        self.commit((path >= 0).sum(1))


class TreePass:
    """A ``RecurrentPass`` over nodes of a tree of each sequence, which begin from their parents' states.

    States of nodes are not kept: the states after a node are computed from those at the tree's beginning,
    along its path (``kernels.recurrent.linear_recurrence``). Several forwards may each bring some depths of
    the tree.

    Args:
        states: the states at the beginning of the tree.
        nodes: the number of nodes of the tree.
        depth: most nodes of a path.
    """

    def __init__(self, states: RecurrentStates, nodes: int, depth: int) -> None:
        self._states, self._nodes, self._depth = states, nodes, depth
        self._inputs: dict[int, Tensor] = {}
        self._scans: dict[int, ScanInputs] = {}
        self._new = slice(0)
        self._paths = self._counts = states.ones

    def begin(self, first: int, ancestors: Tensor) -> None:
        """Begins a forward.

        Args:
            first: nodes of earlier forwards.
            ancestors: bool ``[B, T, N]``: which of the tree's first N >= first + T nodes are on the path of
                each new node, itself included.
        """
        self._new = slice(first, first + ancestors.shape[1])
        numbers = torch.arange(ancestors.shape[2], device=ancestors.device)
        ordered = torch.where(ancestors, numbers, ancestors.shape[2]).sort(2).values[:, :, : self._depth]
        self._counts = ancestors.sum(2)
        self._paths = ordered.masked_fill(ordered == ancestors.shape[2], -1)

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        if number not in self._inputs:
            self._inputs[number] = new.new_zeros(*new.shape[:2], self._nodes)
        self._inputs[number][:, :, self._new] = new
        return torch.cat([self._states.convolutions[number], new], 2)

    def windows(self, number: int, width: int) -> Tensor:
        """Returns the newest ``width`` inputs at the end of each path, which the kept ones precede."""
        inputs = torch.cat([self._states.convolutions[number], self._inputs[number]], 2)
        kept = self._states.convolutions[number].shape[2]
        places = self._counts[..., None] + (kept - width + torch.arange(width, device=inputs.device))
        on_path = self._paths.gather(2, (places - kept).clamp(0, self._paths.shape[2] - 1))
        places = torch.where(places < kept, places, kept + on_path)  # [B, T, width]
        shape = places.shape[0], inputs.shape[1], *places.shape[1:]
        return inputs.gather(2, places.flatten(1)[:, None].expand(*shape[:2], -1)).view(shape)

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        if number not in self._scans:
            self._scans[number] = inputs.kept(self._nodes)
        own = self._scans[number]
        for kept, new in zip(own.by_token, inputs.by_token, strict=True):
            kept[:, self._new] = new
        if own.rates is not None and inputs.rates is not None:
            own.rates.copy_(inputs.rates)
        out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        state = self._states.recurrences[number]
        linear_recurrence(state, own.q, own.k, own.v, own.decay, own.rates, own.beta, None, out, self._paths)
        return out

    def accept(self, path: Tensor) -> None:
        """Applies the nodes of ``path``, int64 ``[B, R]``, to the states; -1 follows the last node."""
        tokens = path.clamp_min(0)
        inputs = {
            number: own.gather(2, tokens[:, None].expand(-1, own.shape[1], -1))
            for number, own in self._inputs.items()
        }
        scans = {number: own.taken(tokens) for number, own in self._scans.items()}
        _advance(self._states, inputs, scans, (path >= 0).sum(1))


class DraftedStates:
    """The states of a draft, which processes tokens in several forwards before any of them is committed.

    The states after the committed tokens are kept, and with them what the layers read for each later token.
    A forward of the newest tokens begins from a copy of the states, to which the tokens before it are applied
    (:meth:`begin`); the forwards of drafted tokens continue it. The object itself is the ``RecurrentPass`` of
    that forward.

    Args:
        states: after the committed tokens of each sequence.
        newest: tokens of a forward of the newest ones.
        chain: most tokens that precede such a forward after the committed ones.

    Attributes:
        room: most tokens of a sequence that were processed after the committed ones, without drafted ones.
        drafted: a ``RecurrentPass`` over drafted tokens that follow these and each other; :meth:`tree` makes
            one for trees.
    """

    def __init__(self, states: RecurrentStates, newest: int, chain: int) -> None:
        self._states, self.room, self._several = states, newest + chain, chain > 0
        self._now = states.like()
        self._before = torch.zeros(states.batch, dtype=torch.int64, device=states.ones.device)
        self._inputs: dict[int, Tensor] = {}
        self._scans: dict[int, ScanInputs] = {}
        self.drafted: RecurrentPass = TokenPass(self._now)

    @property
    def buffers(self) -> list[Tensor]:
        """Returns all buffers beside those of the committed states."""
        scans = [t for scan in self._scans.values() for t in (*scan.by_token, scan.rates) if t is not None]
        return [*self._now.buffers, *self._inputs.values(), *scans]

    def tree(self, nodes: int, depth: int) -> TreePass:
        """Returns a pass over the nodes of a tree, without its root, which is the last of the newest tokens.

        Args:
            nodes, depth: as for :class:`TreePass`.
        """
        return TreePass(self._now, nodes, depth)

    def begin(self, committed: Tensor, before: Tensor) -> None:
        """Prepares a forward of the newest tokens.

        Args:
            committed: int64 ``[B]``, how many of the tokens that were processed are applied to the states
                for good.
            before: int64 ``[B]``, how many of those that follow precede the forward.
        """
        _advance(self._states, self._inputs, self._scans, committed)
        self._before.copy_(before)
        self._now.restore(self._states.buffers)
        if self._several:
            _advance(self._now, self._inputs, self._scans, before)

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        if number not in self._inputs:
            self._inputs[number] = new.new_zeros(*new.shape[:2], self.room)
        self._write(self._inputs[number], new, 2)
        return self.drafted.convolve(number, new, columns)

    def windows(self, number: int, width: int) -> None:
        return None

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        if number not in self._scans:
            self._scans[number] = inputs.kept(self.room)
        kept = self._scans[number]
        for own, new in zip(kept.by_token, inputs.by_token, strict=True):
            self._write(own, new, 1)
        if kept.rates is not None and inputs.rates is not None:
            kept.rates.copy_(inputs.rates)
        return self.drafted.recur(number, inputs)

    def _write(self, own: Tensor, new: Tensor, dim: int) -> None:
        """Writes the forward's tokens, along ``dim``, after those that precede the forward."""
        places = self._before[:, None] + torch.arange(new.shape[dim], device=new.device)
        shape = [1] * new.dim()
        shape[0], shape[dim] = places.shape
        own.scatter_(dim, places.view(shape).expand_as(new), new)


class RecurrentView:
    """A ``KVView`` of a hybrid model: another view for its attention layers, and the states of the others.

    Args:
        view: the view of the layers with attention.
        states: the states of the recurrent layers.
        commits: each pass brings one token, which is committed at once (plain decoding).
        depths: the depths of the new tokens if they are a tree that branches; by default each follows the
            one before.
    """

    def __init__(
        self, view: KVView, states: RecurrentStates, commits: bool, depths: Sequence[int] | None = None
    ) -> None:
        self._view = view
        self.capturable, self.resizable = view.capturable, view.resizable
        self._tree = None if depths is None else TreePass(states, len(depths), max(depths) + 1)
        self._proposed = self._tree or (None if commits else ProposedPass(states))
        self.recurrent: RecurrentPass | None = self._proposed or TokenPass(states)
        self.indexed = view.indexed

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        self._view.begin(start, mask_words)
        if self._tree is not None:
            assert mask_words is not None, "a tree that branches has masks"
            self._tree.begin(0, unpack_mask(mask_words)[:, :, : mask_words.shape[1]])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        return self._view(layer, q, k, v, params)

    def move(self, index: Tensor) -> None:
        self._view.move(index)
        if self._proposed is not None:
            self._proposed.accept(index)


def _advance(
    states: RecurrentStates, inputs: dict[int, Tensor], scans: dict[int, ScanInputs], counts: Tensor
) -> None:
    """Applies the first ``counts`` tokens, int64 ``[B]``, to states.

    Args:
        inputs: the inputs of each convolution, ``[B, channels, T]``.
        scans: the inputs of each recurrence.
    """
    for number, new in inputs.items():
        kept = states.convolutions[number]
        columns = counts[:, None] + torch.arange(kept.shape[2], device=counts.device)
        kept.copy_(torch.cat([kept, new], 2).gather(2, columns[:, None].expand_as(kept)))
    for number, scan in scans.items():
        state = states.recurrences[number]
        linear_recurrence(state, scan.q, scan.k, scan.v, scan.decay, scan.rates, scan.beta, counts, None)


def _appended(kept: Tensor, new: Tensor) -> Tensor:
    """Returns the inputs of a convolution after those that are kept, and keeps the newest."""
    inputs = torch.cat([kept, new], 2)
    kept.copy_(inputs[:, :, new.shape[2] :])
    return inputs


def _scanned(state: Tensor, inputs: ScanInputs, counts: Tensor | None) -> Tensor:
    """Returns the outputs of all tokens. With ``counts``, the number of tokens, their state is stored."""
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    linear_recurrence(
        state, inputs.q, inputs.k, inputs.v, inputs.decay, inputs.rates, inputs.beta, counts, out
    )
    return out


def with_states(
    view: Callable[[int, Tensor | None, Sequence[int] | None], KVView], states: RecurrentStates, commits: bool
) -> Callable[[int, Tensor | None, Sequence[int] | None], RecurrentView]:
    """Makes of a function that makes views one that makes them with the states (:class:`RecurrentView`)."""

    def made(queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> RecurrentView:
        branches = depths is not None and [*depths] != [*range(queries)]
        return RecurrentView(view(queries, mask, depths), states, commits, depths if branches else None)

    return made

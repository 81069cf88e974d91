"""The forward that runs in a thread: its attention, and the states of its recurrent layers.

They are no keywords of the forward, because some families' layers do not pass keywords on. Layers run in
order, so a counter tells which one calls if a layer does not know its index: compiled layers share code.
Operators hide the calls from the compiler.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.operators import fake, operator

ATTENTION = "triforce_tree"
"""The attention implementation of copies of models that compute for us."""


class Attend(Protocol):
    """The attention function of one forward."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """Stores the new keys and values of ``layer``, and computes its attention.

        Args:
            q, k, v: ``[B, H_q, T, D]``, ``[B, H_kv, T, D]`` and ``[B, H_kv, T, D_v]``; q and k rotated.

        Returns:
            ``[B, T, H_q, D_v]``.
        """


@dataclass(frozen=True)
class StateShapes:
    """Holds the shapes of the states of one sequence, in the order of the forward.

    Attributes:
        convolutions: (channels, columns) of each causal convolution. The columns are its newest inputs; there
            is one column less than the width of the kernel.
        recurrences: (heads, values, keys) of each recurrence.
    """

    convolutions: tuple[tuple[int, int], ...]
    recurrences: tuple[tuple[int, int, int], ...]

    def bytes(self, itemsize: int) -> int:
        """Returns the bytes of one sequence's states; ``itemsize`` is that of the convolutions. Recurrences
        are fp32.
        """
        convolutions = sum(channels * columns for channels, columns in self.convolutions)
        return convolutions * itemsize + 4 * sum(h * v * k for h, v, k in self.recurrences)

    def token_bytes(self, itemsize: int) -> int:
        """Returns the most bytes of what the layers read for one token, as it is kept until a commit."""
        channels = sum(channels for channels, _ in self.convolutions)
        return channels * itemsize + 4 * sum(h * (v + 2 * k + max(v, k) + 1) for h, v, k in self.recurrences)


@dataclass(frozen=True)
class ScanInputs:
    """The inputs of a recurrence for T tokens (see ``kernels.recurrent.linear_recurrence``), fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rates: Tensor | None = None
    beta: Tensor | None = None

    @property
    def by_token(self) -> tuple[Tensor, ...]:
        """Returns the tensors that have a part for each token."""
        return self.q, self.k, self.v, self.decay, *(() if self.beta is None else (self.beta,))

    def kept(self, tokens: int) -> "ScanInputs":
        """Returns buffers for as many tokens of these shapes."""
        return self._each(lambda own: own.new_zeros(own.shape[0], tokens, *own.shape[2:]))

    def taken(self, tokens: Tensor) -> "ScanInputs":
        """Returns the inputs of these tokens, int64 ``[B, R]``."""
        sequences = torch.arange(len(tokens), device=tokens.device)[:, None]
        return self._each(lambda own: own[sequences, tokens])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "ScanInputs":
        q, k, v, decay, *beta = map(change, self.by_token)
        rates = None if self.rates is None else self.rates.clone()
        return ScanInputs(q, k, v, decay, rates, beta[0] if beta else None)


class RecurrentPass(Protocol):
    """The states of one forward over T new tokens of each sequence; ``number`` counts calls from 0.

    The tokens follow each other, or are nodes of a tree, each of which follows its parent.
    """

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        """Returns the inputs of a convolution, preceded by the inputs that it keeps: ``[B, channels, columns
        + T]``.

        Args:
            new: ``[B, channels, T]``.
        """

    def windows(self, number: int, width: int) -> Tensor | None:
        """Returns what a convolution reads for each new token of a tree, ``[B, channels, T, width]``, after
        :meth:`convolve`; None if the tokens follow each other.
        """

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        """Returns the outputs of a recurrence, fp32 ``[B, T, H, V]``."""


class ChunkPass(RecurrentPass, Protocol):
    """The states of one forward over a part of a prompt, whose recurrences the model's own code computes."""

    def state(self, number: int) -> Tensor | None:
        """Returns the state ``[B, H, V, K]`` that a recurrence starts from; None for zeros."""

    def keep(self, number: int, state: Tensor) -> None:
        """Keeps the state ``[B, H, V, K]`` after the last token, which the model's own code has computed."""


class IndexedPass(Protocol):
    """The KV slots of one forward, for layers that attend to the slots that an indexer chooses."""

    def visible(self, queries: int) -> Tensor:
        """Returns which slots the first ``queries`` new tokens see, bool ``[B, T, S]``, itself included.

        Called once for each indexer, before its :meth:`index_keys`.
        """

    def index_keys(self, layer: int, new: Tensor, first: int) -> Tensor:
        """Stores an indexer's keys of new tokens, and returns those of all slots, ``[B, S, D]``.

        Args:
            new: ``[B, T, D]``, keys from new token ``first`` on.
        """


class RunningForward(threading.local):
    """The forward that runs in this thread.

    Attributes:
        attend: computes the attention of a layer; None outside a forward.
        layers: indices of the layers with attention, in their order, for compiled layers.
        count: calls of ``attend`` so far.
        called: the attention modules that have attended, by layer; compiled layers are not included.
        states: the states of recurrent layers; None if there are none.
        convolutions, recurrences: numbers of the next ones.
        indexed: stores the keys of indexers; None for models without any.
        index_from: the first new token whose keys an indexer computes next.
    """

    attend: Attend | None = None
    layers: Sequence[int] = ()
    count = 0
    called: dict[int, nn.Module]
    states: RecurrentPass | None = None
    convolutions = recurrences = 0
    indexed: IndexedPass | None = None
    index_from = 0

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, module: nn.Module | None = None
    ) -> Tensor:
        """Returns the attention of the next layer, see :class:`Attend`.

        Args:
            module: the attention module; None in a compiled layer.
        """
        if self.attend is None:
            raise RuntimeError(
                f"attention implementation {ATTENTION!r} was called outside triforce_tree; restore the "
                "model with model.set_attn_implementation('sdpa')"
            )
        self.count += 1
        if module is None:
            return self.attend(self.layers[self.count - 1], q, k, v, params)
        layer: Any = module.layer_idx
        self.called[layer] = module
        return self.attend(layer, q, k, v, params)


running = RunningForward()


@contextmanager
def running_forward(
    attend: Attend,
    layers: Sequence[int] = (),
    states: RecurrentPass | None = None,
    first: tuple[int, int] = (0, 0),
    indexed: IndexedPass | None = None,
) -> Iterator[RunningForward]:
    """Returns a context in which the layers of model copies call ``attend``, and use these recurrent states.

    Args:
        first: numbers of the next convolution and recurrence, for a forward that does not begin at layer 0.
        indexed: stores the keys of indexers, if there are any.
    """
    own = vars(running)
    before = dict(own)
    own.update(
        attend=attend, layers=layers, count=0, called={}, states=states,
        convolutions=first[0], recurrences=first[1], indexed=indexed,
    )  # fmt: skip
    try:
        yield running
    finally:
        own.clear()
        own.update(before)


def indexed_pass() -> IndexedPass:
    """Returns ``indexed`` of the running forward.

    Raises:
        RuntimeError: the forward has none.
    """
    if running.indexed is None:
        raise RuntimeError(
            "a layer with an indexer ran over a cache that has no slots for the indexer's keys"
        )
    return running.indexed


def _states() -> RecurrentPass:
    if running.states is None:
        raise RuntimeError(
            "a recurrent layer ran without states; pass the forward a view or a cache that has them"
        )
    return running.states


def convolve(new: Tensor, columns: int) -> Tensor:
    """Returns ``RecurrentPass.convolve`` for the forward's next convolution."""
    # Only the compiler needs the operators.
    run = _convolve if torch.compiler.is_compiling() else _convolve.definition
    return run(new, columns)


def convolved(
    own: Callable[..., Tensor], inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Returns the outputs of the convolution whose inputs :func:`convolve` returned last.

    Args:
        own: transformers' function, for tokens that follow each other.
        inputs: ``[B, channels, columns + T]``.
        weight: ``[channels, columns + 1]``.

    Returns:
        ``[B, channels, n]``, of which the last T outputs are those of the new tokens.
    """
    if torch.compiler.is_compiling():
        return _convolved(inputs, weight, bias, activation)
    windows = _states().windows(running.convolutions - 1, weight.shape[1])
    if windows is None:
        return own(inputs, weight, bias, activation=activation)
    return _of_windows(windows, weight, bias, activation).to(inputs.dtype)


def _of_windows(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Returns a convolution's outputs ``[B, channels, T]``, in the weight's dtype."""
    out = (windows.float() * weight.float()[:, None]).sum(3)
    if bias is not None:
        out = out + bias.float()[:, None]
    out = out.to(weight.dtype)
    return out if activation is None else ACT2FN[activation](out)


def recur(inputs: ScanInputs) -> Tensor:
    """Returns ``RecurrentPass.recur`` for the forward's next recurrence."""
    run = _recur if torch.compiler.is_compiling() else _recur.definition
    return run(inputs.q, inputs.k, inputs.v, inputs.decay, inputs.rates, inputs.beta)


def recur_by(own: Callable[[Tensor | None], Tensor]) -> None:
    """Computes the forward's next recurrence by the model's own code, which maps the initial to the final
    state.

    This is possible only in forwards over a :class:`ChunkPass`.
    """
    number, states = running.recurrences, cast(ChunkPass, _states())
    running.recurrences += 1
    states.keep(number, own(states.state(number)))


@operator("recurrent_convolve")
def _convolve(new: Tensor, columns: int) -> Tensor:
    number = running.convolutions
    running.convolutions += 1
    return _states().convolve(number, new, columns)


@fake("recurrent_convolve")
def _(new: Tensor, columns: int) -> Tensor:
    batch, channels, tokens = new.shape
    return new.new_empty(batch, channels, columns + tokens)


@operator("recurrent_convolved")
def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    width = weight.shape[1]
    windows = _states().windows(running.convolutions - 1, width)
    if windows is None:
        windows = inputs.unfold(2, width, 1)
    return _of_windows(windows, weight, bias, activation).to(inputs.dtype)


@fake("recurrent_convolved")
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    batch, channels, columns = inputs.shape
    return inputs.new_empty(batch, channels, columns + 1 - weight.shape[1])


@operator("recurrent_recur")
def _recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None
) -> Tensor:
    number = running.recurrences
    running.recurrences += 1
    return _states().recur(number, ScanInputs(q, k, v, decay, rates, beta))


@fake("recurrent_recur")
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None) -> Tensor:
    return v.new_empty(v.shape)

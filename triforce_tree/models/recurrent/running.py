"""The states that the recurrent layers of a running forward read and write.

Layers run in order, so a counter tells which state is meant: compiled layers share code. Operators hide the
states from the compiler.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateShapes:
    """Shapes of the states of one sequence, in the order of the forward.

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


@dataclass(frozen=True)
class Rows:
    """The inputs of a recurrence for T tokens (see ``kernels.recurrent.linear_recurrence``), fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rates: Tensor | None = None
    beta: Tensor | None = None


class RecurrentPass(Protocol):
    """The states of one forward over T new tokens of each sequence; ``number`` counts calls from 0."""

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        """Returns the inputs of a convolution, preceded by the inputs that it keeps: ``[B, channels, columns
        + T]``.

        Args:
            new: ``[B, channels, T]``.
        """

    def recur(self, number: int, rows: Rows) -> Tensor:
        """Returns the outputs of a recurrence, fp32 ``[B, T, H, V]``."""


class ChunkPass(RecurrentPass, Protocol):
    """The states of one forward over a part of a prompt, whose recurrences the model's own code computes."""

    def state(self, number: int) -> Tensor | None:
        """Returns the state ``[B, H, V, K]`` that a recurrence starts from; None for zeros."""

    def keep(self, number: int, state: Tensor) -> None:
        """Keep the state ``[B, H, V, K]`` after the last token, which the model's own code has computed."""


class _Running(threading.local):
    states: RecurrentPass | None = None
    convolutions = 0
    recurrences = 0


_running = _Running()


@contextmanager
def running(states: RecurrentPass | None, first: tuple[int, int] = (0, 0)) -> Iterator[None]:
    """Returns a context in which the recurrent layers of a forward use these states.

    Args:
        first: numbers of the next convolution and recurrence, for a forward that does not begin at layer 0.
    """
    _running.states, (_running.convolutions, _running.recurrences) = states, first
    try:
        yield
    finally:
        _running.states = None


def reached() -> tuple[int, int]:
    """Returns the numbers of the next convolution and recurrence, after the layers that ran last in
    :func:`running`.
    """
    return _running.convolutions, _running.recurrences


def _states() -> RecurrentPass:
    if _running.states is None:
        raise RuntimeError(
            "a recurrent layer ran without states; pass the forward a view or a cache that has them"
        )
    return _running.states


def convolve(new: Tensor, columns: int) -> Tensor:
    """Returns ``RecurrentPass.convolve`` for the forward's next convolution."""
    operator = torch.ops.triforce_tree.recurrent_convolve if torch.compiler.is_compiling() else _convolve_now
    return operator(new, columns)


def recur(rows: Rows) -> Tensor:
    """Returns ``RecurrentPass.recur`` for the forward's next recurrence."""
    operator = torch.ops.triforce_tree.recurrent_recur if torch.compiler.is_compiling() else _recur_now
    return operator(rows.q, rows.k, rows.v, rows.decay, rows.rates, rows.beta)


def recur_by(own: Callable[[Tensor | None], Tensor]) -> None:
    """Compute the forward's next recurrence by the model's own code, which maps the initial to the final
    state.

    This is possible only in forwards over a :class:`ChunkPass`.
    """
    number, states = _running.recurrences, cast(ChunkPass, _states())
    _running.recurrences += 1
    states.keep(number, own(states.state(number)))


def _convolve_now(new: Tensor, columns: int) -> Tensor:
    number = _running.convolutions
    _running.convolutions += 1
    return _states().convolve(number, new, columns)


def _recur_now(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None
) -> Tensor:
    number = _running.recurrences
    _running.recurrences += 1
    return _states().recur(number, Rows(q, k, v, decay, rates, beta))


@torch.library.custom_op("triforce_tree::recurrent_convolve", mutates_args=())
def _convolve(new: Tensor, columns: int) -> Tensor:
    return _convolve_now(new, columns)


@_convolve.register_fake
def _(new: Tensor, columns: int) -> Tensor:
    batch, channels, tokens = new.shape
    return new.new_empty(batch, channels, columns + tokens)


@torch.library.custom_op("triforce_tree::recurrent_recur", mutates_args=())
def _recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None
) -> Tensor:
    return _recur_now(q, k, v, decay, rates, beta)


@_recur.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None) -> Tensor:
    return v.new_empty(v.shape)

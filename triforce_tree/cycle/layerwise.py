"""Prefill layer by layer: all of a prompt through one decoder layer, then through the next.

Chunk by chunk through all layers, as prompts are usually fed, every chunk would read all earlier rows of
every layer, and far from the device each of these readings crosses the bus. Layer by layer a layer's rows
are read while they are all on the device, and cross the bus once, on their way out. It takes one layer's
rows and one hidden state a token as memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from triforce_tree.caches.base import Rows, Variant
from triforce_tree.cycle.model import decoder_layers
from triforce_tree.hf_model import HFModel
from triforce_tree.kernels.prefill import causal_attention
from triforce_tree.level import Progress


class Sink(Protocol):
    """What keeps the rows of a prefill."""

    def buffer(self, rows: int) -> Tensor:
        """Room for one layer's rows ``[rows, 2, H_kv, D]``, which every layer overwrites."""

    def part(self, layer: int, start: int, rows: Tensor) -> Callable[[], None]:
        """The buffer's rows from ``start`` on hold ``layer``'s.

        Returns:
            lets the computation wait until these rows may be overwritten.
        """

    def whole(self, layer: int, rows: Tensor) -> None:
        """All rows of ``layer`` are in the buffer; read at once what is wanted of them."""


class _LayerRows:
    """One layer's rows at a time, as a cache for the attention of a chunk."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.length = buffer, 0

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self.length

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        stop = self.length + q.shape[2]
        seen = self.buffer[:stop].permute(1, 2, 0, 3)[:, None]  # [2, 1, H_kv, S, D]
        for mine, new in zip(seen, (k, v), strict=True):
            mine[:, :, self.length :] = new
        return causal_attention(q, seen[0], seen[1], scale=how.scale, softcap=how.softcap, sinks=how.sinks)

    def advance(self, count: int) -> None: ...

    def keep(self, rows: list[int]) -> None:
        raise RuntimeError("prefill proposes nothing")

    def commit(self, count: int) -> None: ...

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming


class _Calls:
    """How the model calls its decoder layers for each chunk, and what it gives the first of them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self.hidden: list[Tensor] = []
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, layers compute nothing: they hand their input on, and their calls are noted."""
        own = [layer.__dict__.get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = self._note(index)
            yield
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _note(self, index: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if index == 0:
                self.hidden.append(hidden_states)
                self._calls.append([])
            self._calls[-1].append((args, kwargs))
            return hidden_states

        return forward

    def run(self, index: int, chunk: int) -> None:
        """Layer ``index`` on one chunk; its output takes the place of its input."""
        args, kwargs = self._calls[chunk][index]
        out = self.layers[index](self.hidden[chunk], *args, **kwargs)
        self.hidden[chunk] = out if isinstance(out, Tensor) else out[0]


@torch.no_grad()
def fill_by_layers(
    model: HFModel, tokens: list[int], chunk: int, sink: Sink, progress: Progress | None = None
) -> None:
    """Compute the rows of ``tokens`` in all layers, into ``sink``.

    Args:
        model: inside its ``active()``.
        chunk: tokens at once.
        progress: hears of tokens as if they were fed one after the other, layers counting alike.
    """
    if not tokens:
        return
    buffer = sink.buffer(len(tokens))
    rows = _LayerRows(buffer)
    calls = _Calls(decoder_layers(model.model))
    starts = range(0, len(tokens), chunk)
    with calls.noted():
        for start in starts:
            rows.length = start
            part = tokens[start : start + chunk]
            depths = torch.arange(len(part), device=model.device)
            model.forward(part, Rows(depths, None, depths, len(part)), rows, last_only=True)
    free: list[Callable[[], None]] = []
    told = done = 0
    for layer in range(model.layers):
        waiting, free = free, []
        for number, start in enumerate(starts):
            if waiting:
                waiting[number]()
            rows.length = start
            calls.run(layer, number)
            stop = min(start + chunk, len(tokens))
            free.append(sink.part(layer, start, buffer[start:stop]))
            done += stop - start
            if progress and done // model.layers > told:
                progress(done // model.layers - told)
                told = done // model.layers
        sink.whole(layer, buffer)

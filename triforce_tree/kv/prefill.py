"""Prompts into the full cache, one sequence at a time, in chunks."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kv.indexed import in_halves, joined, selected_attention
from triforce_tree.kv.recurrent_states import PromptPass, RecurrentStates
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.hidden_states import hidden_states
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.running_forward import ChunkPass, IndexedPass
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress

# Fewest queries of one attention call under a window.
_BLOCK = 512
# Tokens of a forward times those before it, at most; it holds for forwards of so many tokens. 4,096 tokens
# after 36,864 take a fifth of a second with 8 billion parameters on an H200.
_MOST_SEEN, _LEAST_FORWARD, _LARGE = 4096 * 36_864, 2048, 4096


class PromptCache:
    """Lets a prefill write into one sequence of a :class:`KVStore` without a copy.

    Args:
        store: keys and values.
        sequence: which of its sequences.
        states: of recurrent layers, if there are any.
        length: tokens that it has already; 0 clears the states of recurrent layers.

    Attributes:
        length: tokens that are in the cache.
    """

    def __init__(
        self, store: KVStore, sequence: int, states: RecurrentStates | None = None, length: int = 0
    ) -> None:
        self.store, self.sequence, self.length = store, sequence, length
        self._seen_slots = 0  # of the running forward
        self.recurrent: ChunkPass | None = None
        if states is not None:
            if not length:
                states.clear(sequence)
            self.recurrent = PromptPass(states, sequence)

    def positions(self, count: int) -> Tensor:
        return torch.arange(self.length, self.length + count, device=self.store.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        stop = self.length + k.shape[2]
        params = self.store.layers[layer].checked(params)
        keys, values = self.store.append(layer, self.sequence, self.length, k, v)
        if params.selected is not None:
            return selected_attention(q, keys, values, params, self.visible(q.shape[2]))
        # Layers that share the keys of another layer may get only the last queries.
        return windowed_attention(q, keys, values, params, stop - q.shape[2]).transpose(1, 2)

    @property
    def indexed(self) -> IndexedPass | None:
        return None if self.store.index_layers is None else self

    def visible(self, queries: int) -> Tensor:
        """See ``IndexedPass``; the slots are those of the tokens so far."""
        self._seen_slots = count = self.length + queries
        return torch.ones(1, queries, count, dtype=torch.bool, device=self.store.device).tril(self.length)

    def index_keys(self, layer: int, new: Tensor, first: int) -> Tensor:
        """See ``IndexedPass``."""
        assert self.store.index_layers is not None
        at, start = self.store.index_layers + layer, self.length + first
        self.store.append(at, self.sequence, start, *in_halves(new))
        # Keys of later tokens of the chunk are not written yet; the mask hides them.
        k, v = (part[self.sequence][None, :, : self._seen_slots] for part in self.store.layers[at].kv)
        return joined(k, v)

    def advance(self, count: int) -> None:
        self.length += count


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, position: int) -> Tensor:
    """Computes ``causal_attention``, under a window in blocks, so that few hidden keys are scored.

    Args:
        q: ``[B, H_q, T, D]``, from ``position`` on.
        k, v: ``[B, H_kv, S, D]``, of which the last T are the queries' own; all that a window shows.

    Returns:
        ``[B, H_q, T, D]``.
    """
    count, before = q.shape[2], k.shape[2] - q.shape[2]
    window = params.window
    parts = []
    stop = 0
    while (start := stop) < count:
        first = 0
        if window is None:
            stop = count
        elif params.chunked:
            # All queries of a block are in one chunk, which hides nothing of itself.
            inside = (position + start) % window
            first, stop = before + start - inside, min(count, start + window - inside)
        else:
            first, stop = max(0, before + start - window + 1), min(count, start + max(window, _BLOCK))
        queries, seen = q[:, :, start:stop], [t[:, :, first : before + stop] for t in (k, v)]
        out = causal_attention(
            queries,
            *seen,
            scale=params.scale,
            window=None if params.chunked else window,
            softcap=params.softcap,
            sinks=params.sinks,
        )
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def chunk_tokens(chunk: int | None, device: torch.device) -> int:
    """Returns ``chunk`` if it is given, else the default chunk of prefill for the device, in tokens."""
    return chunk or (4096 if device.type == "cuda" else 1024)


def forward_end(start: int, stop: int, chunk: int) -> int:
    """Returns where a forward of a prefill ends that begins at position ``start``, at most ``stop``.

    It has ``chunk`` tokens, and half as many wherever they would attend to twice as many: sequences beside it
    wait for each forward. The position alone decides, so that a prefill with pauses has the same forwards.
    Whole chunks end at the same positions as without this.
    """
    size = chunk
    while _LEAST_FORWARD < size <= _LARGE and start * size > _MOST_SEEN:
        size //= 2
    return min(start + size, stop)


def prefill(
    model: HFModel,
    cache: PromptCache,
    tokens: list[int],
    chunk: int,
    progress: Progress | None,
    start: int = 0,
    features: Features | None = None,
) -> None:
    """Stores keys, values and states of ``tokens`` for one sequence.

    Args:
        cache: of the sequence, which holds the first ``start`` tokens.
        chunk: most tokens of a forward, see :func:`forward_end`.
        progress: called with the tokens of each forward.
        features: where hidden states are kept for the drafter, if it reads any.
    """
    if features is not None:
        features.begin(cache.sequence, start)
    reads: AbstractContextManager[dict[int, Tensor]] = nullcontext(dict[int, Tensor]())
    if features is not None:
        reads = hidden_states(model.running, decoder_layers(model.running), features.layers)
    with reads as hidden:
        first = start
        while first < len(tokens):
            part = tokens[first : forward_end(first, len(tokens), chunk)]
            model.feed(part, cache, every_state=features is not None)
            if features is not None:
                features.feed(cache.sequence, first, hidden)
            if progress:
                progress(len(part))
            first += len(part)

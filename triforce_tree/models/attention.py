"""The hook in transformers' attention: attention modules of model copies call the attention of the running
forward.

There is no model code here: transformers' attention interface calls one function in every layer, which passes
queries, keys and values on to the KV cache or the view of the forward that runs in this thread.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.models.recurrent.running import ChunkPass

ATTENTION = "triforce_tree"
"""The attention implementation of copies of models that compute for us."""


class Attend(Protocol):
    """The attention function of one forward."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """Store the new keys and values of ``layer``, and compute its attention.

        Args:
            q, k, v: ``[B, H_q, T, D]``, ``[B, H_kv, T, D]`` and ``[B, H_kv, T, D_v]``; q and k rotated.

        Returns:
            ``[B, T, H_q, D_v]``.
        """


class RunningAttention(threading.local):
    """The attention of the forward that runs in this thread.

    It is not a keyword of the forward, because some families' layers do not pass keywords on.

    Attributes:
        attend: computes it; None outside a forward.
        layers: indices of the layers with attention, in their order, for layers that do not know their own
            index (compiled layers share code).
        count: calls so far.
        called: the attention modules that have attended, by layer; compiled layers are not included.
    """

    attend: Attend | None = None
    layers: Sequence[int] = ()
    count = 0
    called: dict[int, nn.Module]

    def next(
        self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, module: nn.Module | None = None
    ) -> Tensor:
        """Returns the attention of the forward's next layer; ``module`` is the layer's module if it is known;
        see :class:`Attend`.
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


running_attention = RunningAttention()


@contextmanager
def attending(attend: Attend, layers: Sequence[int] = ()) -> Iterator[dict[int, nn.Module]]:
    """Returns a context in which the attention modules of model copies call ``attend``; yields the modules
    that have called it, by layer.
    """
    own = running_attention
    before = own.attend, own.layers, own.count, getattr(own, "called", {})
    own.attend, own.layers, own.count, own.called = attend, layers, 0, {}
    try:
        yield own.called
    finally:
        own.attend, own.layers, own.count, own.called = before


@torch.library.custom_op("triforce_tree::planned_attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Calls the attention of the running forward. An operator takes plain numbers, so 0 means no window or
    softcap, and a negative window means chunks.
    """
    params = AttentionParams(scale, abs(window) or None, softcap or None, sinks, window < 0)
    return running_attention.next(q, k, v, params)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[3])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    triforce_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' modules call in copies of models that compute for us."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, chunked = effective_window(module, sliding_window)
    query = scaled_queries(module, query, triforce_positions)
    # Only the compiler needs the operator; calling it takes longer than a small attention.
    if torch.compiler.is_compiling():
        size = -(window or 0) if chunked else window or 0
        operator = torch.ops.triforce_tree.planned_attend
        out = operator(query, key, value, scale, size, softcap or 0.0, s_aux)
    else:
        params = AttentionParams(scale, window, softcap or None, s_aux, chunked)
        out = running_attention.next(query, key, value, params, module)
    # Some families take views of it, as transformers' own functions return contiguous tensors.
    return out.contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def effective_window(module: nn.Module, window: int | None) -> tuple[int | None, bool]:
    """Returns the window of an attention module (None if it hides nothing), and whether it is a chunk length.

    Args:
        window: window of sliding attention, as the module passes it on. Chunk lengths are only in the
            configuration.
    """
    chunk = getattr(module, "triforce_chunk", None)
    if chunk is None:
        chunk = _chunk_of(module)
    window = chunk or window
    limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if window is None or (limit is not None and window >= limit):
        return None, False
    return window, chunk > 0


def keep_chunks(copy: nn.Module) -> None:
    """Keep the chunk of each attention module of a copy of a model in the module.

    A compiled layer that read its own index would be compiled for this index alone.
    """
    for module in copy.modules():
        if hasattr(module, "layer_idx"):
            settings: Any = module
            settings.triforce_chunk = _chunk_of(module)


def _chunk_of(module: nn.Module) -> int:
    """Returns the length of the chunks within which a module's queries attend; 0 without chunks."""
    config: Any = getattr(module, "config", None)
    kinds: Any = getattr(config, "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    # Phi-4-multimodal calls the layer of an encoder so, counted from the last one.
    if isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] == "chunked_attention":
        return int(config.attention_chunk_size)
    return 0


class KVCache(Protocol):
    """The cache of one forward: it stores the new keys and values, and computes attention over them.

    Attributes:
        recurrent: the states of recurrent layers; None for models without any.
    """

    @property
    def recurrent(self) -> ChunkPass | None: ...

    def positions(self, count: int) -> Tensor:
        """Returns int64 ``[count]``: the positions of the next ``count`` tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """See :class:`Attend`."""

    def advance(self, count: int) -> None:
        """Count ``count`` tokens as stored. Called at the end of their forward."""


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's keys and values: the attention heads, and the window (see ``AttentionParams``)."""

    heads: Heads
    window: int | None = None
    chunked: bool = False

    @property
    def elements(self) -> int:
        """Returns the number of elements of one token's keys and values."""
        return self.heads.row


def _scales(module: nn.Module) -> bool:
    tuned = getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
    return bool(tuned) and not getattr(module, "use_rope", False)


def scales_queries(model: nn.Module) -> bool:
    """Returns whether forwards of a model need ``triforce_positions``, see :func:`take_over_query_scales`."""
    return any(_scales(module) for module in model.modules())


def take_over_query_scales(copy: nn.Module) -> None:
    """Make the attention modules of a copy of a model leave the scale to :func:`scaled_queries`.

    Llama 4 scales the queries of layers without rotary embedding by their positions, which it derives from
    the length of transformers' cache (attn_temperature_tuning). Nodes of a tree have other positions.
    """
    for module in copy.modules():
        if _scales(module):
            settings: Any = module
            settings.triforce_query_scale = settings.floor_scale, settings.attn_scale
            settings.attn_temperature_tuning = False


def scaled_queries(module: nn.Module, query: Tensor, positions: Tensor | None) -> Tensor:
    """Returns queries ``[B, H_q, T, D]``, scaled by a factor of their positions ``[B, T]`` if the module has
    such a factor.

    The factor is ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`` (arXiv 2501.19399).
    """
    settings: Any = getattr(module, "triforce_query_scale", None)
    if settings is None:
        return query
    assert positions is not None, "the model's layers do not pass keywords on"
    floor_scale, attn_scale = settings
    factor = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    scaled: Tensor = query * factor[:, None, :, None]
    return scaled.to(query.dtype)

"""The hook in transformers' attention: attention modules of model copies call the attention of the running
forward.

There is no model code here: transformers' attention interface calls one function in every layer, which passes
queries, keys and values on to the KV cache or the view of the forward that runs in this thread.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.kernels.operators import fake, operator
from triforce_tree.models.running_forward import ATTENTION, ChunkPass, IndexedPass, running


@operator("planned_attend")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Calls the attention of the running forward. An operator takes plain numbers, so 0 means no window or
    softcap, and a negative window means chunks.
    """
    params = AttentionParams(scale, abs(window) or None, softcap or None, sinks, window < 0)
    return running.attention(q, k, v, params)


@fake("planned_attend")
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
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends for transformers' attention modules in copies of models that compute for us."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Chunk lengths are only in the configuration, which ``use_our_attention`` has read.
    chunk: int | None = getattr(module, "triforce_chunk", None)
    window = sliding_window if chunk is None else chunk
    limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if window is not None and limit is not None and window >= limit:
        window = None
    chunked = chunk is not None and window is not None
    if triforce_positions is not None:
        query = scaled_queries(module, query, triforce_positions)
    else:
        assert not hasattr(module, "triforce_query_scale"), "the model's layers do not pass keywords on"
    # Only the compiler needs the operator, whose call takes longer than a small attention.
    if torch.compiler.is_compiling():
        size = -(window or 0) if chunked else window or 0
        out = _attend(query, key, value, scale, size, softcap or 0.0, s_aux)
    else:
        params = AttentionParams(scale, window, softcap or None, s_aux, chunked, indices)
        out = running.attention(query, key, value, params, module)
    # Some families take views of it, as transformers' own functions return contiguous tensors.
    return out.contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def use_our_attention(copy: PreTrainedModel) -> bool:
    """Makes the attention modules of a copy of a model call the running forward.

    Returns:
        whether forwards of the copy need ``triforce_positions``, see :func:`scaled_queries`.
    """
    copy.set_attn_implementation(ATTENTION)
    if copy.config._attn_implementation == ATTENTION:
        for module in copy.modules():
            # Layers that were copied (copy.deepcopy, layer_replication of peft) have their own configuration.
            own: Any = None if isinstance(module, PreTrainedModel) else getattr(module, "config", None)
            if isinstance(own, PreTrainedConfig):
                own._attn_implementation_internal = ATTENTION
    keep_chunks(copy)
    scaled = [module for module in copy.modules() if _scales(module)]
    for module in scaled:
        settings: Any = module
        settings.triforce_query_scale = settings.floor_scale, settings.attn_scale
        settings.attn_temperature_tuning = False
    return bool(scaled)


def keep_chunks(copy: nn.Module) -> None:
    """Keeps in each attention module of a copy the length of the chunks that it attends within; 0 without.

    A compiled layer that read its own index would be compiled for this index alone.
    """
    for module in copy.modules():
        index = getattr(module, "layer_idx", None)
        if index is None:
            continue
        settings: Any = module
        config: Any = getattr(module, "config", None)
        kinds: Any = getattr(config, "layer_types", None) or ()
        # Phi-4-multimodal calls the layer of an encoder so, counted from the last one.
        chunked = isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] == "chunked_attention"
        settings.triforce_chunk = int(config.attention_chunk_size) if chunked else None


class KVCache(Protocol):
    """The cache of one forward: it stores the new keys and values, and computes attention over them.

    Attributes:
        recurrent: the states of recurrent layers; None for models without any.
        indexed: stores the keys of indexers; None for models without any.
    """

    @property
    def recurrent(self) -> ChunkPass | None: ...

    @property
    def indexed(self) -> IndexedPass | None: ...

    def positions(self, count: int) -> Tensor:
        """Returns int64 ``[count]``: the positions of the next ``count`` tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """See :class:`Attend`."""

    def advance(self, count: int) -> None:
        """Counts ``count`` tokens as stored. Called at the end of their forward."""


@dataclass(frozen=True)
class KVShape:
    """Describes one layer's keys and values: the attention heads, and the window (``AttentionParams``).

    Attributes:
        index: whether these are the keys of an indexer, which have no values: the first half of their
            elements is stored as keys, the second half as values.
    """

    heads: Heads
    window: int | None = None
    chunked: bool = False
    index: bool = False

    @cached_property
    def elements(self) -> int:
        """Returns the number of elements of one token's keys and values."""
        return self.heads.row


def _scales(module: nn.Module) -> bool:
    tuned = getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
    return bool(tuned) and not getattr(module, "use_rope", False)


def scales_queries(model: nn.Module) -> bool:
    """Returns whether a model scales queries by their positions."""
    return any(_scales(module) for module in model.modules())


def scaled_queries(module: nn.Module, query: Tensor, positions: Tensor) -> Tensor:
    """Returns queries ``[B, H_q, T, D]``, scaled by a factor of their positions ``[B, T]`` if the module has
    such a factor.

    Llama 4 scales the queries of layers without rotary embedding, and derives their positions from the
    length of transformers' cache (attn_temperature_tuning). Nodes of a tree have other positions. The factor
    is ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`` (arXiv 2501.19399).
    """
    settings: Any = getattr(module, "triforce_query_scale", None)
    if settings is None:
        return query
    floor_scale, attn_scale = settings
    factor = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    scaled: Tensor = query * factor[:, None, :, None]
    return scaled.to(query.dtype)

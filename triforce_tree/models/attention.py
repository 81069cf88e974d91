"""The parameters of a layer's attention, the KV cache that a forward uses, and the shape of its entries."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.models.recurrent.running import ChunkPass


class Attend(Protocol):
    """The attention function of one forward."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """Store the new keys and values of ``layer``, and compute its attention.

        Args:
            q, k, v: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]``, rotated.

        Returns:
            ``[B, T, H_q, D]``.
        """


class RunningAttention(threading.local):
    """The current forward. Layers run in order: a counter gives the index, so compiled layers share code.

    ``layers`` are the indices of the layers with attention.
    """

    attend: Attend | None = None
    layer = 0
    layers: Sequence[int] = ()

    def next(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """The attention of the forward's next layer."""
        if self.attend is None:
            raise RuntimeError("the attention of a StepModel was called outside of it")
        layer = self.layers[self.layer]
        self.layer += 1
        return self.attend(layer, q, k, v, params)


def effective_window(module: nn.Module, window: int | None) -> tuple[int | None, bool]:
    """The window of an attention module, None where it hides nothing, and whether it is a chunk.

    Args:
        window: of sliding attention, as the module passes it on. Chunks are in the configuration alone.
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
    """The length of the chunks that a module's queries see; 0 where they see no chunks."""
    config: Any = getattr(module, "config", None)
    kinds: Any = getattr(config, "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    # Phi-4-multimodal calls the layer of an encoder so, counted from the last one.
    if isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] == "chunked_attention":
        return int(config.attention_chunk_size)
    return 0


class KVCache(Protocol):
    """The cache of one forward: stores the new keys and values, and computes attention over them.

    Attributes:
        recurrent: the states of recurrent layers; None for models without any.
    """

    @property
    def recurrent(self) -> ChunkPass | None: ...

    def positions(self, count: int) -> Tensor:
        """int64 ``[count]``: the positions of the next ``count`` tokens."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        """Store the new keys and values of one layer, and attend to everything that the queries may see.

        Args:
            layer: the attention module; ``layer.layer_idx`` numbers it.
            q, k, v: ``[B, H_q, T, D]``, ``[B, H_kv, T, D]`` and ``[B, H_kv, T, D_v]`` as the model passes
                them.

        Returns:
            ``[B, H_q, T, D_v]``.
        """

    def advance(self, count: int) -> None:
        """Called at the end of a forward: its ``count`` tokens are in the cache."""


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's keys and values: the attention heads, and the window (see ``AttentionParams``)."""

    heads: Heads
    window: int | None = None
    chunked: bool = False

    @property
    def elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.heads.row


def _scales(module: nn.Module) -> bool:
    tuned = getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
    return bool(tuned) and not getattr(module, "use_rope", False)


def scales_queries(model: nn.Module) -> bool:
    """Whether forwards of a model need ``triforce_positions``, see :func:`take_over_query_scales`."""
    return any(_scales(module) for module in model.modules())


def take_over_query_scales(copy: nn.Module) -> None:
    """Make the attention modules of a copy of a model leave the scale to :func:`scaled_queries`.

    Llama 4 scales the queries of layers without rotary embedding by their positions, which it counts from the
    length of transformers' cache (attn_temperature_tuning). Nodes of a tree are at other positions.
    """
    for module in copy.modules():
        if _scales(module):
            settings: Any = module
            settings.triforce_query_scale = settings.floor_scale, settings.attn_scale
            settings.attn_temperature_tuning = False


def scaled_queries(module: nn.Module, query: Tensor, positions: Tensor | None) -> Tensor:
    """Queries ``[B, H_q, T, D]`` by the scale of their positions ``[B, T]``, where the module has one.

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

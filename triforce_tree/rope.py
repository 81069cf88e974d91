"""A model family's own rotary embedding, applied outside its forward."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.length_rope import LengthRope
from triforce_tree.model_copy import shallow_copy


class FamilyRope:
    """Rotates queries and keys exactly as the model's own attention layers do.

    ``rotate`` uses the family's ``apply_rotary_pos_emb`` and rotary module, so interleaved, partial and
    scaled variants come out right. Scaled variants (YaRN) multiply by a constant at every position,
    position 0 included: keys that passed the model at position 0 carry it already, so it is divided out.

    Args:
        model: a transformers causal LM.
        lengths: the choice of frequencies, where they depend on the text's length.

    Raises:
        ValueError: the model has no rotary embedding of a known form.
    """

    def __init__(self, model: PreTrainedModel, lengths: LengthRope | None = None) -> None:
        own = shallow_copy(model)
        if lengths is not None:
            lengths.hold(own)
        embed = getattr(own.base_model, "rotary_emb", None)
        name = type(model).__name__
        if not isinstance(embed, nn.Module):
            raise ValueError(
                f"{name} has no rotary embedding on its base model, so its keys cannot be kept "
                "unrotated; choose a draft model with RoPE"
            )
        self._embed = embed
        self._by_layer_type = "layer_type" in inspect.signature(self._embed.forward).parameters
        self._memo: dict[Any, tuple[Tensor, Tensor]] = {}
        self._memo_key: Tensor | None = None
        self.unrotated: frozenset[int] = frozenset()

    def rotate(self, layer: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate by ``positions`` int64 ``[T]`` what came out of the model at position 0.

        Args:
            layer: the attention module the tensors belong to.
            q, k: ``[B, H, T, D]``.
        """
        if layer.layer_idx in self.unrotated:
            return q, k
        cos, sin = self._tables(layer, positions, q)
        apply = vars(sys.modules[type(layer).__module__])["apply_rotary_pos_emb"]
        rotated: tuple[Tensor, Tensor] = apply(q, k, cos, sin)
        return rotated

    def _tables(self, layer: Any, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._memo_key is not positions:
            # One forward passes the same tensor to every layer.
            self._memo_key, self._memo = positions, {}
        kind = layer.config.layer_types[layer.layer_idx] if self._by_layer_type else None
        if kind not in self._memo:
            more = {"layer_type": kind} if self._by_layer_type else {}
            zero = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
            cos, sin = self._embed(like, positions[None], **more)
            constant, _ = self._embed(like, zero, **more)
            self._memo[kind] = (cos / constant, sin / constant)
        return self._memo[kind]

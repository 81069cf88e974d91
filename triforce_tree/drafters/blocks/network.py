"""The network of a block drafter: fusion of hidden states, and decoder layers over a block of slots."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triforce_tree.drafters.blocks.conditioned import (
    CandidateSelector,
    GroupedConvolution,
    MarkovHead,
    ParentHead,
)
from triforce_tree.drafters.blocks.format import BlockFormat
from triforce_tree.drafters.heads.attention import RmsNorm, attend, rotated, silu_gated
from triforce_tree.drafters.heads.files import HeadWeights

Seen = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Takes the number of a layer, and rotated keys and values of the block, ``[B, H_kv, T, D]`` each. Returns
the keys and values that the block attends to, ``[B, H_kv, S, D]``, and a mask, bool ``[B, T, S]``."""


class BlockNetwork(nn.Module):
    """Fuses hidden states of the target, and computes a block of slots that attends to them.

    In every layer, keys and values of a committed position are projections of its fused hidden state, those
    of a slot are projections of the layer's input. Parameters have the names of a published checkpoint, so
    that ``state_dict`` is one.

    Args:
        format: the configuration.
        size: hidden size of the target.
        vocabulary: size of the target's vocabulary.
        own_embeddings: whether the drafter has embeddings of its own.
        drafted: size of the vocabulary of the drafter's own language model head; None without one.

    Attributes:
        kv_heads, head_dim: sizes of each layer's keys and values.
        parent_head: corrects the logits of a slot by the token before it; None without such a head.
    """

    layers: Any
    _frequencies: Tensor

    def __init__(
        self,
        format: BlockFormat,
        size: int,
        vocabulary: int,
        own_embeddings: bool = False,
        drafted: int | None = None,
    ) -> None:
        super().__init__()
        self.format, config = format, format.layers
        own: int = config.hidden_size
        self.kv_heads, self.head_dim = int(config.num_key_value_heads), int(config.head_dim)
        self.fc = nn.Linear(len(format.inputs) * size, own, bias=False)
        self.hidden_norm = RmsNorm(own, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(format) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(own, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(vocabulary, own) if own_embeddings else None
        self.lm_head = nn.Linear(own, drafted, bias=False) if drafted is not None else None
        self.markov_head: ParentHead | None = None
        self.candidate_selector: ParentHead | None = None
        if format.markov is not None:
            self.markov_head = MarkovHead(*format.markov, vocabulary, drafted or vocabulary, own)
        if format.selector is not None:
            self.candidate_selector = CandidateSelector(
                *format.selector, vocabulary, own, format.logit_scale, format.softcap
            )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self._scaling: float = rotary.attention_scaling
        self.register_buffer("_frequencies", rotary.inv_freq.double(), persistent=False)

    @property
    def parent_head(self) -> ParentHead | None:
        return self.markov_head if self.candidate_selector is None else self.candidate_selector

    @classmethod
    def load(
        cls,
        format: BlockFormat,
        size: int,
        vocabulary: int,
        weights: HeadWeights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "BlockNetwork":
        """Makes the network of a checkpoint.

        Raises:
            ValueError: a tensor is missing, has another shape, or would not be used.
        """
        head = weights.tensors.get("lm_head.weight")
        with torch.device("meta"):
            drafted = None if head is None else len(head)
            network = cls(format, size, vocabulary, "embed_tokens.weight" in weights, drafted)
        taken = {name: weights.take(name, *like.shape) for name, like in network.named_parameters()}
        network.load_state_dict({name: t.to(device, dtype) for name, t in taken.items()}, assign=True)
        # The confidence head changes no distribution, and t2d is the inverse of d2t.
        without_effect = [name for name in weights if name == "t2d" or name.startswith("confidence_head.")]
        weights.refuse_unused([*without_effect, "d2t"])
        network._frequencies = network._frequencies.to(device)
        return network.requires_grad_(False)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Returns the fused hidden states ``[B, T, H]`` of the target's ``[B, T, size]``, one for each of
        ``format.inputs``.
        """
        hidden: Tensor = self.hidden_norm(self.fc(torch.cat(list(states), -1).to(self.fc.weight.dtype)))
        return hidden

    def context(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys before rotation and the values of fused hidden states ``[B, T, H]`` in all layers,
        ``[layers, B, H_kv, T, D]`` each.
        """
        keys, values = zip(*(layer.self_attn.keys_values(fused) for layer in self.layers), strict=True)
        return torch.stack(keys), torch.stack(values)

    def first_states(self, batch: int) -> Tensor:
        """Returns the states of the parent head at the root, ``[B, 1, state_size]``."""
        head = self.parent_head
        return self.fc.weight.new_zeros(batch, 1, 0 if head is None else head.state_size)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, fp32 ``[B, T, D]``, of positions in the text, int64 ``[B, T]``."""
        # In fp32 the angles of position 1,000,000 would be wrong by up to 0.06.
        angles = positions.double()[..., None] * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scaling).float(), (angles.sin() * self._scaling).float()

    def forward(self, embedded: Tensor, positions: Tensor, seen: Seen) -> Tensor:
        """Returns what the language model head reads for each slot, ``[B, T, H]``.

        Args:
            embedded: ``[B, T, H]``, embeddings of the newest token and of mask tokens.
            positions: int64 ``[B, T]``, their positions in the text.
        """
        cos, sin = self.angles(positions)
        hidden = embedded
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, partial(seen, i))
        normed: Tensor = self.norm(hidden)
        return normed


def near(format: BlockFormat, layer: int, slots: Tensor, positions: Tensor) -> Tensor:
    """Returns whether each slot of a block may attend to each position by their distance, bool ``[B, T, S]``.

    Args:
        slots: int64 ``[B, T]``, the positions of the slots.
        positions: int64 ``[B, S]``.
    """
    window, distance = format.windows[layer], slots[:, :, None] - positions[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if window is not None and format.anchored:
        allowed = (slots[:, :1] - positions < window)[:, None].expand_as(distance)
    elif window is not None:
        allowed = distance.abs() < window
    return allowed & (distance >= 0) if format.causal[layer] else allowed


class BlockLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, format: BlockFormat) -> None:
        super().__init__()
        config = format.layers
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        if format.convolution is not None:
            self.attention_conv: GroupedConvolution | None
            self.mlp_conv: GroupedConvolution | None
            self.attention_conv = GroupedConvolution(config.hidden_size, *format.convolution)
            self.mlp_conv = GroupedConvolution(config.hidden_size, *format.convolution)
        else:
            self.attention_conv = self.mlp_conv = None

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        attention = partial(self.self_attn, cos=cos, sin=sin, seen=seen)
        hidden = hidden + _convolved(self.attention_conv, attention, self.input_layernorm(hidden))
        return hidden + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))


def _convolved(convolution: GroupedConvolution | None, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns a part of a layer applied to ``x``, between convolutions if there are any."""
    if convolution is None:
        return part(x)
    before, after = convolution.corrections(x)
    return convolution.convolve(1, part(convolution.convolve(0, x, before)), after)


class BlockAttention(nn.Module):
    """Attention with normalised queries and keys."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, int(config.head_dim)
        self.kv_heads = int(config.num_key_value_heads)
        widths = config.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        bias = bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(size, widths[0], bias=bias)
        self.k_proj = nn.Linear(size, widths[1], bias=bias)
        self.v_proj = nn.Linear(size, widths[1], bias=bias)
        self.o_proj = nn.Linear(widths[0], size, bias=bias)
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys before rotation and values, ``[B, H_kv, T, D]`` each, of fused hidden states or of
        the inputs of slots, ``[B, T, H]``.
        """
        return self.k_norm(self._heads(self.k_proj(hidden))), self._heads(self.v_proj(hidden))

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        keys, values = self.keys_values(hidden)
        queries, keys = rotated(self.q_norm(self._heads(self.q_proj(hidden))), keys, cos, sin)
        attended = attend(queries, *seen(keys, values), self.head_dim**-0.5)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads


class GatedMLP(nn.Module):
    def __init__(self, size: int, middle: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(size, middle, bias=False),
            nn.Linear(size, middle, bias=False),
        )
        self.down_proj = nn.Linear(middle, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_gated(self.gate_proj(x), self.up_proj(x)))
        return out

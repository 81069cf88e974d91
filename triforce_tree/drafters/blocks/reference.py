"""A plain forward of a block drafter in fp32 on the CPU, which the loaded network is compared with."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from triforce_tree.drafters.blocks.format import BlockFormat
from triforce_tree.drafters.heads.files import HeadWeights


def reference_hidden(
    weights: HeadWeights, format: BlockFormat, embedded: Tensor, states: Sequence[Tensor]
) -> Tensor:
    """Returns what the language model head reads for each slot, fp32 ``[T, H]``.

    Args:
        weights: tensors by their names in z-lab's layout.
        format: the configuration.
        embedded: fp32 ``[T, H]``, embeddings of the slots.
        states: fp32 ``[C, size]`` each, the target's hidden states at positions 0 to C - 1, before the block.
    """
    config, slots = format.layers, len(embedded)

    def weight(name: str) -> Tensor:
        return weights.tensors[name].float()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight(f"{name}.weight"), config.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        bias = f"{name}.bias"
        return F.linear(x, weight(f"{name}.weight"), weight(bias) if bias in weights else None)

    context = norm(linear(torch.cat(list(states), -1), "fc"), "hidden_norm")
    positions = torch.arange(len(context) + slots)
    cos, sin = LlamaRotaryEmbedding(config)(context, positions[None])
    query, key = positions[-slots:, None], positions
    hidden = embedded
    for i, (causal, window) in enumerate(zip(format.causal, format.windows, strict=True)):
        own = f"layers.{i}."
        x = norm(hidden, f"{own}input_layernorm")
        # All positions are projected to queries too, for the sake of one call; only those of slots are used.
        both = torch.cat([context, x])
        q, k, v = (
            linear(both, f"{own}self_attn.{n}_proj").view(1, len(both), -1, config.head_dim) for n in "qkv"
        )
        q, k = norm(q, f"{own}self_attn.q_norm"), norm(k, f"{own}self_attn.k_norm")
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mask = (key <= query) if causal else torch.ones(slots, len(both), dtype=torch.bool)
        if window is not None:
            mask = mask & ((query - key).abs() < window)
        out = F.scaled_dot_product_attention(q[:, :, -slots:], k, v, mask, enable_gqa=True)
        hidden = hidden + linear(out.transpose(1, 2).flatten(2)[0], f"{own}self_attn.o_proj")
        x = norm(hidden, f"{own}post_attention_layernorm")
        gated = F.silu(linear(x, f"{own}mlp.gate_proj")) * linear(x, f"{own}mlp.up_proj")
        hidden = hidden + linear(gated, f"{own}mlp.down_proj")
    return norm(hidden, "norm")

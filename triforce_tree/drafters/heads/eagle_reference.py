"""A plain forward of an EAGLE-3 head in fp32 on the CPU, which the loaded head is compared with."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from triforce_tree.drafters.heads.eagle_format import EagleFormat
from triforce_tree.drafters.heads.files import HeadWeights


def reference_logits(
    weights: HeadWeights,
    format: EagleFormat,
    embedded: Tensor,
    states: Sequence[Tensor],
    head: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Returns the logits over the draft vocabulary, fp32 ``[V_draft]``, after the last of T pairs.

    Args:
        weights: tensors by their names in the layout of SafeAILab/EAGLE.
        format: the configuration.
        embedded: fp32 ``[T, H]``, embeddings of the tokens.
        states: fp32 ``[T, hidden_size]`` each, the target's hidden states.
        head: the target's logits for an fp32 state ``[hidden_size]``, for a head without a matrix of its own.
    """
    layer = format.layer

    def weight(name: str) -> Tensor:
        return weights.tensors[name].float()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight(name), layer.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        bias = f"{name}_proj.bias"
        return F.linear(x, weight(f"{name}_proj.weight"), weight(bias) if bias in weights else None)

    def computed(own: str, x: Tensor, residual: Tensor) -> Tensor:
        q, k, v = (linear(x, f"{own}self_attn.{name}") for name in "qkv")
        heads = q.shape[-1] // layer.num_attention_heads
        q, k, v = (part.view(1, len(x), -1, heads).transpose(1, 2) for part in (q, k, v))
        if f"{own}self_attn.q_norm.weight" in weights:
            q, k = norm(q, f"{own}self_attn.q_norm.weight"), norm(k, f"{own}self_attn.k_norm.weight")
        with torch.device("cpu"):
            angles = LlamaRotaryEmbedding(layer)(x, torch.arange(len(x))[None])
        q, k = apply_rotary_pos_emb(q, k, *angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = residual + linear(out.transpose(1, 2).flatten(2)[0], f"{own}self_attn.o")
        x = norm(hidden, f"{own}post_attention_layernorm.weight")
        return hidden + linear(
            F.silu(linear(x, f"{own}mlp.gate")) * linear(x, f"{own}mlp.up"), f"{own}mlp.down"
        )

    if format.fc_norm:
        states = [norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
    joined = torch.cat(list(states), -1)
    if format.norm_before_fc:
        joined = norm(joined, "input_norm.weight")
    hidden = F.linear(joined, weight("fc.weight"))
    normed = norm(hidden, "midlayer.hidden_norm.weight")
    both = torch.cat([norm(embedded, "midlayer.input_layernorm.weight"), normed], -1)
    hidden = computed("midlayer.", both, normed if format.norm_before_residual else hidden)
    for n in range(1, format.layers):
        hidden = computed(f"layers.{n}.", norm(hidden, f"layers.{n}.input_layernorm.weight"), hidden)
    last = norm(hidden[-1], "norm.weight")
    if head is None:
        return F.linear(last, weight("lm_head.weight"))
    return head(last).float().cpu()

"""A draft model as transformers has it, with attention of our own for training, which is not compiled."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

_NAME = "train_pair"


def llama(hidden: int, layers: int, heads: int, head_dim: int, mlp: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=head_dim, intermediate_size=mlp, vocab_size=4096, max_position_embeddings=131_072,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
    )  # fmt: skip


def new_model(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """Returns a model with weights in fp32; those that write to the residual stream are smaller in deeper
    models.
    """
    config._attn_implementation = _NAME
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / ((2 * config.num_hidden_layers) ** 0.5 if last else 1))
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model.to(device)


@torch.compiler.disable
def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float,
    sinks: tuple[int, Tensor, Tensor, Tensor], **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as with the draft's streaming cache.

    Args:
        q, k, v: ``[B, H, T, D]``.
        sinks: number of sinks among the first tokens; a mask ``[T, phases * number + T - number]``; cos and
            sin ``[1, phases, D]`` that turn their keys to where the sinks are in each phase.
    """
    count, visible, cos, sin = sinks
    first = k[:, :, None, :count].float()
    turned = first * cos[0][:, None] + rotate_half(first) * sin[0][:, None]  # [B, H, phases, count, D]
    k = torch.cat((turned.to(k.dtype).flatten(2, 3), k[:, :, count:]), dim=2)
    v = torch.cat((*[v[:, :, :count]] * cos.shape[1], v[:, :, count:]), dim=2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_NAME, attend)

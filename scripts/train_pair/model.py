"""The two models of the pair, as transformers has them, with attention of our own for training.

Everything but attention is compiled, layer by layer. The target runs on one row of batch x length tokens, so
that one compilation serves every context length with as many tokens; attention separates the rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

_NAME = "train_pair"
# The fastest first; flash attention where cuDNN refuses a shape.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def llama(hidden: int, layers: int, heads: int, head_dim: int, mlp: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=head_dim, intermediate_size=mlp, vocab_size=4096, max_position_embeddings=131_072,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
    )  # fmt: skip


# Target and draft; and tiny ones for a run on any machine.
SHAPES = (llama(384, 6, 3, 128, 1152, 5e6), llama(256, 2, 4, 64, 512, 1e4))
TOY_SHAPES = (llama(64, 2, 1, 64, 128, 5e6), llama(32, 1, 1, 32, 64, 1e4))


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


def hidden_states(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Returns the last hidden states ``[B, L, hidden]`` of tokens ``[B, L]``, after the final norm."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)[None]
    flat = model.model(tokens.view(1, -1), position_ids=positions, use_cache=False, batch=batch)
    return flat.last_hidden_state.view(batch, length, -1)


@torch.compiler.disable
def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, batch: int = 1,
    sinks: tuple[int, Tensor, Tensor, Tensor] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within each of ``batch`` rows of a flat one; or the draft's streaming cache.

    Args:
        q, k, v: ``[1, H, batch * L, D]``; with ``sinks`` ``[B, H, T, D]``.
        sinks: number of sinks among the first tokens; a mask ``[T, phases * number + T - number]``; cos and
            sin ``[1, phases, D]`` that turn their keys to where the sinks are in each phase.
    """
    if sinks is None:
        q, k, v = (x[0].unflatten(1, (batch, -1)).transpose(0, 1) for x in (q, k, v))
        if q.is_cuda:
            with sdpa_kernel(_BACKENDS, set_priority=True):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    count, visible, cos, sin = sinks
    first = k[:, :, None, :count].float()
    turned = first * cos[0][:, None] + rotate_half(first) * sin[0][:, None]  # [B, H, phases, count, D]
    k = torch.cat((turned.to(k.dtype).flatten(2, 3), k[:, :, count:]), dim=2)
    v = torch.cat((*[v[:, :, :count]] * cos.shape[1], v[:, :, count:]), dim=2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_NAME, attend)


def nll(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Returns negative log-likelihood ``[T]`` fp32 of ``labels`` ``[T]`` given last hidden states ``[T,
    hidden]``.
    """
    return F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="none")

"""Sparsity and locality of attention (TriForce, sections 3.1 and 3.2), by transformers' own forwards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from scripts.benchmarks.paper.policies import attention_by
from triforce_tree.models.recurrent.pass_through import CACHE

_CHUNK = 1024


def sees_everything(model: PreTrainedModel) -> bool:
    """Returns whether every layer is an attention layer that sees all tokens before its own."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    # Some older configurations name no kinds of layers, but a window for all of them.
    windowed = kinds is None and getattr(config, "sliding_window", None) is not None
    return not windowed and set(kinds or ()) <= {"full_attention"}


@torch.no_grad()
def recovered(
    model: PreTrainedModel, tokens: Sequence[int], prompt: int, budget: int
) -> tuple[list[float], list[list[float]]]:
    """Measures the attention to the ``budget`` tokens that the prompt's last token attends to most.

    Args:
        model: for which :func:`sees_everything` holds.
        tokens: a text; those after the first ``prompt`` are given, not drawn.
        budget: tokens, chosen for each query head alone.

    Returns:
        (for each layer, the share of the last prompt token's attention; for each later token and layer, the
        share of its attention to the prompt). Means over query heads.
    """
    sparse: dict[int, float] = {}
    local: dict[int, Tensor] = {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        heads, queries, seen = k.shape[1], q.shape[2], k.shape[2]
        scores = q[0].unflatten(0, (heads, -1)).float() @ k[0, :, None].float().transpose(-1, -2) * scaling
        at = torch.arange(seen, device=q.device)
        later = at > torch.arange(seen - queries, seen, device=q.device)[:, None]
        probs = scores.masked_fill(later, -torch.inf).softmax(-1)  # [H, G, T, S]
        top = probs[..., :1, :prompt].topk(min(budget, prompt), dim=-1).indices
        kept = probs.gather(-1, top.expand(*probs.shape[:-1], -1)).sum(-1)  # [H, G, T]
        sparse[module.layer_idx] = float(kept[..., 0].mean())
        local[module.layer_idx] = (kept / probs[..., :prompt].sum(-1))[..., 1:].mean((0, 1)).cpu()
        out = probs.to(v.dtype) @ v[0, :, None]
        return out.flatten(0, 1).transpose(0, 1)[None], None

    cache = DynamicCache(config=model.config)

    def feed(part: Sequence[int]) -> None:
        ids = torch.tensor([list(part)], device=model.device)
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})

    for first in range(0, prompt - 1, _CHUNK):
        feed(tokens[first : min(first + _CHUNK, prompt - 1)])
    with attention_by(model, attend):
        feed(tokens[prompt - 1 :])
    layers = sorted(sparse)
    return [sparse[i] for i in layers], torch.stack([local[i] for i in layers], 1).tolist()

"""A small draft model as it is trained: a Llama that reads the text as while decoding (StreamingLLM).

Its cache keeps ``sinks`` first tokens and between ``window`` and 2 ``window`` newest ones, of which blocks of
``window`` leave. Positions are relative to the cache. A segment runs in one pass, with the sinks and a
window before it. After k blocks have left, the sinks are k blocks further on, seen from the window, so each
phase has its own copy of the sinks' keys, turned by k blocks.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import rotate_half

from scripts.train_drafters.segments import Cache, Segments
from scripts.train_drafters.teacher import Teacher

_NAME = "train_drafters"
_THETA = 10_000.0
# Standard deviation of the weights when a training begins; that of layers behind which a residual is added is
# divided by the root of their number.
_SPREAD, _EMBEDDED = 0.02, 0.04


class DraftTraining(nn.Module):
    """A Llama whose embedding, tied to its head, begins as the target's head on its principal components.

    With E ``[V, H]`` the target's head times the weights of its last norm, and P ``[H, d]`` the first
    eigenvectors of E^T E, the rows of E P keep what differs most between tokens.

    Args:
        teacher: the target.
        hidden, layers, head_dim, mlp: sizes of the draft.
        cache: what it keeps.

    Attributes:
        depths, every, features: as those of other drafters; it reads no hidden states of the target.

    Raises:
        ValueError: ``hidden`` is not a multiple of ``head_dim``.
    """

    depths = every = 1
    features = ()

    def __init__(
        self, teacher: Teacher, hidden: int, layers: int, head_dim: int, mlp: int, cache: Cache
    ) -> None:
        if hidden % head_dim:
            raise ValueError(
                f"--hidden {hidden} is not a multiple of --head-dim {head_dim}; choose one that is"
            )
        super().__init__()
        self.cache, heads = cache, hidden // head_dim
        ends = {
            f"{name}_token_id": getattr(teacher.model.config, f"{name}_token_id") for name in ("bos", "eos")
        }
        config = LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, head_dim=head_dim, intermediate_size=mlp,
            vocab_size=teacher.head.shape[0], max_position_embeddings=131_072, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": _THETA}, tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"], dtype="float16", **ends,
        )  # fmt: skip
        config._attn_implementation = _NAME
        self.model = LlamaForCausalLM(config)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=_SPREAD / ((2 * layers) ** 0.5 if last else 1))
        with torch.no_grad():
            weighed = teacher.head.float() * teacher.last_norm.float()
            kept = weighed @ torch.linalg.eigh(weighed.mT @ weighed).eigenvectors.flip(1)[:, :hidden]
            self.head[:, : kept.shape[1]].copy_(kept * (_EMBEDDED / kept.std()))
        self.to(teacher.head.device)
        if teacher.head.is_cuda:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    @property
    def head(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    def forward(self, tokens: Tensor, hidden: dict[int, Tensor], segments: Segments) -> list[Tensor]:
        """Returns the states ``[N, L, d]`` that the language model head reads for the token at i + 2.

        Args:
            tokens: int64 ``[R, T]``.
            hidden: is not read.
        """
        cache, own = self.cache, segments.positions + 1
        # Positions of the tokens behind the sinks: a window, and the segment.
        first = (own[:, :1] - cache.window).clamp_min(cache.sinks)
        run = cache.window + segments.length
        places = torch.cat(
            [segments.kept[:, : cache.sinks], first + torch.arange(run, device=tokens.device)], 1
        )
        starts = torch.arange(0, run - cache.window, cache.window, device=tokens.device)[None]
        turns = self.model.model.rotary_emb(torch.zeros(1, device=tokens.device), position_ids=starts)
        sinks = (cache.sinks, streaming_mask(cache, run, tokens.device), *turns)
        read = tokens[segments.rows, places.clamp_max(tokens.shape[1] - 1)]
        made = self.model.model(read, use_cache=False, sinks=sinks).last_hidden_state
        at = torch.where(own < cache.sinks, own, own - first + cache.sinks)
        return [made.gather(1, at[..., None].expand(-1, -1, made.shape[-1]))]

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model.config.to_dict()
        return found

    def published(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def complete(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Adds the tokenizer to a folder with the model."""
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def streaming_mask(cache: Cache, length: int, device: torch.device) -> Tensor:
    """Returns which tokens of [sinks; run] see which columns of [copies of the sinks; run], in a run of
    ``length`` tokens, more than a window.
    """
    at = torch.arange(-cache.sinks, length, device=device)  # place after the sinks; sinks are negative
    phase = (torch.div(at, cache.window, rounding_mode="floor") - 1).clamp(min=0)
    column = torch.arange(length, device=device)
    window = (column <= at[:, None]) & (column >= phase[:, None] * cache.window)
    phases = -(-length // cache.window) - 1
    copy = torch.arange(phases, device=device).repeat_interleave(cache.sinks)
    sink = torch.arange(cache.sinks, device=device).repeat(phases) - cache.sinks
    return torch.cat([(copy == phase[:, None]) & (sink <= at[:, None]), window], dim=1)


@torch.compiler.disable
def _attend(
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


AttentionInterface.register(_NAME, _attend)

"""The network of an EAGLE-3 head: fusion of three hidden states, one decoder layer, language model head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from triforce_tree.drafters.heads.files import take
from triforce_tree.drafters.token_map import ABSENT

# Rotary embeddings whose frequencies do not depend on the length of the sequence.
_ROPES = ("default", "linear", "llama3", "yarn")


class EagleLayer:
    """The network of an EAGLE-3 head (github.com/SafeAILab/EAGLE, ``cnets.py``).

    Args:
        weights: tensors by their published names.
        config: contents of ``config.json``.
        folder: the folder that messages name.
        embeddings: the target's input embeddings, used if ``weights`` has none.
        head: the target's language model head, used if ``weights`` has none.
        size, vocabulary: the target's hidden size and vocabulary size.
        device, dtype: device and dtype of the computation.

    Attributes:
        weight_bytes: bytes of the head's own weights on the device.

    Raises:
        ValueError: weights are missing or have other shapes, or the rotary embedding is not supported.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: Mapping[str, Any],
        folder: Path,
        embeddings: nn.Module,
        head: nn.Module,
        size: int,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        try:
            llama: Any = LlamaConfig.from_dict(dict(config))
        except Exception as error:  # third-party code may raise anything on values of unknown origin
            why = " ".join(str(error).split())[:160]
            raise ValueError(f"config.json in {str(folder)!r} cannot be used ({why})") from error

        held: dict[str, int] = {}

        def get(name: str, *shape: int) -> Tensor:
            weight = take(weights, name, shape, folder).to(device, dtype)
            held[name] = weight.nbytes
            return weight

        own = llama.hidden_size
        self.heads: int = llama.num_attention_heads
        self.kv_heads: int = llama.num_key_value_heads
        self.head_dim: int = llama.head_dim
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads in {str(folder)!r} are no multiple of {self.kv_heads} KV heads"
            )
        self.scale: float = self.head_dim**-0.5
        self.fc = get("fc.weight", own, 3 * size)
        layer = "midlayer."
        rows = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        parts = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
        self._widths = rows
        self.qkv = torch.cat([get(f"{p}.weight", n, 2 * own) for p, n in zip(parts, rows, strict=True)])
        self.bias = None
        if f"{parts[0]}.bias" in weights:
            self.bias = torch.cat([get(f"{p}.bias", n) for p, n in zip(parts, rows, strict=True)])
        self.out = get(f"{layer}self_attn.o_proj.weight", own, rows[0])
        self.gate_up = torch.cat([get(f"{layer}mlp.{name}_proj.weight", -1, own) for name in ("gate", "up")])
        self.down = get(f"{layer}mlp.down_proj.weight", own, len(self.gate_up) // 2)

        def norm(name: str) -> LlamaRMSNorm:
            layer_norm = LlamaRMSNorm(own, llama.rms_norm_eps)
            layer_norm.weight = nn.Parameter(get(name, own), requires_grad=False)
            return layer_norm

        self.input_norm, self.hidden_norm = (
            norm(f"{layer}input_layernorm.weight"),
            norm(f"{layer}hidden_norm.weight"),
        )
        self.mlp_norm, self.norm = norm(f"{layer}post_attention_layernorm.weight"), norm("norm.weight")
        self._embed(weights, own, size, vocabulary, embeddings, get)
        self._vocabulary(weights, own, size, vocabulary, head, folder, get)
        self.weight_bytes = sum(held.values())
        for table in (self._columns, self._absent):
            self.weight_bytes += 0 if table is None else table.nbytes
        rope = llama.rope_parameters["rope_type"]
        if rope not in _ROPES:
            raise ValueError(
                f"rope_type={rope!r} in {str(folder)!r} is not supported; known are {', '.join(_ROPES)}"
            )
        self._rotary = LlamaRotaryEmbedding(llama).to(device)

    def _embed(self, weights: Any, own: int, size: int, vocabulary: int, shared: nn.Module, get: Any) -> None:
        self._embeddings: Any = shared
        if "embed_tokens.weight" in weights or own != size:
            table = get("embed_tokens.weight", vocabulary, own)
            self._embeddings = lambda ids: F.embedding(ids, table)

    def _vocabulary(
        self, weights: Any, own: int, size: int, vocabulary: int, shared: nn.Module, folder: Path, get: Any
    ) -> None:
        self._head: Any = shared
        self._columns: Tensor | None = None
        self._absent: Tensor | None = None
        if "lm_head.weight" not in weights and own == size:
            return
        head = get("lm_head.weight", -1, own)
        self._head = lambda x: F.linear(x, head)
        if "d2t" not in weights:
            get("lm_head.weight", vocabulary, own)
            return
        # Draft token i has id i + d2t[i] in the target's vocabulary.
        ids = take(weights, "d2t", (len(head),), folder).long() + torch.arange(len(head))
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"d2t in {str(folder)!r} does not map {len(head)} draft tokens to different ones of the "
                f"target's {vocabulary}; give heads that were trained for this target"
            )
        columns = torch.full((vocabulary,), -1)
        columns[ids] = torch.arange(len(ids))
        self._columns, self._absent = columns.clamp_min(0).to(head.device), (columns < 0).to(head.device)

    def angles(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines, fp32 ``[count, head_dim]``, of positions 0 to ``count - 1``."""
        positions = torch.arange(count, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
        return cos[0], sin[0]

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Projects three hidden states ``[B, T, hidden_size]`` of the target to one ``[B, T, H]``."""
        return F.linear(torch.cat(list(states), -1).to(self.fc.dtype), self.fc)

    def project(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries ``[B, H_q, T, D]``, keys and values ``[B, H_kv, T, D]``, before rotation.

        Args:
            tokens: int64 ``[B, T]``, the token after each position of ``hidden``.
            hidden: ``[B, T, H]``, fused hidden states of the target or outputs of this layer.
        """
        embedded = self.input_norm(self._embeddings(tokens).to(hidden.dtype))
        both = F.linear(torch.cat([embedded, self.hidden_norm(hidden)], -1), self.qkv, self.bias)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in both.split(self._widths, -1))
        return q, k, v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output ``[B, T, H]``.

        Args:
            hidden: ``[B, T, H]``, the input of the layer.
            attended: ``[B, H_q, T, D]``, the output of its attention.
        """
        hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), self.out)
        gate, up = F.linear(self.mlp_norm(hidden), self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits ``[B, T, V]`` over the target's vocabulary from the layer's output ``[B, T, H]``."""
        logits: Tensor = self._head(self.norm(hidden))
        if self._columns is None or self._absent is None:
            return logits
        return logits.index_select(2, self._columns).float().masked_fill_(self._absent, ABSENT)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embeddings to queries or keys ``[B, H, T, D]``; cosines and sines are ``[B, T, D]``."""
    result: Tensor = x.float() * cos[:, None] + rotate_half(x.float()) * sin[:, None]
    return result.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns attention outputs ``[B, H_q, T, D]``, finite even if the mask allows no slot.

    Args:
        q: ``[B, H_q, T, D]``, rotated.
        k, v: ``[B, H_kv, S, D]``, keys rotated.
        mask: bool ``[B, T, S]``, True where attention is allowed.
    """
    groups = q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (-1, groups))  # [B, H_kv, G, T, D]
    scores = torch.matmul(grouped, k[:, :, None].mT).float() * scale
    probs = scores.masked_fill(~mask[:, None, None], ABSENT).softmax(-1).to(v.dtype)
    return torch.matmul(probs, v[:, :, None]).flatten(1, 2)

"""The network of an EAGLE-3.1 head as it is trained (arXiv 2503.01840, 2605.09992).

Its arithmetic is that of ``triforce_tree/drafters/heads/eagle_layer.py``, which fuses weights and keeps no
gradients. Training unrolls the head over its own outputs (training-time test, EAGLE-3, section 3.1).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scripts.train_drafters.segments import Cache, Rotary, Segments, StreamingAttention
from scripts.train_drafters.teacher import Teacher

_THETA = 10_000.0


class EagleNetwork(nn.Module):
    """One decoder layer over pairs of a fused hidden state of the target and the token after it.

    At depth d, position i holds the pair of the output of depth d - 1 at i and the token at i + 1 + d. It
    attends to the pairs of the target's states up to i, and to its own at earlier depths.

    Args:
        teacher: the target.
        depths: how many tokens are drafted one after the other.
        mlp: neurons of the layer.
        own_head: a language model head of its own, which begins as the target's.
        cache: what the drafter keeps.

    Attributes:
        features: the hidden states of the target that it reads.
        every: 1, since it learns from all positions of a segment.
        head: the weight of the language model head, ``[V, H]``.
    """

    kind = "eagle3"

    def __init__(self, teacher: Teacher, depths: int, mlp: int, own_head: bool, cache: Cache) -> None:
        super().__init__()
        size, layers = teacher.size, teacher.layers
        self.depths, self.every, self.cache = depths, 1, cache
        self.inputs = [max(1, layers // 3), max(1, 2 * layers // 3), layers]
        self.features = tuple(number - 1 for number in self.inputs)
        self.heads, self.kv_heads, self.head_dim = teacher.heads, teacher.kv_heads, teacher.head_dim
        self._teacher, self._mlp, self._eps = [teacher], mlp, teacher.eps

        def norm() -> LlamaRMSNorm:
            return LlamaRMSNorm(size, self._eps)

        def linear(rows: int, columns: int, spread: float = 0.02) -> nn.Linear:
            layer = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(layer.weight, std=spread)
            return layer

        self.fc_norm = nn.ModuleList(norm() for _ in self.inputs)
        self.fc = linear(size, len(self.inputs) * size)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q, self.k, self.v = (linear(rows, 2 * size) for rows in (width, kv_width, kv_width))
        self.out = linear(size, width, 0.005)
        self.gate, self.up, self.down = linear(mlp, size), linear(mlp, size), linear(size, mlp, 0.005)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = norm(), norm(), norm(), norm()
        self.lm_head = linear(*teacher.head.shape) if own_head else None
        with torch.no_grad():
            # It begins with what the target's language model head reads for the token before.
            self.fc.weight[:, -size:] += torch.eye(size)
            for begun in (self.fc_norm[-1], self.norm):
                begun.weight.copy_(teacher.last_norm)
            if self.lm_head is not None:
                self.lm_head.weight.copy_(teacher.head)
        self.to(teacher.head.device)
        self._rotary = Rotary(self.head_dim, _THETA, teacher.head.device)

    @property
    def head(self) -> Tensor:
        return self._teacher[0].head if self.lm_head is None else self.lm_head.weight

    def project(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries ``[N, H, T, D]``, keys and values ``[N, H_kv, T, D]``, before rotation."""
        embedded = self.input_norm(self._teacher[0].embedded(tokens).to(hidden.dtype))
        both = torch.cat([embedded, self.hidden_norm(hidden)], -1)
        q, k, v = (
            layer(both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return q, k, v

    def forward(self, tokens: Tensor, hidden: dict[int, Tensor], segments: Segments) -> list[Tensor]:
        """Returns for each depth d the states ``[N, L, H]`` that the language model head reads for the token
        at i + 2 + d.

        Args:
            tokens: int64 ``[R, T]``.
            hidden: ``[R, T, H]`` by element of ``features``.
        """
        states = [norm(segments.take(hidden[i])) for norm, i in zip(self.fc_norm, self.features, strict=True)]
        fused = self.fc(torch.cat(states, -1))
        q, k, v = self.project(segments.take(tokens, 1), fused)
        attention = StreamingAttention(segments, self._rotary, k, v)
        q, x = q[:, :, -segments.length :], fused[:, -segments.length :]
        outputs = []
        for depth in range(self.depths):
            if depth:
                q, k, v = self.project(segments.take_own(tokens, 1 + depth), x)
                attention.add(k, v, depth)
            x = x + self.out(attention(q, depth).transpose(1, 2).flatten(2))
            normed = self.mlp_norm(x)
            x = self.norm(x + self.down(F.silu(self.gate(normed)) * self.up(normed)))
            outputs.append(x)
        return outputs

    def config(self) -> dict[str, Any]:
        """Returns ``config.json`` of the published layout."""
        vocabulary, size = self.head.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
            "intermediate_size": self._mlp, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "num_hidden_layers": 1,
            "vocab_size": vocabulary, "draft_vocab_size": vocabulary, "rms_norm_eps": self._eps,
            "hidden_act": "silu", "rope_theta": _THETA, "max_position_embeddings": 2048,
            "tie_word_embeddings": False, "fc_norm": True, "norm_output": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.inputs},
        }  # fmt: skip

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors by their published names."""
        attention, mlp = "midlayer.self_attn", "midlayer.mlp"
        found = {
            "fc.weight": self.fc.weight, "norm.weight": self.norm.weight,
            f"{attention}.q_proj.weight": self.q.weight, f"{attention}.k_proj.weight": self.k.weight,
            f"{attention}.v_proj.weight": self.v.weight, f"{attention}.o_proj.weight": self.out.weight,
            f"{mlp}.gate_proj.weight": self.gate.weight, f"{mlp}.up_proj.weight": self.up.weight,
            f"{mlp}.down_proj.weight": self.down.weight,
            "midlayer.input_layernorm.weight": self.input_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm.weight,
        }  # fmt: skip
        found |= {f"fc_norm.{i}.weight": norm.weight for i, norm in enumerate(self.fc_norm)}
        return found if self.lm_head is None else found | {"lm_head.weight": self.lm_head.weight}

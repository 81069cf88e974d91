"""A decoder layer that drafts one token after the other, as it is trained.

It is unrolled over its own outputs (training-time test, EAGLE-3, arXiv 2503.01840, section 3.1).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scripts.train_drafters.segments import Cache, Rotary, Segments, StreamingAttention
from scripts.train_drafters.teacher import Teacher


class UnrolledLayer(nn.Module):
    """One decoder layer over pairs of a hidden state and the token after it.

    At depth d, position i holds the pair of the output of depth d - 1 at i and the token at i + 1 + d. It
    attends to the pairs of the target's states up to i, and to its own at earlier depths.

    Args:
        teacher: the target.
        depths: how many tokens are drafted one after the other.
        cache: what the drafter keeps.
        features: the hidden states of the target that it reads.
        width: columns of what queries, keys and values are projected from.
        mlp: neurons.
        theta: base of the rotary frequencies.
        within_cache: see :class:`StreamingAttention`.

    Attributes:
        every: 1, since it learns from all positions of a segment.
        head: the weight of the language model head, ``[V, H]``.
    """

    every = 1

    def __init__(
        self, teacher: Teacher, depths: int, cache: Cache, features: tuple[int, ...], width: int, mlp: int,
        theta: float, within_cache: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.depths, self.cache, self.features, self._teacher = depths, cache, features, [teacher]
        self._within_cache, self._mlp, size = within_cache, mlp, teacher.size
        rows, kv_rows = teacher.heads * teacher.head_dim, teacher.kv_heads * teacher.head_dim
        self.q, self.k, self.v = (self.linear(count, width) for count in (rows, kv_rows, kv_rows))
        self.out = self.linear(size, rows, 0.005)
        self.gate, self.up = self.linear(mlp, size), self.linear(mlp, size)
        self.down = self.linear(size, mlp, 0.005)
        self.input_norm, self.mlp_norm, self.norm = (self.rms_norm() for _ in range(3))
        self.norm.weight.data.copy_(teacher.last_norm)
        self._rotary = Rotary(teacher.head_dim, theta, teacher.head.device)

    def linear(self, rows: int, columns: int, spread: float = 0.02) -> nn.Linear:
        layer = nn.Linear(columns, rows, bias=False)
        nn.init.normal_(layer.weight, std=spread)
        return layer

    def rms_norm(self) -> LlamaRMSNorm:
        return LlamaRMSNorm(self._teacher[0].size, self._teacher[0].eps)

    @property
    def head(self) -> Tensor:
        return self._teacher[0].head

    def fused(self, states: list[Tensor]) -> Tensor:
        """Returns the hidden states of the first depth ``[N, T, H]`` from those of ``features``."""
        raise NotImplementedError

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream ``[N, T, H]`` and what queries, keys and values are projected from."""
        raise NotImplementedError

    def pairs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the pairs of a depth after the first one.

        Args:
            tokens: int64 ``[N, L]``, the drafted tokens.
            hidden: ``[N, L, H]``, the outputs of the depth before.
        """
        return tokens, hidden

    def _project(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the residual stream, queries ``[N, H, T, D]``, keys and values ``[N, H_kv, T, D]``."""
        x, read = self.inputs(self._teacher[0].embedded(tokens).to(hidden.dtype), hidden)
        heads = (
            layer(read).unflatten(-1, (-1, self._teacher[0].head_dim)) for layer in (self.q, self.k, self.v)
        )
        q, k, v = (part.transpose(1, 2) for part in heads)
        return x, q, k, v

    def forward(self, tokens: Tensor, hidden: dict[int, Tensor], segments: Segments) -> list[Tensor]:
        """Returns for each depth d the states ``[N, L, H]`` that the language model head reads for the token
        at i + 2 + d.

        Args:
            tokens: int64 ``[R, T]``.
            hidden: ``[R, T, H]`` by element of ``features``.
        """
        states, length = self.fused([segments.take(hidden[i]) for i in self.features]), segments.length
        x, q, k, v = self._project(segments.take(tokens, 1), states)
        attention = StreamingAttention(segments, self._rotary, k, v, self._within_cache)
        x, q = x[:, -length:], q[:, :, -length:]
        outputs: list[Tensor] = []
        for depth in range(self.depths):
            if depth:
                x, q, k, v = self._project(*self.pairs(segments.take_own(tokens, 1 + depth), outputs[-1]))
                attention.add(k, v, depth)
            x = x + self.out(attention(q, depth).transpose(1, 2).flatten(2))
            normed = self.mlp_norm(x)
            outputs.append(self.norm(x + self.down(F.silu(self.gate(normed)) * self.up(normed))))
        return outputs

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns the tensors of the layer by their names in a checkpoint, after ``prefix``."""
        parts: dict[str, Any] = {
            "self_attn.q_proj": self.q, "self_attn.k_proj": self.k, "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.out, "mlp.gate_proj": self.gate, "mlp.up_proj": self.up,
            "mlp.down_proj": self.down, "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.mlp_norm,
        }  # fmt: skip
        return {f"{prefix}{name}.weight": part.weight for name, part in parts.items()}

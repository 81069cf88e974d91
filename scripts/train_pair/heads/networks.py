"""The trainable heads, and their files in the published formats.

Both share the target's embeddings and language model head, which are neither trained nor saved.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from triforce_tree.runtime.files.replacing import replace_file


class Heads(Protocol):
    """Predictions at several depths, teacher forced.

    Attributes:
        features: hidden states of the target that they read, as ``drafters.base.Drafter`` numbers them.
        depths: K, how many tokens they predict in a row.
    """

    features: tuple[int, ...]
    depths: int

    def __call__(
        self, tokens: Tensor, hidden: list[Tensor], window: int | None = None, rows: slice = slice(None)
    ) -> list[Tensor]:
        """What the language model head reads, ``[B, N, H]`` for each depth.

        The state of depth d at position i predicts the token at i + d + 2; where that is beyond the text
        its value is arbitrary.

        Args:
            tokens: int64 ``[B, T]``: ``sinks`` first tokens of a text, then a later part of it.
            hidden: the target's states ``[B, T, H]`` of these positions, one for each of ``features``.
            window: pairs that a query sees besides the sinks; None: all of the part.
            rows: N positions that are wanted.
        """

    def config(self) -> dict[str, Any]: ...

    def files(self) -> dict[str, Tensor]:
        """Tensors by their published names."""


class MedusaHeads(nn.Module):
    """K residual blocks over the state after the final norm."""

    name, weights_file = "medusa", "medusa_lm_head.safetensors"

    def __init__(self, target: LlamaForCausalLM, depths: int, layers: int = 1) -> None:
        super().__init__()
        size = target.config.hidden_size
        self.features: tuple[int, ...] = (target.config.num_hidden_layers,)
        self.depths, self.layers = depths, layers
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(layers)) for _ in range(depths)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, hidden: list[Tensor], window: int | None = None, rows: slice = slice(None)
    ) -> list[Tensor]:
        outputs = []
        for blocks in self.heads:
            x = hidden[0][:, rows]
            for block in blocks:  # type: ignore[attr-defined]
                x = x + F.silu(block(x))
            outputs.append(x)
        return outputs

    def config(self) -> dict[str, Any]:
        return {
            "medusa_num_heads": self.depths, "medusa_num_layers": self.layers,
            "base_model_name_or_path": "triforce_tree/pair/target",
        }  # fmt: skip

    def files(self) -> dict[str, Tensor]:
        found = {}
        for k, blocks in enumerate(self.heads):
            for i, block in enumerate(blocks):
                found[f"{k}.{i}.linear.weight"], found[f"{k}.{i}.linear.bias"] = block.weight, block.bias
        return found


class EagleHead(nn.Module):
    """One decoder layer, unrolled over its own outputs as in training-time test (EAGLE-3, section 3.1).

    At depth d position i holds the pair of the output of depth d - 1 at i with the token at i + 1 + d; it
    sees the pairs of the target's states up to i, and its own at the depths before.
    """

    name, weights_file = "eagle", "model.safetensors"

    def __init__(self, target: LlamaForCausalLM, depths: int, mlp: int, sinks: int) -> None:
        super().__init__()
        own = target.config
        size, layers = own.hidden_size, own.num_hidden_layers
        inputs = [max(1, layers // 3), max(1, 2 * layers // 3), layers]
        self.features = tuple(j - 1 for j in inputs)
        self.depths, self.sinks = depths, sinks
        self.settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
            "intermediate_size": mlp, "num_attention_heads": own.num_attention_heads,
            "num_key_value_heads": 1, "head_dim": own.head_dim, "num_hidden_layers": 1,
            "vocab_size": own.vocab_size, "draft_vocab_size": own.vocab_size,
            "rms_norm_eps": own.rms_norm_eps, "hidden_act": "silu",
            "rope_theta": 10_000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": inputs},
        }  # fmt: skip
        self.heads, self.head_dim = own.num_attention_heads, own.head_dim
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.qkv = nn.Linear(2 * size, (self.heads + 2) * own.head_dim, bias=False)
        self.out = nn.Linear(self.heads * own.head_dim, size, bias=False)
        self.gate, self.up = nn.Linear(size, mlp, bias=False), nn.Linear(size, mlp, bias=False)
        self.down = nn.Linear(mlp, size, bias=False)
        norms = (LlamaRMSNorm(size, own.rms_norm_eps) for _ in range(4))
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = norms
        for matrix in (self.fc, self.qkv, self.gate, self.up):
            nn.init.normal_(matrix.weight, std=0.02)
        for matrix in (self.out, self.down):
            nn.init.normal_(matrix.weight, std=0.005)
        with torch.no_grad():
            # It begins with the last layer's state.
            self.fc.weight[:, 2 * size :] += torch.eye(size)
            self.norm.weight.copy_(target.model.norm.weight)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(self.settings))
        # Not a module of this one, so that it is neither trained nor saved.
        self._embed = [target.get_input_embeddings()]

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.input_norm(self._embed[0](tokens).to(hidden.dtype))
        both = self.qkv(torch.cat([embedded, self.hidden_norm(hidden)], -1))
        both = both.unflatten(-1, (-1, self.head_dim))
        q, k, v = both.transpose(1, 2).split([self.heads, 1, 1], 1)
        return q, k, v

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(x, positions[None])
        return x * cos[:, None] + rotate_half(x) * sin[:, None]

    def forward(
        self, tokens: Tensor, hidden: list[Tensor], window: int | None = None, rows: slice = slice(None)
    ) -> list[Tensor]:
        length, device = tokens.shape[1], tokens.device
        at = torch.arange(length, device=device)
        fused = self.fc(torch.cat(hidden, -1))
        # Pair i needs the token after it; the last one has none, and its outputs are not used.
        following = F.pad(tokens, (0, self.depths))
        q, raw, base_v = self._pairs(following[:, 1 : length + 1], fused)
        base_k = self._turned(raw, at)
        mask, wanted = at <= at[:, None], at[rows]
        if window is not None:
            mask = mask & ((at > at[:, None] - window) & (at >= self.sinks))
        mask = mask[rows]
        x, outputs, own = fused[:, rows], [], []
        for depth in range(self.depths):
            if depth:
                q, k, v = self._pairs(following[:, wanted + 1 + depth], x)
                own.append((self._turned(k, wanted + depth), v))
            else:
                q = q[:, :, rows]
            turned = self._turned(q, wanted + depth)
            scores = [(turned @ base_k.mT).masked_fill(~mask, -1e30)]
            values = [base_v]
            if window is not None:
                # As the cache has them: the sinks right before the window, wherever it is.
                far = torch.full_like(wanted, self.sinks + window - 1 + depth)
                first = self._turned(raw[:, :, : self.sinks], at[: self.sinks])
                scores.append(self._turned(q, far) @ first.mT)
                values.append(base_v[:, :, : self.sinks])
            alone = [(turned * k).sum(-1, keepdim=True) for k, _ in own]
            probs = (torch.cat([*scores, *alone], -1).float() * self.head_dim**-0.5).softmax(-1)
            parts = probs.to(base_v.dtype).split([*(s.shape[-1] for s in scores), *[1] * len(own)], -1)
            attended = sum(p @ v for p, v in zip(parts, values, strict=False))
            attended = attended + sum(p * v for p, (_, v) in zip(parts[len(values) :], own, strict=True))
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            normed = self.mlp_norm(x)
            x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
            outputs.append(self.norm(x))
        return outputs

    def config(self) -> dict[str, Any]:
        return self.settings

    def files(self) -> dict[str, Tensor]:
        layer, head = "midlayer.", self.head_dim
        q, k, v = self.qkv.weight.split([self.heads * head, head, head])
        return {
            "fc.weight": self.fc.weight, "norm.weight": self.norm.weight,
            f"{layer}self_attn.q_proj.weight": q, f"{layer}self_attn.k_proj.weight": k,
            f"{layer}self_attn.v_proj.weight": v, f"{layer}self_attn.o_proj.weight": self.out.weight,
            f"{layer}mlp.gate_proj.weight": self.gate.weight, f"{layer}mlp.up_proj.weight": self.up.weight,
            f"{layer}mlp.down_proj.weight": self.down.weight,
            f"{layer}input_layernorm.weight": self.input_norm.weight,
            f"{layer}hidden_norm.weight": self.hidden_norm.weight,
            f"{layer}post_attention_layernorm.weight": self.mlp_norm.weight,
        }  # fmt: skip


def save(heads: "MedusaHeads | EagleHead", out: Path) -> int:
    """Weights in bf16 and ``config.json``, the weights file replaced at once; returns its bytes."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous().clone() for name, t in heads.files().items()
    }
    path, part = out / heads.weights_file, out / f"{heads.weights_file}.part"
    save_file(tensors, part)
    part.replace(path)
    replace_file(out / "config.json", json.dumps(heads.config(), indent=1))
    return path.stat().st_size


def restore(heads: "MedusaHeads | EagleHead", out: Path) -> bool:
    """Read weights that :func:`save` wrote; False where there are none."""
    path = out / heads.weights_file
    if not path.exists():
        return False
    saved = load_file(path)
    with torch.no_grad():
        for name, tensor in heads.files().items():
            # Parts of one matrix are views of it.
            tensor.copy_(saved[name])
    return True

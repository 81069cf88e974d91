"""An MTP layer of a target as it is trained (DeepSeek-V3, arXiv 2412.19437), and the checkpoint that has it.

Its arithmetic is that of ``triforce_tree/drafters/heads/mtp.py``: a decoder layer of Llama over ``eh_proj``
of the normed embedding of a token and the normed hidden state before it. Queries and keys are rotated by the
positions in the text, as the target's are.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scripts.train_drafters.segments import Cache, Rotary, Segments, StreamingAttention
from scripts.train_drafters.teacher import Teacher
from triforce_tree.runtime.files.writing import replace_file

FILE = "mtp.safetensors"
_TARGET, _INDEX = "target.safetensors", "model.safetensors.index.json"


class MtpTraining(nn.Module):
    """One layer, unrolled over its own outputs as it drafts, see ``EagleNetwork``.

    Args:
        teacher: the target, a Llama or a relative with the same layers.
        depths: how many tokens are drafted one after the other.
        cache: what the drafter keeps.

    Attributes:
        features: the hidden state of the target that it reads, the one after the last norm.
        every: 1, since it learns from all positions of a segment.
        head: the weight of the language model head, ``[V, H]``.

    Raises:
        ValueError: the target's layers or rotary frequencies are others than those of a plain Llama.
    """

    kind = "mtp"

    def __init__(self, teacher: Teacher, depths: int, cache: Cache) -> None:
        super().__init__()
        own = teacher.model.config
        rope = own.rope_parameters or {}
        if own.model_type != "llama" or rope.get("rope_type", "default") != "default":
            raise ValueError(
                f"MTP layers are trained for a Llama with rope_type 'default', and the target is a "
                f"{own.model_type} with {rope.get('rope_type')!r}; use --kind eagle3 or dflash"
            )
        self.depths, self.every, self.cache, self.features = depths, 1, cache, (teacher.layers,)
        self._teacher, size, mlp = [teacher], teacher.size, own.intermediate_size
        self.heads, self.kv_heads, self.head_dim = teacher.heads, teacher.kv_heads, teacher.head_dim

        def linear(rows: int, columns: int, spread: float = 0.02) -> nn.Linear:
            layer = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(layer.weight, std=spread)
            return layer

        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.eh_proj = linear(size, 2 * size)
        self.q, self.k, self.v = (linear(rows, size) for rows in (width, kv_width, kv_width))
        self.out = linear(size, width, 0.005)
        self.gate, self.up, self.down = linear(mlp, size), linear(mlp, size), linear(size, mlp, 0.005)
        norms = (LlamaRMSNorm(size, teacher.eps) for _ in range(5))
        self.enorm, self.hnorm, self.input_norm, self.mlp_norm, self.norm = norms
        with torch.no_grad():
            self.eh_proj.weight[:, size:] += torch.eye(size)
            self.norm.weight.copy_(teacher.last_norm)
        self.to(teacher.head.device)
        self._rotary = Rotary(self.head_dim, float(rope["rope_theta"]), teacher.head.device)

    @property
    def head(self) -> Tensor:
        return self._teacher[0].head

    def project(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the layer's input ``[N, T, H]``, and queries, keys and values before rotation."""
        embedded = self.enorm(self._teacher[0].embedded(tokens).to(hidden.dtype))
        x = self.eh_proj(torch.cat([embedded, self.hnorm(hidden)], -1))
        normed = self.input_norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return x, q, k, v

    def forward(self, tokens: Tensor, hidden: dict[int, Tensor], segments: Segments) -> list[Tensor]:
        """See ``EagleNetwork.forward``."""
        states, length = segments.take(hidden[self.features[0]]), segments.length
        x, q, k, v = self.project(segments.take(tokens, 1), states)
        attention = StreamingAttention(segments, self._rotary, k, v, within_cache=False)
        x, q, outputs = x[:, -length:], q[:, :, -length:], []
        for depth in range(self.depths):
            if depth:
                x, q, k, v = self.project(segments.take_own(tokens, 1 + depth), outputs[-1])
                attention.add(k, v, depth)
            x = x + self.out(attention(q, depth).transpose(1, 2).flatten(2))
            normed = self.mlp_norm(x)
            outputs.append(self.norm(x + self.down(F.silu(self.gate(normed)) * self.up(normed))))
        return outputs

    def config(self) -> dict[str, Any]:
        """Returns ``config.json`` of the target with its MTP layer."""
        own: dict[str, Any] = self._teacher[0].model.config.to_dict()
        return own | {"num_mtp_layers": 1}

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors by their names in the target's checkpoint."""
        parts = {
            "eh_proj": self.eh_proj, "enorm": self.enorm, "hnorm": self.hnorm, "shared_head.norm": self.norm,
            "self_attn.q_proj": self.q, "self_attn.k_proj": self.k, "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.out, "mlp.gate_proj": self.gate, "mlp.up_proj": self.up,
            "mlp.down_proj": self.down, "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.mlp_norm,
        }  # fmt: skip
        layer = self._teacher[0].layers
        return {f"model.layers.{layer}.{name}.weight": part.weight for name, part in parts.items()}

    def complete(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Adds the target to a folder with the layer, so that it is a whole checkpoint."""
        if not (folder / _TARGET).exists():
            self._teacher[0].model.save_pretrained(folder, max_shard_size="1TB")
            (folder / "model.safetensors").replace(folder / _TARGET)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        names: dict[str, str] = {}
        for file in (_TARGET, FILE):
            with safe_open(folder / file, "pt") as held:
                names |= dict.fromkeys(held.keys(), file)
        size = sum((folder / file).stat().st_size for file in (_TARGET, FILE))
        replace_file(folder / _INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": names}))
        replace_file(folder / "config.json", json.dumps(self.config(), indent=1))

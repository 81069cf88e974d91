"""Widens a trained drafter beside its target, so that it drafts for the inflated one what it did before.

The target's hidden states are then [x; 0], with a constant in dimension d where the vocabulary grows, and the
head's residual stream is to be such a vector too. The tables of ``pair.py`` hold for the layer; the inputs of
its attention, an embedding beside a hidden state, and of ``fc``, several hidden states, are blocks of D
columns. The layers that it reads are those of the new model that hold the small model's.

Published heads for large vocabularies have a language model head of at most 32,000 entries, and so has the
widened one. Entries after the small vocabulary's cannot be drawn, as in ``pair.py``: the bias of the output
projection gives dimension d a constant, and the last norm passes on a small part of it, so little that it
does not grow where the normed state is fed back.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from scripts.inflate.heads import HeadPlaces
from scripts.inflate.pair import constant_of, layer_places
from scripts.inflate.shapes import Shape
from triforce_tree.drafters.heads.eagle_format import EagleFormat, canonical, eagle_format
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.registry import CONFIG, WEIGHTS, format_of

_ENTRIES = 32_000
# The logits of entries that cannot be drawn are lower by ``_SHIFT`` over the root mean square of the stream;
# ``_PASSED`` is the last norm's weight of the constant.
_SHIFT, _PASSED = 2.0**22, 2.0**-8


def inflate_drafter(
    folder: Path, target: PreTrainedModel, shape: str | Shape, out: Path, seed: int = 0
) -> None:
    """Writes a drafter of another shape with the same function, in bf16.

    Args:
        folder: an EAGLE-3 head with the target's whole vocabulary, and its embeddings.
        target: the small target that it was trained for.
        shape: what the target is inflated to.
        out: the folder to write.
        seed: of the weights without effect.

    Raises:
        ValueError: the drafter is of another kind, or does not fit into the shape.
    """
    shape = Shape.parse(shape) if isinstance(shape, str) else shape
    if (title := format_of(folder)).drafter.rpartition(":")[2] != "Eagle3":
        raise ValueError(f"{str(folder)!r} holds {title.title}; only an EAGLE-3 head can be widened")
    format, weights = eagle_format(folder), HeadWeights(folder, WEIGHTS, canonical)
    wide = _Eagle(format, weights, target, shape, seed)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in wide.tensors.items()}
    if wide.entries < (shape.vocabulary or 0):
        tensors["d2t"] = torch.zeros(wide.entries, dtype=torch.int64)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS[0])
    (out / CONFIG).write_text(json.dumps(wide.config))


class _Eagle:
    """The tensors and the configuration of a widened EAGLE-3 head."""

    def __init__(
        self, format: EagleFormat, weights: HeadWeights, target: PreTrainedModel, shape: Shape, seed: int
    ) -> None:
        layer, self._weights, self._shape = format.layer, weights, shape
        device = target.device
        self._random = torch.Generator(device).manual_seed(seed)
        self._device, self._small, self._big = device, layer.hidden_size, shape.hidden
        own = Shape(
            layer.hidden_size, 1, layer.num_attention_heads, layer.num_key_value_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
            layer.intermediate_size,
        )  # fmt: skip
        for name in ("hidden", "mlp"):
            if getattr(shape, name) < getattr(own, name):
                raise ValueError(
                    f"{name}={getattr(shape, name)} of the shape is less than the drafter's "
                    f"{getattr(own, name)}; choose a larger shape"
                )
        places, entries = HeadPlaces.of(own, shape), target.config.vocab_size
        vocabulary = shape.vocabulary or entries
        self._constant = constant_of(target.config) if vocabulary > entries else 0.0
        layers = layer_places(target.config.num_hidden_layers, shape.layers)
        inputs = [layers[number - 1][-1] + 1 for number in format.inputs or ()]
        if not inputs:
            raise ValueError(
                "the head names no layers that it reads; give one with eagle_aux_hidden_state_layer_ids"
            )
        self.entries = min(vocabulary, max(entries, _ENTRIES))
        self.tensors: dict[str, Tensor] = {}
        self._fuse(len(inputs), format)
        self._layer(places, shape)
        self._head(target, entries, vocabulary)
        weights.refuse_unused()
        eps = (layer.rms_norm_eps * self._small - self._constant**2) / self._big
        self.config = _configuration(format, shape, vocabulary, self.entries, inputs, eps)

    def _matrix(self, rows: int, columns: int, zero: bool) -> Tensor:
        matrix = torch.zeros(rows, columns, device=self._device)
        return matrix if zero else matrix.normal_(0.0, 0.02, generator=self._random)

    def _norm(self, name: str, blocks: int = 1, passed: float = 0.0) -> None:
        """Adds a norm over ``blocks`` hidden states; ``passed`` is the weight of dimension d."""
        weight = self._weights.take(name, blocks * self._small).to(self._device)
        ratio = math.sqrt(self._small / self._big)
        wide = torch.full((blocks, self._big), ratio, device=self._device)
        wide[:, : self._small] = (weight.double() * ratio).float().view(blocks, -1)
        if self._big > self._small:
            wide[:, self._small] = passed
        self.tensors[name] = wide.flatten()

    def _fuse(self, states: int, format: EagleFormat) -> None:
        small, big = self._small, self._big
        if format.fc_norm:
            for i in range(states):
                self._norm(f"fc_norm.{i}.weight")
        if format.norm_before_fc:
            self._norm("input_norm.weight", states)
        weight = self._weights.take("fc.weight", small, states * small).to(self._device)
        wide = self._matrix(big, states * big, zero=True)
        wide.view(big, states, big)[:small, :, :small] = weight.view(small, states, small)
        self.tensors["fc.weight"] = wide

    def _layer(self, places: HeadPlaces, shape: Shape) -> None:
        small, big, take, own = self._small, self._big, self._weights.take, "midlayer."
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self._norm(f"{own}{name}.weight")
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            name = f"{own}self_attn.{part}_proj.weight"
            weight, wide = take(name, -1, 2 * small), self._matrix(rows, 2 * big, zero=False)
            for block in range(2):
                columns = slice(block * big, (block + 1) * big)
                places.copy(name, weight[:, block * small : (block + 1) * small], wide[:, columns])
            self.tensors[name] = wide
        name = f"{own}self_attn.o_proj.weight"
        wide = self._matrix(big, width, zero=True)
        places.copy(name, take(name, small, -1), wide)
        self.tensors[name] = wide
        if self._constant:
            bias = torch.zeros(big, device=self._device)
            bias[small] = self._constant
            self.tensors[f"{own}self_attn.o_proj.bias"] = bias
        for part, shaped in (
            ("gate", (shape.mlp, big)),
            ("up", (shape.mlp, big)),
            ("down", (big, shape.mlp)),
        ):
            name = f"{own}mlp.{part}_proj.weight"
            weight, wide = take(name, -1, -1), self._matrix(*shaped, zero=part == "down")
            wide[: weight.shape[0], : weight.shape[1]] = weight.to(self._device)
            self.tensors[name] = wide

    def _head(self, target: PreTrainedModel, entries: int, vocabulary: int) -> None:
        small, big = self._small, self._big
        self._norm("norm.weight", passed=_PASSED if self._constant else 0.0)
        has_own = "lm_head.weight" in self._weights
        if not has_own and vocabulary == entries:
            return
        weight = self._weights.take("lm_head.weight", entries, small) if has_own else None
        head = target.get_output_embeddings().weight if weight is None else weight
        wide = self._matrix(self.entries, big, zero=False)
        for start in range(0, self.entries, entries):
            count = min(entries, self.entries - start)
            wide[start : start + count, :small] = head[:count].to(wide)
        if self._constant:
            scale = _PASSED * self._constant * math.sqrt(big / small)
            wide[:entries, small] = 0.0
            wide[entries:, small] = -(2.0 ** math.ceil(math.log2(_SHIFT / scale)))
        self.tensors["lm_head.weight"] = wide


def _configuration(
    format: EagleFormat, shape: Shape, vocabulary: int, entries: int, inputs: list[int], eps: float
) -> dict[str, Any]:
    """Returns ``config.json`` in the layout of SafeAILab/EAGLE."""
    layer: Mapping[str, Any] = format.layer.to_diff_dict()
    kept = {name: layer[name] for name in ("model_type", "rope_parameters", "hidden_act") if name in layer}
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **kept, "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "num_hidden_layers": 1,
        "vocab_size": vocabulary, "draft_vocab_size": entries, "rms_norm_eps": eps,
        **{name: True for name in switches if getattr(format, name)},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inputs},
    }  # fmt: skip

"""Widens a trained drafter to the shape of an inflated target, for which it computes the same distributions.

The hidden states of an inflated target are [x; 0], where x is the small target's state; if the vocabulary
grows, the first of the zeros is a constant instead (``pair.py``). The residual stream of the widened drafter
has the same form, and its matrices are filled by the tables of ``pair.py``. ``fc`` and the attention of an
EAGLE-3 layer read several vectors beside each other, so each D columns of them are filled like one matrix.
The widened drafter reads those layers of the inflated target that hold the small target's layers.

Published EAGLE-3 heads of large vocabularies have a language model head of at most 32,000 entries, and so has
the widened one. Its entries after those of the small vocabulary have a probability of 0: the bias of the
output projection writes the constant into the residual stream, and their logits are a large negative
multiple of it. The last norm passes on only a small part of the constant, because the normed state is fed
back. A block drafter uses the target's language model head, and gets the constant from the embeddings. So
does an MTP layer, whose norm of the embedding divides it by the embedding's root mean square: ``eh_proj``
multiplies it by that of the whole table. What the norms of the layer take for the constant's square then
differs from it by a small part of ε.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from scripts.inflate.heads import HeadPlaces
from scripts.inflate.pair import GAIN, SHIFT, constant_of, layer_places
from scripts.inflate.shapes import Shape
from scripts.train_drafters.mtp import FILE as MTP
from triforce_tree.drafters.blocks.format import block_format
from triforce_tree.drafters.blocks.format import canonical as block_names
from triforce_tree.drafters.heads.eagle_format import canonical, eagle_format
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.registry import CONFIG, WEIGHTS, format_of, settings

Record = dict[str, Any]
_ENTRIES = 32_000


def inflate_drafter(
    folder: Path, target: PreTrainedModel, shape: str | Shape, out: Path, seed: int = 0
) -> None:
    """Writes a drafter of another shape that computes the same distributions, in bf16.

    Args:
        folder: a block drafter, an EAGLE-3 head with the target's whole vocabulary and its embeddings, or a
            checkpoint of the target with an MTP layer, as ``scripts/train_drafters`` writes it.
        target: the small target that it was trained for.
        shape: what the target is inflated to.
        out: the folder to write; of an MTP layer it has no tensors of the target, see :func:`mtp_layer`.
        seed: of the weights without effect.

    Raises:
        ValueError: the drafter is of another kind, or does not fit into the shape.
    """
    shape = Shape.parse(shape) if isinstance(shape, str) else shape
    kind = MTP if (folder / MTP).is_file() else format_of(folder).drafter.rpartition(":")[2]
    if (widen := _KINDS.get(kind)) is None:
        raise ValueError(
            f"{str(folder)!r} holds {format_of(folder).title}; only EAGLE-3 heads, block drafters and MTP "
            "layers can be widened"
        )
    tensors, config = widen(folder, target, shape, seed)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}, out / WEIGHTS[0])
    (out / CONFIG).write_text(json.dumps(config))


@contextmanager
def mtp_layer(target: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Lets ``load(target, drafter="mtp")`` find the MTP layer in a folder; the target keeps its weights."""
    config: Any = target.config
    kept = config.name_or_path
    config.name_or_path, config.num_mtp_layers = str(folder), 1
    try:
        yield
    finally:
        config.name_or_path = kept


class _Widening:
    """Widens the parts that drafters share.

    Args:
        weights: of the small drafter.
        layer: the configuration of its decoder layers.
        target, shape, seed: as in :func:`inflate_drafter`.

    Attributes:
        tensors: the wide ones so far.
        constant: of dimension d of the target's stream; 0 where the vocabulary does not grow.
        eps: of the wide norms.

    Raises:
        ValueError: the drafter does not fit into the shape.
    """

    def __init__(
        self, weights: HeadWeights, layer: Any, target: PreTrainedModel, shape: Shape, seed: int
    ) -> None:
        self.weights, self.shape, self.device = weights, shape, target.device
        self.small, self.big = int(layer.hidden_size), shape.hidden
        self._random = torch.Generator(target.device).manual_seed(seed)
        own = Shape(
            layer.hidden_size, layer.num_hidden_layers, layer.num_attention_heads, layer.num_key_value_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
            layer.intermediate_size,
        )  # fmt: skip
        for name in ("hidden", "mlp"):
            if getattr(shape, name) < getattr(own, name):
                raise ValueError(
                    f"{name}={getattr(shape, name)} of the shape is less than the drafter's "
                    f"{getattr(own, name)}; choose a larger shape"
                )
        self._places = HeadPlaces.of(own, shape)
        self.entries: int = target.config.vocab_size
        self.vocabulary = shape.vocabulary or self.entries
        self.constant = constant_of(target.config) if self.vocabulary > self.entries else 0.0
        self.eps = (layer.rms_norm_eps * self.small - self.constant**2) / self.big
        self.tensors: dict[str, Tensor] = {}
        self._layers = layer_places(target.config.num_hidden_layers, shape.layers)

    def output_of(self, layer: int) -> int:
        """Returns the layer of the new model whose output is that of the small one's ``layer``."""
        return self._layers[layer][-1]

    def matrix(self, rows: int, columns: int, zero: bool) -> Tensor:
        """Returns a matrix of zeros or of random values."""
        matrix = torch.zeros(rows, columns, device=self.device)
        return matrix if zero else matrix.normal_(0.0, 0.02, generator=self._random)

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.to(torch.bfloat16)

    def norm(self, name: str, blocks: int = 1, passed: float = 0.0) -> None:
        """Adds a norm over ``blocks`` hidden states; ``passed`` is the weight of dimension d."""
        weight = self.weights.take(name, blocks * self.small).to(self.device)
        ratio = math.sqrt(self.small / self.big)
        wide = torch.full((blocks, self.big), ratio, device=self.device)
        wide[:, : self.small] = (weight.double() * ratio).float().view(blocks, -1)
        if self.big > self.small:
            wide[:, self.small] = passed
        self.add(name, wide.flatten())

    def fusion(self, states: int, name: str = "fc.weight", passed: float = 0.0) -> None:
        """Adds a matrix that reads several vectors; ``passed`` is the weight of the first's dimension d."""
        small, big = self.small, self.big
        weight = self.weights.take(name, small, states * small).to(self.device)
        wide = self.matrix(big, states * big, zero=True)
        wide.view(big, states, big)[:small, :, :small] = weight.view(small, states, small)
        if big > small:
            wide[small, small] = passed
        self.add(name, wide)

    def attention(self, prefix: str, blocks: int, normed: bool) -> None:
        """Adds the projections of a layer's attention.

        Args:
            prefix: of their names.
            blocks: how many hidden states the layer reads beside each other.
            normed: whether queries and keys are normalised after their projection.
        """
        small, big, shape = self.small, self.big, self.shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            name = f"{prefix}{part}_proj.weight"
            # All dimensions of a normalised key count.
            weight, wide = (
                self.weights.take(name, -1, blocks * small),
                self.matrix(rows, blocks * big, zero=normed and part == "k"),
            )
            for block in range(blocks):
                columns = slice(block * big, (block + 1) * big)
                self._places.copy(name, weight[:, block * small : (block + 1) * small], wide[:, columns])
            self.add(name, wide)
        name = f"{prefix}o_proj.weight"
        wide = self.matrix(big, width, zero=True)
        self._places.copy(name, self.weights.take(name, small, -1), wide)
        self.add(name, wide)
        if normed:
            times = shape.head_dim // self._places.head_dim
            # The scores are divided by sqrt(m h), as the queries of ``heads.py``.
            for part, ratio in (("q", 1.0), ("k", times**-0.5)):
                name = f"{prefix}{part}_norm.weight"
                weight = self.weights.take(name, self._places.head_dim).to(self.device)
                spread = torch.ones(shape.head_dim, device=self.device)
                spread[self._places.rotary.to(self.device)] = (weight.double() * ratio).float()
                self.add(name, spread)

    def mlp(self, prefix: str) -> None:
        big, neurons = self.big, self.shape.mlp
        for part, rows, columns in (("gate", neurons, big), ("up", neurons, big), ("down", big, neurons)):
            name = f"{prefix}{part}_proj.weight"
            weight, wide = self.weights.take(name, -1, -1), self.matrix(rows, columns, zero=part == "down")
            wide[: weight.shape[0], : weight.shape[1]] = weight.to(self.device)
            self.add(name, wide)

    def config(self) -> Record:
        """Returns the fields of ``config.json`` that all layouts have."""
        shape = self.shape
        return {
            "hidden_size": shape.hidden, "intermediate_size": shape.mlp, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
            "vocab_size": self.vocabulary, "rms_norm_eps": self.eps,
        }  # fmt: skip


def _eagle(
    folder: Path, target: PreTrainedModel, shape: Shape, seed: int
) -> tuple[dict[str, Tensor], Record]:
    format, weights = eagle_format(folder), HeadWeights(folder, WEIGHTS, canonical)
    wide, own = _Widening(weights, format.layer, target, shape, seed), "midlayer."
    if not format.inputs:
        raise ValueError(
            f"the head in {str(folder)!r} names no layers that it reads; name them in config.json"
        )
    inputs, small = [wide.output_of(number - 1) + 1 for number in format.inputs], wide.small
    if format.fc_norm:
        for i in range(len(inputs)):
            wide.norm(f"fc_norm.{i}.weight")
    if format.norm_before_fc:
        wide.norm("input_norm.weight", len(inputs))
    wide.fusion(len(inputs))
    masked: Record = {}
    if format.mask_token is not None:
        if format.layers > 1:
            raise ValueError(
                f"the head in {str(folder)!r} has {format.layers} layers; only one can be widened"
            )
        masked = {"ptd_token_id": format.mask_token, "para_num": format.depths}
        state = weights.take("mask_hidden", 1, len(inputs) * small).to(wide.device).view(-1, small)
        state = F.pad(state, (0, wide.big - small))
        wide.add("mask_hidden", state.reshape(1, -1))
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        wide.norm(f"{own}{name}.weight")
    wide.attention(f"{own}self_attn.", 2, normed=False)
    wide.mlp(f"{own}mlp.")
    wide.norm("norm.weight", passed=GAIN if wide.constant else 0.0)
    rows, has_own = min(wide.vocabulary, max(wide.entries, _ENTRIES)), "lm_head.weight" in weights
    if has_own or wide.vocabulary > wide.entries:
        own_head = weights.take("lm_head.weight", wide.entries, small) if has_own else None
        head = target.get_output_embeddings().weight if own_head is None else own_head
        matrix = wide.matrix(rows, wide.big, zero=False)
        for start in range(0, rows, wide.entries):
            count = min(wide.entries, rows - start)
            matrix[start : start + count, :small] = head[:count].to(matrix)
        if wide.constant:
            bias = torch.zeros(wide.big, device=wide.device)
            bias[small] = wide.constant
            wide.add(f"{own}self_attn.o_proj.bias", bias)
            scale = GAIN * wide.constant * math.sqrt(wide.big / small)
            matrix[: wide.entries, small] = 0.0
            matrix[wide.entries :, small] = -(2.0 ** math.ceil(math.log2(SHIFT / scale)))
        wide.add("lm_head.weight", matrix)
    if rows < wide.vocabulary:
        wide.tensors["d2t"] = torch.zeros(rows, dtype=torch.int64)
    weights.refuse_unused()
    layer: Record = format.layer.to_diff_dict()
    kept = {name: layer[name] for name in ("model_type", "rope_parameters") if name in layer}
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return wide.tensors, {
        "architectures": ["LlamaForCausalLMEagle3"], **kept, **wide.config(), "num_hidden_layers": 1,
        "draft_vocab_size": rows, **masked, **{name: True for name in switches if getattr(format, name)},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inputs},
    }  # fmt: skip


def _block(
    folder: Path, target: PreTrainedModel, shape: Shape, seed: int
) -> tuple[dict[str, Tensor], Record]:
    format, weights = block_format(folder), HeadWeights(folder, WEIGHTS, block_names)
    wide, config = _Widening(weights, format.layers, target, shape, seed), settings(folder)
    wide.fusion(len(format.inputs))
    wide.norm("hidden_norm.weight")
    for layer in range(format.layers.num_hidden_layers):
        own = f"layers.{layer}."
        wide.norm(f"{own}input_layernorm.weight")
        wide.norm(f"{own}post_attention_layernorm.weight")
        wide.attention(f"{own}self_attn.", 1, normed=True)
        wide.mlp(f"{own}mlp.")
    # The embeddings of the slots have the constant, and the head is the target's.
    wide.norm("norm.weight", passed=GAIN if wide.constant else 0.0)
    weights.refuse_unused()
    inputs = [wide.output_of(number) for number in format.inputs]
    named = {**(config.get("dflash_config") or {}), "target_layer_ids": inputs}
    return wide.tensors, {
        **config,
        **wide.config(),
        "num_target_layers": shape.layers,
        "dflash_config": named,
    }


def _mtp(folder: Path, target: PreTrainedModel, shape: Shape, seed: int) -> tuple[dict[str, Tensor], Record]:
    prefix = "model.layers.{}.".format
    own = prefix(target.config.num_hidden_layers)
    weights = HeadWeights(folder, [MTP], lambda name: name.removeprefix(own))
    wide = _Widening(weights, target.config, target, shape, seed)
    for name in ("hnorm", "input_layernorm", "post_attention_layernorm"):
        wide.norm(f"{name}.weight")
    size = float(target.get_input_embeddings().weight.detach().float().square().mean().sqrt())
    kept = 2.0 ** round(math.log2(size * math.sqrt(wide.small / wide.big))) if wide.constant else 0.0
    wide.norm("enorm.weight", passed=1.0)
    wide.fusion(2, "eh_proj.weight", passed=kept)
    wide.norm("shared_head.norm.weight", passed=GAIN)
    wide.attention("self_attn.", 1, normed=False)
    wide.mlp("mlp.")
    weights.refuse_unused()
    tensors = {prefix(shape.layers) + name: tensor for name, tensor in wide.tensors.items()}
    layers = {"num_hidden_layers": shape.layers, "num_mtp_layers": 1}
    return tensors, {"model_type": "llama", **wide.config(), **layers}


_KINDS = {"Eagle3": _eagle, "ParallelEagle3": _eagle, "BlockDrafter": _block, MTP: _mtp}

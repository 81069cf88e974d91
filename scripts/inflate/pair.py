"""Inflation: a Llama of a large shape that computes a small model's function, token for token.

Speed at real size can then be measured with real acceptance and no download: an inflated model reads
every byte and does every operation of its shape, its caches are full-size, and its logits are the small
model's. Its quality is that of the small model, so its figures are always labelled "inflated". Positions are
the small model's too.

Write d for the small hidden size and D for the large one. The residual stream x becomes [x; 0]. Its mean
of squares is then d/D of what it was, so RMSNorm gives

    x / sqrt(d/D mean(x²) + ε') · w'  =  x / sqrt(mean(x²) + ε) · w    for ε' = ε d/D, w' = w sqrt(d/D).

The small model's layers are spread evenly over the depth. All other layers add zero to the stream. "Free"
entries below multiply exact zeros, or feed products that do; they are random, since some kernels run faster
on zeros (power, not arithmetic). Heads that have no effect are copies of the small model's, and added layers
have the heads and the first norm of the next small layer: random heads would select other chunks at each
token, and a retrieval cache in front of host memory would exchange at least twice as many as it does for a
trained model. Rows are outputs, columns inputs:

    tensor         from the small model               zero, and must be         free
    embed_tokens   columns < d                        columns >= d              -
    norm weights   entries < d, times sqrt(d/D)       -                         entries >= d
    q, k, v        its heads, columns < d             -                         columns >= d
    gate, up       its neurons, columns < d           -                         other neurons, columns >= d
    o              rows < d, columns of its heads     rows >= d, other columns  -
    down           rows < d, columns of its neurons   rows >= d, other columns  -
    lm_head        columns < d                        columns >= d where tied   columns >= d
    added layers   q, k, v and their norm             o, down                   all else

About three tenths of the weights of ``llama-2-7b`` are zeros (o and down), and D - d of the D inputs of
q, k, v, gate and up; the speed of decoding, which is bound by memory, does not depend on them.

Heads (``inflated_heads``): KV heads and their query heads find places in the groups of the large shape, and
heads of h dimensions become heads of m h, for any integer m.

Vocabulary: entry v + i of a vocabulary larger than the small model's v is a copy of entry i mod v, except
that its logit is lower by s = ``SHIFT`` / r, where r is the root mean square of the small model's last
residual stream (0.5 to 210 in the models that were looked at): more than 1,000 for every r below 4,096, so
that its probability is exactly 0 in fp32 at every temperature up to 10. Neither sampling nor top-k can
tell the small model's distribution from the large one's, while embedding, lm_head, softmax, noise and top-k
have the large size. s comes from dimension d of the stream, where every embedding has a constant c and no
layer writes. c² is taken out of ε: ε' D + c² = ε d, so that the norms are still the small model's. Entry d is
zero in all norm weights but the last one's, which is ``GAIN``; there lm_head has zeros in its first v rows
and a large negative number in the others. c and these numbers are powers of two, exact in bf16. ``GAIN`` is
small, so that the norm of a drafter that reads the last norm's output has the small model's scale too.

Experts: where the shape has E experts of which k are a token's, the new model is a Mixtral. The small MLP's
neurons are cut into k parts, and expert i holds part i mod k, its down projection times k. The router's rows
are the same for the k experts from a multiple of k on, so that a token's experts are k neighbours with a
weight of 1/k each: the sum is the small MLP's output, and which of the E/k groups it is depends on the token.
Passes over several tokens read as many experts as with independent choices, if the groups are as likely.
Torch's top-k takes the first experts of those that are equal, so that two groups never mix on a GPU.

Rounding: all but the norm weights, and the queries where heads grow, are copied bit for bit. sqrt(d/D) is
in general no power of two, so a norm weight in bf16 is rounded once more. The embedded target's logits in
bf16 are 0.77% (of their standard deviation, root mean square) off its fp32 ones; inflated to hidden size
4096 it is 0.81%. Padding x with a multiple of itself instead of zeros can keep the weights bit-exact, and
gave 0.75%: not worth another zero block in every projection. In fp32 the difference is 1e-6.
"""

import copy
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from scripts.inflate.heads import HeadPlaces
from scripts.inflate.shapes import SHAPES, Shape
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer
from triforce_tree.models.few_row import quantisation

__all__ = ["SHAPES", "Shape", "inflate", "inflate_pair", "inflate_two"]

Inflated: TypeAlias = LlamaForCausalLM | MixtralForCausalLM

_NORM_SPREAD = 0.1  # of free norm weights, relative to their mean
# See "Vocabulary" above.
SHIFT, GAIN = 2.0**22, 2.0**-8
# Of a configuration that becomes a Mixtral's.
_KEPT = {
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "initializer_range", "hidden_act",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
}  # fmt: skip
# What decides on the tokens that a layer attends to, and their values.
_ATTENDING = ("input_layernorm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: str | Shape,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Inflated:
    """Returns a model of another shape that computes the same function, built in place on the device.

    Peak memory is the new model and one small matrix.

    Args:
        model: a LlamaForCausalLM; it is only read.
        shape: no smaller than the model's in any respect, its head_dim a multiple of the model's. A
            vocabulary larger than the model's needs a larger hidden size too.
        device: of the new model; the model's own by default.
        seed: of the free entries; they are reproducible on the same kind of device.

    Returns:
        A model whose config names the shape it was inflated from (``inflated_from``).

    Raises:
        ValueError: the model is not a plain Llama, or does not fit into the shape.
    """
    shape = Shape.parse(shape) if isinstance(shape, str) else shape
    small = _plain_llama(model)
    heads = _fit(Shape.of(small.config), shape)
    config = _config(small.config, shape)
    with torch.device("meta"):
        big: Inflated = AutoModelForCausalLM.from_config(
            config, dtype=small.dtype, attn_implementation=small.config._attn_implementation
        )
    device = torch.device(device or small.device)
    big.to_empty(device=device)
    big.tie_weights()
    with torch.device(device):
        # Its frequencies are not in the state dict, and to_empty() does not keep them.
        big.model.rotary_emb = type(big.model.rotary_emb)(config=config)
    heads.check_frequencies(small, big)
    _fill(big, small.config.hidden_size, torch.Generator(device).manual_seed(seed))
    _copy(small, big, heads)
    if config.vocab_size > small.config.vocab_size:
        _append_entries(small, big)
    big.generation_config = copy.deepcopy(small.generation_config)
    big.eval()
    return big


def inflate_two(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    shape: str | Shape,
    draft_shape: str | Shape = "llama-68m",
    seed: int = 0,
) -> tuple[Inflated, Inflated]:
    """Returns a target and its draft, inflated; the draft's vocabulary is that of the target's shape.

    Raises:
        ValueError: the target or the draft does not fit into its shape.
    """
    big = inflate(target, shape, seed=seed)
    own = Shape.parse(draft_shape) if isinstance(draft_shape, str) else draft_shape
    return big, inflate(draft, replace(own, vocabulary=big.config.vocab_size), seed=seed)


def inflate_pair(
    shape: str | Shape = "llama-2-7b",
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    draft_shape: str | Shape = "llama-68m",
    seed: int = 0,
) -> tuple[Inflated, Inflated, PreTrainedTokenizerBase]:
    """Returns the embedded pair at real size, with the vocabulary of the target's shape: (target, draft,
    tokenizer).

    Args:
        shape: the target's, of head_dim 128.
        device, dtype: as :func:`triforce_tree.loading.checkpoints.load_model` chooses them.
        draft_shape: the draft's, of head_dim 64; its vocabulary is the target's.
        seed: of the free entries.

    Raises:
        ValueError: the target or the draft does not fit into its shape.
    """
    small = [load_model(PAIR / name, device, dtype) for name in ("target", "draft")]
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the embedded pair has a tokenizer"
    return *inflate_two(small[0], small[1], shape, draft_shape, seed=seed), tokenizer


def _plain_llama(model: PreTrainedModel) -> LlamaForCausalLM:
    name = type(model).__name__
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{name} cannot be inflated; only a LlamaForCausalLM can")
    for setting in ("attention_bias", "mlp_bias", "quantization_config"):
        if getattr(model.config, setting, None):
            raise ValueError(
                f"{name} with {setting} cannot be inflated; give an unquantised Llama without biases"
            )
    if (method := quantisation(model)) is not None:
        raise ValueError(f"{name} is quantised ({method}) and cannot be inflated; give plain weights")
    return model


def _fit(small: Shape, big: Shape) -> HeadPlaces:
    """Returns the places of the small model's heads; raises ValueError if it does not fit into the shape."""
    if big.active and small.mlp % big.active:
        raise ValueError(
            f"active={big.active} experts cannot share the model's {small.mlp} neurons evenly; choose a "
            "divisor of these"
        )
    least = replace(small, mlp=small.mlp // max(1, big.active))
    for field in ("hidden", "layers", "heads", "mlp"):
        if getattr(big, field) < getattr(least, field):
            raise ValueError(
                f"{field}={getattr(big, field)} of the shape is less than the model's "
                f"{getattr(least, field)}; choose a shape with at least as many, or a smaller model"
            )
    if big.hidden % big.heads:
        # transformers neither saves nor loads such a configuration, even with head_dim given.
        raise ValueError(
            f"hidden={big.hidden} of the shape is not a multiple of heads={big.heads}; choose one that is"
        )
    if big.tied and not small.tied:
        raise ValueError(
            "the shape ties lm_head to the embedding, but the model's are separate; leave out -tied"
        )
    _fit_vocabulary(small, big)
    return HeadPlaces.of(small, big)


def _fit_vocabulary(small: Shape, big: Shape) -> None:
    own, wanted = small.vocabulary or 0, big.vocabulary
    if wanted is None or wanted == own:
        return
    if wanted < own:
        raise ValueError(
            f"vocabulary={wanted} of the shape is less than the model's {own}; choose a larger one, or a "
            f"shape without one"
        )
    if big.tied:
        raise ValueError(
            f"vocabulary={wanted} of the shape is more than the model's {own}, and the appended entries need "
            "an lm_head of their own; leave out -tied"
        )
    if big.hidden == small.hidden:
        raise ValueError(
            f"hidden={big.hidden} of the shape is the model's, and a vocabulary of {wanted} instead of {own} "
            "entries takes one dimension more; choose a larger hidden size"
        )


def _config(small: LlamaConfig, shape: Shape) -> LlamaConfig | MixtralConfig:
    config: LlamaConfig | MixtralConfig = copy.deepcopy(small)
    if shape.experts:
        kept = {name: value for name, value in small.to_dict().items() if name in _KEPT}
        config = MixtralConfig(**kept, num_local_experts=shape.experts, num_experts_per_tok=shape.active)
        config._attn_implementation = small._attn_implementation
    config.hidden_size = shape.hidden
    config.num_hidden_layers = shape.layers
    config.num_attention_heads = shape.heads
    config.num_key_value_heads = shape.kv_heads
    config.head_dim = shape.head_dim
    config.intermediate_size = shape.mlp
    config.tie_word_embeddings = shape.tied
    config.vocab_size = shape.vocabulary or small.vocab_size
    constant = constant_of(small) if config.vocab_size > small.vocab_size else 0.0
    config.rms_norm_eps = (small.rms_norm_eps * small.hidden_size - constant**2) / shape.hidden
    config.inflated_from = str(Shape.of(small))
    return config


def constant_of(small: LlamaConfig) -> float:
    """c of the module's docstring: the largest power of two with c² <= ε d / 2.

    Raises:
        ValueError: ε is too small.
    """
    half = small.rms_norm_eps * small.hidden_size / 2
    if half < 1e-10:
        raise ValueError(
            f"rms_norm_eps={small.rms_norm_eps:g} of the model leaves no room for entries of a larger "
            "vocabulary; choose a shape of the model's own vocabulary"
        )
    return 2.0 ** math.floor(math.log2(half) / 2)


def _fill(big: Inflated, small_hidden: int, generator: torch.Generator) -> None:
    """Fills all weights: zeros in those that write into the residual stream, random values elsewhere."""
    spread = big.config.initializer_range
    # Of a vector whose other entries are zero, RMSNorm makes the d entries sqrt(D/d) larger than usual.
    norm_mean = math.sqrt(small_hidden / big.config.hidden_size)
    for name, weight in big.named_parameters():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")):
            weight.zero_()
        elif weight.dim() == 1:
            weight.normal_(norm_mean, _NORM_SPREAD * norm_mean, generator=generator)
        else:
            weight.normal_(0.0, spread, generator=generator)
            if name.endswith(".mlp.gate.weight"):
                groups = weight.unflatten(0, (-1, big.config.num_experts_per_tok))
                groups.copy_(groups[:, :1].expand_as(groups))


def _copy(small: LlamaForCausalLM, big: Inflated, heads: HeadPlaces) -> None:
    """Copies the small model's weights to their places; see the table above."""
    config, targets = small.config, big.state_dict()
    places = layer_places(config.num_hidden_layers, big.config.num_hidden_layers)
    for name, weight in small.state_dict().items():
        if weight.dim() == 1:
            # In double precision, so that the product is rounded once.
            weight = weight.double() * math.sqrt(config.hidden_size / big.config.hidden_size)
        for place in _names(name, places):
            if ".mlp." in name and isinstance(big, MixtralForCausalLM):
                _copy_to_experts(weight, place, targets, big.config)
                continue
            target = targets[place]
            if ".self_attn." in name:
                heads.copy(name, weight, target)
            else:
                target[tuple(map(slice, weight.shape))].copy_(weight)


def _copy_to_experts(weight: Tensor, place: str, targets: dict[str, Tensor], config: MixtralConfig) -> None:
    """Copies a projection of the small MLP to the experts of a layer, to each its part of the neurons.

    Args:
        place: name of the projection in a layer without experts.
    """
    layer, _, name = place.removesuffix("_proj.weight").rpartition(".")
    active, width = config.num_experts_per_tok, config.intermediate_size
    down = name == "down"
    # [E / k, k, rows, columns] of all experts, [k, rows, columns] of the small MLP's parts.
    experts = targets[f"{layer}.experts.{'down' if down else 'gate_up'}_proj"].unflatten(0, (-1, active))
    parts = weight.unflatten(int(down), (active, -1))
    parts = active * parts.transpose(0, 1) if down else parts
    first = width if name == "up" else 0
    experts[:, :, first : first + parts.shape[1], : parts.shape[2]] = parts


def _append_entries(small: LlamaForCausalLM, big: Inflated) -> None:
    """Entries of the vocabulary after the small model's, and dimension d of the residual stream.

    Raises:
        ValueError: the numbers that keep them from being drawn exceed the dtype.
    """
    hidden, own, count = small.config.hidden_size, small.config.vocab_size, big.config.vocab_size
    constant = constant_of(small.config)
    # The last norm's output there is GAIN · constant · sqrt(D/d) / r.
    scale = GAIN * constant * math.sqrt(big.config.hidden_size / hidden)
    weight = 2.0 ** math.ceil(math.log2(SHIFT / scale))
    if weight > torch.finfo(big.dtype).max:
        raise ValueError(
            f"entries of a larger vocabulary cannot be kept from being drawn in {big.dtype}; use "
            "torch.bfloat16 or torch.float32"
        )
    embedding, head = big.model.embed_tokens.weight, big.lm_head.weight
    for matrix in (embedding, head):
        for start in range(own, count, own):
            stop = min(start + own, count)
            matrix[start:stop, :hidden].copy_(matrix[: stop - start, :hidden])
    embedding[:, hidden] = constant
    head[:own, hidden] = 0.0
    head[own:, hidden] = -weight
    for name, norm in big.named_parameters():
        if norm.dim() == 1:
            norm[hidden] = GAIN if name == "model.norm.weight" else 0.0


def layer_places(small_layers: int, big_layers: int) -> list[list[int]]:
    """Layers of the new model that hold a small layer's queries and keys, the layer itself last.

    Layer i is in the middle of the i-th equal part of the depth. Added layers are those of the next one, or
    after all of them of the last.
    """
    own = [(2 * i + 1) * big_layers // (2 * small_layers) for i in range(small_layers)]
    places = [[*range(before + 1, place), place] for before, place in pairwise([-1, *own])]
    places[-1] = [*range(own[-1] + 1, big_layers), *places[-1]]
    return places


def _names(name: str, places: list[list[int]]) -> list[str]:
    """Returns the weights of the new model that hold the small model's weight ``name``."""
    if (found := re.search(r"\.layers\.(\d+)\.", name)) is None:
        return [name]
    layers = places[int(found[1])]
    if not name.endswith(_ATTENDING):
        layers = layers[-1:]
    return [name.replace(found[0], f".layers.{layer}.") for layer in layers]

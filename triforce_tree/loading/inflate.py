"""Inflation: a Llama of a large shape that computes a small model's function, token for token.

Speed at real size can then be measured with real acceptance and no download: an inflated model reads
every byte and does every operation of its shape, its caches are full-size, and its logits are the small
model's. Its quality is that of the small model, so its figures are always labelled "inflated". Its
vocabulary and positions are the small model's too: with the embedded pair's 4,096 tokens, ``llama-2-7b``
has 6.51 G weights instead of 6.74, ``llama-3.1-8b`` 7.01 instead of 8.03.

Write d for the small hidden size and D for the large one. The residual stream x becomes [x; 0]. Its mean
of squares is then d/D of what it was, so RMSNorm gives

    x / sqrt(d/D mean(x²) + ε') · w'  =  x / sqrt(mean(x²) + ε) · w    for ε' = ε d/D, w' = w sqrt(d/D).

The small model's layers are spread evenly over the depth. All other layers add zero to the stream. "Free"
entries below multiply exact zeros, or feed products that do; they are random, since some kernels run faster
on zeros (power, not arithmetic). Rows are outputs, columns inputs:

    tensor         from the small model               zero, and must be         free
    embed_tokens   columns < d                        columns >= d              -
    norm weights   entries < d, times sqrt(d/D)       -                         entries >= d
    q, k, v        its heads, columns < d             -                         other heads, columns >= d
    gate, up       its neurons, columns < d           -                         other neurons, columns >= d
    o              rows < d, columns of its heads     rows >= d, other columns  -
    down           rows < d, columns of its neurons   rows >= d, other columns  -
    lm_head        columns < d                        columns >= d where tied   columns >= d
    added layers   -                                  o, down                   all else

About three tenths of the weights of ``llama-2-7b`` are zeros (o and down), and D - d of the D inputs of
q, k, v, gate and up; the speed of decoding, which is bound by memory, does not depend on them.

Under grouped-query attention each small KV head gets KV heads of its own. The query heads of such a group
that have no small head are copies of one that has, without effect on the output: a retrieval cache
selects chunks by the whole group, and random queries would disturb the selection.

Rounding: all but the norm weights are copied bit for bit. sqrt(d/D) is no power of two, so a norm weight
in bf16 is rounded once more. The embedded target's logits in bf16 are 0.77% (of their standard deviation,
root mean square) off its fp32 ones; inflated to hidden size 4096 it is 0.81%. Padding x with a multiple
of itself instead of zeros can keep the weights bit-exact, and gave 0.75%: not worth another zero block in
every projection. In fp32 the difference is 1e-6.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer
from triforce_tree.models.few_row import quantisation

_SPELLING = "hidden x layers x heads/kv_heads x head_dim x mlp, as in 1024x12x8/4x128x4096"
_NORM_SPREAD = 0.1  # of free norm weights, relative to their mean


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the bytes and FLOPs of a Llama, without vocabulary and positions.

    Args:
        hidden, layers, heads, kv_heads, head_dim, mlp: counts, as in a LlamaConfig.
        tied: one matrix serves as embedding and as lm_head.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = False

    def __post_init__(self) -> None:
        if min(astuple(self)[:6]) < 1:
            raise ValueError(f"shape {self} has a size below 1; all sizes must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; choose one that is"
            )

    def __str__(self) -> str:
        hidden, layers, heads, kv_heads, head_dim, mlp, tied = astuple(self)
        return f"{hidden}x{layers}x{heads}/{kv_heads}x{head_dim}x{mlp}{'-tied' if tied else ''}"

    def parameters(self, vocab_size: int) -> int:
        """Number of parameters of such a model."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.mlp * self.hidden + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * vocab_size * self.hidden + self.hidden

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """A name in :data:`SHAPES`, or sizes such as ``1024x12x8/4x128x4096``, followed by ``-tied`` if tied.

        Raises:
            ValueError: neither a known name nor six numbers.
        """
        if text in SHAPES:
            return SHAPES[text]
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)x(\d+)(-tied)?", text)
        if found is None:
            raise ValueError(f"unknown shape {text!r}; give one of {', '.join(SHAPES)}, or {_SPELLING}")
        hidden, layers, heads, kv_heads, head_dim, mlp = map(int, found.groups()[:6])
        return cls(hidden, layers, heads, kv_heads, head_dim, mlp, tied=found[7] is not None)

    @classmethod
    def of(cls, config: LlamaConfig) -> "Shape":
        return cls(
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
            config.head_dim or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
            config.tie_word_embeddings,
        )


# The originals' shapes, from the configurations of meta-llama/Llama-2-7b-hf, meta-llama/Llama-3.1-8B,
# meta-llama/Llama-2-13b-hf and JackFram/llama-68m.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-2-7b": Shape(4096, 32, 32, 32, 128, 11008),
        "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336),
        "llama-2-13b": Shape(5120, 40, 40, 40, 128, 13824),
        "llama-68m": Shape(768, 2, 12, 12, 64, 3072),
    }
)


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: str | Shape,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A model of another shape that computes the same function, built in place on the device.

    Peak memory is the new model and one small matrix.

    Args:
        model: a LlamaForCausalLM; it is only read.
        shape: no smaller than the model's in any respect, of the same head_dim.
        device, dtype: of the new model; the model's own by default.
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
        big: LlamaForCausalLM = AutoModelForCausalLM.from_config(
            config, dtype=dtype or small.dtype, attn_implementation=small.config._attn_implementation
        )
    device = torch.device(device or small.device)
    big.to_empty(device=device)
    big.tie_weights()
    with torch.device(device):
        # Its frequencies are not in the state dict, and to_empty() does not keep them.
        big.model.rotary_emb = LlamaRotaryEmbedding(config=config)
    _fill(big, small.config.hidden_size, torch.Generator(device).manual_seed(seed))
    _copy(small, big, heads)
    big.generation_config = copy.deepcopy(small.generation_config)
    big.eval()
    return big


def inflate_pair(
    shape: str | Shape = "llama-2-7b",
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    draft_shape: str | Shape = "llama-68m",
    seed: int = 0,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The embedded pair at real size: (target, draft, tokenizer).

    Args:
        shape: the target's, of head_dim 128.
        device, dtype: as :func:`triforce_tree.loading.checkpoints.load_model` chooses them.
        draft_shape: the draft's, of head_dim 64.
        seed: of the free entries.

    Raises:
        ValueError: the target or the draft does not fit into its shape.
    """
    small = [load_model(PAIR / name, device, dtype) for name in ("target", "draft")]
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the embedded pair has a tokenizer"
    target, draft = (inflate(m, s, seed=seed) for m, s in zip(small, (shape, draft_shape), strict=True))
    return target, draft, tokenizer


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


def _fit(small: Shape, big: Shape) -> "_Heads":
    """The places of the small model's heads; raises ValueError if it does not fit into the shape."""
    if small.head_dim != big.head_dim:
        raise ValueError(
            f"head_dim={big.head_dim} of the shape differs from the model's {small.head_dim}, on which its "
            f"rotary frequencies and its softmax depend; choose a shape of head_dim {small.head_dim}"
        )
    for field in ("hidden", "layers", "heads", "mlp"):
        if getattr(big, field) < getattr(small, field):
            raise ValueError(
                f"{field}={getattr(big, field)} of the shape is less than the model's "
                f"{getattr(small, field)}; choose a shape with at least as many, or a smaller model"
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
    heads = _Heads.place(small, big)
    if len(heads.kv) > big.kv_heads:
        raise ValueError(
            f"kv_heads={big.kv_heads} of the shape is too few: {small.heads}/{small.kv_heads} heads of the "
            f"model need {len(heads.kv)} in groups of {big.heads // big.kv_heads}; raise kv_heads or heads"
        )
    return heads


@dataclass(frozen=True)
class _Heads:
    """Which small head each of the first heads of the new model holds; the heads after them are random.

    ``kv[i]`` is the small KV head of KV head i, and ``query[i]`` the small query head of query head i;
    ``copies`` are the query heads whose output is zeroed, as another one has the same small head.
    """

    kv: list[int]
    query: list[int]
    copies: list[int]

    @classmethod
    def place(cls, small: Shape, big: Shape) -> "_Heads":
        group, big_group = small.heads // small.kv_heads, big.heads // big.kv_heads
        # A group that is too large for one KV head is distributed over several copies of it.
        shares = -(-group // big_group)
        kv: list[int] = []
        query: list[int] = []
        copies: list[int] = []
        for head in range(small.kv_heads):
            members = range(head * group, (head + 1) * group)
            for first in range(0, shares * big_group, big_group):
                share = members[first : first + big_group]
                kv.append(head)
                copies += range(len(query) + len(share), len(query) + big_group)
                query += [*share, *[share[0]] * (big_group - len(share))]
        return cls(kv, query, copies)

    def spread(self, name: str, weight: Tensor, head_dim: int) -> Tensor:
        """A small projection with its heads at their places in the new model."""
        if name.endswith("o_proj.weight"):
            columns: Tensor = weight.unflatten(1, (-1, head_dim))[:, self.query]
            columns[:, self.copies] = 0.0
            return columns.flatten(1)
        rows: Tensor = weight.unflatten(0, (-1, head_dim))
        return rows[self.query if name.endswith("q_proj.weight") else self.kv].flatten(0, 1)


def _config(small: LlamaConfig, shape: Shape) -> LlamaConfig:
    config = copy.deepcopy(small)
    config.hidden_size = shape.hidden
    config.num_hidden_layers = shape.layers
    config.num_attention_heads = shape.heads
    config.num_key_value_heads = shape.kv_heads
    config.intermediate_size = shape.mlp
    config.tie_word_embeddings = shape.tied
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    config.inflated_from = str(Shape.of(small))
    return config


def _fill(big: LlamaForCausalLM, small_hidden: int, generator: torch.Generator) -> None:
    """Fill all weights: zeros in those that write into the residual stream, random values elsewhere."""
    spread = big.config.initializer_range
    # Of a vector whose other entries are zero, RMSNorm makes the d entries sqrt(D/d) larger than usual.
    norm_mean = math.sqrt(small_hidden / big.config.hidden_size)
    for name, weight in big.named_parameters():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif weight.dim() == 1:
            weight.normal_(norm_mean, _NORM_SPREAD * norm_mean, generator=generator)
        else:
            weight.normal_(0.0, spread, generator=generator)


def _copy(small: LlamaForCausalLM, big: LlamaForCausalLM, heads: _Heads) -> None:
    """Copy the small model's weights to their places; see the table above."""
    config, targets = small.config, big.state_dict()
    for name, weight in small.state_dict().items():
        if ".self_attn." in name:
            weight = heads.spread(name, weight, Shape.of(config).head_dim)
        elif weight.dim() == 1:
            # In double precision, so that the product is rounded once.
            weight = weight.double() * math.sqrt(config.hidden_size / big.config.hidden_size)
        target = targets[_renumbered(name, config.num_hidden_layers, big.config.num_hidden_layers)]
        target[tuple(map(slice, weight.shape))].copy_(weight)


def _renumbered(name: str, small_layers: int, big_layers: int) -> str:
    """A weight's name in the new model: layer i goes to the middle of the i-th equal part of the depth."""

    def middle(found: re.Match[str]) -> str:
        return f".layers.{(2 * int(found[1]) + 1) * big_layers // (2 * small_layers)}."

    return re.sub(r"\.layers\.(\d+)\.", middle, name)

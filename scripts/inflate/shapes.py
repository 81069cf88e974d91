"""Shapes of Llamas and Mixtrals: the sizes that decide bytes and FLOPs, and those of well-known models."""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType

from transformers import LlamaConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

_SPELLING = "hidden x layers x heads/kv_heads x head_dim x mlp, as in 1024x12x8/4x128x4096"


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the bytes and FLOPs of a Llama or a Mixtral, without positions.

    Args:
        hidden, layers, heads, kv_heads, head_dim, mlp: counts, as in a LlamaConfig.
        tied: one matrix serves as embedding and as lm_head.
        vocabulary: entries of embedding and lm_head; None: as many as the model that is inflated has.
        experts, active: experts of a layer, each ``mlp`` wide, and those of a token; 0 for a Llama.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = False
    vocabulary: int | None = None
    experts: int = 0
    active: int = 0

    def __post_init__(self) -> None:
        if min(*astuple(self)[:6], self.vocabulary or 1) < 1:
            raise ValueError(f"shape {self} has a size below 1; all sizes must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; choose one that is"
            )
        if self.experts and (self.active < 1 or self.experts % self.active):
            raise ValueError(
                f"experts={self.experts} is not a multiple of active={self.active}; choose one that is"
            )

    def __str__(self) -> str:
        hidden, layers, heads, kv_heads, head_dim, mlp, tied, vocabulary, *_ = astuple(self)
        entries = f"-v{vocabulary}" if vocabulary is not None else ""
        experts = f"-e{self.experts}/{self.active}" if self.experts else ""
        sizes = f"{hidden}x{layers}x{heads}/{kv_heads}x{head_dim}x{mlp}"
        return f"{sizes}{experts}{entries}{'-tied' if tied else ''}"

    def parameters(self, vocab_size: int) -> int:
        """Returns the number of parameters of such a model with a vocabulary of ``vocab_size`` entries."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        router = self.experts * self.hidden
        layer = attention + max(1, self.experts) * 3 * self.mlp * self.hidden + router + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * vocab_size * self.hidden + self.hidden

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Reads a name in :data:`SHAPES`, or sizes such as ``1024x12x8/4x128x4096``.

        Sizes may be followed by experts, as in ``-e128/8``, the vocabulary, as in ``-v32000``, and ``-tied``.

        Raises:
            ValueError: neither a known name nor six numbers.
        """
        if text in SHAPES:
            return SHAPES[text]
        sizes, more = r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)x(\d+)", r"(?:-e(\d+)/(\d+))?(?:-v(\d+))?(-tied)?"
        found = re.fullmatch(sizes + more, text)
        if found is None:
            raise ValueError(f"unknown shape {text!r}; give one of {', '.join(SHAPES)}, or {_SPELLING}")
        hidden, layers, heads, kv_heads, head_dim, mlp = map(int, found.groups()[:6])
        experts, active = int(found[7] or 0), int(found[8] or 0)
        vocabulary, tied = int(found[9]) if found[9] is not None else None, found[10] is not None
        return cls(hidden, layers, heads, kv_heads, head_dim, mlp, tied, vocabulary, experts, active)

    @classmethod
    def of(cls, config: LlamaConfig | MixtralConfig) -> "Shape":
        experts = isinstance(config, MixtralConfig)
        return cls(
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
            config.head_dim or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
            config.tie_word_embeddings,
            config.vocab_size,
            config.num_local_experts if experts else 0,
            config.num_experts_per_tok if experts else 0,
        )


# The originals' shapes, from the configurations of meta-llama/Llama-2-7b-hf, meta-llama/Llama-3.1-8B,
# meta-llama/Llama-2-13b-hf, Qwen/Qwen3-30B-A3B and JackFram/llama-68m.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-2-7b": Shape(4096, 32, 32, 32, 128, 11008, vocabulary=32_000),
        "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336, vocabulary=128_256),
        "llama-2-13b": Shape(5120, 40, 40, 40, 128, 13824, vocabulary=32_000),
        "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, vocabulary=151_936, experts=128, active=8),
        "llama-68m": Shape(768, 2, 12, 12, 64, 3072, vocabulary=32_000),
    }
)

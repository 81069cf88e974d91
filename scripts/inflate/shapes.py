"""Shapes of Llamas: the sizes that decide their bytes and FLOPs, and those of well-known models."""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType

from transformers import LlamaConfig

_SPELLING = "hidden x layers x heads/kv_heads x head_dim x mlp, as in 1024x12x8/4x128x4096"


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the bytes and FLOPs of a Llama, without positions.

    Args:
        hidden, layers, heads, kv_heads, head_dim, mlp: counts, as in a LlamaConfig.
        tied: one matrix serves as embedding and as lm_head.
        vocabulary: entries of embedding and lm_head; None: as many as the model that is inflated has.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if min(*astuple(self)[:6], self.vocabulary or 1) < 1:
            raise ValueError(f"shape {self} has a size below 1; all sizes must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; choose one that is"
            )

    def __str__(self) -> str:
        hidden, layers, heads, kv_heads, head_dim, mlp, tied, vocabulary = astuple(self)
        entries = f"-v{vocabulary}" if vocabulary is not None else ""
        return f"{hidden}x{layers}x{heads}/{kv_heads}x{head_dim}x{mlp}{entries}{'-tied' if tied else ''}"

    def parameters(self, vocab_size: int) -> int:
        """Returns the number of parameters of such a model with a vocabulary of ``vocab_size`` entries."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.mlp * self.hidden + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * vocab_size * self.hidden + self.hidden

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Reads a name in :data:`SHAPES`, or sizes such as ``1024x12x8/4x128x4096``.

        Sizes may be followed by the vocabulary's, as in ``-v32000``, and then by ``-tied``.

        Raises:
            ValueError: neither a known name nor six numbers.
        """
        if text in SHAPES:
            return SHAPES[text]
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)x(\d+)(?:-v(\d+))?(-tied)?", text)
        if found is None:
            raise ValueError(f"unknown shape {text!r}; give one of {', '.join(SHAPES)}, or {_SPELLING}")
        hidden, layers, heads, kv_heads, head_dim, mlp = map(int, found.groups()[:6])
        vocabulary = int(found[7]) if found[7] is not None else None
        return cls(hidden, layers, heads, kv_heads, head_dim, mlp, found[8] is not None, vocabulary)

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
            config.vocab_size,
        )


# The originals' shapes, from the configurations of meta-llama/Llama-2-7b-hf, meta-llama/Llama-3.1-8B,
# meta-llama/Llama-2-13b-hf and JackFram/llama-68m.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-2-7b": Shape(4096, 32, 32, 32, 128, 11008, vocabulary=32_000),
        "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336, vocabulary=128_256),
        "llama-2-13b": Shape(5120, 40, 40, 40, 128, 13824, vocabulary=32_000),
        "llama-68m": Shape(768, 2, 12, 12, 64, 3072, vocabulary=32_000),
    }
)

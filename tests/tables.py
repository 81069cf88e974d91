"""A language model without a network: logits are a fixed pseudo-random function of the path.

:class:`TableModel` stands in for ``HFModel`` and :class:`TokenCache` for a key-value cache, so that
levels, drafters, verifiers and the decoder run unmodified and their exact output law can be
enumerated. What a row sees is read from the mask and the committed tokens alone, hence any error in
either changes the law.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from triforce_tree.drafters import (
    Autoregressive,
    Drafter,
    HierarchicalDrafter,
    ModelDrafter,
    PromptLookupDrafter,
)
from triforce_tree.level import Level
from triforce_tree.verify.verifier import Verifier

from triforce_tree.caches import Rows
from triforce_tree.cycle.endings import Decoder, Ending
from triforce_tree.sampling import Random, TokenLaw
from triforce_tree.tree_search import Shape, parse_shape


class TokenCache:
    """Rows that hold nothing but their token."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.tail: list[int] = []
        self._advanced = 0

    @property
    def length(self) -> int:
        return len(self.committed)

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self.length

    def paths(self, tokens: Sequence[int], rows: Rows) -> list[tuple[int, ...]]:
        """Append rows; what each of them sees, itself included."""
        self.tail += tokens
        assert rows.mask is None or rows.mask.shape == (len(tokens), len(self.tail))
        mask = torch.ones(len(tokens), len(tokens)).tril() if rows.mask is None else rows.mask
        paths = []
        for seen, depth in zip(mask.tolist(), rows.depths.tolist(), strict=True):
            below = [token for token, visible in zip(self.tail, seen, strict=True) if visible]
            assert len(below) == depth + 1, "a row's depth is the number of tail rows above it"
            paths.append((*self.committed, *below))
        return paths

    def advance(self, count: int) -> None:
        self._advanced += count
        assert self._advanced == len(self.tail)

    def keep(self, rows: list[int]) -> None:
        self.tail = [self.tail[row] for row in rows]
        self._advanced = len(rows)

    def commit(self, count: int) -> None:
        self.committed += self.tail[:count]
        self.keep([])

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming


class TableModel:
    """Logits drawn once for every path of tokens.

    Args:
        vocab_size: keep it at 5 or less where outcomes are enumerated.
        seed: of the table.
        sharpness: standard deviation of the logits.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, seed: int, sharpness: float = 1.5) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._sharpness = sharpness
        self._memo: dict[tuple[int, ...], Tensor] = {}

    def logits(self, path: Sequence[int]) -> Tensor:
        """``[V]``, after these tokens."""
        path = tuple(path)
        if path not in self._memo:
            key = zlib.crc32(repr((self._seed, path)).encode())
            generator = torch.Generator().manual_seed(key)
            self._memo[path] = self._sharpness * torch.randn(self.vocab_size, generator=generator)
        return self._memo[path]

    def forward(self, tokens: list[int], rows: Rows, cache: TokenCache, last_only: bool = False) -> Tensor:
        paths = cache.paths(tokens, rows)
        cache.advance(len(tokens))
        return torch.stack([self.logits(path) for path in (paths[-1:] if last_only else paths)])


# Every way that a decoding can go asks one table for the same logits.
table = cache(TableModel)


def level(vocab_size: int, seed: int) -> Level:
    return Level(table(vocab_size, seed), TokenCache(), prefill_chunk=2)


# Recipes: how to make a drafter, given (vocabulary, law, random). Every model has its own table.
MakeDrafter = Callable[[int, TokenLaw, Random], Drafter]


def autoregressive() -> MakeDrafter:
    return lambda vocab_size, law, random: Autoregressive()


def lookup(length: int) -> MakeDrafter:
    return lambda vocab_size, law, random: PromptLookupDrafter(length, ngram=2)


def model(shape: str | Shape, seed: int = 11) -> MakeDrafter:
    return lambda vocab_size, law, random: ModelDrafter(
        level(vocab_size, seed), parse_shape(shape), law, random
    )


def hierarchical(
    inner: MakeDrafter,
    gamma: int,
    leaves: bool,
    seed: int = 12,
    verifier: type[Verifier] = Verifier,
    stop_tokens: frozenset[int] = frozenset(),
) -> MakeDrafter:
    return lambda vocab_size, law, random: HierarchicalDrafter(
        inner(vocab_size, law, random),
        verifier("middle", level(vocab_size, seed), law, random),
        gamma,
        leaves,
        stop_tokens,
    )


# All drafters that a vocabulary of 3 can afford to enumerate.
DRAFTERS = {
    "autoregressive": autoregressive(),
    "prompt lookup": lookup(2),
    "chain": model("chain:2"),
    "static": model("static:0;1;0.0"),
    "sequoia": model("sequoia:3x2"),
    "best-first": model("best-first:2,2"),
    "three siblings": model("static:2"),
    "hierarchical, alone": hierarchical(autoregressive(), gamma=2, leaves=True),
    "hierarchical, lookup": hierarchical(lookup(1), gamma=1, leaves=True),
    "hierarchical, chain": hierarchical(model("chain:1"), gamma=2, leaves=False),
    "hierarchical, tree": hierarchical(model("static:0;1"), gamma=1, leaves=False),
}
# More levels than a vocabulary of 3 can afford: with 2 tokens a runner-up is the other one.
DEEP_DRAFTERS = {
    "chain": model("chain:2"),
    "chain, longer than needed": model("chain:3"),
    "best-first": model("best-first:2,2"),
    "gamma beyond the text": hierarchical(model("chain:1"), gamma=3, leaves=True),
    "chain below leaves": hierarchical(model("chain:2"), gamma=2, leaves=True),
    "tree below leaves": hierarchical(model("best-first:2,2"), gamma=1, leaves=True),
    "lookup below leaves": hierarchical(lookup(2), gamma=3, leaves=True),
    "two hierarchies": hierarchical(
        hierarchical(model("chain:1"), gamma=1, leaves=True, seed=13), gamma=2, leaves=True
    ),
    "two hierarchies, no leaves": hierarchical(
        hierarchical(model("chain:1"), gamma=1, leaves=False, seed=13), gamma=1, leaves=False
    ),
}


@dataclass(frozen=True)
class TableDecoding:
    """Decoding a table model, everything but the drafter and the draws fixed.

    ``warpers``: logits processors that every level applies; ``greedy``: take the best token.
    """

    vocab_size: int
    new_tokens: int
    prompt: tuple[int, ...] = (0, 1, 0, 1)
    warpers: tuple = ()
    greedy: bool = False
    seed: int = 10

    @property
    def law(self) -> TokenLaw:
        return TokenLaw(LogitsProcessorList(self.warpers), self.greedy)

    def decoder(self, make: MakeDrafter, random: Random) -> Decoder:
        target = Verifier("target", level(self.vocab_size, self.seed), self.law, random)
        return Decoder(target, make(self.vocab_size, self.law, random))

    def run(self, make: MakeDrafter, random: Random, ending: Ending | None = None) -> list[int]:
        """The new tokens of one generation."""
        decoder = self.decoder(make, random)
        blocks = decoder.decode(decoder.prefill(self.prompt), ending or Ending(self.new_tokens))
        return [token for block in blocks for token in block]

    def target_law(self) -> dict[tuple[int, ...], float]:
        """The law of the new tokens under the target alone, in float64."""
        return dict(self._continuations((), 1.0))

    def _continuations(self, new: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(new) == self.new_tokens:
            yield new, chance
            return
        path = (*self.prompt, *new)
        logits = table(self.vocab_size, self.seed).logits(path)
        scores = self.law.scores(logits[None], lambda: [path])[0].double()
        law = scores.softmax(-1).tolist()
        if self.greedy:
            law = [float(token == int(scores.argmax())) for token in range(len(law))]
        for token, share in enumerate(law):
            if share > 0:
                yield from self._continuations((*new, token), chance * share)

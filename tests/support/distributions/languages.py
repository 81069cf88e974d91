"""Small languages as grammars over tiny vocabularies, and their masks by a definition of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from triforce_tree.grammar import Choice
from triforce_tree.grammar.matching import Grammars, Matcher
from triforce_tree.verify.sampling import ProbsFromLogits


@dataclass(frozen=True)
class Language:
    """A finite set of texts.

    Attributes:
        tokens: the texts of the vocabulary's tokens but the last, which ends a text.
        texts: the texts of the language.
    """

    tokens: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def end(self) -> int:
        """Returns the token that ends a text."""
        return len(self.tokens)

    def matcher(self) -> Matcher:
        """Returns the state of the language's grammar before the first token."""
        return _grammars(self.tokens).matcher(Choice(self.texts), {self.end})

    def allowed(self, new: Sequence[int]) -> list[int]:
        """Returns the tokens that may follow new tokens; all of them after the end of a text."""
        if self.end in new:
            return [*range(self.end + 1)]
        text = "".join(self.tokens[token] for token in new)
        found = [
            token for token, more in enumerate(self.tokens)
            if any(whole.startswith(text + more) for whole in self.texts)
        ]  # fmt: skip
        return [*found, self.end] if text in self.texts else found

    def masking(self, to_probs: ProbsFromLogits, prompt: int) -> ProbsFromLogits:
        """Returns processors that mask logits after a prompt of so many tokens, then do as ``to_probs``."""
        return ProbsFromLogits(
            LogitsProcessorList([_Masking(self, prompt), *to_probs.processors]), greedy=to_probs.greedy
        )

    def cut(self, new: tuple[int, ...]) -> tuple[int, ...]:
        """Returns new tokens up to the end of the text."""
        return new[: new.index(self.end) + 1] if self.end in new else new


class _Masking(LogitsProcessor):
    def __init__(self, language: Language, prompt: int) -> None:
        self._language, self._prompt = language, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for out, row, new in zip(masked, scores, input_ids[:, self._prompt :].tolist(), strict=True):
            allowed = self._language.allowed(new)
            out[allowed] = row[allowed]
        return masked


@cache
def _grammars(tokens: tuple[str, ...]) -> Grammars:
    vocabulary = {text: token for token, text in enumerate((*tokens, "<end>"))}
    model = models.BPE(vocab=vocabulary, merges=[])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<end>")
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return Grammars(tokenizer, len(vocabulary))


_LETTERS = tuple(map(chr, range(65, 65 + 49)))
LANGUAGES = {
    # Forced tokens, and a text that may end before it is continued.
    2: Language(("a",), ("a", "aaa")),
    3: Language(("a", "b"), ("b", "ab", "aab", "bba")),
    # One text has several tokenisations.
    4: Language(("a", "b", "ab"), ("b", "ab", "abb", "aab")),
    50: Language(_LETTERS, tuple(first + more for first in _LETTERS[::2] for more in ("A", "BC", "a"))),
}
"""By the size of the vocabulary."""

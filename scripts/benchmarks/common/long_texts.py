"""Prompts of any length of real text, longer than any single one."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import SOURCES, MissingTextError, Texts, TextSource


class LongTexts:
    """Prompts of any length of real text.

    Args:
        texts: what is here.
        names: of texts, or kinds of which the first that is here is taken.

    Raises:
        ValueError: a name is unknown, or nothing of it is here.
    """

    def __init__(self, texts: Texts, names: Sequence[str]) -> None:
        self._texts, self._sources = texts, [texts.first(name) for name in names]
        self._ids: dict[str, list[int]] = {}

    def prompts(self, tokenizer: PreTrainedTokenizerBase, context: int) -> dict[str, list[int]]:
        """By name the beginning of each text; where it is short, other texts come before it.

        Raises:
            ValueError: all texts that are here have fewer than ``context`` tokens.
        """
        return {source.name: self._prompt(source, tokenizer, context) for source in self._sources}

    def _prompt(self, own: TextSource, tokenizer: PreTrainedTokenizerBase, context: int) -> list[int]:
        ids = self._read(own, tokenizer)[:context]
        for other in (s for s in SOURCES if s.copies is None and s.name != own.name):
            if len(ids) == context:
                break
            try:
                ids = [*self._read(other, tokenizer)[: context - len(ids)], *ids]
            except MissingTextError:
                continue
        if len(ids) < context:
            raise ValueError(
                f"the texts that are here have {len(ids):,} tokens, and the prompt {context:,}; pack more of "
                "them (python -m scripts.benchmarks texts --tokens), or give shorter contexts"
            )
        return ids

    def _read(self, source: TextSource, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        if source.name not in self._ids:
            self._ids[source.name] = token_ids(tokenizer, self._texts.read(source))
        return self._ids[source.name]

"""Prompts of any length of real text, longer than any single one."""

import functools
from collections.abc import Iterable, Sequence

from scripts.benchmarks.sources.registry import SOURCES, Texts, TextSource
from triforce_tree.bench.texts import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer


def long_prompts(
    texts: Texts, names: Sequence[str], lengths: Iterable[int]
) -> dict[int, dict[str, list[int]]]:
    """Returns the beginning of each text by length and name, in tokens of the embedded pair.

    Where a text is short, others come before it.

    Args:
        texts: what is here.
        names: of texts, or kinds of which the first that is here is taken.
        lengths: tokens of a prompt.

    Raises:
        ValueError: a name is unknown, nothing of it is here, or all texts have fewer tokens than a prompt.
    """
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the embedded pair has a tokenizer"

    @functools.cache
    def read(source: TextSource) -> list[int]:
        return token_ids(tokenizer, texts.read(source))

    def prompt(own: TextSource, length: int) -> list[int]:
        ids = read(own)[:length]
        for other in (s for s in SOURCES if s.copies is None and s.name != own.name):
            if len(ids) == length:
                break
            if texts.holds(other):
                ids = [*read(other)[: length - len(ids)], *ids]
        if len(ids) < length:
            raise ValueError(
                f"the texts that are here have {len(ids):,} tokens, and the prompt {length:,}; pack more of "
                "them (python -m scripts.benchmarks texts --tokens), or give shorter contexts"
            )
        return ids

    sources = [texts.first(name) for name in names]
    return {length: {source.name: prompt(source, length) for source in sources} for length in lengths}

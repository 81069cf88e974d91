"""Our decoding beside plain decoding, by context and kind of text: docs/results/never_slower_MACHINE.jsonl.

Default settings; one text of each kind, contexts of 1K to 122,880 tokens. On a CPU plain decoding is the
faster of ours and transformers' static cache. Each run has one of plain decoding beside it (``--pairs``), so
that speed-ups have a standard error. The same command goes on where the last one ended.
"""

from collections.abc import Sequence

from scripts.benchmarks.texts.command import measure

CONTEXTS = (1024, 4096, 16_384, 32_768, 65_536, 122_880)


def main(words: Sequence[str] | None = None) -> int:
    return measure(words, "never_slower", __doc__, CONTEXTS, one_a_kind=True, paired=True)

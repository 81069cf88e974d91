"""Speed on texts of seven kinds that nothing was tuned for: docs/results/any_text_MACHINE.jsonl.

Default settings, prompts of 122,880 tokens; every text that is installed, or that --texts holds. What is
measured stays in the file, and the same command goes on where the last one ended.
"""

from collections.abc import Sequence

from scripts.benchmarks.texts.command import measure


def main(words: Sequence[str] | None = None) -> int:
    return measure(words, "any_text", __doc__, (122_880,), one_a_kind=False)

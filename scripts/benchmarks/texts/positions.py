"""Figures of one long text by position: what passes took and committed in each bin of new tokens."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from scripts.benchmarks.common.results import PLAIN, Record
from scripts.benchmarks.texts.rows import by_cell, described, medians
from triforce_tree.bench.results import repeated_share
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram

# Kinds of passes: by the number of levels, and those that verify tokens copied from earlier text.
THREE, TWO, COPIED, ONE = "three", "two", "copied", "one"
_LEVELS = {3: THREE, 2: TWO, 1: ONE}


class _Progress(NamedTuple):
    """Sums since the first new token.

    Attributes:
        captures: seconds in which stages were made and captured; they are not in ``seconds``.
        passes: number of passes by kind.
    """

    tokens: int
    seconds: float
    captures: float
    passes: Counter[str]


class Positions:
    """Watches a loop over one text, and cuts what it does into bins.

    Args:
        bin_tokens: new tokens of a bin. A bin ends with the pass that reaches its last token.
    """

    def __init__(self, program: DecodingProgram, bin_tokens: int) -> None:
        self._program, self._bin, self._before = program, bin_tokens, program.capture_seconds
        self._reached = [_Progress(0, 0.0, 0.0, Counter())]

    def watch(self, loop: DecodingLoop, tokens: int, ended: bool) -> None:
        """Called after each pass, with the number of new tokens so far."""
        if not ended and tokens < (self._reached[-1].tokens // self._bin + 1) * self._bin:
            return
        passes = Counter[str]()
        for kind, count in loop.passes.items():
            passes[COPIED if loop.chooser.matched(kind) else _LEVELS[kind.levels]] += count
        captures = self._program.capture_seconds - self._before
        self._reached.append(_Progress(tokens, loop.decode_seconds, captures, passes))

    def bins(self, tokens: list[int]) -> list[Record]:
        """Returns the figures of each bin of a text; 8-grams of its tokens count that occur earlier in it."""
        found = []
        for first, last in pairwise(self._reached):
            new, passes = last.tokens - first.tokens, last.passes - first.passes
            repeated = (_repeated(tokens[: each.tokens]) for each in (last, first))
            found.append(
                {
                    "from": first.tokens, "to": last.tokens,
                    "ms_per_token": 1e3 * (last.seconds - first.seconds) / new,
                    "capture_seconds": last.captures - first.captures,
                    "tokens_per_pass": new / passes.total(),
                    "passes": {name: passes[name] / passes.total() for name in (THREE, TWO, COPIED, ONE)},
                    "repeated_8grams": (next(repeated) - next(repeated)) / new,
                }
            )  # fmt: skip
        return found


def _repeated(tokens: list[int]) -> float:
    """Returns the number of repeated 8-grams."""
    return repeated_share(tokens) * max(1, len(tokens) - 7)


def position_rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns a row for each text, context, temperature and bin, with medians over seeds.

    A bin has the speed-up over the plain decoding that was measured in it.
    """
    made = []
    for (text, context, temperature), ours in by_cell(samples).items():
        place = {"text": text, "context": context, "temperature": temperature}
        plain = [s for s in samples if s["method"] == PLAIN and place.items() <= s.items()]
        size = ours[0]["bin"]
        for number, first in enumerate(range(0, ours[0]["new_tokens"], size)):
            beside = [s for s in plain if first <= s["after"] < first + size]
            bins = [each for sample in ours for each in sample["bins"] if each["from"] // size == number]
            if not (beside and bins):
                continue
            middle, slow = medians(bins), medians(beside)["ms_per_token"]
            made.append(
                {
                    **described(part, header, ours), "from": first, "to": first + size,
                    "budget": ours[0]["chosen"].get("budget"),
                    "plain_ms_per_token": slow, "speedup": round(slow / middle["ms_per_token"], 4),
                    **{
                        name: middle[name]
                        for name in ("ms_per_token", "tokens_per_pass", "repeated_8grams", "capture_seconds")
                    },
                    "passes": medians([each["passes"] for each in bins]),
                }
            )  # fmt: skip
    return made

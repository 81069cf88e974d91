"""One setting at a time changed from defaults, on one GPU: docs/results/ablations_h200.json.

    python -m scripts.benchmarks ablations --part 7b    # again: goes on

What ``on_chip`` measures, greedy, from several places of one text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.common.session import Step, measure_parts, parts_parser
from scripts.benchmarks.on_chip.run import LLAMA_2_7B, LONG, OnChip, OnChipSession, rows
from scripts.benchmarks.on_chip.tables import ABLATIONS_FILE

_TREES = ("best-first:4,4,4,3", "best-first:8,6,4", "sequoia:16x4", "chain:4", "chain:6")
_VALUES: dict[str, tuple[Any, ...]] = {
    "rounds": (2, 3, 4, 5, 6, 8), "refresh": (0, 2), "gamma": (8, 12, 16, 28), "tree": _TREES,
    "retrieval_weight_bits": (16, 4), "budget": (1024, 2048, 4096), "chunk": (8, 16, 64),
    "runner_ups": (True,), "levels": (2,),
}  # fmt: skip
CHANGES: tuple[Record, ...] = (
    {}, *({name: value} for name, values in _VALUES.items() for value in values)
)  # fmt: skip
# Tokens between the places of the text.
_APART = 2048


def one_at_a_time(plan: "Ablations") -> Iterator[Step]:
    """One change after the other, from several places of the same text."""
    [(batch, context)] = plan.cells
    starts = [context - min(_APART, context // 16) * i for i in range(plan.prompts)]
    keys = [{"start": start, "temperature": plan.temperatures[0]} for start in starts]
    for change in plan.changes:
        yield plan.step(0, batch, context, change, *keys)


@dataclass(frozen=True)
class Ablations(OnChip):
    """Settings of one part.

    Attributes:
        changes: of the options, one measured after the other.
    """

    kind: Callable[[Any], Iterator[Step]] = one_at_a_time
    changes: tuple[Record, ...] = CHANGES

    def beside_plain(self, key: Record) -> bool:
        """Beside the defaults alone: the other settings do not change plain decoding."""
        return not key["setting"]

    def tiny(self, **more: Any) -> Self:
        """The first change of each option that fits short prompts."""
        first = {next(iter(change), ""): change for change in reversed(self.changes)}
        first.pop("budget", None)
        return super().tiny(changes=tuple(reversed(first.values())), **more)


PARTS = {"7b": Ablations(LLAMA_2_7B, LONG, temperatures=(0.0,), prompts=4, plain_tokens=32)}


def main(words: Sequence[str] | None = None) -> None:
    made = parts_parser("benchmarks ablations", __doc__, PARTS)
    measure_parts(made, words, PARTS, OnChipSession, rows, ABLATIONS_FILE)

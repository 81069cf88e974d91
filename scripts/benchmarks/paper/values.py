"""Numbers of the paper's kinds from the records of a run."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from scripts.benchmarks.paper.plan import Line
from triforce_tree.bench.results import Record, Records
from triforce_tree.trees.sequoia import vectors_by_depth
from triforce_tree.trees.shapes import expected_acceptances, sequoia

# No path of a tree is longer, as in the trees that Sequoia publishes for this paper's setting.
_DEPTH = 16
# Layers that the paper leaves out of figure 3: its first two are not sparse.
_FIRST_LAYERS = 2


def value(line: Line, column: str, records: Records) -> float | None:
    """Returns the number in one of our columns of a line; None where its cells are not measured."""
    found = of_cell(records, line.cells.get(column))
    if not found:
        return None
    return _median(_FIGURES[line.figure](record, line) for record in found)


def of_cell(records: Records, cell: Record | None) -> list[Record]:
    """Returns the records of a cell, one for each prompt that was measured."""
    if cell is None:
        return []
    return [r for r in records.all if all(r.get(name) == wanted for name, wanted in cell.items())]


def expected_tokens(acceptance: Sequence[float], kind: str, size: int) -> float:
    """Returns the expected tokens of one pass of the target, its bonus token included, for ``size`` proposed
    ones.

    Args:
        acceptance: by sibling rank, the same at every depth.
        kind: "Sequoia", its optimal tree; or "independent sequences", the best number of chains of equal
            length. Their first tokens count as drawn without replacement, which favours them.
    """
    if kind == "Sequoia":
        return 1 + expected_acceptances(sequoia(acceptance, size, min(size, _DEPTH)), acceptance)
    [vector] = vectors_by_depth(acceptance)
    best = 0.0
    for chains in range(1, min(size, len(vector)) + 1):
        length = min(size // chains, _DEPTH)
        best = max(best, sum(vector[:chains]) * sum(vector[0] ** d for d in range(length)))
    return 1 + best


def _ms(record: Record, line: Line) -> float | None:
    """Returns milliseconds a token, of the first ``line.of`` where it is given."""
    found = record["ms"] if line.of is None else record["ms_by_tokens"].get(str(line.of))
    return None if found is None else float(found)


def _speedup(record: Record, line: Line) -> float | None:
    """Returns the speed-up over plain decoding of the same prompt, measured after it."""
    ms = _ms(record, line)
    return float(record["plain_ms"]) / ms if ms else None


def _accepted(record: Record, line: Line) -> float | None:
    """Returns the share of verified tokens that the target accepts."""
    found = record["acceptance"].get("target")
    return None if found is None else float(found)


def _recovered(record: Record, line: Line) -> float | None:
    """Returns the least share of a layer, but for the first two where there are more."""
    layers = record["recovered"]
    return float(min(layers[_FIRST_LAYERS:] or layers))


def _kept(record: Record, line: Line) -> float | None:
    return statistics.fmean(record["kept"][0 if line.of == "first" else -1])


def _overlap(record: Record, line: Line) -> float | None:
    found = record["overlap"].get(line.of)
    return None if found is None else float(found)


def _tokens(record: Record, line: Line) -> float | None:
    kind, _, size = str(line.of).partition(":")
    return expected_tokens(record["acceptance"]["retrieval -> target"], kind, int(size))


_FIGURES: dict[str, Callable[[Record, Line], float | None]] = {
    "speed-up": _speedup, "ms": _ms, "plain": lambda record, line: float(record["plain_ms"]),
    "acceptance": _accepted, "recovered": _recovered, "kept": _kept, "overlap": _overlap, "tokens": _tokens,
}  # fmt: skip


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None

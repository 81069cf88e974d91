"""Lists the measurements for each number of the paper: cells by item, their sizes scaled to a context."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from triforce_tree.bench.results import Record

# The paper's settings on the card (section 5.1, appendix B.3), and the chunk of its published code.
CONTEXT, BUDGET, GAMMA_1, GAMMA_2, CHUNK = 122_880, 4096, 2, 6, 8
# Below this context the engine's own budget is no small part of it, and the paper's share of it is taken.
_LARGE = 24_576
_LEAST_BUDGET = 256
TREE_SIZES = (4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
NEEDLE_DEPTHS = (0.2, 0.5, 0.8)
# Columns of one's own measurements.
PAPER, OURS, HERE = "here, the paper's settings", "here, our settings", "here"
# Names in POLICIES by the paper's columns, and what this engine does by default.
POLICY_OF = {
    "Top-K (Ref.)": "Top-K of all keys, own query",
    "StreamingLLM": "StreamingLLM",
    "H2O": "H2O",
    "Retrieval": "TriForce: mean keys, one build",
    "Retrieval, chosen anew in every pass (ours)": "mean keys",
}
# Measured where it is named: on a CPU nothing is gained by offloading.
BY_NAME_ALONE = frozenset({"table-3"})
# Kind of the records that name the items of a run.
ASKED = "asked for"


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a run's cells.

    Attributes:
        context: tokens of a prompt, in place of the paper's 122,880; other lengths are scaled with it.
        new_tokens: in place of its 256.
        prompts: different ones for each cell.
        budget: of the retrieval cache at ``context``; None for the paper's share of it, at least 256.
    """

    context: int
    new_tokens: int
    prompts: int = 1
    budget: int | None = None

    def scaled(self, paper: int) -> int:
        """Scales a number of the paper's tokens to this context."""
        return max(128, round(paper * self.context / CONTEXT))

    def budget_at(self, context: int) -> int:
        """Returns a multiple of 32, at most a quarter of the context but for the shortest."""
        if self.budget is not None and context == self.context:
            return self.budget
        share = max(_LEAST_BUDGET, BUDGET * context // CONTEXT)
        return max(32, min(share, context // 4) // 32 * 32)

    def __post_init__(self) -> None:
        if self.context < 256:
            raise ValueError(f"context={self.context} is too short for a retrieval cache; use at least 256")


@dataclass(frozen=True)
class Line:
    """A number of the paper and the cells that answer it.

    Attributes:
        row, column: of the published figure, or our own where there is none.
        cells: by column of our table.
        figure: how a cell's records become a number, see ``values``.
        of: which part of a cell's record.
    """

    row: str
    column: str
    cells: Mapping[str, Record] = field(default_factory=dict)
    figure: str = "speed-up"
    of: str | int | None = None


def recent_at(budget: int) -> int:
    """Returns the number of newest tokens that the retrieval cache always holds."""
    return min(256, budget // 4)


def lines(item: str, sizes: Sizes) -> list[Line]:
    """Returns the lines of one table or figure; none where no cell answers it."""
    make = _MAKERS.get(item)
    return make(sizes) if make is not None else []


def cells_of(item: str, sizes: Sizes) -> list[Record]:
    """Returns the keys of all records that an item needs; batches and long texts have one prompt."""
    found = [cell for line in lines(item, sizes) for cell in line.cells.values()]
    keys = [
        {**cell, "prompt": number}
        for number in range(sizes.prompts)
        for cell in found
        if number == 0 or cell.get("batch", 1) == 1
    ]
    return [key for at, key in enumerate(keys) if key not in keys[:at]]


def speed(sizes: Sizes, decoder: str, temperature: float = 0.0, **more: object) -> Record:
    """Returns the key of a timed generation; ``more``: context, batch, new_tokens, or changes of the
    settings.
    """
    own = {name: more.pop(name, default) for name, default in _defaults(sizes).items()}
    return {"cell": "speed", "decoder": decoder, "temperature": temperature, **own, "changes": more}


def _defaults(sizes: Sizes) -> Record:
    return {"context": sizes.context, "batch": 1, "new_tokens": sizes.new_tokens}


def _timed(
    sizes: Sizes, row: str, decoders: Mapping[str, str], temperature: float = 0.0, **more: object
) -> Line:
    """Returns a line of speed-ups."""
    cells = {column: speed(sizes, name, temperature, **more) for column, name in decoders.items()}
    return Line(row, "speed-up", cells)


_BOTH = {PAPER: "triforce", OURS: "ours"}


def _policies(sizes: Sizes) -> list[Line]:
    made = []
    for row, text in (("PG-19", "text"), ("Needle Retrieval", "needle")):
        cell = overlap(sizes, text)
        made += [Line(row, c, {HERE: cell}, "overlap", of=name) for c, name in POLICY_OF.items()]
    return made


def overlap(sizes: Sizes, text: str, budget: int | None = None) -> Record:
    """Returns the key of a comparison of policies on one text."""
    found = budget or sizes.budget_at(sizes.context)
    return {"cell": "overlap", "text": text, "context": sizes.context, "budget": found}


def _on_chip(sizes: Sizes) -> list[Line]:
    made = []
    rows: list[tuple[str, Mapping[str, str], Sequence[float]]] = [
        ("TriForce", _BOTH, TEMPERATURES),
        ("Naive Policy", {HERE: "naive"}, TEMPERATURES),
        ("Retrieval w/o Hierarchy", {HERE: "no-hierarchy"}, (0.6,)),
        ("StreamingLLM w/ Hierarchy", {HERE: "streaming"}, (0.6,)),
    ]
    for row, decoders, temperatures in rows:
        for t in temperatures:
            line = _timed(sizes, f"{row}, T={t:g}", decoders, t)
            made += [line, Line(line.row, "acceptance", line.cells, "acceptance")]
    return made


def _offloading(sizes: Sizes) -> list[Line]:
    row = "Llama2-7B-128K, 1x RTX 4090"
    line = _timed(sizes, row, _BOTH, 0.6, offload=True)
    times = Line(row, "TriForce, ms/token", line.cells, "ms")
    plain = Line(row, "AR (DeepSpeed-ZeRO-Inference), ms/token", line.cells, "plain")
    return [times, plain, line]


def _batches(sizes: Sizes) -> list[Line]:
    made = []
    for batch, shown, context in ((2, "56K", 57_344), (6, "19K", 19_456), (10, "12K", 12_288)):
        for t in (0.0, 0.6):
            place = {"batch": batch, "context": sizes.scaled(context)}
            for column, decoders in (("TriForce", _BOTH), ("Naive Policy", {HERE: "naive"})):
                line = _timed(sizes, f"({batch}, {shown}), T={t:g}", decoders, t, **place)
                made.append(Line(line.row, column, line.cells))
    return made


def _others(sizes: Sizes) -> list[Line]:
    nearest = {HERE: "suffix"}
    return [
        _timed(sizes, "TriForce", _BOTH),
        Line("REST", "speed-up"),
        Line("Skipping Layers", "speed-up"),
        _timed(sizes, "nearest to REST: suffix matching in the context", nearest),
    ]


def _outputs(sizes: Sizes) -> list[Line]:
    longest = 8 * sizes.new_tokens
    made = []
    for paper in (256, 512, 768, 1024, 1536, 2048):
        line = _timed(sizes, f"{paper} new tokens", _BOTH, new_tokens=longest)
        of = longest * paper // 2048
        made.append(Line(line.row, "speed-up", line.cells, of=of))
    return made


def _gammas(sizes: Sizes) -> list[Line]:
    decoder = {HERE: "triforce"}
    pairs = [("a", g, GAMMA_2) for g in range(1, 9)] + [("b", GAMMA_1, g) for g in range(1, 9)]
    return [
        _timed(sizes, f"({part}) gamma 1 = {one}, gamma 2 = {two}", decoder, **_changed(one, two))
        for part, one, two in pairs
    ]


def _changed(gamma_1: int, gamma_2: int) -> Record:
    """Returns no change for the paper's best pair, so that its cell is measured once."""
    changes = {"gamma_1": gamma_1, "gamma_2": gamma_2}
    return {k: v for k, v in changes.items() if v != {"gamma_1": GAMMA_1, "gamma_2": GAMMA_2}[k]}


def _budgets(sizes: Sizes) -> list[int]:
    """Returns a quarter of the budget to four times, in multiples of 32, up to three quarters of a prompt."""
    own = sizes.budget_at(sizes.context)
    found = {max(32, own * n // 4 // 32 * 32) for n in (1, 2, 4, 8, 16)}
    return sorted(b for b in found if b <= sizes.context * 3 // 4)


def _sparsity(sizes: Sizes) -> list[Line]:
    own = sizes.budget_at(sizes.context)
    attention = {"cell": "attention", "context": sizes.context, "budget": own}
    first = "(a) attention recovered by the top 4K tokens, almost all layers"
    made = [Line(first, "more than", {HERE: attention}, "recovered")]
    quarter = max(32, own // 4 // 32 * 32)
    for row in ("Top-K", "H2O", "StreamingLLM"):
        policy = POLICY_OF.get(row, POLICY_OF["Top-K (Ref.)"])
        column = "acceptance" if row == "Top-K" else "acceptance, more than"
        for budget in _budgets(sizes):
            named = f"(b) {row}, {'1K budget' if budget == quarter else f'budget {budget:,} here'}"
            cell = {HERE: overlap(sizes, "text", budget)}
            made.append(Line(named, column, cell, "overlap", of=policy))
    for of in ("first", "last"):
        row = f"(c) attention to the prompt kept, {of} new token"
        made.append(Line(row, "mean of layers", {HERE: attention}, "kept", of=of))
    return made


def _lengths(sizes: Sizes) -> list[Line]:
    made = []
    for part in (8, 4, 2, 1):
        shown = "the whole context (122K)" if part == 1 else f"1/{part} of the context"
        for column, decoders in (("TriForce", _BOTH), ("Naive Policy", {HERE: "naive"})):
            line = _timed(sizes, shown, decoders, context=max(256, sizes.context // part))
            made.append(Line(shown, column, line.cells))
    return [*made, Line("theoretical limit", "TriForce, at most")]


def _ablations(sizes: Sizes) -> list[Line]:
    decoder, own = {HERE: "triforce"}, sizes.budget_at(sizes.context)
    made = []
    for budget in _budgets(sizes):
        name = "(a) budget 4K, the best" if budget == own else f"(a) budget {budget:,} here"
        made.append(_timed(sizes, name, decoder, **({} if budget == own else {"budget": budget})))
    for chunk in (4, CHUNK, 16, 32):
        if chunk <= recent_at(own):
            name = f"(b) chunk of {chunk}"
            made.append(_timed(sizes, name, decoder, **({} if chunk == CHUNK else {"chunk": chunk})))
    made += [Line(line.row, "acceptance", line.cells, "acceptance") for line in made]
    ranks = {HERE: {"cell": "ranks", "context": sizes.context, "temperature": 0.6}}
    for size in TREE_SIZES:
        for kind in ("Sequoia", "independent sequences"):
            row = f"(c) {kind}, {size} tokens"
            made.append(Line(row, "tokens a pass", ranks, "tokens", of=f"{kind}:{size}"))
    return made


_MAKERS: dict[str, Callable[[Sizes], list[Line]]] = {
    "table-1": _policies, "table-2": _on_chip, "table-3": _offloading, "table-4": _batches,
    "table-5": _others, "table-7": _outputs, "table-8": _gammas, "figure-3": _sparsity,
    "figure-5": _lengths, "figure-6": _ablations,
}  # fmt: skip


def rounds(gamma_1: int, gamma_2: int) -> int:
    """Returns the draft rounds that propose about ``gamma_2`` tokens if six of ten are accepted.

    The paper drafts until there are as many; here rounds are fixed before a pass.
    """
    each = (1 - 0.6 ** (gamma_1 + 1)) / 0.4
    return max(1, math.ceil(gamma_2 / each))


def uses_own_budget(context: int) -> bool:
    """Returns whether "our settings" are the engine's defaults, the budget included."""
    return context >= _LARGE

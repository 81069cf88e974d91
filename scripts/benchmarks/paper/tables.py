"""The paper's tables: each published number, its model and card, and the numbers of this run beside it."""

from scripts.benchmarks.paper import plan
from scripts.benchmarks.paper.plan import Line, Sizes
from scripts.benchmarks.paper.published import Item, items
from scripts.benchmarks.paper.values import value
from triforce_tree.bench.results import Records
from triforce_tree.bench.tables import Table

BENCHMARK = "paper"
Place = tuple[tuple[str, str], ...]
_COLUMNS = (plan.HERE, plan.PAPER, plan.OURS)
# What is the same as in the paper, and what differs, beside model, card, text and sizes.
_NOTES = {
    "table-1": (
        "chunks of 8, scores by mean keys, one selection for the text after the prompt",
        "here all layers are sparse, the first two too; acceptance is the expected one at temperature 1 over "
        "given tokens, sum of min(p, q); H2O keeps every key of the prompt as a candidate, an upper bound; "
        "the budget includes the newest tokens",
    ),
    "table-2": (
        "chains of 2 draft tokens, at most 6 to the target, chunks of 8 (the paper's settings)",
        "a speed-up is against this engine's own plain decoding after the same prefill; rounds are fixed "
        "before a pass, and chunks are chosen anew in every pass of the target; the naive policy is the "
        "draft alone, chains of 6, its window as configured. Our settings: the engine's own choice of "
        "trees, levels and rounds, plain passes included",
    ),
    "table-3": (
        "keys and values in host memory, temperature 0.6",
        "plain decoding is this engine's own, offloaded likewise; cards, links and the share of the cache "
        "that stays on the device are others. A run is on one card, and measures this table where --items "
        "names it; two cards: python -m scripts.benchmarks offload_parallel",
    ),
    "table-4": (
        "the numbers of texts, and the share of the paper's context",
        "a token is one of each text, and the clock stops when the first text is complete; budgets are "
        "a share of the context, as in the other tables",
    ),
    "table-5": (
        "one prompt, greedy",
        "REST reads a datastore outside of the model, and skipping layers needs a search for each model: "
        "neither is part of this engine",
    ),
    "table-6": (
        "keys and values in host memory",
        "other models; measured by python -m scripts.benchmarks offload alone",
    ),
    "table-7": (
        "one long text, its time read off at parts of its length",
        "its lengths are those of the paper times this run's new tokens over 256",
    ),
    "table-8": (
        "the paper's settings but for the two lengths, greedy",
        "draft rounds are fixed before a pass, as many as propose gamma 2 tokens where 60 % of draft tokens "
        "are accepted",
    ),
    "figure-3": (
        "the top tokens of the last prompt token, by query head; (c): its top tokens, kept for later ones",
        "(a) is the least share of a layer but the first two; (b) has all layers sparse; 4K and 1K stand for "
        "this run's budget and a quarter of it",
    ),
    "figure-5": ("greedy, the beginning of one text", "the budget of each context is its own share"),
    "figure-6": (
        "the paper's settings but for budget or chunk size, greedy",
        "(c) is expected from acceptance by rank between retrieval and target, sampling at 0.6",
    ),
}


def sizes_of(records: Records) -> Sizes:
    """Returns the sizes of the run that made the records."""
    own = records.settings
    return Sizes(own["context"], own["new_tokens"], own["prompts"], own["budget"])


def shown_items(records: Records) -> list[str]:
    """Returns the items that a run or its continuations were asked for."""
    asked = {record["item"] for record in records.all if record["cell"] == plan.ASKED}
    return [name for name in items() if name in asked]


def tables(records: Records) -> list[Table]:
    """Returns a table for each item that was asked for."""
    return [_table(items()[name], records) for name in shown_items(records)]


def cells(records: Records) -> dict[Place, dict[str, float]]:
    """Returns the figures of the run by item, row and column."""
    found: dict[Place, dict[str, float]] = {}
    for name in shown_items(records):
        for line in plan.lines(name, sizes_of(records)):
            for column in line.cells:
                number = value(line, column, records)
                if number is not None:
                    place = (("item", name), ("row", line.row), ("column", column))
                    found.setdefault(place, {})[line.column] = number
    return found


def _table(item: Item, records: Records) -> Table:
    lines = plan.lines(item.name, sizes_of(records))
    known = {(line.row, line.column) for line in lines}
    # Published numbers that no cell of a run answers.
    lines += [Line(f.row, f.column) for f in item.figures if (f.row, f.column) not in known]
    rows = [_row(item, line, records) for line in lines]
    heads = ["row", "figure", "paper", "its model, card, context", *_COLUMNS]
    # The columns of the paper always stand; others where they hold something.
    shown = [n for n in range(len(heads)) if n < 4 or any(row[n] for row in rows)]
    cut = [[row[n] for n in shown] for row in rows]
    return Table(item.heading, [heads[n] for n in shown], cut, _note(item, records))


def _row(item: Item, line: Line, records: Records) -> list[str]:
    figure = item.figure(line.row, line.column)
    paper = ["", ""] if figure is None else [shown(figure.value, line.column), figure.setup]
    mine = [value(line, column, records) for column in _COLUMNS]
    return [
        line.row,
        line.column,
        *paper,
        *("" if number is None else shown(number, line.column) for number in mine),
    ]


def shown(number: float, column: str) -> str:
    """Returns a number with its unit, by the column's name."""
    if column.endswith("ms/token"):
        return f"{number:.4g}"
    if column == "tokens a pass":
        return f"{number:.2f}"
    shares = ("acceptance", "Top-K (Ref.)", "StreamingLLM", "H2O", "Retrieval", "more than", "mean of layers")
    return f"{number:.3f}" if column.startswith(shares) else f"{number:.2f}x"


def _note(item: Item, records: Records) -> str:
    same, differs = _NOTES[item.name]
    own = records.settings
    budget = sizes_of(records).budget_at(own["context"])
    prompts = f"{own['prompts']} prompt{'s' if own['prompts'] > 1 else ''} of {own['context']:,} tokens"
    here = (
        f"{_model(own)}, {own.get('hardware', 'this machine')}, text {own['text']}, {prompts}, "
        f"{own['new_tokens']} new ones, budget {budget:,}"
    )
    parts = [
        f"Same as in the paper: {same}.",
        f"Different: {differs}; model, card and text.",
        f"Here: {here}.",
        item.plot,
    ]
    return " ".join(part for part in parts if part)


def _model(settings: dict[str, object]) -> str:
    shape = settings.get("shape")
    name = "embedded pair" if settings["target"] == "embedded" else str(settings["target"])
    timed = f" (timed: inflated to {shape})" if shape else ""
    return f"{name}{timed}, draft {settings['draft']}"

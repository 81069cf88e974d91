"""TriForce's tables 2, 3 and 4 (Sun et al., arXiv 2404.11912), measured with any pair beside its numbers.

    python -m scripts.benchmarks paper --prompts 5 --out results/paper.jsonl    # tables 2 and 4
    python -m scripts.benchmarks paper --tables 3 --gpu-memory 24GiB            # the cache in host memory

Every speed-up is the ratio to plain decoding by this engine, after the same prefill, on the same prompt. On a
GPU the embedded pair is timed in the shape of Llama-2-7B, unless --target or --shape says otherwise. A run
that was cut short goes on where it ended.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import islice

import torch

from scripts.inflate.pair import inflate_pair
from triforce_tree.api import load
from triforce_tree.bench import texts as text
from triforce_tree.bench.results import Record, Records, repeated_share
from triforce_tree.bench.tables import Table
from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar
from triforce_tree.cli.groups import (
    add_engine,
    add_seed_and_out,
    add_text_source,
    engine_options,
)
from triforce_tree.cli.parsing import positive
from triforce_tree.cli.texts import documents
from triforce_tree.config import load_arguments
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.engine import Engine
from triforce_tree.runtime.devices import device_of
from triforce_tree.verify.sampling import ProbsFromLogits

# The paper's settings (section 5.1, appendix B.3), and the chunk of its published code.
CONTEXT, BUDGET, GAMMA_1, GAMMA_2, CHUNK = 122_880, 4096, 2, 6, 8
# Draft rounds that propose about GAMMA_2 tokens if six of ten are accepted: the paper drafts until there are
# as many, and here rounds are fixed before a pass.
ROUNDS = 4
_WARM_UP_TOKENS = 4
# Documents of a data set that prompts are taken from.
_DOCUMENTS = 40
# Names of the columns by the settings of a cell.
COLUMNS = {"paper": "here, the paper's settings", "ours": "here, our settings"}

# Speed-up and acceptance by temperature; speed-ups of TriForce and of the draft alone by batch, its contexts
# and the temperature.
_TRIFORCE = {
    0.0: (2.31, 0.9234), 0.2: (2.25, 0.9203), 0.4: (2.2, 0.9142), 0.6: (2.19, 0.9137), 0.8: (2.08, 0.8986),
    1.0: (2.08, 0.9004), 1.2: (2.02, 0.8902),
}  # fmt: skip
_NAIVE = {
    0.0: (1.56, 0.4649), 0.2: (1.54, 0.4452), 0.4: (1.47, 0.4256), 0.6: (1.42, 0.4036), 0.8: (1.34, 0.3131),
    1.0: (1.29, 0.2872), 1.2: (1.27, 0.2664),
}  # fmt: skip
_BATCHES = {
    (2, 57_344, 0.0): (1.89, 1.46), (2, 57_344, 0.6): (1.75, 1.35), (6, 19_456, 0.0): (1.9, 1.39),
    (6, 19_456, 0.6): (1.76, 1.28), (10, 12_288, 0.0): (1.72, 1.34), (10, 12_288, 0.6): (1.61, 1.21),
}  # fmt: skip
_A100, _RTX_4090 = "Llama2-7B-128K, A100", "Llama2-7B-128K, RTX 4090"


@dataclass(frozen=True)
class Cell:
    """One decoder at one temperature.

    Attributes:
        naive: the draft alone proposes, in chains of ``GAMMA_2`` tokens, without the retrieval level.
        batch: number of texts.
        context: tokens of each prompt in the paper.
        offload: whether the cache is in host memory.
    """

    naive: bool
    temperature: float
    batch: int = 1
    context: int = CONTEXT
    offload: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Returns the settings that it is measured with."""
        return ("paper",) if self.naive else ("paper", "ours")


@dataclass(frozen=True)
class Row:
    """A cell and its published figures: speed-up, acceptance, or milliseconds a token."""

    cell: Cell
    setup: str
    published: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        cell = self.cell
        texts = f"{cell.batch} texts of {cell.context // 1024}K, " if cell.batch > 1 else ""
        return f"{'draft alone' if cell.naive else 'TriForce'}, {texts}T={cell.temperature:g}"


def _rows() -> dict[str, list[Row]]:
    chip = [
        Row(Cell(naive, t), _A100, {"speed-up": speed, "acceptance": accepted})
        for naive, published in ((False, _TRIFORCE), (True, _NAIVE))
        for t, (speed, accepted) in published.items()
    ]
    host = Row(
        Cell(False, 0.6, offload=True), _RTX_4090, {"ms/token": 312, "plain ms/token": 1516, "speed-up": 4.86}
    )
    batches = [
        Row(Cell(naive, t, batch, context), _A100, {"speed-up": speed[naive]})
        for (batch, context, t), speed in _BATCHES.items()
        for naive in (False, True)
    ]
    return {"2": chip, "3": [host], "4": batches}


ROWS = _rows()
_TITLES = {
    "2": "Table 2 (section 5.1): on chip, 256 new tokens",
    "3": "Table 3 (section 5.1): offloading, 256 new tokens",
    "4": "Table 4 (section 5.1): batches",
}
_NOTE = (
    "As in the paper: chains of 2 draft tokens, at most 6 to the target, a budget of 4,096 of 122,880 tokens "
    "in chunks of 8. Different: draft rounds are fixed before a pass, chunks are chosen anew in every pass "
    "of the target, and a batch is timed until its first text is complete. Our settings: the engine's own "
    "choice of trees, levels and rounds, plain passes included. Here: {target}{shape}, draft {draft}, "
    "{hardware}, text {text}, prompts of {context:,} tokens ({prompts} for a cell), {new_tokens} new ones. "
    "Other lengths are scaled alike."
)


def budget_at(context: int) -> int:
    """Returns the paper's share of a context, at least 256 but no more than a quarter, in multiples of 32."""
    return max(32, min(max(256, BUDGET * context // CONTEXT), context // 4) // 32 * 32)


def rows_of(table: str, temperatures: Sequences[float] | None = None) -> list[Row]:
    """Returns the rows of a table, those of some temperatures alone where these are given."""
    return [row for row in ROWS[table] if temperatures is None or row.cell.temperature in temperatures]


def keys_of(rows: Iterable[Row], prompts: int) -> list[Record]:
    """Returns the keys of all measurements; a batch has one set of prompts."""
    cells = dict.fromkeys(row.cell for row in rows)
    return [
        {**asdict(cell), "settings": settings, "prompt": number}
        for number in range(prompts)
        for cell in cells
        if number == 0 or cell.batch == 1
        for settings in cell.settings
    ]


def engine_for(engine: Engine, key: Record, context: int) -> Engine:
    """Returns the engine with the settings of a cell, whose prompts have ``context`` tokens."""
    more: Record = {"prefix_cache": False} | ({"offload": True} if key["offload"] else {})
    if key["settings"] == "paper":
        more |= {"other_trees": "none", "runner_ups": False}
        if key["naive"]:
            more |= {"levels": 2, "tree": f"chain:{GAMMA_2}", "rounds": 1}
        else:
            budget = budget_at(context)
            more |= {"budget": budget, "recent": min(256, budget // 4), "chunk": CHUNK}
            more |= {"levels": 3, "tree": f"chain:{GAMMA_1}", "gamma": GAMMA_2, "rounds": ROUNDS}
            more |= {"refresh": 0, "retrieval_weight_bits": 16}
    return engine.with_options(**load_arguments(more))


@dataclass(frozen=True)
class Measurement:
    """Measures cells: one prefill, then drafting and plain decoding of the same prompts.

    Attributes:
        engine: models, and "our settings".
        cut: returns so many prompts of so many tokens, from the length and the number.
        context, new_tokens, prompts: of the run, in place of the paper's 122,880 and 256, and one.
        seed: of all draws.
        wanted: returns whether to continue; a generation ends where it says no.
    """

    engine: Engine
    cut: Callable[[int, int], list[list[int]]]
    context: int
    new_tokens: int
    prompts: int
    seed: int
    wanted: Callable[[], bool]

    def __call__(self, key: Record) -> Record:
        context = max(256, round(key["context"] * self.context / CONTEXT))
        if key["batch"] > 1:
            prompts = self.cut(context, key["batch"])
        else:
            prompts = [self.cut(context, self.prompts)[key["prompt"]]]
        engine, to_probs = engine_for(self.engine, key, context), ProbsFromLogits.at(key["temperature"])
        with engine.program(prompts, self.new_tokens, to_probs) as program:
            program.prefill(prompts)
            decode = partial(self._decode, program, to_probs, prompts, self.seed + key["prompt"])
            for drafts in (True, False):
                decode(min(_WARM_UP_TOKENS, self.new_tokens), drafts)
            # Plain decoding takes the same time for every token, and half of them are enough.
            plain = min(max(_WARM_UP_TOKENS, self.new_tokens // 2), self.new_tokens)
            found = decode(self.new_tokens, True)
            plain_ms = decode(plain, False)["ms/token"]
            return {**found, "plain ms/token": plain_ms, "prompt_tokens": context}

    def _decode(
        self,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        prompts: Sequences[list[int]],
        seed: int,
        new_tokens: int,
        drafts: bool,
    ) -> Record:
        """Decodes until the first text has ``new_tokens`` tokens; a token of a batch is one of each text."""
        loop = DecodingLoop.over(program, to_probs, seed)
        if not drafts:
            loop.policy.fixed = 0
        sequences = [Sequence(prompt, Ending(new_tokens)) for prompt in prompts]
        loop.begin(sequences, cached=True)
        for _ in loop.decode():
            if max(len(sequence.new) for sequence in sequences) >= new_tokens or not self.wanted():
                break
        return {
            "ms/token": 1e3 * loop.decode_seconds / statistics.fmean(len(each.new) for each in sequences),
            "acceptance": loop.levels[-1].acceptance_rate,
            "repeated_8grams": statistics.fmean(repeated_share(each.new) for each in sequences),
        }


def value_of(records: Records, cell: Cell, settings: str, figure: str) -> float | None:
    """Returns the median of a figure over the prompts of a cell; None where it is not measured."""
    wanted = asdict(cell) | {"settings": settings}
    found = [r for r in records.all if all(r[name] == value for name, value in wanted.items())]
    values = [r["plain ms/token"] / r["ms/token"] if figure == "speed-up" else r[figure] for r in found]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def tables_of(records: Records, shown: Mapping[str, Sequences[Row]]) -> Iterator[Table]:
    """Yields the paper's tables, each number beside those of this run.

    Args:
        shown: rows by table.
    """
    own = records.settings
    shape = f" in the shape of {own['shape']}" if own["shape"] else ""
    target = "embedded pair" if own["target"] == "embedded" else own["target"]
    note = _NOTE.format(**{**own, "target": target, "shape": shape})
    for name, rows in shown.items():
        lines = [
            [
                row.name, figure, _shown(published, figure), row.setup,
                *(_shown(value_of(records, row.cell, settings, figure), figure) for settings in COLUMNS),
            ]
            for row in rows
            for figure, published in row.published.items()
        ]  # fmt: skip
        heads = ["row", "figure", "paper", "its setup", *COLUMNS.values()]
        yield Table(_TITLES[name], heads, lines, note if name == [*shown][-1] else "")


def _shown(number: float | None, figure: str) -> str:
    if number is None:
        return ""
    return f"{number:.2f}x" if figure == "speed-up" else f"{number:.4g}"


def main(words: Sequences[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks paper", description=(__doc__ or "").partition("\n")[0]
    )
    add = made.add_argument
    add("--tables", nargs="+", choices=[*ROWS], default=["2", "4"], help="tables; by default 2 and 4")
    add("--temperatures", nargs="+", type=float, help="rows of the tables; by default all of them")
    add("--context", type=positive, help="tokens of a prompt; by default 2,048, on a GPU 122,880")
    add("--new-tokens", type=positive, help="tokens to generate; by default 32, on a GPU the paper's 256")
    add("--prompts", type=positive, default=1, help="different prompts for each cell without a batch")
    add(
        "--shape", metavar="NAME", help="time the embedded pair in this shape, as in llama-2-7b, or none; by "
        "default llama-2-7b on a GPU without --target",
    )  # fmt: skip
    add_seed_and_out(made)
    add_text_source(made)
    add_engine(made)
    made.set_defaults(json=False)
    args = made.parse_args(words)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        made.error(str(error))


def _run(args: argparse.Namespace) -> int:
    device = device_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given, gpu = args.target or args.draft or args.drafter, device.type == "cuda"
    shape = None if args.shape == "none" else args.shape or ("llama-2-7b" if gpu and not given else None)
    if shape is not None and given:
        raise ValueError(
            f"--shape {shape} inflates the embedded pair; leave out --target, --draft and --drafter"
        )
    context, new_tokens = args.context or (CONTEXT if gpu else 2048), args.new_tokens or (256 if gpu else 32)
    if context < 256:
        raise ValueError(f"context={context} is too short for a retrieval cache; use at least 256")
    source, texts = documents(args)
    settings = {
        "benchmark": "paper", "context": context, "new_tokens": new_tokens, "prompts": args.prompts,
        "seed": args.seed, "text": source, **options.pair_names(args), "shape": shape,
        **options.recorded(args),
    }  # fmt: skip
    records = records_of(args, settings)
    engine = options.engine_of(args) if shape is None else _inflated(args, shape, device)
    if engine.draft is None:
        raise ValueError("the paper's chains need a draft model; give --draft")
    engine.target.check_length(context, new_tokens)
    shown = {name: rows_of(name, args.temperatures) for name in dict.fromkeys(args.tables)}
    keys = keys_of((row for rows in shown.values() for row in rows), args.prompts)
    if not keys:
        raise ValueError(f"no row of these tables has T={args.temperatures}; leave --temperatures out")
    progress = bar("cells")
    task = progress.add_task("measuring", total=len(keys))
    found, tokenizer = list(islice(texts, _DOCUMENTS)), engine.tokenizer
    assert tokenizer is not None, "engine_of refuses a target without one"
    cut = cache(lambda length, count: text.prompts(found, tokenizer, length, count))
    with Interrupt() as interrupt, progress:
        measure = Measurement(
            engine, cut, context, new_tokens, args.prompts, args.seed, lambda: not interrupt.requested
        )
        series_of(args, records, interrupt, (progress, task), _described).fill(keys, measure)
    return finish(args, records, list(tables_of(records, shown)), interrupt.requested)


def _inflated(args: argparse.Namespace, shape: str, device: torch.device) -> Engine:
    """Returns an engine of the embedded pair inflated to a shape, with the options that were given."""
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    target, draft, tokenizer = inflate_pair(shape, device, getattr(torch, dtype))
    return load(target, draft, tokenizer=tokenizer, **load_arguments(engine_options(args)))


def _described(record: Record) -> str:
    who = "draft alone" if record["naive"] else COLUMNS[record["settings"]]
    return f"{who}, {record['batch']} x {record['prompt_tokens']:,} T={record['temperature']:g}: " + (
        f"{record['ms/token']:.1f} ms a token"
    )

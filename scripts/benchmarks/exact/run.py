"""Greedy texts of ``exact=True``: plain decoding beside two and three levels, partings and times.

    python -m scripts.benchmarks exact                       # docs/results/bit_exact_MACHINE.jsonl
    python -m scripts.benchmarks exact --shapes llama-3.1-8b --prompt 122880 --new 256 --tokens 4096
    python -m scripts.benchmarks exact --shapes pair --prompt 1700 --tokens 400     # on a CPU too

Uses the embedded pair inflated to real shapes; ``pair`` is the pair itself. A parting is a prompt whose texts
differ; after it they are other texts. The goal is none, ties of the two largest logits included, which are
counted in the first prompts. The first prompts are decoded one by one, and the next ones in two batches, with
and without ``exact``, for milliseconds a token; the goal is at most 3 % more. The others are decoded in
batches with ``exact`` alone. Each length of the prompts is a part of the results file. Exit code 1 where a
text parts, 3 where the time limit ended the run; the same command then goes on.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging

from scripts.benchmarks.common.command import machine_of, pair_shapes, parser, results_folder
from scripts.benchmarks.common.results import Record, ResultsFile
from scripts.benchmarks.exact.tables import rows_of
from scripts.benchmarks.texts.grid import TimeLimit
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine, load
from triforce_tree.bench.results import commit, hardware
from triforce_tree.bench.texts import evenly_spaced, pydoc_text, token_ids
from triforce_tree.config import load_arguments
from triforce_tree.runtime.executor import free_memory

# Prompts that are decoded one by one, and batches that are decoded without ``exact`` too. The first of each
# also capture graphs, and their times do not count.
_SINGLE, _BATCHES = 4, 2
# Prompts whose ties of the largest logits are counted.
_TIES = 2


class Mode(NamedTuple):
    """An engine: the levels of its passes, and whether it is exact."""

    levels: int
    exact: bool


class Comparison:
    """The prompts of one shape through engines that differ in levels and ``exact``, one engine at a time.

    Args:
        file: what is measured already; more is added.
        limit: after which no further generation is begun.
    """

    def __init__(self, shape: str, args: Any, file: ResultsFile, limit: TimeLimit) -> None:
        self.shape, self.args, self.file, self.limit = shape, args, file, limit
        self.modes = [Mode(levels, exact) for exact in (True, False) for levels in (1, *args.levels)]
        self.count = -(-args.tokens // args.new)
        self._options: dict[str, Any] = {"prefix_cache": False}
        self._models: tuple[Any, Any, Any] | None = None

    def jobs(self, mode: Mode) -> Iterator[range]:
        """Numbers of the prompts that are decoded together and not recorded yet."""
        single = min(_SINGLE, self.count)
        groups = [range(n, n + 1) for n in range(single)]
        starts = range(single, self.count, self.args.batch)
        for n in starts if mode.exact else starts[:_BATCHES]:
            groups.append(range(n, min(n + self.args.batch, self.count)))
        for numbers in groups:
            if any(self._find(mode, n) is None for n in numbers):
                yield numbers

    def measure(self, mode: Mode, done: Any) -> bool:
        """Decodes what an engine lacks; whether it was completed."""
        jobs = list(self.jobs(mode))
        if not jobs:
            return True
        engine = self._engine(mode)
        texts = evenly_spaced(token_ids(engine.tokenizer, pydoc_text()), self.args.prompt, self.count)
        try:
            for numbers in jobs:
                if self.limit.reached():
                    return False
                self._decode(engine, mode, numbers, [texts[n] for n in numbers])
                done()
        finally:
            engine.close()
            del engine
            free_memory()
        return True

    def _decode(self, engine: Engine, mode: Mode, numbers: range, prompts: list[list[int]]) -> None:
        how: dict[str, Any] = {"max_new_tokens": self.args.new, "do_sample": False, "seed": 0}
        out = engine.generate(prompts, **how)
        for row, number in enumerate(numbers):
            tokens = out.sequences[row, self.args.prompt :].tolist()
            record: Record = {**self._key(mode, number), "tokens": tokens, "first": numbers[0]}
            record |= {"batch": len(numbers), "ms": 1e3 * out.decode_seconds / self.args.new}
            if mode == Mode(1, True) and number < _TIES:
                logits = engine.generate(prompts, output_logits=True, **how).logits
                top = torch.stack([step[row].topk(2).values for step in logits])
                record["ties"] = int((top[:, 0] == top[:, 1]).sum())
            self.file.add(record)

    def _key(self, mode: Mode, number: int) -> Record:
        return {"shape": self.shape, "levels": mode.levels, "exact": mode.exact, "prompt": number}

    def _find(self, mode: Mode, number: int) -> Record | None:
        return self.file.find(**self._key(mode, number))

    def _engine(self, mode: Mode) -> Engine:
        dtype, device = getattr(torch, self.args.dtype), torch.device(self.args.device)
        how = {"levels": mode.levels, "exact": mode.exact, **self._options}
        if self.shape == "pair":
            return load(device=device, dtype=dtype, **load_arguments(how))
        if self._models is None:
            shape, draft = pair_shapes(self.shape, self.args.tiny)
            self._models = inflate_pair(shape, device, dtype, draft)
        target, draft, tokenizer = self._models
        return load(target, draft if mode.levels > 1 else None, tokenizer=tokenizer, **load_arguments(how))


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks exact", __doc__)
    made.add_argument("--shapes", nargs="+", default=["llama-2-7b", "llama-3.1-8b"], help="or pair")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    dtypes = ("float32", "bfloat16", "float16")
    made.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of models")
    made.add_argument("--levels", type=int, nargs="+", default=[2, 3], choices=[2, 3], help="beside plain")
    made.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=512, help="tokens of a text")
    made.add_argument("--tokens", type=int, default=100_000, help="of all texts of a shape and a mode")
    made.add_argument("--batch", type=int, default=16, help="prompts that are decoded together")
    made.add_argument("--seconds", type=float, help="end before this many, with what is measured")
    args = made.parse_args(words)
    if args.tiny:
        args.device, args.dtype, args.shapes, args.levels = "cpu", "float32", ["llama-3.1-8b"], [2]
        args.prompt, args.new, args.tokens, args.batch = 300, 4, 24, 2
    elif args.device == "cpu" and (large := [shape for shape in args.shapes if shape != "pair"]):
        made.error(f"there is no GPU here for {', '.join(large)}; use --shapes pair, or --tiny")
    logging.set_verbosity_error()
    limit = TimeLimit(args.seconds)
    path: Path = (
        results_folder(args.out, args.tiny) / f"bit_exact_{machine_of(torch.device(args.device))}.jsonl"
    )
    settings = {name: getattr(args, name) for name in ("dtype", "prompt", "new", "tokens", "batch", "seed")}
    settings |= {"commit": commit(), "machine": hardware()}
    file = ResultsFile(path, f"{args.prompt}-tokens", settings, rows_of)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    complete = True
    with Progress(*columns) as progress:
        for shape in args.shapes:
            comparison = Comparison(shape, args, file, limit)
            for mode in comparison.modes:
                name = f"{shape}, levels={mode.levels}, exact={mode.exact}"
                task = progress.add_task(name, total=len(list(comparison.jobs(mode))))
                complete = comparison.measure(mode, partial(progress.advance, task)) and complete
    print(*file.rows, sep="\n")
    if any(row.get("partings") for row in file.rows):
        return 1
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

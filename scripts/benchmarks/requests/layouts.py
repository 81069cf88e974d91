"""Holds what the benchmarks of shared keys and values have in common: models, clocks, layouts."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import triforce_tree
from scripts.benchmarks.common.command import device_of, machine_of
from scripts.benchmarks.common.results import Record, header
from scripts.benchmarks.sources.registry import Texts, named, prompts
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine
from triforce_tree.bench.texts import token_ids
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.requests import batch_pool
from triforce_tree.runtime.executor import free_memory

LAYOUTS = ("stored once", "copied")


def common_options(made: argparse.ArgumentParser, context: int) -> None:
    """Adds the options of both benchmarks."""
    made.add_argument("--shape", default="llama-3.1-8b", help="of the target, unless --tiny")
    made.add_argument("--context", nargs="+", type=int, default=[context], help="tokens of the document")
    made.add_argument("--levels", nargs="+", type=int, default=[1, 2, 3], choices=[1, 2, 3])
    made.add_argument("--new", type=int, default=128, help="tokens of an answer")
    made.add_argument("--runs", type=int, default=3, help="timed runs of each layout after a first one")
    made.add_argument("--text", default="python-topics", help="what the document is cut from, by name")


class Setup:
    """Models of a run, and where it takes place.

    Attributes:
        target, draft, tokenizer: the embedded pair where ``--tiny`` is given, else inflated.
        machine: for the name of the results file.
        shape: of the target.
        clock: seconds; those of the process on a CPU, whose machine may do something else meanwhile.
    """

    def __init__(self, made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        device = device_of(made, args.tiny)
        self.machine, self.shape = machine_of(device), "the embedded pair" if args.tiny else args.shape
        self.target: Any
        self.draft: Any
        self.clock: Callable[[], float] = time.process_time if args.tiny else time.perf_counter
        if args.tiny:
            loaded = triforce_tree.load(device="cpu")
            assert loaded.draft is not None
            self.target, self.draft = loaded.target.model, loaded.draft.model
            self.tokenizer = loaded.tokenizer
        else:
            sizes = args.shape, device, torch.bfloat16, "llama-68m", args.seed
            self.target, self.draft, self.tokenizer = inflate_pair(*sizes)

        [self._source] = named(args.text)
        self._ids = token_ids(self.tokenizer, Texts().read(self._source))

    def document(self, tokens: int) -> list[int]:
        """Returns a document of so many tokens."""
        [found] = prompts(self._source, self._ids, tokens)
        return found

    def questions(self, count: int) -> list[list[int]]:
        """Returns the tokens of different questions, to stand at the end of a document."""
        return [
            token_ids(self.tokenizer, f"\n\nQuestion {n}: what does the text say about topic {n}?\n")
            for n in range(1, count + 1)
        ]

    def in_turns(
        self, runs: int, levels: int, store: str, measure: Callable[[Engine], Record]
    ) -> list[list[Record]]:
        """Runs both layouts in turns, each run with an engine that holds nothing; the first runs are trials.

        Args:
            store: the function of ``batch_pool`` that finds what prompts share.
        """
        found: dict[str, list[Record]] = {name: [] for name in LAYOUTS}
        for _ in range(1 + runs):
            for name in LAYOUTS:
                engine = triforce_tree.load(self.target, self.draft, tokenizer=self.tokenizer, levels=levels)
                with _layout(name, store):
                    found[name].append(measure(engine))
                engine.close()
                free_memory()
        return [*found.values()]

    def head(self, args: argparse.Namespace) -> Record:
        """Returns the header of the results file."""
        own = {"shape": self.shape, "new_tokens": args.new, "runs": args.runs, "text": args.text}
        by_process = self.machine == "cpu"
        own["seconds_of"] = "the process" if by_process else "the clock"
        return header(args.seed) | own


@contextmanager
def _layout(name: str, store: str) -> Iterator[None]:
    """Inside, batches store common prefixes once, or copy them."""
    choice = getattr(batch_pool, store)
    if name == "copied":
        setattr(batch_pool, store, lambda *_: None)
    try:
        yield
    finally:
        setattr(batch_pool, store, choice)


def compared(found: Sequence[list[Record]], timed: Sequence[str], place: Record) -> list[Record]:
    """Returns a row for each layout: what the last run counted, medians of what was timed, and the ratio to
    copies.

    Args:
        found: runs of each layout, the first of which is a trial; their ``tokens`` are those of all answers.
        timed: keys of seconds.
        place: what both rows are about.
    """
    texts = [[token for answer in runs[-1]["tokens"] for token in answer] for runs in found]
    same = {"same_tokens": common_prefix(*texts), "all_tokens": len(texts[0])}
    rows: list[Record] = []
    for layout, runs in zip(LAYOUTS, found, strict=True):
        counts = {key: value for key, value in runs[-1].items() if key != "tokens"}
        medians = {key: statistics.median([run[key] for run in runs[1:]]) for key in timed}
        rows.append({**place, "layout": layout, **counts, **medians, **same})
    # Runs of both layouts took turns: the machine was as busy for one as for the other.
    rows[0]["of_copies"] = {
        key: statistics.median(
            [one[key] / other[key] for one, other in zip(found[0][1:], found[1][1:], strict=True)]
        )
        for key in timed
    }
    return rows

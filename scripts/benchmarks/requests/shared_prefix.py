"""Questions about documents in one batch: common keys and values stored and read once, beside copies of them.

    python -m scripts.benchmarks shared_prefix
    python -m scripts.benchmarks shared_prefix --context 65536 --questions 4 --levels 1 2

The questions are about one document; then half of them about another one. Both begin with the same third, as
behind a long header.

A step is a pass of the target, with the passes of the levels below it. Bytes are those of the target's keys
and values. Both layouts run the same models one after the other; ``same_tokens`` is how many tokens of all
answers come before the first one that differs. Where memory holds fewer copies than questions, ``rows`` says
how many were decoded together.
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import triforce_tree
from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    device_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import Record, header, write
from triforce_tree import Engine
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import Texts, named, prompts
from triforce_tree.generation.batch import prefixes as batch_prefixes
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.shared.store import SharedStore
from triforce_tree.kv.shared.tree import PrefixTree
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.runtime.executor import free_memory

FILE = "shared_prefix_h200.json"
LAYOUTS = ("stored once", "copied")
CASES = ("one document", "two documents behind a header")


class Steps:
    """A streamer that counts the passes of one sequence."""

    def __init__(self) -> None:
        self.count = -1  # it gets the prompt first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1

    def end(self) -> None:
        """Nothing is held back."""


@contextmanager
def layout(name: str) -> Iterator[None]:
    """Inside, batches store a common prefix so."""
    choice = batch_prefixes.prefixes_stored_once
    if name == "copied":
        batch_prefixes.prefixes_stored_once = lambda *_: PrefixTree()
    try:
        yield
    finally:
        batch_prefixes.prefixes_stored_once = choice


def measure(engine: Engine, questions: list[list[int]], new_tokens: int, runs: int) -> Record:
    """Medians of the runs after a first one, which prefills, compiles and captures."""
    samples, tokens = [], list[list[int]]()
    for _ in range(1 + runs):
        steps = [Steps() for _ in questions]
        out = engine.generate(
            questions, streamer=steps, do_sample=False, max_new_tokens=new_tokens, eos_token_id=[]
        )
        passes = max(each.count for each in steps)
        width = out.sequences.shape[1] - new_tokens
        tokens = [row[width:] for row in out.sequences.tolist()]
        rate = len(questions) * new_tokens / out.decode_seconds
        samples.append((1e3 * out.decode_seconds / passes, rate, out.prefill_seconds))
    program = engine.hierarchy.last_program
    assert program is not None
    cold, *warm = samples
    step_ms, rate, prefill = (statistics.median(column) for column in zip(*warm, strict=True))
    once = isinstance(program.store, SharedStore)
    return {
        "stored_once": once, "prefix": program.cache.prefix.size.slots, "rows": program.batch,
        "bytes": program.store.memory.nbytes, "ms_per_step": step_ms, "tokens_per_second": rate,
        "cold_prefill_seconds": cold[2], "prefill_seconds": prefill, "tokens": tokens,
    }  # fmt: skip


def other_behind_a_header(document: list[int]) -> list[int]:
    """The document with its last two thirds exchanged."""
    third = len(document) // 3
    return document[:third] + document[2 * third :] + document[third : 2 * third]


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks shared_prefix", __doc__)
    made.add_argument("--shape", default="llama-3.1-8b")
    made.add_argument("--context", type=int, default=98_304, help="tokens of the document")
    made.add_argument("--questions", type=int, default=8)
    made.add_argument("--levels", nargs="+", type=int, default=[1, 2, 3], choices=[1, 2, 3])
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    made.add_argument("--new", type=int, default=128, help="tokens of an answer")
    made.add_argument("--runs", type=int, default=3, help="timed runs after the first one")
    made.add_argument("--text", default="python-topics", help="what the document is cut from, by name")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    context, new = (384, 8) if args.tiny else (args.context, args.new)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    options: Record = {**TINY_OPTIONS, "prefill_chunk": 128} if args.tiny else {}
    sizes = (TINY_SHAPES[args.shape], TINY_DRAFT) if args.tiny else (args.shape, "llama-68m")
    target, draft, tokenizer = inflate_pair(sizes[0], device, dtype, sizes[1], args.seed)
    [source] = named(args.text)
    [document] = prompts(source, token_ids(tokenizer, Texts().read(source)), context)
    topics = [
        token_ids(tokenizer, f"\n\nQuestion {number}: what does the text say about topic {number}?\n")
        for number in range(1, args.questions + 1)
    ]
    both = document, other_behind_a_header(document)
    asked = {
        CASES[0]: [document + topic for topic in topics],
        CASES[1]: [both[2 * n // len(topics)] + topic for n, topic in enumerate(topics)],
    }
    path, rows = results_folder(args.out, args.tiny) / FILE, list[Record]()
    head = header(args.seed, "api") | {"context": context, "new_tokens": new, "runs": args.runs}
    for case, levels in itertools.product(args.cases, args.levels):
        found = []
        for name in LAYOUTS:
            engine = triforce_tree.load(
                target, draft, tokenizer=tokenizer, profile=False, levels=levels, **options
            )
            with layout(name):
                found.append(measure(engine, asked[case], new, args.runs))
            engine.close()
            free_memory()
        texts = [[token for answer in each.pop("tokens") for token in answer] for each in found]
        for name, each in zip(LAYOUTS, found, strict=True):
            same = {"same_tokens": common_prefix(*texts), "all_tokens": len(texts[0])}
            rows.append({"shape": args.shape, "case": case, "levels": levels, "layout": name, **each, **same})
            print(rows[-1], flush=True)
        write(path, head | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

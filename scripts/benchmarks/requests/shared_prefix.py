"""Questions about documents in one batch: common keys and values stored and read once, beside copies of them.

    python -m scripts.benchmarks shared_prefix
    python -m scripts.benchmarks shared_prefix --context 65536 --questions 4 --levels 1 2
    python -m scripts.benchmarks shared_prefix --tiny --context 256 1024 4096 --levels 1 3 --out docs/results

The questions are about one document; then half of them about another one. Both begin with the same third, as
behind a long header.

A step is a pass of the target, with the passes of the levels below it. Bytes are those of the target's keys
and values, ``slots`` those of a KV head. Both layouts run the same models in turns, each run with an engine
that holds nothing: ``prefill_seconds`` and ``computed`` tokens are those of its first request, times of steps
those of the same request once more. ``of_copies`` are medians of the ratios of two runs. ``same_tokens`` is
how many tokens of all answers come before the first one that differs. Where memory holds fewer copies than
questions, ``rows`` says how many were decoded together. ``--tiny`` runs the embedded pair on the CPU, and
takes seconds of the process.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import torch

from scripts.benchmarks.common.command import parser, results_folder
from scripts.benchmarks.common.results import Record, write
from scripts.benchmarks.requests.layouts import Setup, common_options, compared
from scripts.benchmarks.requests.tables import SHARED
from triforce_tree import Engine

CASES = ("one document", "two documents behind a header")


class Steps:
    """A streamer that counts the passes of one sequence, and notes when the first and the last one ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.count, self.first, self.last = clock, -1, 0.0, 0.0  # it gets the prompt first

    def put(self, value: torch.Tensor) -> None:
        self.count, self.last = self.count + 1, self._clock()
        if self.count == 1:
            self.first = self.last

    def end(self) -> None:
        """Nothing is held back."""


def measure(engine: Engine, questions: list[list[int]], args: argparse.Namespace, setup: Setup) -> Record:
    """Measures a request to an engine that holds nothing, and the same one again."""
    found, new_tokens = list[Record](), args.new
    for _ in range(2):
        steps = [Steps(setup.clock) for _ in questions]
        start = setup.clock()
        out = engine.generate(
            questions, streamer=steps, do_sample=False, max_new_tokens=new_tokens, eos_token_id=[]
        )
        first, last = min(s.first for s in steps), max(s.last for s in steps)
        on_cpu = setup.machine == "cpu"
        passes = max(s.count for s in steps)
        found.append({
            "prefill_seconds": first - start if on_cpu else out.prefill_seconds,
            "ms_per_step": 1e3 * ((last - first) / (passes - 1) if on_cpu else out.decode_seconds / passes),
            "tokens_per_second": len(questions) * new_tokens / out.decode_seconds,
            "computed": sum(map(len, questions)) - len(questions) - sum(out.reused_tokens),
            "tokens": [row[-new_tokens:] for row in out.sequences.tolist()],
        })  # fmt: skip
    program = engine.last_program
    assert program is not None
    store, slots = program.store, program.cache.backend.pool_slots
    cold, warm = found
    return {
        **warm, "prefill_seconds": cold["prefill_seconds"], "computed": cold["computed"],
        "stored_once": slots > 0, "rows": program.batch,
        "bytes": store.memory.nbytes, "slots": slots or store.batch * store.slots,
    }  # fmt: skip


def other_behind_a_header(document: list[int]) -> list[int]:
    """Returns the document with its last two thirds exchanged."""
    third = len(document) // 3
    return document[:third] + document[2 * third :] + document[third : 2 * third]


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks shared_prefix", __doc__)
    common_options(made, context=98_304)
    made.add_argument("--questions", type=int, default=8)
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = made.parse_args(words)
    setup = Setup(made, args)
    topics = setup.questions(args.questions)
    file = SHARED.format(machine=setup.machine)
    path, rows = results_folder(args.out, args.tiny) / file, list[Record]()
    head = setup.head(args) | {"questions": args.questions}
    for case, context, levels in itertools.product(args.cases, args.context, args.levels):
        document = setup.document(context)
        both = document, document if case == CASES[0] else other_behind_a_header(document)
        asked = [both[2 * n // len(topics)] + topic for n, topic in enumerate(topics)]
        found = setup.in_turns(
            args.runs,
            levels,
            "for_known",
            lambda engine, asked=asked: measure(engine, asked, args, setup),
        )
        place = {"shape": setup.shape, "case": case, "context": context, "levels": levels}
        rows += compared(found, ("prefill_seconds", "ms_per_step", "tokens_per_second"), place)
        print(*rows[-2:], sep="\n", flush=True)
        write(path, head | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

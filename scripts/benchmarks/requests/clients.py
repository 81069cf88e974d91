"""Clients that ask about one document and join a running batch: keys and values stored once, and copies.

    python -m scripts.benchmarks clients
    python -m scripts.benchmarks clients --tiny --context 1100 4096 --levels 1 --new 64 --out docs/results

The first client asks alone; the others come while its answer is decoded, and join as there is room. Each
run begins with nothing in memory, and the two layouts take turns. ``seconds`` are from the first request to
the last answer, ``decode_seconds`` those of passes alone, by the clock. ``slots`` are KV slots of a head that
were made, ``stored`` the most tokens that were in them at a time; ``same_tokens`` is how many tokens of all
answers come before the first one that differs. ``of_copies`` are medians of the ratios of two runs.
``--tiny`` runs the embedded pair on the CPU, and takes seconds of the process.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence

from scripts.benchmarks.common.command import parser, results_folder
from scripts.benchmarks.common.results import Record, write
from scripts.benchmarks.requests.layouts import Setup, common_options, compared
from scripts.benchmarks.requests.tables import CLIENTS
from triforce_tree import Engine
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput

TIMES = ("seconds", "decode_seconds")


class Clients:
    """Questions that join as soon as there is room, and the answers by number."""

    def __init__(self, engine: Engine, questions: Sequence[list[int]], new: int, tokens: int | None) -> None:
        self.tokens, self._engine, self._new = tokens, engine, new
        self._waiting = list(questions)
        self._running = 1
        self.answers: dict[int, list[int]] = {}
        self.stored = self.together = 0

    def wanted(self, fits: Fits) -> int:
        """Returns how many clients wait and fit; called after each pass."""
        store = self._engine.last_program
        assert store is not None
        self.stored = max(self.stored, store.store.tokens()[0])
        self.together = max(self.together, self._running)
        return self._running + sum(fits(question, self._new) for question in self._waiting)

    def next(self, fits: Fits) -> Joined | None:
        """Returns the next question, where it fits."""
        if not self._waiting or not fits(self._waiting[0], self._new):
            return None
        self._running += 1
        return Joined(self._waiting.pop(0), self._new)

    def ended(self, number: int, output: GenerateOutput) -> None:
        """Keeps the answer."""
        self._running -= 1
        self.answers[number] = output.sequences[0, -self._new :].tolist()


def measure(engine: Engine, questions: list[list[int]], args: argparse.Namespace, setup: Setup) -> Record:
    """Measures one run, from the first request to the last answer."""
    new = args.new
    clients = Clients(engine, questions[1:], new, args.batch_tokens)
    start = setup.clock()
    out = engine.generate(
        [questions[0]], joining=clients, max_batch=len(questions), do_sample=False, max_new_tokens=new,
        eos_token_id=[],
    )  # fmt: skip
    seconds = setup.clock() - start
    program = engine.last_program
    assert program is not None
    group = program.store.groups[0]
    slots = program.store.memory.numel() // sum(
        t.shape[0] * t.shape[2] * t.shape[4] for t in (group.k, group.v)
    )
    answers = [clients.answers[number] for number in range(len(questions))]
    return {
        "seconds": seconds, "decode_seconds": out.decode_seconds, "slots": slots,
        "bytes": program.store.memory.nbytes, "stored": clients.stored, "together": clients.together,
        "tokens": answers,
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks clients", __doc__)
    common_options(made, context=98_304)
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--batch-tokens", type=int, help="most tokens of all prompts, shared ones counted once")
    args = made.parse_args(words)
    setup = Setup(made, args)
    file = CLIENTS.format(machine=setup.machine)
    path, rows = results_folder(args.out, args.tiny) / file, list[Record]()
    head = setup.head(args) | {"clients": args.clients}
    for context, levels in itertools.product(args.context, args.levels):
        document = setup.document(context)
        questions = [document + question for question in setup.questions(args.clients)]
        found = setup.in_turns(
            args.runs, levels, "unit_of", lambda engine, asked=questions: measure(engine, asked, args, setup)
        )
        place = {"shape": setup.shape, "context": context, "levels": levels}
        rows += compared(found, TIMES, place)
        print(*rows[-2:], sep="\n", flush=True)
        write(path, head | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Clients that ask about one document and join a running batch: keys and values stored once, and copies.

    python -m scripts.benchmarks clients
    python -m scripts.benchmarks clients --tiny --context 4096

The first client asks alone; the others come while its answer is decoded, and join as there is room. Each
run begins with nothing in memory, and the two layouts take turns. ``seconds`` are from the first request to
the last answer, ``decode_seconds`` those of passes alone. ``slots`` are KV slots of a head that were made,
``stored`` the most tokens that were in them at a time; ``same_tokens`` is how many tokens of all answers come
before the first one that differs.
``--tiny`` runs the embedded pair on the CPU.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import triforce_tree
from scripts.benchmarks.common.command import device_of, parser, results_folder
from scripts.benchmarks.common.results import Record, header, write
from triforce_tree import Engine
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import Texts, named, prompts
from triforce_tree.generation.batch import room
from triforce_tree.generation.batch.joining import Fits, Joined
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.runtime.executor import free_memory

FILE = "clients_h200.json"
LAYOUTS = ("stored once", "copied")
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
        """All that wait and fit; called after each pass."""
        store = self._engine.hierarchy.last_program
        assert store is not None
        self.stored = max(self.stored, store.store.tokens()[0])
        self.together = max(self.together, self._running)
        return self._running + sum(fits(question, self._new) for question in self._waiting)

    def next(self, fits: Fits) -> Joined | None:
        """The next question, where it fits."""
        if not self._waiting or not fits(self._waiting[0], self._new):
            return None
        self._running += 1
        return Joined(self._waiting.pop(0), self._new)

    def ended(self, number: int, output: GenerateOutput) -> None:
        """Keep the answer."""
        self._running -= 1
        self.answers[number] = output.sequences[0, -self._new :].tolist()


@contextmanager
def layout(name: str) -> Iterator[None]:
    """Inside, prompts that join store a prefix so."""
    choice = room.prefix_tokens
    if name == "copied":
        room.prefix_tokens = lambda *_: None
    try:
        yield
    finally:
        room.prefix_tokens = choice


def measure(engine: Engine, questions: list[list[int]], new: int, tokens: int | None) -> Record:
    """One run, from the first request to the last answer."""
    clients = Clients(engine, questions[1:], new, tokens)
    start = time.perf_counter()
    out = engine.generate(
        [questions[0]], joining=clients, max_batch=len(questions), do_sample=False, max_new_tokens=new,
        eos_token_id=[],
    )  # fmt: skip
    seconds = time.perf_counter() - start
    program = engine.hierarchy.last_program
    assert program is not None
    group = program.store.groups[0]
    slots = program.store.memory.numel() // sum(t.shape[0] * t.shape[2] * t.shape[4] for t in group.kv)
    answers = [clients.answers[number] for number in range(len(questions))]
    return {
        "seconds": seconds, "decode_seconds": out.decode_seconds, "slots": slots,
        "bytes": program.store.memory.nbytes, "stored": clients.stored, "together": clients.together,
        "tokens": answers,
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks clients", __doc__)
    made.add_argument("--shape", default="llama-3.1-8b")
    made.add_argument("--context", type=int, default=98_304, help="tokens of the document")
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--batch-tokens", type=int, help="most tokens of all prompts, shared ones counted once")
    made.add_argument("--levels", nargs="+", type=int, default=[1, 2, 3], choices=[1, 2, 3])
    made.add_argument("--new", type=int, default=128, help="tokens of an answer")
    made.add_argument("--runs", type=int, default=3, help="timed runs of each layout after a first one")
    made.add_argument("--text", default="python-topics", help="what the document is cut from, by name")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    if args.tiny:
        loaded = triforce_tree.load(device="cpu", profile=False)
        target, draft = loaded.hierarchy.target.model, loaded.hierarchy.draft
        assert draft is not None
        draft, tokenizer = draft.model, loaded.tokenizer
    else:
        sizes = args.shape, device, torch.bfloat16, "llama-68m", args.seed
        target, draft, tokenizer = inflate_pair(*sizes)
    assert tokenizer is not None
    [source] = named(args.text)
    [document] = prompts(source, token_ids(tokenizer, Texts().read(source)), args.context)
    questions = [
        document + token_ids(tokenizer, f"\n\nQuestion {n}: what does the text say about topic {n}?\n")
        for n in range(args.clients)
    ]
    path, rows = results_folder(args.out, args.tiny) / FILE, list[Record]()
    sizes_of = {"context": args.context, "clients": args.clients, "new_tokens": args.new, "runs": args.runs}
    for levels in args.levels:
        found: dict[str, list[Record]] = {name: [] for name in LAYOUTS}
        for _ in range(1 + args.runs):
            for name in LAYOUTS:
                engine = triforce_tree.load(target, draft, tokenizer=tokenizer, profile=False, levels=levels)
                with layout(name):
                    found[name].append(measure(engine, questions, args.new, args.batch_tokens))
                engine.close()
                free_memory()
        texts = [[t for answer in found[name][-1]["tokens"] for t in answer] for name in LAYOUTS]
        for name in LAYOUTS:
            timed = {key: statistics.median(run[key] for run in found[name][1:]) for key in TIMES}
            same = {"same_tokens": common_prefix(*texts), "all_tokens": len(texts[0])}
            last = {key: value for key, value in found[name][-1].items() if key != "tokens"}
            rows.append({"levels": levels, "layout": name, **last, **timed, **same})
            print(rows[-1], flush=True)
        write(path, header(args.seed, "api") | sizes_of | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

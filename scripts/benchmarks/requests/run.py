"""Whole requests: a prompt with a question, and a second question behind it, ours beside plain decoding.

    python -m scripts.benchmarks requests --texts texts.json.xz
    python -m scripts.benchmarks requests --shapes llama-3.1-8b --contexts 32768 122880
    python -m scripts.benchmarks requests --pair        # the embedded pair on the CPU, three minutes

A request is timed from the call of ``session.generate`` with token ids to its return, its first token when
a streamer gets it. The first run of each engine compiles and captures; its seconds stand apart. Before each
cold request the kept keys and values are forgotten. Both engines have the same models, one after the other,
as the keys and values of both may not fit together.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import triforce_tree
from scripts.benchmarks.common.command import (
    TINY_OPTIONS,
    device_of,
    machine_of,
    pair_shapes,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.common.timing import synchronize
from scripts.benchmarks.sources.registry import Texts, named, prompts
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine
from triforce_tree.bench.texts import token_ids
from triforce_tree.config import load_arguments
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.runtime.executor import free_memory
from triforce_tree.sessions.session import Session

PAIR = "embedded pair"
QUESTIONS = (
    "\n\nQuestion: What is described first in the text above?\nAnswer:",
    "\n\nQuestion: Which of these topics is described at most length, and why?\nAnswer:",
)
TURNS = ("cold", "second turn")
# Medians over runs are kept of these.
_SECONDS = ("prefill_seconds", "first_token_seconds", "decode_seconds", "seconds")


class FirstToken:
    """A streamer that notes when the first new tokens came."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def request(session: Session, question: Sequence[int], new_tokens: int) -> Record:
    """Returns seconds of one request, and what was kept for it."""
    device, streamer = session.engine.target.device, FirstToken()
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": []}
    synchronize(device)
    start = time.perf_counter()
    out = session.generate(list(question), streamer=streamer, **how)
    synchronize(device)
    seconds = time.perf_counter() - start
    levels = {level.name: level for level in out.levels or ()}
    rates = {name: level.acceptance_rate for name, level in levels.items()}
    # The streamer gets the prompt first.
    return {
        "prompt_tokens": len(session.tokens) - int(out.new_tokens), "reused_tokens": out.reused_tokens,
        "new_tokens": out.new_tokens, "prefill_seconds": out.prefill_seconds,
        "first_token_seconds": streamer.stamps[1] - start, "decode_seconds": out.decode_seconds,
        "acceptance": {name: rate for name, rate in rates.items() if rate is not None},
        "tokens_per_pass": levels["target"].mean_accepted_length,
        "seconds": seconds, "tokens": session.tokens[-int(out.new_tokens) :],
    }  # fmt: skip


def conversation(engine: Engine, document: list[int], new_tokens: int) -> list[Record]:
    """Makes the requests of one run: a cold one and a second turn."""
    questions = [token_ids(engine.tokenizer, text) for text in QUESTIONS]
    # Room for all turns, so that no request makes new buffers.
    room = sum(map(len, questions)) + len(QUESTIONS) * new_tokens
    session = engine.session(document, reserve=room)
    with session.buffers() as program:
        program.cache.forget()
    return [request(session, question, new_tokens) for question in questions]


def measure(engine: Engine, document: list[int], new_tokens: int, runs: int) -> list[Record]:
    """Returns a record for each turn: medians of the runs after the first one, and the seconds of that."""
    try:
        first, *others = (conversation(engine, document, new_tokens) for _ in range(1 + runs))
    finally:
        engine.release()
    records = []
    for number, turn in enumerate(TURNS):
        same = [run[number] for run in others]
        record = same[0] | {name: statistics.median(each[name] for each in same) for name in _SECONDS}
        records.append({"turn": turn, "first_run_seconds": first[number]["seconds"], **record})
    return records


def rows_of(shape: str, context: int, ours: list[Record], plain: list[Record]) -> list[Record]:
    """Returns a row for each turn, with plain decoding beside it."""
    rows = []
    for own, other in zip(ours, plain, strict=True):
        tokens, reference = own.pop("tokens"), other.pop("tokens")
        rows.append({
            "shape": shape, "context": context, **own, "plain": {name: other[name] for name in _SECONDS},
            "speedup": other["seconds"] / own["seconds"],
            "of_cold_first_token": own["first_token_seconds"] / ours[0]["first_token_seconds"],
            # Greedy texts part at ties, after which the questions of later turns stand behind other texts.
            "same_tokens": common_prefix(tokens, reference),
        })  # fmt: skip
    return rows


def inflated(shape: str, device: torch.device, tiny: bool, options: Record, seed: int) -> Engine:
    """Returns an engine of the embedded pair in a shape, or in a trial run in a tiny one."""
    big, small = pair_shapes(shape, tiny)
    dtype = torch.float32 if tiny else torch.bfloat16
    target, draft, tokenizer = inflate_pair(big, device, dtype, small, seed)
    return triforce_tree.load(target, draft, tokenizer=tokenizer, **load_arguments(options))


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks requests", __doc__)
    made.add_argument("--shapes", nargs="+", default=["llama-2-7b", "llama-3.1-8b"], metavar="SHAPE")
    made.add_argument("--contexts", nargs="+", type=int, metavar="N", help="tokens of documents")
    made.add_argument("--pair", action="store_true", help="the embedded pair on the CPU, at 16,384 tokens")
    made.add_argument("--new", type=int, default=256, help="tokens of an answer")
    made.add_argument("--runs", type=int, default=2, help="timed runs after the first one")
    made.add_argument("--text", help="what prompts are cut from, by name: austen, with --pair python-topics")
    made.add_argument("--texts", help="file that `texts` wrote; by default what is installed")
    args = made.parse_args(words)
    on_cpu = args.tiny or args.pair
    device = device_of(made, on_cpu)
    contexts = [384] if args.tiny else args.contexts or ([16_384] if args.pair else [32_768, 122_880])
    new = 8 if args.tiny else args.new
    options: Record = {**TINY_OPTIONS, "prefill_chunk": 128} if args.tiny else {}
    [source] = named(args.text or ("python-topics" if args.pair else "austen"))
    text = Texts(args.texts).read(source)
    path = results_folder(args.out, args.tiny) / f"requests_{machine_of(device)}.jsonl"
    rows: list[Record] = []
    head = header(args.seed) | {"text": source.name, "new_tokens": new, "runs": args.runs}
    head["dtype"] = "fp32" if on_cpu else "bf16"
    for shape in [PAIR] if args.pair else args.shapes:
        if args.pair:
            engine = triforce_tree.load(device=device, dtype=torch.float32, **load_arguments(options))
        else:
            engine = inflated(shape, device, args.tiny, options, args.seed)
        plain = engine.with_options(levels=1)
        ids = token_ids(engine.tokenizer, text)
        for context in contexts:
            [document] = prompts(source, ids, context)
            measured = [measure(own, document, new, args.runs) for own in (engine, plain)]
            entries = engine.target.vocab_size
            rows += [row | {"vocabulary": entries} for row in rows_of(shape, context, *measured)]
            print(*rows[-len(TURNS) :], sep="\n", flush=True)
            write(path, head | {"rows": rows})
        engine.close()
        del engine, plain
        free_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

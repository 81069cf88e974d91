"""Speed of the embedded pair on a CPU: docs/results/cpu_16k.jsonl.

Single measurements go to a JSON-lines file beside it, so a run that was cut short goes on where it ended.
Several prompts from different places of Python's help topics, all methods in turns on each; the fastest of
transformers' static cache, dynamic cache and assisted decoding (with our draft) is the baseline.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, header, write
from scripts.benchmarks.cpu.tables import SPEED
from triforce_tree.bench import results, speed
from triforce_tree.bench import texts as text
from triforce_tree.bench.baselines import METHODS
from triforce_tree.bench.tables import speed_of
from triforce_tree.runtime.files.writing import check_writable


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks cpu", __doc__, tiny=False)
    add = made.add_argument
    add("--context", type=int, default=16_384, help="tokens of each prompt")
    add("--new-tokens", type=int, default=256, help="tokens to write")
    add("--prompts", type=int, default=3, help="different prompts")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy")
    add("--threads", type=int, default=2, help="of torch")
    args = made.parse_args(words)
    out = check_writable(args.out or RESULTS / SPEED)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)

    settings = {
        "benchmark": "text", "context": args.context, "new_tokens": args.new_tokens, "seed": args.seed,
        "text": text.PYDOC, "threads": args.threads, "commit": results.commit(),
    }  # fmt: skip
    records = results.Records(out.with_suffix(".samples.jsonl"), settings)
    engine = triforce_tree.load(device="cpu", dtype=torch.float32)
    assert engine.tokenizer is not None
    prompts = text.prompts([text.pydoc_text()], engine.tokenizer, args.context, args.prompts)

    with Progress() as progress:
        task = progress.add_task("measuring", total=len(prompts) * len(args.temperatures) * len(METHODS))

        def done(record: dict[str, Any]) -> None:
            ms = 1e3 * record["decode_seconds"] / record["timed_tokens"]
            place = f"prompt {record['prompt']} T={record['temperature']:g}"
            progress.console.print(f"{place} {record['method']}: {ms:.2f} ms a token")
            progress.advance(task)

        timing = speed.Timing(list(METHODS), args.temperatures, args.new_tokens)
        speed.measure(engine, prompts, timing, results.Series(records, args.seed, done=done))
    result = {
        **header(args.seed),
        "prompts": len(prompts),
        "options": {k: str(v) for k, v in engine.config.as_options().items()},
        "rows": speed_of(records),
    }
    write(out, result)
    print(json.dumps(result))

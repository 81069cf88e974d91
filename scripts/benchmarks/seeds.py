"""What noise by position costs in accepted tokens and time beside fresh noise: docs/results/seeds_*.jsonl.

    python -m scripts.benchmarks seeds
    python -m scripts.benchmarks seeds --shape llama-3.1-8b --context 16384 --texts 4

A sequence with a seed of its own takes the noise of each token from the seed and the token's position
(``verify/seeded.py``). Other sequences draw fresh noise in each pass. The target continues each prompt, and
after each of these new tokens one pass is made with either noise: both are compared at the same places of the
same texts, so that the difference is not one between texts.
"""

import statistics
from collections.abc import Iterator, Sequence

import torch
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.command import machine_of, parser
from scripts.benchmarks.common.results import RESULTS, Record, header, rounded, write
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine
from triforce_tree.bench.texts import prompts, pydoc_text
from triforce_tree.decoding.loop import DecodingLoop, OneProgram
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending
from triforce_tree.decoding.sequence import Sequence as Text
from triforce_tree.verify.sampling import ProbsFromLogits

SETTINGS: dict[str, Record] = {
    "two levels": {"levels": 2, "advanced": {"rounds": 1}},
    "three levels": {"levels": 3, "advanced": {"rounds": 2}},
}
FRESH, BY_POSITION = "fresh", "by position"
# Tokens that a pass may bring.
_MOST = 64


def passes_after(
    program: DecodingProgram, to_probs: ProbsFromLogits, prompt: list[int], text: list[int], noise: str
) -> Iterator[tuple[int, float]]:
    """One pass after each token of ``text``: the tokens that it brought, and its seconds."""
    by_position = noise == BY_POSITION
    loop = DecodingLoop(OneProgram(program), [None], to_probs, 0, by_position=by_position)
    loop.begin([Text([*prompt, *text], Ending(_MOST))])
    for number in range(1, len(text) + 1):
        # Not the seeds that the texts were drawn with.
        known = Text([*prompt, *text[:number]], Ending(_MOST), number, 1000 + number if by_position else None)
        loop.begin([known], cached=True)
        if program.levels == 3:
            program.cache.means.catch_up()
        before = loop.decode_seconds
        loop.step()
        yield len(known.new), loop.decode_seconds - before


def measured(
    engine: Engine, given: Sequence[list[int]], count: int, temperature: float, noise: str
) -> Record:
    """Means over all passes after all texts."""
    to_probs, found = ProbsFromLogits.at(temperature), list[tuple[int, float]]()
    for number, prompt in enumerate(given):
        torch.manual_seed(number)
        sampling = {"temperature": temperature, "do_sample": True, "eos_token_id": None}
        out = engine.generate(prompt, max_new_tokens=count, seed=[number], **sampling)
        text = out.sequences[0, len(prompt) :].tolist()
        with engine.program([prompt], count + _MOST, to_probs) as program:
            found += passes_after(program, to_probs, prompt, text, noise)
    tokens = [new for new, _ in found]
    error = statistics.stdev(tokens) / len(tokens) ** 0.5
    pass_ms = 1e3 * statistics.median(seconds for _, seconds in found)
    mean = statistics.mean(tokens)
    return {
        "noise": noise, "passes": len(found),
        "tokens_per_pass": rounded(mean), "standard_error": rounded(error),
        "median_pass_ms": rounded(pass_ms), "ms_per_token": rounded(pass_ms / mean),
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks seeds", __doc__, tiny=False)
    add = made.add_argument
    add("--shape", help="what the embedded pair is inflated to; by default it stays as it is")
    add("--context", type=int, default=4000, help="prompt tokens")
    add("--texts", type=int, default=12, help="how many, from places of Python's help topics")
    add("--new-tokens", type=int, default=256, help="of each text")
    add("--temperatures", type=float, nargs="+", default=[0.6, 1.0], help="of sampling")
    args = made.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = "target", "draft", "tokenizer"
    models = dict(zip(names, inflate_pair(args.shape), strict=True)) if args.shape else {}
    engine = triforce_tree.load(**models)
    assert engine.tokenizer is not None
    given = prompts([pydoc_text()], engine.tokenizer, args.context, args.texts)
    rows: list[Record] = []
    content = {**header(args.seed), "shape": args.shape, "context": args.context, "rows": rows}
    path = args.out or RESULTS / f"seeds_{machine_of(engine.target.device)}.jsonl"
    for name, options in SETTINGS.items():
        own = engine.with_options(**options)
        for temperature in args.temperatures:
            for noise in (FRESH, BY_POSITION):
                row = measured(own, given, args.new_tokens, temperature, noise)
                rows.append({"setting": name, "temperature": temperature, **row})
                print(rows[-1], flush=True)
                write(path, content)
    return 0

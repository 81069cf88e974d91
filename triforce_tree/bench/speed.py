"""Measures the speed of every method on the same prompts, in turns, so that load on the machine affects all
alike.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from triforce_tree.bench.baselines import COMPILED, METHODS, Job
from triforce_tree.bench.results import Record, Series, repeated_share
from triforce_tree.engine import Engine

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8


def check_methods(engine: Engine, methods: Sequence[str]) -> None:
    """Raises ValueError for methods that cannot run with these models."""
    for name in methods:
        if name == "transformers-assistant" and engine.draft is None:
            raise ValueError("transformers-assistant needs a draft model; give one, or leave it out")
        if name == "transformers-assistant" and engine.token_map is not None:
            raise ValueError(
                "transformers-assistant needs a draft with the target's own vocabulary; leave it out"
            )


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    methods: Sequence[str],
    temperatures: Sequence[float],
    new_tokens: int,
    series: Series,
    place: Record,
) -> None:
    """Measures what the series lacks.

    Args:
        engine: our models and settings.
        prompts: token ids.
        methods: names from ``METHODS``, which are timed after each prompt.
        temperatures: 0 is greedy.
        new_tokens: tokens of each generation.
        place: further keys of the records, such as the length of these prompts.

    Raises:
        ValueError: a method needs one pass for all new tokens, which has no time without prefill.
    """
    seed, warm = series.seed, set[tuple[str, float]]()

    def one(key: Record) -> Record:
        prompt, temperature, method = list(prompts[key["prompt"]]), key["temperature"], key["method"]
        if (method, temperature) not in warm:
            METHODS[method](engine, _warm_up(engine, method, Job(prompt, temperature, new_tokens, seed)))
            warm.add((method, temperature))
        job = Job(prompt, temperature, new_tokens, seed + key["prompt"], series.stop)
        sample = METHODS[method](engine, job)
        if sample.timed_tokens < 1 and series.wanted():
            raise ValueError(
                f"{method} made all {new_tokens} new tokens in its first pass, which is not timed; ask for "
                "more of them"
            )
        return {
            "prompt_tokens": len(prompt),
            "prefill_seconds": sample.prefill_seconds,
            "decode_seconds": sample.decode_seconds,
            "timed_tokens": sample.timed_tokens,
            "acceptance": sample.acceptance,
            "repeated_8grams": repeated_share(sample.tokens),
            "tokens": sample.tokens,
        }

    cells = product(range(len(prompts)), temperatures, methods)
    keys = [{**place, "prompt": n, "temperature": t, "method": method} for n, t, method in cells]
    series.fill(keys, one)


def _warm_up(engine: Engine, method: str, job: Job) -> Job:
    """Returns a short generation. On a GPU it has the full length, if transformers' static decoding compiles
    for its cache size.
    """
    if method in COMPILED and engine.target.device.type == "cuda":
        return job
    return replace(job, prompt=job.prompt[:WARM_UP_PROMPT], new_tokens=WARM_UP_TOKENS)

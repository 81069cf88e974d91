"""Speed of batches: all levels beside plain decoding of the same batch, and beside one sequence at a time."""

from collections.abc import Sequence
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList

from triforce_tree.engine import Engine
from triforce_tree.eval.baselines import Job
from triforce_tree.eval.results import Record, Series
from triforce_tree.eval.speed import WARM_UP_PROMPT, WARM_UP_TOKENS

KIND = "batch"
OURS, PLAIN, ALONE = "all levels", "plain decoding", "all levels, one by one"
METHODS = (OURS, PLAIN, ALONE)


def generate(
    engine: Engine,
    prompts: Sequence[list[int]],
    temperature: float,
    new_tokens: int,
    seed: int,
    stop: StoppingCriteria | None = None,
) -> Any:
    """The output of the prompts together; no token ends a text."""
    how = Job(prompts[0], temperature, new_tokens, seed).sampling(engine)
    criteria = StoppingCriteriaList([stop] if stop else [])
    return engine.generate(list(prompts), stopping_criteria=criteria, seed=seed, **how)


def counted(out: Any) -> int:
    """New tokens of all sequences."""
    return sum(out.new_tokens) if isinstance(out.new_tokens, list) else int(out.new_tokens)


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    batches: Sequence[int],
    temperatures: Sequence[float],
    new_tokens: int,
    series: Series,
) -> None:
    """Measure what the series lacks; arguments as of ``eval.speed.measure``.

    A record has the seconds of decoding and the tokens of all sequences; one by one, their sums.

    Args:
        prompts: of equal length, as many as the largest batch; a batch has the first of them.
        batches: numbers of sequences.
    """
    engines = {OURS: engine.with_options(prefix_cache=False)}
    engines[ALONE] = engines[OURS]
    engines[PLAIN] = engine.with_options(levels=1, prefix_cache=False)
    warm: set[tuple[str, int, float]] = set()

    def one(key: Record) -> Record:
        method, batch, temperature = key["method"], key["batch"], key["temperature"]
        own, together = engines[method], 1 if method == ALONE else batch
        groups = [list(prompts[first : first + together]) for first in range(0, batch, together)]
        if (method, together, temperature) not in warm:
            short = [prompt[:WARM_UP_PROMPT] for prompt in groups[0]]
            generate(own, short, temperature, WARM_UP_TOKENS, series.seed)
            warm.add((method, together, temperature))
        outs = [
            generate(own, group, temperature, new_tokens, series.seed + i, series.stop)
            for i, group in enumerate(groups)
        ]
        return {
            "seconds": sum(out.decode_seconds for out in outs),
            "prefill_seconds": sum(out.prefill_seconds for out in outs),
            "new_tokens": sum(map(counted, outs)),
        }

    keys = [
        {"kind": KIND, "batch": batch, "temperature": temperature, "method": method}
        for temperature in temperatures
        for batch in batches
        # A single sequence is decoded alone.
        for method in (METHODS if batch > 1 else METHODS[:2])
    ]
    series.fill(keys, one)

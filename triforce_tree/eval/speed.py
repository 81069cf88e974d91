"""Speed of every method on the same prompts, in turns, so that load on the machine affects all alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import StoppingCriteria

from triforce_tree.engine import Engine
from triforce_tree.eval.baselines import BASELINES, COMPILED, METHODS, Job
from triforce_tree.eval.results import Record, Records, repeated_share, speed_rows

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8


def settings(context: int, new_tokens: int, seed: int, source: str, target: str, draft: str) -> Record:
    """Settings that must be the same in a results file and the run that continues it."""
    return {
        "benchmark": "text",
        "context": context,
        "new_tokens": new_tokens,
        "seed": seed,
        "text": source,
        "target": target,
        "draft": draft,
    }


def check_methods(engine: Engine, methods: Sequence[str]) -> None:
    """Raise ValueError for methods that are unknown or cannot run with these models."""
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
        if name == "transformers-assistant" and engine.hierarchy.draft is None:
            raise ValueError("transformers-assistant needs a draft model; give one, or leave it out")


@dataclass(frozen=True)
class Timing:
    """Which generations are timed after each prompt, and how.

    Attributes:
        methods: names from ``METHODS``.
        temperatures: 0 is greedy.
        new_tokens: tokens of each generation.
        seed: of all draws.
        done: called with every record, old ones included.
        stop: ends a generation early; its measurement is discarded.
        wanted: whether to continue, called before each generation.
    """

    methods: Sequence[str]
    temperatures: Sequence[float]
    new_tokens: int
    seed: int = 0
    done: Callable[[Record], None] = lambda record: None
    stop: StoppingCriteria | None = None
    wanted: Callable[[], bool] = lambda: True


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    timing: Timing,
    records: Records,
    place: Record | None = None,
) -> None:
    """Measure what ``records`` lacks.

    Args:
        engine: our models and settings.
        prompts: token ids.
        records: gets every measurement as it is made.
        place: what else a record is found by, such as the length of these prompts.
    """
    new_tokens, seed = timing.new_tokens, timing.seed
    warm: set[tuple[str, float]] = set()
    for number, prompt in enumerate(prompts):
        for temperature in timing.temperatures:
            for method in timing.methods:
                if not timing.wanted():
                    return
                key = {**(place or {}), "prompt": number, "temperature": temperature, "method": method}
                record = records.find(**key)
                if record is None:
                    if (method, temperature) not in warm:
                        first = Job(list(prompt), temperature, new_tokens, seed)
                        METHODS[method](engine, _warm_up(engine, method, first))
                        warm.add((method, temperature))
                    job = Job(list(prompt), temperature, new_tokens, seed + number, timing.stop)
                    sample = METHODS[method](engine, job)
                    if len(sample.tokens) < new_tokens:
                        return
                    record = {
                        **key,
                        "prompt_tokens": len(prompt),
                        "prefill_seconds": sample.prefill_seconds,
                        "decode_seconds": sample.decode_seconds,
                        "timed_tokens": sample.timed_tokens,
                        "acceptance": sample.acceptance,
                        "repeated_8grams": repeated_share(sample.tokens),
                        "tokens": sample.tokens,
                    }
                    records.add(record)
                timing.done(record)


def _warm_up(engine: Engine, method: str, job: Job) -> Job:
    """A short generation; on a GPU transformers' static decoding compiles for the size of its cache."""
    if method in COMPILED and engine.hierarchy.target.device.type == "cuda":
        return job
    return replace(job, prompt=job.prompt[:WARM_UP_PROMPT], new_tokens=WARM_UP_TOKENS)


def rows(records: Records, context: int, new_tokens: int) -> list[Record]:
    return speed_rows(records.all, BASELINES.__contains__, context, new_tokens)

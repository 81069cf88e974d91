"""Decoding methods to compare: ours and those of transformers, in the same process."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from triforce_tree.config import load_arguments
from triforce_tree.engine import Engine
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import listed_ids


@dataclass(frozen=True)
class Sample:
    """One measured generation.

    ``decode_seconds`` is the time of the last ``timed_tokens`` of ``tokens``, without prefill. ``acceptance``
    has the acceptance rates of our levels by name, or the tokens per pass of an assisted baseline.
    """

    prefill_seconds: float
    decode_seconds: float
    timed_tokens: int
    tokens: list[int]
    acceptance: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One generation that every method makes, from the same distribution."""

    prompt: list[int]
    temperature: float
    new_tokens: int
    seed: int = 0
    stop: StoppingCriteria | None = None
    progress: Progress | None = None

    def sampling(self, engine: Engine) -> dict[str, Any]:
        """Returns options of ``generate`` that set only the temperature, and disable the end token."""
        options: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        if ends := listed_ids(engine.target.settings.eos_token_id):
            options["suppress_tokens"] = ends
        return options


Method = Callable[[Engine, Job], Sample]


class Stamps(StoppingCriteria):
    """Records the time after each pass of a generation, and the number of tokens then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.passes: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.passes.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def ours(**options: object) -> Method:
    """Returns the method of this engine with ``options`` changed; every prompt is prefilled."""

    def run(engine: Engine, job: Job) -> Sample:
        out = engine.with_options(**load_arguments({**options, "prefix_cache": False})).generate(
            job.prompt,
            stopping_criteria=StoppingCriteriaList([job.stop] if job.stop else []),
            progress=job.progress,
            seed=job.seed,
            **job.sampling(engine),
        )
        rates = {level.name: level.acceptance_rate for level in out.levels or []}
        tokens = out.sequences[0, len(job.prompt) :].tolist()
        return Sample(
            out.prefill_seconds or 0.0,
            out.decode_seconds or 0.0,
            len(tokens),
            tokens,
            {name: rate for name, rate in rates.items() if rate is not None},
        )

    return run


def transformers_generate(assisted: bool = False, **options: Any) -> Method:
    """Returns a method that runs transformers' own ``generate``. The first pass, which is prefill, is not
    timed.

    Args:
        assisted: whether our draft is its ``assistant_model``.
        options: further options of ``generate``.
    """

    def run(engine: Engine, job: Job) -> Sample:
        target: Any = engine.target.model
        more = dict(options)
        if assisted:
            assert engine.draft is not None, "methods that cannot run were refused"
            more["assistant_model"] = engine.draft.model
        stamps = Stamps(target.device)
        criteria = StoppingCriteriaList([stamps, *([job.stop] if job.stop else [])])
        ids = torch.tensor([job.prompt], device=target.device)
        torch.manual_seed(job.seed)
        start = time.perf_counter()
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=criteria,
            **job.sampling(engine),
            **more,
        )
        (first, had), (last, has) = stamps.passes[0], stamps.passes[-1]
        several = assisted or "prompt_lookup_num_tokens" in options
        passes = len(stamps.passes) - 1
        return Sample(
            first - start,
            last - first,
            has - had,
            out[0, len(job.prompt) :].tolist(),
            {"tokens_per_pass": (has - had) / passes} if several and passes else {},
        )

    return run


PLAIN_METHOD = "triforce-autoregressive"
METHODS: dict[str, Method] = {
    "triforce": ours(),
    "triforce-3-level": ours(levels=3),
    "triforce-2-level": ours(levels=2),
    PLAIN_METHOD: ours(levels=1),
    "transformers-static": transformers_generate(cache_implementation="static"),
    "transformers-dynamic": transformers_generate(),
    "transformers-assistant": transformers_generate(assisted=True),
    "transformers-prompt-lookup": transformers_generate(prompt_lookup_num_tokens=10),
}
DRAFTING = frozenset({"triforce", "triforce-3-level", "triforce-2-level"})
# Methods that transformers' generate compiles on a GPU.
COMPILED = frozenset({"transformers-static"})
# Prompt lookup is left out, because it copies the loops of greedy models.
BASELINES = frozenset({"transformers-static", "transformers-dynamic", "transformers-assistant"})


def usable_methods(engine: Engine) -> list[str]:
    """Returns the usual methods. Without a draft model of the target's vocabulary, these are the methods that
    need none.
    """
    assists = engine.draft is not None and engine.token_map is None
    return [n for n in METHODS if assists or n != "transformers-assistant"]

"""Compares two generations of one prompt: by the hierarchy, and by the target alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from triforce_tree.check.ties import Difference, first_difference
from triforce_tree.engine import Engine
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.verify.sampling import ProbsFromLogits


def token_count(out: GenerateOutput) -> int:
    """Returns the number of new tokens of a single sequence."""
    assert not isinstance(out.new_tokens, list), "one prompt was continued"
    return out.new_tokens or 0


def ms_per_token(out: GenerateOutput) -> float | None:
    """Returns the decode time per token in milliseconds, without prefill, or None if there is no new
    token.
    """
    count = token_count(out)
    return 1e3 * (out.decode_seconds or 0.0) / count if count else None


def prompt_count(out: GenerateOutput) -> int:
    """Returns the number of tokens of the prompt of a single sequence."""
    return out.sequences.shape[1] - token_count(out)


def new_ids(out: GenerateOutput) -> list[int]:
    return out.sequences[0, prompt_count(out) :].tolist()


@dataclass(frozen=True)
class Comparison:
    """Two generations of one prompt.

    Attributes:
        ours: the generation by the hierarchy.
        baseline: the generation by the target alone.
        greedy: whether their tokens must agree, except at ties.
        difference: the first difference; None if they agree, or if memory was too small for judging.
    """

    ours: GenerateOutput
    baseline: GenerateOutput
    greedy: bool
    difference: Difference | None = None

    @property
    def speedup(self) -> float | None:
        ours, baseline = ms_per_token(self.ours), ms_per_token(self.baseline)
        return baseline / ours if ours and baseline else None

    @property
    def identical(self) -> bool | None:
        """Returns whether the texts are equal; None when sampling, where the draws differ but not the
        distribution.
        """
        return new_ids(self.ours) == new_ids(self.baseline) if self.greedy else None

    @property
    def first_difference(self) -> int | None:
        """Returns the index of the first new token that differs, counted from 0, or None if none does."""
        if self.identical is not False:
            return None
        return common_prefix(new_ids(self.ours), new_ids(self.baseline))

    @property
    def failed(self) -> bool:
        """Returns whether greedy texts differ and no tie explains it; False if that could not be judged."""
        return self.difference is not None and not self.difference.tie

    def verdict(self) -> str:
        if self.identical is None:
            tokens = "sampled: the same distribution, other draws"
        elif self.identical:
            tokens = "tokens identical"
        else:
            tokens = difference_verdict(self.first_difference or 0, self.difference)
        ours, baseline = ms_per_token(self.ours), ms_per_token(self.baseline)
        if ours is None or baseline is None or self.speedup is None:
            return tokens
        return f"{self.speedup:.2f}x: {ours:.1f} ms a token, target alone {baseline:.1f} ms; {tokens}"


def difference_verdict(token: int, found: Difference | None) -> str:
    """Returns a sentence about greedy texts that differ from this new token on. None means that memory was
    too small for judging.
    """
    text = f"texts differ from token {token} on"
    if found is None:
        return f"{text}; too little memory to tell a tie from a failure"
    numbers = f"gap {found.gap:.2g}, noise {found.noise:.2g}"
    if found.tie:
        return f"{text}: a tie ({numbers})"
    why = "there are no ties in 32 bits" if found.exact else "no tie"
    return f"{text}: FAILED, {why} ({numbers})"


def compared(
    engine: Engine, prompt: Sequence[int], ours: GenerateOutput, baseline: GenerateOutput, greedy: bool
) -> Comparison:
    """Judges two generations of a prompt by the same models.

    Args:
        ours: the generation by the hierarchy.
        baseline: the generation by the target alone.
        greedy: whether both took the most probable token at each position.
    """
    result = Comparison(ours, baseline, greedy)
    if result.identical is not False:
        return result
    return replace(result, difference=judged(engine, prompt, new_ids(ours), new_ids(baseline)))


def judged(
    engine: Engine,
    prompt: Sequence[int],
    ours: Sequence[int],
    baseline: Sequence[int],
    to_scores: ProbsFromLogits | None = None,
) -> Difference | None:
    """Returns the first difference of two texts, or None if there is none or memory was too small for
    judging.
    """
    try:
        return first_difference(engine, prompt, ours, baseline, to_scores)
    except torch.OutOfMemoryError:
        return None


def summary(out: GenerateOutput, comparison: Comparison | None = None) -> dict[str, Any]:
    """Returns a generation as a JSON object."""
    result: dict[str, Any] = {
        "prompt_tokens": prompt_count(out),
        "reused_tokens": out.reused_tokens,
        "new_tokens": out.new_tokens,
        "finish_reason": out.finish_reason,
        "prefill_seconds": out.prefill_seconds,
        "capture_seconds": out.capture_seconds,
        "ms_per_token": ms_per_token(out),
        "memory": out.memory,
        "ranks": out.ranks,
        "levels": [level.as_dict() for level in out.levels or []],
    }
    if comparison is not None:
        found = comparison.difference
        result |= {
            "identical": comparison.identical,
            "first_difference": comparison.first_difference,
            "tie": found.tie if found else None,
            "gap": found.gap if found else None,
            "noise": found.noise if found else None,
            "failed": comparison.failed,
            "speedup": comparison.speedup,
            "baseline_ms_per_token": ms_per_token(comparison.baseline),
        }
    return result

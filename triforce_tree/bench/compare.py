"""The hierarchy and the target's own decoding, one after the other on the same prompt."""

from dataclasses import dataclass
from typing import Any

from triforce_tree.output import GenerateOutput


def ms_per_token(out: GenerateOutput) -> float | None:
    """Decode time of one token, prefill apart; None where no token came."""
    return 1e3 * (out.decode_seconds or 0.0) / out.new_tokens if out.new_tokens else None


def new_ids(out: GenerateOutput) -> list[int]:
    count = out.new_tokens or 0
    return out.sequences[0, out.sequences.shape[1] - count :].tolist()


@dataclass(frozen=True)
class Comparison:
    """Two generations of one prompt; ``greedy`` says whether their tokens must agree."""

    ours: GenerateOutput
    baseline: GenerateOutput
    greedy: bool

    @property
    def speedup(self) -> float | None:
        ours, baseline = ms_per_token(self.ours), ms_per_token(self.baseline)
        return baseline / ours if ours and baseline else None

    @property
    def identical(self) -> bool | None:
        """None when sampling: equal laws, other draws."""
        return new_ids(self.ours) == new_ids(self.baseline) if self.greedy else None

    @property
    def first_difference(self) -> int | None:
        """The new token, counted from 0, where the two texts part."""
        pairs = zip(new_ids(self.ours), new_ids(self.baseline), strict=False)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        shorter = min(self.ours.new_tokens or 0, self.baseline.new_tokens or 0)
        return shorter if parted is None and not self.identical else parted

    def verdict(self) -> str:
        if self.identical is None:
            tokens = "sampled: both follow the same law, by other draws"
        elif self.identical:
            tokens = "tokens identical"
        else:
            tokens = f"tokens differ from new token {self.first_difference} on"
        ours, baseline = ms_per_token(self.ours), ms_per_token(self.baseline)
        if ours is None or baseline is None or self.speedup is None:
            return tokens
        return f"{self.speedup:.2f}x: {ours:.1f} ms a token, target alone {baseline:.1f} ms; {tokens}"


def summary(out: GenerateOutput, comparison: Comparison | None = None) -> dict[str, Any]:
    """A generation as a JSON object."""
    result: dict[str, Any] = {
        "prompt_tokens": out.sequences.shape[1] - (out.new_tokens or 0),
        "new_tokens": out.new_tokens,
        "finish_reason": out.finish_reason,
        "prefill_seconds": out.prefill_seconds,
        "capture_seconds": out.capture_seconds,
        "ms_per_token": ms_per_token(out),
        "profile": out.profile,
        "memory": out.memory,
        "levels": [level.as_dict() for level in out.levels or []],
    }
    if comparison is not None:
        result |= {
            "identical": comparison.identical,
            "speedup": comparison.speedup,
            "baseline_ms_per_token": ms_per_token(comparison.baseline),
        }
    return result

"""What each stage of a cycle costs: seconds measured on made-up texts, and what they depend on.

The draft-length controller chooses by these. They are measured once for a machine, a pair of models and the
settings below, and kept in the user's cache folder (``cost_table.py``).
"""

import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from triforce_tree.decoding.draft_length import StageSeconds
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime import distributed
from triforce_tree.runtime.fingerprint import hardware, shape_of
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

# At most so many samples of a stage, fewer once they took so many seconds. The first one warms up.
_SAMPLES, _ENOUGH = 6, 0.1
# Runs of a sample on a GPU, where the host then runs ahead of the device as it does while decoding.
_RUNS = 3
# Full stages are measured at the longest context, and at one of this many tokens or a quarter of the longest.
_SHORT = 1024
# Context lengths between which the costs of an offloaded cache are stored.
_OFFLOADED_LENGTHS = 5


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the stages, those of the target at several context lengths.

    Attributes:
        lengths: tokens of context, ascending.
        draft_round: a round of drafting, with the retrieval level's verification where there is one.
        verification, plain: the target's stages at each of the lengths; a longer context never costs less.

    Raises:
        ValueError: lengths that do not ascend or match the seconds, or seconds that are not above 0.
    """

    lengths: tuple[int, ...]
    draft_round: float
    verification: tuple[float, ...]
    plain: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.lengths)
        if not count or not len(self.verification) == len(self.plain) == count:
            raise ValueError(f"{count} lengths, {len(self.verification)} and {len(self.plain)} seconds")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} do not ascend")
        for seconds in zip(self.verification, self.plain, strict=True):
            StageSeconds(self.draft_round, *seconds)
        if list(self.verification) != sorted(self.verification) or list(self.plain) != sorted(self.plain):
            raise ValueError("a longer context costs less")

    def at(self, tokens: int) -> StageSeconds:
        """Behind ``tokens`` of context: between two lengths, and beyond the last one, on a straight line."""
        verification = _on_line(tokens, self.lengths, self.verification)
        return StageSeconds(self.draft_round, verification, _on_line(tokens, self.lengths, self.plain))


class MeasuredStages(Protocol):
    """Stages that can be run on made-up texts: a prepared ``DecodingProgram``."""

    device: torch.device

    @property
    def stage_names(self) -> Collection[str]: ...

    def trial(self, length: int) -> AbstractContextManager[Callable[[], None]]: ...

    def run(self, name: str, generator: torch.Generator) -> None: ...


def measure(
    stages: MeasuredStages,
    longest: int,
    refresh: int = 1,
    transferred: Callable[[int, bool], int] | None = None,
) -> StageCosts:
    """Run each stage a few times; below a second on a GPU where a stage takes milliseconds.

    All ranks of a group measure together. Random numbers are the measurement's own. Texts must be fed or
    rewound afterwards.

    Args:
        stages: after their graphs were captured.
        longest: most tokens of context.
        refresh: every so many rounds the retrieval level chooses its chunks anew, 0 for the first one alone.
        transferred: bytes that cross the bus in the target's stage behind so many tokens, and in the
            autoregressive one where the flag is True, for a cache in host memory; trial runs transfer next to
            nothing. None where the cache is on the device.
    """
    clock = StageClock(stages.device)
    generator = torch.Generator(stages.device)
    generator.manual_seed(0)
    seconds: dict[str, float] = {}
    with stages.trial(longest) as begin:
        # The order of a pass: stages read what those before them wrote.
        for name in ("draft", "retrieval_refresh", "retrieval", "target", "plain"):
            if name in stages.stage_names and (name != "retrieval" or refresh != 1):
                seconds[name] = _seconds_of(stages, name, begin, clock, generator)
    choose = seconds.get("retrieval_refresh", 0.0)
    retrieval = seconds.get("retrieval", choose)
    # Of n rounds one chooses.
    verified = retrieval if refresh == 0 else (choose + (refresh - 1) * retrieval) / refresh
    # Without a draft no round is ever made.
    a_round = seconds.get("draft", seconds["plain"]) + verified
    full = seconds.get("target", seconds["plain"])
    if transferred is not None:
        bus = bandwidths(stages.device)[0]
        lengths = [max(1, longest * n // _OFFLOADED_LENGTHS) for n in range(1, _OFFLOADED_LENGTHS + 1)]
        verification = [max(full, transferred(length, False) / bus) for length in lengths]
        plain = [max(seconds["plain"], transferred(length, True) / bus) for length in lengths]
        return _rounded(lengths, a_round, verification, plain)
    short = max(1, min(_SHORT, longest // 4))
    if short == longest:
        return _rounded([longest], a_round, [full], [seconds["plain"]])
    with stages.trial(short) as begin:
        near = {
            name: _seconds_of(stages, name, begin, clock, generator)
            for name in ("target", "plain")
            if name in seconds
        }
    verification = [near.get("target", near["plain"]), full]
    return _rounded([short, longest], a_round, verification, [near["plain"], seconds["plain"]])


def settings_of(
    program: DecodingProgram,
    sampling: str,
    transferred: Callable[[int, bool], int] | None,
) -> dict[str, Any]:
    """What the costs depend on, as plain values.

    Args:
        program: a prepared ``DecodingProgram``.
        sampling: how probabilities come from logits.
        transferred: as for :func:`measure`.
    """
    config, device = program.config, program.device
    target = program.target.model
    settings: dict[str, Any] = {
        "machine": hardware(device),
        "software": f"torch {torch.__version__}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "ranks": group.size if (group := distributed.current()) is not None else 1,
        "target": f"{shape_of(target)}, {_bytes(target)} bytes",
        "drafter": _drafter(program.drafter),
        "sampling": sampling,
        "levels": program.levels,
        "batch": program.batch,
        # Lengths are interpolated, but graphs and split sizes are made for the longest.
        "context": 1 << (program.max_seq_len - 1).bit_length(),
        "cache on": "device" if transferred is None else "host",
    }
    if transferred is not None:
        # Free memory, and so the split, differs a little from run to run.
        settings["transferred"] = [
            f"{transferred(program.max_seq_len, plain):.0e}" for plain in (False, True)
        ]
    if program.levels > 1:
        settings |= {"tree": repr(device_tree_shape(parse_shape(config.tree))), **asdict(config.streaming)}
    if program.levels == 3:
        settings |= {
            "max_draft_tokens": program.max_draft_tokens,
            "runner_ups": program.runner_ups,
            "retrieval_weight_bits": config.retrieval_weight_bits,
            **asdict(replace(config.retrieval, select_chunks=None)),
            "select_chunks": getattr(config.retrieval.select_chunks, "__qualname__", None),
        }
    return settings


def _seconds_of(
    stages: MeasuredStages,
    name: str,
    begin: Callable[[], None],
    clock: StageClock,
    generator: torch.Generator,
) -> float:
    runs = _RUNS if stages.device.type == "cuda" else 1
    samples: list[float] = []
    # Ranks take equally many, or one would wait for the others for ever.
    while len(samples) < _SAMPLES and distributed.broadcast_object(sum(samples) < _ENOUGH):
        begin()
        clock.start()
        for _ in range(runs):
            stages.run(name, generator)
        clock.mark(name)
        clock.synchronize()
        samples.append(clock.seconds()[name])
    return statistics.median(samples[1:] or samples) / runs


def _rounded(
    lengths: Sequence[int], a_round: float, verification: Sequence[float], plain: Sequence[float]
) -> StageCosts:
    """Two significant digits, so that costs which are measured again seldom change a choice."""

    def rounded(seconds: float) -> float:
        return float(f"{seconds:.1e}")

    def ascending(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(rounded(max(seconds[: i + 1])) for i in range(len(seconds)))

    return StageCosts(tuple(lengths), rounded(a_round), ascending(verification), ascending(plain))


def _on_line(tokens: int, lengths: Sequence[int], seconds: Sequence[float]) -> float:
    if len(lengths) == 1 or tokens <= lengths[0]:
        return seconds[0]
    right = next((i for i, length in enumerate(lengths) if length >= tokens), len(lengths) - 1)
    slope = (seconds[right] - seconds[right - 1]) / (lengths[right] - lengths[right - 1])
    return seconds[right - 1] + slope * (tokens - lengths[right - 1])


def _drafter(drafter: Drafter | None) -> str | None:
    if drafter is None:
        return None
    model = getattr(drafter, "draft", None)
    own = f", {shape_of(model.model)}, {_bytes(model.model)} bytes" if isinstance(model, HFModel) else ""
    return f"{type(drafter).__qualname__}{own}"


def _bytes(model: PreTrainedModel) -> int:
    """Of the parameters: quantised or sharded models share their shape's name."""
    return sum(p.numel() * p.element_size() for p in model.parameters())

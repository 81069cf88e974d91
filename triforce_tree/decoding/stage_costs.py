"""Stage costs: seconds of each stage, measured on made-up sequences, and the settings they depend on.

The draft-length controller chooses by them. They are measured once for a machine, a pair of models and the
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

# Most samples of a stage, and seconds after which no more are taken. The first one is the warm-up.
_SAMPLES, _ENOUGH = 6, 0.1
# Runs of a sample on a GPU, so that the host runs ahead of the device as it does while decoding.
_RUNS = 3
# The target's stages are measured at the longest context, and at this many tokens or a quarter of it.
_SHORT = 1024
# Number of context lengths for which the costs of an offloaded cache are stored.
_OFFLOADED_LENGTHS = 5


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the stages, those of the target at several context lengths.

    Attributes:
        lengths: tokens of context, ascending.
        draft_round: a round of drafting, with the retrieval level's verification where there is one.
        verification, plain: the target's stages at each of the lengths, not decreasing.

    Raises:
        ValueError: lengths that are not ascending, or not as many as the seconds; seconds that decrease, or
            are not above 0.
    """

    lengths: tuple[int, ...]
    draft_round: float
    verification: tuple[float, ...]
    plain: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.lengths)
        if not count or not len(self.verification) == len(self.plain) == count:
            raise ValueError(
                f"{count} lengths, but {len(self.verification)} and {len(self.plain)} seconds; give as many"
            )
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} are not ascending; sort them")
        for seconds in zip(self.verification, self.plain, strict=True):
            StageSeconds(self.draft_round, *seconds)
        if list(self.verification) != sorted(self.verification) or list(self.plain) != sorted(self.plain):
            raise ValueError(
                f"verification={self.verification} or plain={self.plain} costs less at a longer context; "
                "give seconds that do not decrease"
            )

    def at(self, tokens: int) -> StageSeconds:
        """After ``tokens`` of context: interpolated between two lengths, extrapolated beyond the last one."""
        verification = _interpolated(tokens, self.lengths, self.verification)
        return StageSeconds(self.draft_round, verification, _interpolated(tokens, self.lengths, self.plain))


class MeasuredStages(Protocol):
    """Stages that can be run on made-up sequences: a prepared ``DecodingProgram``."""

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
    """Run each stage a few times; this takes less than a second on a GPU where a stage takes milliseconds.

    All ranks of a group measure together. Random numbers come from a generator of the measurement's own.
    Sequences must be fed or rewound afterwards.

    Args:
        stages: after their graphs were captured.
        longest: most tokens of context.
        refresh: rounds from one refresh of the retrieved chunks to the next; 0: only the first one refreshes.
        transferred: bytes that the target's stage copies to the device after so many tokens of context, or
            the autoregressive one where the flag is True, for a cache in host memory; trial runs copy next to
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
    refreshing = seconds.get("retrieval_refresh", 0.0)
    retrieval = seconds.get("retrieval", refreshing)
    # One of ``refresh`` rounds refreshes.
    verified = retrieval if refresh == 0 else (refreshing + (refresh - 1) * retrieval) / refresh
    # Without a drafter there are no rounds, and this is not used.
    draft_round = seconds.get("draft", seconds["plain"]) + verified
    full = seconds.get("target", seconds["plain"])
    if transferred is not None:
        bus = bandwidths(stages.device)[0]
        lengths = [max(1, longest * n // _OFFLOADED_LENGTHS) for n in range(1, _OFFLOADED_LENGTHS + 1)]
        verification = [max(full, transferred(length, False) / bus) for length in lengths]
        plain = [max(seconds["plain"], transferred(length, True) / bus) for length in lengths]
        return _rounded(lengths, draft_round, verification, plain)
    short = max(1, min(_SHORT, longest // 4))
    if short == longest:
        return _rounded([longest], draft_round, [full], [seconds["plain"]])
    with stages.trial(short) as begin:
        at_short = {
            name: _seconds_of(stages, name, begin, clock, generator)
            for name in ("target", "plain")
            if name in seconds
        }
    verification = [at_short.get("target", at_short["plain"]), full]
    return _rounded([short, longest], draft_round, verification, [at_short["plain"], seconds["plain"]])


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
        "kv_bits": config.kv_bits,
        # Costs are interpolated between lengths, but graphs and split sizes are made for the longest.
        "context": 1 << (program.max_seq_len - 1).bit_length(),
        "cache on": "device" if transferred is None else "host",
    }
    if transferred is not None:
        # Rounded: free memory, and so the split, differs a little from run to run.
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
    # All ranks take the same number of samples, or one would wait for the others forever.
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
    lengths: Sequence[int], draft_round: float, verification: Sequence[float], plain: Sequence[float]
) -> StageCosts:
    """Rounded to two significant digits, so that measuring again seldom changes a draft length."""

    def rounded(seconds: float) -> float:
        return float(f"{seconds:.1e}")

    def ascending(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(rounded(max(seconds[: i + 1])) for i in range(len(seconds)))

    return StageCosts(tuple(lengths), rounded(draft_round), ascending(verification), ascending(plain))


def _interpolated(tokens: int, lengths: Sequence[int], seconds: Sequence[float]) -> float:
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
    """Of the parameters, which tell quantised and sharded models of one shape apart."""
    return sum(p.numel() * p.element_size() for p in model.parameters())

"""Stage costs: seconds of each stage, measured on made-up sequences, and the settings they depend on.

The controller of passes chooses by them. They are measured once for a machine, a pair of models and the
settings below, and kept in the user's cache folder (``cost_table.py``).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from triforce_tree.decoding.choice.passes import OF_SHAPE, StageSeconds
from triforce_tree.decoding.prepared_stages import StageProgress
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import stage_name
from triforce_tree.drafters.base import Drafter
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import parameter_bytes
from triforce_tree.runtime import distributed
from triforce_tree.runtime.fingerprint import hardware, shape_of
from triforce_tree.runtime.stage_clock import StageClock

# Most and fewest samples of a stage, the warm-up among them; seconds after which no more are taken, with the
# fewest and without.
_SAMPLES, _FEWEST, _ENOUGH, _LONG = 6, 4, 0.1, 1.0
# Measuring may take at most this share of a request's time. An allowance is divided into so many parts, and
# each stage may use one. Each stage is run at least once at two context lengths, in the time of so many
# passes of the target alone; on a CPU a first run is slow, as the processor's caches lack what it reads.
_ALLOWED, _STAGES, _LEAST_PASSES = 0.02, 24, {"cpu": 26, "cuda": 8}
# Tokens that are decoded with drafts in the time of such a pass, at best on a CPU.
_DECODED = {"cpu": 4, "cuda": 1}
# Tokens that a prefill processes in the time of such a pass: on a CPU, and on a GPU.
_PREFILLED = {"cpu": 30, "cuda": 100}
# Stages of the target, whose costs grow with the context.
_OF_TARGET = ("plain", "chain", "root", "tree")
# Runs of a sample on a GPU.
_RUNS = 3
# The target's stages are measured at the longest context, and at this many tokens or a quarter of it.
_SHORT = 1024
# Plain passes before a drafter's preparation; context lengths of an offloaded cache's costs.
_PAUSED, _OFFLOADED_LENGTHS = 64, 5


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the stages at several context lengths.

    Attributes:
        lengths: tokens of context, ascending.
        seconds: at each of the lengths; no stage of the target costs less at a longer one.

    Raises:
        ValueError: lengths that are not ascending, or not as many as the seconds; seconds that decrease.
    """

    lengths: tuple[int, ...]
    seconds: tuple[StageSeconds, ...]

    def __post_init__(self) -> None:
        count = len(self.lengths)
        if not count or len(self.seconds) != count:
            raise ValueError(f"{count} lengths, but {len(self.seconds)} seconds; give as many")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} are not ascending; sort them")
        for name in _OF_TARGET:
            values = [getattr(seconds, name) for seconds in self.seconds]
            if values != sorted(values):
                raise ValueError(
                    f"{name}={values} costs less at a longer context; give seconds that do not decrease"
                )

    def at(self, tokens: int) -> StageSeconds:
        """After ``tokens`` of context: interpolated between two lengths, extrapolated beyond the last one."""
        lengths = self.lengths
        if len(lengths) == 1 or tokens <= lengths[0]:
            return self.seconds[0]
        right = next((i for i, length in enumerate(lengths) if length >= tokens), len(lengths) - 1)
        left, right_seconds = self.seconds[right - 1], self.seconds[right]
        share = (tokens - lengths[right - 1]) / (lengths[right] - lengths[right - 1])
        changed = {}
        for name in _OF_TARGET:
            low, high = getattr(left, name), getattr(right_seconds, name)
            if high < math.inf:
                changed[name] = low + share * (high - low)
        return replace(left, **changed)

    def scaled(self, factors: Mapping[str, float]) -> "StageCosts":
        """Each stage's seconds times its factor, where there is one, in two significant digits."""
        found = []
        for seconds in self.seconds:
            own = {name: getattr(seconds, name) * factor for name, factor in factors.items()}
            found.append(replace(seconds, **{name: float(f"{value:.1e}") for name, value in own.items()}))
        return replace(self, seconds=tuple(found))


@dataclass(frozen=True)
class Allowance:
    """The time that measuring may take, in passes of the target alone.

    Attributes:
        suffices: whether each stage can be run at least once.
    """

    passes: float
    suffices: bool = True

    @classmethod
    def of(cls, prompt: int, new: int, device: torch.device) -> "Allowance":
        """Returns the allowance of a request with so many prompt tokens and at most so many new ones."""
        passes = _ALLOWED * (prompt / _PREFILLED[device.type] + new / _DECODED[device.type])
        return cls(passes, passes >= _LEAST_PASSES[device.type])


UNLIMITED = Allowance(math.inf)


class MeasuredStages(Protocol):
    """Stages that can be run on made-up sequences: a prepared ``DecodingProgram``."""

    device: torch.device

    @property
    def stage_names(self) -> Collection[str]: ...

    @property
    def levels(self) -> int: ...

    @property
    def batch(self) -> int: ...

    def trial(self, length: int) -> AbstractContextManager[Callable[[bool], None]]: ...

    def run(self, name: str, generator: torch.Generator) -> None: ...

    def prepare_shape(self, number: int) -> None: ...

    @property
    def drafter(self) -> Drafter | None: ...


def measure(
    stages: MeasuredStages,
    longest: int,
    refresh: int = 1,
    transferred: Callable[[int, bool], int] | None = None,
    allowance: Allowance = UNLIMITED,
) -> StageCosts:
    """Run each stage a few times, or once where the allowance is short.

    All ranks measure together, with random numbers of their own. Feed or rewind the sequences afterwards.

    Args:
        stages: after their graphs were captured.
        longest: most tokens of context.
        refresh: rounds from one refresh of the retrieved chunks to the next; 0: only the first one refreshes.
        transferred: bytes that the target's stage copies to the device after so many tokens of context, or
            the autoregressive one where the flag is True, for a cache in host memory; trial runs copy next to
            nothing. None where the cache is on the device.
        allowance: how often stages may be run.
    """
    timer = _Timer(stages, allowance)
    target = {"tree": "target_tree", "chain": "target", "root": "root"}
    if stages.levels < 3:
        target = {"tree": "target"}
    with stages.trial(longest) as begin:
        # It tells how long an allowance is.
        alone = timer.of_target({"plain": "plain"}, begin)
        # The order of a pass: stages read what those before them wrote.
        found = {
            name: timer.seconds_of(name, partial(begin, False))
            for name in ("draft", "retrieval_refresh", "retrieval")
            if name in stages.stage_names and (name != "retrieval" or refresh != 1)
        }
        at_longest = alone | timer.of_target(target, begin)
        prepare = timer.of_preparation(longest)
    lowest = {"draft": found.get("draft", math.inf), "prepare": prepare}
    if (refreshing := found.get("retrieval_refresh")) is not None:
        lowest["retrieval"] = _verified(refreshing, found.get("retrieval"), refresh)
    if transferred is not None:
        bus = bandwidths(stages.device)[0]
        lengths = [max(1, longest * n // _OFFLOADED_LENGTHS) for n in range(1, _OFFLOADED_LENGTHS + 1)]
        each = [
            {
                name: max(seconds, transferred(length, name == "plain") / bus)
                for name, seconds in at_longest.items()
            }
            for length in lengths
        ]
        return _rounded(lengths, lowest, each)
    short = max(1, min(_SHORT, longest // 4))
    if short == longest:
        return _rounded([longest], lowest, [at_longest])
    with stages.trial(short) as begin:
        at_short = timer.of_target({"plain": "plain", **target}, begin)
        return _rounded([short, longest], lowest, [at_short, at_longest])


def measure_shape(stages: MeasuredStages, shape: int, first: StageCosts, refresh: int = 1) -> StageCosts:
    """The same with trees of another shape: its own stages are run, other seconds are those of ``first``.

    Args:
        shape: its number.
        first: costs with trees of the first shape, on a device: at one or two lengths.
        refresh: as for :func:`measure`.

    Raises:
        torch.OutOfMemoryError: device memory is short for its stages.
    """
    timer, measured = _Timer(stages), list[dict[str, float]]()
    drafting = [stage_name(name, shape) for name in ("draft", "retrieval_refresh", "retrieval")]
    verifying = stage_name("target_tree" if stages.levels == 3 else "target", shape)
    found: dict[str, float] = {}
    for length in reversed(first.lengths):
        with stages.trial(length) as begin:
            begin(False)
            stages.prepare_shape(shape)
            for name in drafting if not found else ():
                if name in stages.stage_names and (name != drafting[2] or refresh != 1):
                    found[name] = timer.seconds_of(name, partial(begin, False))
            verified = timer.of_target({"tree": verifying}, begin)
        measured.insert(0, verified)
    lowest = {"draft": found[drafting[0]]}
    if drafting[1] in found:
        lowest["retrieval"] = _verified(found[drafting[1]], found.get(drafting[2]), refresh)
    own = _rounded(
        first.lengths,
        lowest,
        [{"plain": at.plain, **to} for at, to in zip(first.seconds, measured, strict=True)],
    )
    changed = [
        replace(seconds, **{name: getattr(other, name) for name in OF_SHAPE})
        for seconds, other in zip(first.seconds, own.seconds, strict=True)
    ]
    return StageCosts(first.lengths, tuple(changed))


def _verified(refreshing: float, retrieval: float | None, refresh: int) -> float:
    """Seconds of the retrieval level in a round, one of ``refresh`` of which refreshes."""
    other = refreshing if retrieval is None else retrieval
    return other if refresh == 0 else (refreshing + (refresh - 1) * other) / refresh


class _Timer:
    """Seconds of stages on made-up sequences.

    Args:
        allowance: the first stage that is timed must be a pass of the target alone, unless it is unlimited.
    """

    def __init__(self, stages: MeasuredStages, allowance: Allowance = UNLIMITED) -> None:
        self._stages, self._clock = stages, StageClock(stages.device)
        self._passes, self._plain = allowance.passes / _STAGES, 0.0
        why = "the choice of passes depends on it, once for these settings"
        self._progress = StageProgress(None, "timing", why)
        self._generator = torch.Generator(stages.device).manual_seed(0)
        # On a GPU the host runs ahead of the device, as it does while decoding.
        self._runs = _RUNS if stages.device.type == "cuda" else 1

    def seconds_of(self, name: str, begin: Callable[[], None]) -> float:
        """Of one run of a stage; ``begin`` sets the sequences back."""
        self._progress.next(name)
        return self._least(begin, lambda: self._stages.run(name, self._generator), self._runs)

    def of_target(self, names: Mapping[str, str], begin: Callable[[bool], None]) -> dict[str, float]:
        """Of the target's stages, by field of ``StageSeconds``.

        Args:
            names: of the stages, by field.
            begin: sets the sequences back; with chains of full length if told so.
        """
        found: dict[str, float] = {}
        for field, name in names.items():
            if name in self._stages.stage_names:
                found[field] = self.seconds_of(name, partial(begin, True))
            elif name == "root" and self._stages.device.type != "cuda":
                # A graph has the same work whatever it verifies.
                found[field] = self.seconds_of("target", partial(begin, False))
        return found

    def of_preparation(self, length: int) -> float:
        """Of the drafter's work before it proposes after autoregressive passes."""
        if (drafter := self._stages.drafter) is None:
            return 0.0
        batch, text = self._stages.batch, [0] * (length + 1)
        begin = partial(drafter.start, [text[:-_PAUSED] or text[:1]] * batch)
        return self._least(begin, lambda: drafter.prepare([text] * batch, resumed=True), 1)

    def _least(self, begin: Callable[[], None], run: Callable[[], None], runs: int) -> float:
        """Seconds of the fastest sample: what else the machine does makes others slower, by many times."""
        samples: list[float] = []

        def enough() -> bool:
            # Where the warm-up takes long, it has to do.
            most = min(_ENOUGH if len(samples) >= _FEWEST else _LONG, self._passes * self._plain)
            return len(samples) == _SAMPLES or (bool(samples) and sum(samples) > most)

        # All ranks take as many samples, or one would wait for the others forever.
        while not distributed.broadcast_object(enough()):
            begin()
            self._clock.start()
            for _ in range(runs):
                run()
            self._clock.mark("run")
            self._clock.synchronize()
            samples.append(self._clock.seconds()["run"])
            self._plain = self._plain or samples[0]
        return min(samples[1:] or samples) / runs


def settings_of(
    program: DecodingProgram, sampling: str, transferred: Callable[[int, bool], int] | None
) -> dict[str, Any]:
    """What the costs depend on, as plain values.

    Args:
        program: a prepared ``DecodingProgram``.
        sampling: how probabilities come from logits.
        transferred: as for :func:`measure`.
    """
    config, device = program.config, program.device
    settings: dict[str, Any] = {
        "machine": hardware(device),
        "software": f"torch {torch.__version__}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "ranks": group.size if (group := distributed.current()) is not None else 1,
        "context_parallel": config.text_ranks,
        "target": _model(program.target.model),
        "drafter": _drafter(program.drafter),
        "sampling": sampling,
        "levels": program.levels,
        "two levels": program.two_levels,
        "batch": program.batch,
        "kv_bits": config.kv_bits,
        "exact": config.exact,
        "attention": chosen(config.attention_backend, device).name,
        # Costs are interpolated between lengths, but graphs and split sizes are made for the longest.
        "context": 1 << (program.max_seq_len - 1).bit_length(),
        "cache on": "device" if transferred is None else "host",
    }
    if slots := program.cache.backend.pool_slots:
        settings["slots shared"] = 1 << (slots - 1).bit_length()
    if transferred is not None:
        # Rounded: free memory, and so the split, differs a little from run to run.
        settings["transferred"] = [
            f"{transferred(program.max_seq_len, plain):.0e}" for plain in (False, True)
        ]
    if program.levels > 1:
        tree, *others = map(repr, program.shapes)
        settings |= {"tree": tree, **asdict(config.streaming), **({"other trees": others} if others else {})}
    if program.levels == 3:
        settings |= {
            "max_draft_tokens": program.max_draft_tokens,
            "chain": [program.runner_ups, program.tail_tree],
            "retrieval_weight_bits": config.retrieval_weight_bits,
            **asdict(replace(config.retrieval, select_chunks=None)),
            "select_chunks": getattr(config.retrieval.select_chunks, "__qualname__", None),
        }
    return settings


def _rounded(
    lengths: Sequence[int], lowest: Mapping[str, float], target: Sequence[Mapping[str, float]]
) -> StageCosts:
    """Rounded to two significant digits, so that measuring again seldom changes a choice."""

    def rounded(seconds: float) -> float:
        return float(f"{seconds:.1e}")

    ascending: list[dict[str, float]] = []
    for at_length in target:
        last = ascending[-1] if ascending else {}
        ascending.append(
            {name: max(rounded(value), last.get(name, 0.0)) for name, value in at_length.items()}
        )
    others = {name: rounded(value) for name, value in lowest.items()}
    return StageCosts(tuple(lengths), tuple(StageSeconds(**others, **values) for values in ascending))


def _drafter(drafter: Drafter | None) -> str | None:
    if drafter is None:
        return None
    model = getattr(drafter, "draft", None)
    own = f", {_model(model.model)}" if isinstance(model, HFModel) else ""
    return f"{type(drafter).__qualname__}{own}"


def _model(model: PreTrainedModel) -> str:
    """Its shape, and its bytes, which tell quantised and sharded models of one shape apart."""
    return f"{shape_of(model)}, {parameter_bytes(model)} bytes"

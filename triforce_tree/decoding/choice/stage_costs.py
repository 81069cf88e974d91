"""Finds the stage costs of a program: measured on made-up sequences, or guessed from the models' sizes.

The choice of passes follows from them (``policy/costs.py``). They are measured once for each combination of
machine, models and settings (``settings_of``), and kept in the user's cache folder (``stage_costs.json``).
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from triforce_tree.decoding.prepared_stages import StageProgress
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import chain_nodes, drafted
from triforce_tree.drafters.base import Drafter
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.costs import COPIED, CostTable, StageCosts, predicted
from triforce_tree.policy.passes import StageSeconds
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.runtime.fingerprint import hardware, shape_of
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

_LOG = logging.getLogger(__name__)
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
# Runs of a sample on a GPU.
_RUNS = 3
# The target's stages are measured at the longest context, and at this many tokens or a quarter of it.
_SHORT = 1024
# Plain passes before a drafter's preparation; context lengths of an offloaded cache's costs.
_PAUSED, _OFFLOADED_LENGTHS = 64, 5
# Share of a plain pass that a forward of a drafter takes which is no draft model.
_OWN_DRAFTER = 0.05


class _Device(NamedTuple):
    """Holds a device's costs: seconds per layer, bytes per second, and the share of each further token."""

    layer: float
    bandwidth: float
    token: float


_CPU, _GPU = _Device(5e-5, 2e10, 0.05), _Device(3e-5, 1.5e12, 0.003)


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


def user_table() -> CostTable:
    """Returns the path of the table in the user's cache folder."""
    try:
        return _table_at(user_cache("stage_costs.json"))
    except RuntimeError:  # no home folder
        return _table_at(None)


@cache
def _table_at(path: Path | None) -> CostTable:
    return CostTable(path)


def stage_costs(
    program: DecodingProgram,
    to_probs: ProbsFromLogits,
    table: CostTable | None = None,
    allowance: Allowance = UNLIMITED,
) -> StageCosts:
    """Returns the costs of a program's prepared stages, from the table or measured; all ranks use rank 0's.

    Where they are measured, sequences must be fed or rewound afterwards. Where the allowance is too short for
    that, they are guessed, without an entry in the table: the next request guesses the same ones.

    Args:
        program: a ``DecodingProgram`` after ``prepare(to_probs)``.
        to_probs: logits to probabilities.
        table: by default the user's.
        allowance: what measuring may cost.
    """
    table = table or user_table()
    transferred = program.transferred_bytes if program.cache.backend.transfers else None
    settings = settings_of(program, to_probs)
    found = distributed.broadcast_object(table.find(settings))
    longest = program.max_seq_len - 1
    if found is None and transferred is None and not allowance.suffices:
        return distributed.broadcast_object(guessed(program, longest))
    if found is None and not to_probs.context_free:
        # Processors that depend on the text must not see a made-up one: measured without them.
        without = ProbsFromLogits(greedy=to_probs.greedy)
        program.prepare(without)
        found = stage_costs(program, without, table, allowance)
        program.prepare(to_probs)
    if found is None:
        _LOG.info("measuring what each stage costs with these settings, once: %s", table.path)
        start = time.perf_counter()
        measured = measure(program, longest, program.config.retrieval.refresh, transferred, allowance)
        program.capture_seconds += time.perf_counter() - start
        # Times of earlier requests are relative to guessed costs.
        program.selected.timings.clear()
        found = distributed.broadcast_object(
            table.add(settings, measured) if distributed.is_first_rank() else measured
        )
    return found


def costs_by_shape(program: DecodingProgram, first: StageCosts) -> list[StageCosts | None]:
    """Returns the costs with trees of each shape; only those of the first shape are measured.

    The others are predicted from them: making their stages takes seconds on a GPU, and the request may never
    use them.
    """
    known, *others = program.shapes
    chain, tail = chain_nodes(program), program.tail_tree
    return [first, *(predicted(first, known, shape, chain, tail) for shape in others)]


def guessed(program: DecodingProgram, longest: int) -> StageCosts:
    """Costs of a program's stages by the sizes of its models, of which nothing is measured.

    Args:
        longest: most tokens of context.
    """
    batch, target, shape = program.batch, program.target, program.shapes[0]
    weights, element_bytes = target.parameter_bytes, program.store.memory.itemsize
    bits = program.config.weight_bits if program.levels == 3 else 16

    def seconds(tokens: int, context: int, weights: float = weights) -> float:
        """Returns the estimated seconds of a forward of the target."""
        seen = sum(s.elements * min(context, s.window or context) for s in target.kv_shapes)
        read = weights + batch * seen * element_bytes
        return _seconds_of(target, read, batch * tokens)

    plain = [seconds(1, length) for length in (1, longest)]
    draft = prepare = math.inf
    if program.drafter is not None:
        model = getattr(program.drafter, "draft", None)
        if isinstance(model, HFModel):
            forward = _seconds_of(model, model.parameter_bytes, batch * max(shape.widths, default=1))
        else:
            forward = _OWN_DRAFTER * plain[0]
        prepare, draft = forward, max(COPIED * plain[0], forward * drafted(program, 2, 1, 0)[0])
    three = program.levels == 3
    budget = min(longest, program.config.retrieval.budget)
    retrieval = seconds(shape.nodes, budget, weights * bits / 16) if three else math.inf
    found = []
    for length, alone in zip((1, longest), plain, strict=True):
        trees = program.levels == 2 or program.two_levels
        tree = seconds(shape.nodes, length) if trees else math.inf
        chain = seconds(chain_nodes(program), length) if three else math.inf
        # On a GPU a graph has the same work whatever it verifies.
        root = alone if three and program.device.type == "cpu" else chain
        found.append(
            StageSeconds(alone, draft, retrieval, chain, root, tree, prepare if draft < math.inf else 0.0)
        )
    return StageCosts((1, longest), tuple(found)) if longest > 1 else StageCosts((1,), (found[0],))


def _seconds_of(model: HFModel, read: float, tokens: int) -> float:
    """Returns the estimated seconds of a forward over ``tokens`` tokens that reads ``read`` bytes."""
    device = _GPU if model.device.type == "cuda" else _CPU
    return model.layers * device.layer + read / device.bandwidth * (1 + device.token * (tokens - 1))


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


def _verified(refreshing: float, retrieval: float | None, refresh: int) -> float:
    """Returns the seconds of retrieval verification in a round; one of ``refresh`` rounds refreshes its
    chunks.
    """
    other = refreshing if retrieval is None else retrieval
    return other if refresh == 0 else (refreshing + (refresh - 1) * other) / refresh


class _Timer:
    """Measures the seconds of stages on made-up sequences.

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
        """Returns the seconds of one run of a stage; ``begin`` resets the sequences before it."""
        self._progress.next(name)
        return self._least(begin, lambda: self._stages.run(name, self._generator), self._runs)

    def of_target(self, names: Mapping[str, str], begin: Callable[[bool], None]) -> dict[str, float]:
        """Returns the seconds of the target's stages, by field of ``StageSeconds``.

        Args:
            names: the name of each stage, by field.
            begin: resets the sequences; its argument says whether their draft chains are full.
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
        """Returns the seconds of the drafter's work before its first proposal after autoregressive passes."""
        if (drafter := self._stages.drafter) is None:
            return 0.0
        batch, text = self._stages.batch, [0] * (length + 1)
        begin = partial(drafter.start, [text[:-_PAUSED] or text[:1]] * batch)
        return self._least(begin, lambda: drafter.prepare([text] * batch, resumed=True), 1)

    def _least(self, begin: Callable[[], None], run: Callable[[], None], runs: int) -> float:
        """Returns the seconds of the fastest sample; other load on the machine makes some samples much
        slower.
        """
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


def settings_of(program: DecodingProgram, to_probs: ProbsFromLogits) -> dict[str, Any]:
    """Returns the settings that the costs of a prepared program depend on, for one kind of sampling."""
    transferred = program.transferred_bytes if program.cache.backend.transfers else None
    config, device = program.config, program.device
    settings: dict[str, Any] = {
        "machine": hardware(device),
        "software": f"torch {torch.__version__}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "ranks": group.size if (group := distributed.current()) is not None else 1,
        "context_parallel": config.text_ranks,
        "target": _model(program.target),
        "drafter": _drafter(program.drafter),
        "sampling": DeviceProbs.kind(to_probs),
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
    """Returns costs rounded to two significant digits, so that measuring again seldom changes a choice."""

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
    own = f", {_model(model)}" if isinstance(model, HFModel) else ""
    return f"{type(drafter).__qualname__}{own}"


def _model(model: HFModel) -> str:
    """Returns the model's shape and bytes; the bytes distinguish quantised and sharded models."""
    return f"{shape_of(model.model)}, {model.parameter_bytes} bytes"

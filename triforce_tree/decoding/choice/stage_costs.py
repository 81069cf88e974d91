"""Finds the stage costs of a program: in the user's table, measured on made-up sequences, or guessed.

The choice of passes follows from them (``policy/costs.py``). They are found once for each combination of
machine, models and settings (``settings_of``), and stay with the prepared stages of a program.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from triforce_tree.decoding.choice.cost_table import CostTable, user_table
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_progress import StageProgress
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.costs import COPIED, KnownCosts, StageCosts, predicted
from triforce_tree.policy.passes import StageSeconds
from triforce_tree.runtime import distributed
from triforce_tree.runtime.fingerprint import hardware, shape_of
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.verify.sampling import ProbsFromLogits

_LOG = logging.getLogger(__name__)
# Most and fewest samples of a stage, the warm-up among them; seconds after which no more are taken, with the
# fewest and without.
_SAMPLES, _FEWEST, _ENOUGH, _LONG = 6, 4, 0.1, 1.0
# Measuring may take at most this share of a request's time. The allowance is divided into so many parts, and
# each stage may use one. Each stage is run at least once at two context lengths, in the time of so many
# passes of the target alone; on a CPU a first run is slow, as the processor's caches lack what it reads.
_ALLOWED, _STAGES, _LEAST_PASSES = 0.02, 24, {"cpu": 26, "cuda": 8}
# The most tokens that are decoded with drafts in the time of such a pass, and the tokens that are prefilled
# in it.
_DECODED, _PREFILLED = {"cpu": 4, "cuda": 1}, {"cpu": 30, "cuda": 100}
# Runs of a sample. On a GPU the host runs ahead of the device, as it does while decoding.
_RUNS = {"cpu": 1, "cuda": 3}
# The target's stages are measured at the longest context, and at this many tokens or a quarter of it.
_SHORT = 1024
# Plain passes before a drafter's preparation.
_PAUSED = 64
# Share of a plain pass that a forward of a drafter takes which is no draft model.
_OWN_DRAFTER = 0.05
# Options on which costs do not depend, or which were resolved.
_NO_COSTS = {"tree", "other_trees", "gpu_memory", "host_memory", "prefix_cache", "rounds", "prefill_chunk"}


class _Device(NamedTuple):
    """Holds a device's costs.

    Attributes:
        layer: seconds per layer.
        bandwidth: bytes per second.
        token: the seconds of each further token, as a share of those of reading the weights.
        bits: the bits of the weights that ``token`` was found with; those of fewer bits are read in less
            time, but multiplied in the same. 0: bits make no difference.
    """

    layer: float
    bandwidth: float
    token: float
    bits: float


_DEVICES = {"cpu": _Device(5e-5, 2e10, 0.05, 32), "cuda": _Device(3e-5, 1.5e12, 0.003, 0)}


def allowance_of(prompt: int, new: float, device: torch.device) -> float:
    """Returns the passes of the target in whose time a request may measure unknown stage costs.

    Args:
        prompt, new: the request's numbers of prompt tokens and of new tokens; infinite if not known.
    """
    return _ALLOWED * (prompt / _PREFILLED[device.type] + new / _DECODED[device.type])


def known_costs(
    program: DecodingProgram, to_probs: ProbsFromLogits, prompt: int, new: float
) -> KnownCosts | None:
    """Returns the costs of a program's prepared stages with trees of each shape; None if all passes are
    alike.

    Only those with trees of the first shape are measured. Making the stages of the others takes seconds on a
    GPU, and the request may never use them, so their costs are predicted. Sequences must be fed or rewound
    after a measurement.

    Args:
        program: a ``DecodingProgram`` after ``prepare(to_probs)``.
        prompt, new: tokens of the longest prompt, and the most that may follow. Costs are not measured for a
            short request, but guessed until a longer one comes (:func:`allowance_of`).
    """
    if program.levels == 1 or program.config.rounds is not None:
        return None
    kept, refresh = program.selected.costs, program.config.retrieval.refresh
    found = kept.get(refresh)
    if found is not None and not found.guessed:
        return found
    allowance = allowance_of(prompt, new, program.device)
    if found is None or allowance >= _LEAST_PASSES[program.device.type]:
        first = stage_costs(program, to_probs, allowance, user_table())
        guess = first is None
        first = first or distributed.broadcast_object(guessed(program, program.max_seq_len - 1))
        found = program.selected.costs[refresh] = KnownCosts(by_shape(program, first), guess)
    return found


def by_shape(program: DecodingProgram, first: StageCosts) -> list[StageCosts | None]:
    """Returns the costs with trees of each shape, from those with trees of the first shape; None for shapes
    that passes may not use.
    """
    known, *others = program.shapes
    chain, tail = program.chain_nodes, program.tail_tree
    costs = [predicted(first, known, shape, chain, tail) for shape in others]
    return [first, *(each if program.allows(number) else None for number, each in enumerate(costs, 1))]


def stage_costs(
    program: DecodingProgram, to_probs: ProbsFromLogits, allowance: float, table: CostTable
) -> StageCosts | None:
    """Returns the costs with trees of the first shape, from the table or measured; all ranks use rank 0's.

    Returns None if they are not in the table, and the allowance is too short to measure them.
    """
    transferred = program.transferred_bytes if program.cache.backend.transfers else None
    settings = settings_of(program, to_probs)
    found: StageCosts | None = distributed.broadcast_object(table.find(settings))
    if found is not None or (transferred is None and allowance < _LEAST_PASSES[program.device.type]):
        return found
    if not to_probs.in_stages:
        # Processors that depend on the text must not see a made-up one: measured without them.
        without, masked = ProbsFromLogits(greedy=to_probs.greedy), program.masked
        program.prepare(without, masked=masked)
        found = stage_costs(program, without, allowance, table)
        program.prepare(to_probs, masked=masked)
        return found
    _LOG.info("measuring what each stage costs with these settings, once: %s", table.path)
    start, longest = time.perf_counter(), program.max_seq_len - 1
    measured = measure(program, longest, program.config.retrieval.refresh, transferred, allowance)
    program.capture_seconds += time.perf_counter() - start
    first: StageCosts = distributed.broadcast_object(
        table.add(settings, measured) if distributed.is_first_rank() else measured
    )
    return first


def guessed(program: DecodingProgram, longest: int) -> StageCosts:
    """Returns the costs of a program's stages by the sizes of its models, without a measurement.

    Args:
        longest: most tokens of context.
    """
    batch, target, shape = program.batch, program.target, program.shapes[0]
    share, model = _token_share(target), getattr(program.drafter, "draft", None)
    draft_share = _token_share(model) if isinstance(model, HFModel) else 0.0
    weights, element_bytes = target.parameter_bytes, program.store.memory.itemsize
    three, trees = program.levels == 3, program.levels == 2 or program.two_levels

    def seconds(tokens: int, context: int, weight_bits: int | str = 16) -> float:
        """Returns the seconds of a forward of the target."""
        seen = sum(s.elements * min(context, s.window or context) for s in target.kv_shapes)
        read = weights * int(weight_bits) / 16 + batch * seen * element_bytes
        return _seconds_of(target, read, share, batch * tokens)

    def at(length: int) -> StageSeconds:
        plain = seconds(1, length)
        stages = {"plain": plain}
        if program.drafter is not None:
            if isinstance(model, HFModel):
                widest = max(shape.widths, default=1)
                forward = _seconds_of(model, model.parameter_bytes, draft_share, batch * widest)
            else:
                forward = _OWN_DRAFTER * seconds(1, 1)
            stages |= {
                "prepare": forward,
                "draft": max(COPIED * plain, forward * program.drafted(2, 1, 0)[0]),
            }
        if three:
            budget = min(longest, program.config.retrieval.budget)
            chain = seconds(program.chain_nodes, length)
            # On a GPU a graph has the same work whatever it verifies.
            root = plain if program.device.type == "cpu" else chain
            retrieval = seconds(shape.nodes, budget, program.config.weight_bits)
            stages |= {"retrieval": retrieval, "chain": chain, "root": root}
        return StageSeconds(**stages, **({"tree": seconds(shape.nodes, length)} if trees else {}))

    lengths = tuple(sorted({1, max(1, longest)}))
    return StageCosts(lengths, tuple(map(at, lengths)))


def _seconds_of(model: HFModel, read: float, share: float, tokens: int) -> float:
    """Returns the estimated seconds of a forward over ``tokens`` tokens that reads ``read`` bytes, where each
    further token takes this share of the time of reading.
    """
    device = _DEVICES[model.device.type]
    return model.layers * device.layer + read / device.bandwidth * (1 + share * (tokens - 1))


def _token_share(model: HFModel) -> float:
    """Returns the time of each further token of a model, as a share of that of reading the weights."""
    device = _DEVICES[model.device.type]
    if not device.bits:
        return device.token
    linears = [layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
    elements = sum(layer.in_features * layer.out_features for layer in linears)
    held = sum(p.numel() * p.element_size() for layer in linears for p in layer.parameters())
    bits = 8 * held / elements if elements and held else 16
    return device.token * max(1.0, device.bits / bits)


def measure(
    program: DecodingProgram,
    longest: int,
    refresh: int = 1,
    transferred: Callable[[int, bool], int] | None = None,
    allowance: float = math.inf,
) -> StageCosts:
    """Runs each stage a few times, or once where the allowance is short, and returns the costs.

    All ranks measure together, with random numbers of their own. Feed or rewind the sequences afterwards.

    Args:
        program: after its stages were prepared.
        longest: most tokens of context.
        refresh: rounds from one refresh of the retrieved chunks to the next; 0: only the first one refreshes.
        transferred: bytes that the target's stage copies to the device after so many tokens of context, or
            the autoregressive one where the flag is True, for a cache in host memory; trial runs copy next to
            nothing. None where the cache is on the device.
        allowance: the passes of the target in whose time stages may be run.
    """
    timer, names = _Timer(program, allowance), program.stage_names
    target = {"tree": "target_tree", "chain": "target"} if program.levels == 3 else {"tree": "target"}
    target = {field: name for field, name in target.items() if name in names}
    with program.trial(longest) as begin:
        # A plain pass comes first: it shows how long an allowance is.
        plain = timer.seconds_of("plain", begin, True)
        # The order of a pass: stages read what those before them wrote.
        rounds = ["draft"] if "draft" in names else []
        if "retrieval_refresh" in names:
            rounds += ["retrieval_refresh", *(["retrieval"] if refresh != 1 else [])]
        found = {name: timer.seconds_of(name, begin, False) for name in rounds}
        at_longest = {"plain": plain, **timer.of_target(target, begin)}
        others = {"prepare": timer.of_preparation(longest)}
    if "draft" in found:
        others["draft"] = found["draft"]
    if (refreshing := found.get("retrieval_refresh")) is not None:
        other = found.get("retrieval", refreshing)
        others["retrieval"] = other if refresh == 0 else (refreshing + (refresh - 1) * other) / refresh
    costs = {longest: at_longest}
    if (short := max(1, min(_SHORT, longest // 4))) < longest:
        with program.trial(short) as begin:
            alone = timer.seconds_of("plain", begin, True)
            costs = {short: {"plain": alone, **timer.of_target(target, begin)}, **costs}
    if transferred is not None:
        bus = bandwidths(program.device)[0]
        for length, seconds in costs.items():
            for name in seconds:
                seconds[name] = max(seconds[name], transferred(length, name == "plain") / bus)
    return _rounded(costs, others)


class _Timer:
    """Measures the seconds of stages on made-up sequences.

    Args:
        allowance: the first stage that is timed must be a pass of the target alone, unless it is unlimited.
    """

    def __init__(self, program: DecodingProgram, allowance: float) -> None:
        self._program, self._clock = program, StageClock(program.device)
        self._passes, self._plain = allowance / _STAGES, 0.0
        why = "the choice of passes depends on it, once for these settings"
        self._progress = StageProgress(None, "timing", why)
        self._generator = torch.Generator(program.device).manual_seed(0)

    def seconds_of(self, name: str, begin: Callable[[bool], None], chains: bool) -> float:
        """Returns the seconds of one run of a stage.

        Args:
            begin: resets the sequences before a run; its argument says whether their draft chains are full.
        """
        self._progress.next(name)
        run = partial(self._program.run, name, self._generator)
        return self._least(partial(begin, chains), run, _RUNS[self._program.device.type])

    def of_target(self, names: Mapping[str, str], begin: Callable[[bool], None]) -> dict[str, float]:
        """Returns the seconds of the target's stages, by field of ``StageSeconds``."""
        found = {field: self.seconds_of(name, begin, True) for field, name in names.items()}
        # On a GPU a graph has the same work whatever it verifies.
        if "chain" in names and self._program.device.type != "cuda":
            found["root"] = self.seconds_of("target", begin, False)
        return found

    def of_preparation(self, length: int) -> float:
        """Returns the seconds of the drafter's work before its first proposal after autoregressive passes."""
        if (drafter := self._program.drafter) is None:
            return 0.0
        batch, text = self._program.batch, [0] * (length + 1)
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
    config, device, backend = program.config, program.device, program.cache.backend
    options = {name: value for name, value in config.as_options().items() if name not in _NO_COSTS}
    # Rounded: free memory, and so the split, differs a little from run to run.
    moved = [program.transferred_bytes(program.max_seq_len, plain) for plain in (False, True)]
    return options | {
        "machine": hardware(device),
        "software": f"torch {torch.__version__}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "ranks": [group.size if (group := distributed.current()) is not None else 1, config.text_ranks],
        "target": _model(program.target),
        "drafter": _drafter(program),
        "sampling": to_probs.kind + (" with grammars" if program.masked else ""),
        "levels": [program.levels, program.two_levels],
        "trees": [repr(shape) for shape in program.shapes],
        "chain": [program.max_draft_tokens, program.runner_ups, program.tail_tree],
        "select_chunks": getattr(config.retrieval.select_chunks, "__qualname__", None),
        "batch": program.batch,
        "attention": chosen(config.attention_backend, device).name,
        # Costs are interpolated between lengths, but graphs and split sizes are made for the longest.
        "context": _power_of_two(program.max_seq_len),
        "slots": _power_of_two(backend.pool_slots),
        "transferred": [f"{each:.0e}" for each in moved] if backend.transfers else None,
    }


def _power_of_two(count: int) -> int:
    """Returns the next power of two."""
    return 1 << (count - 1).bit_length()


def _rounded(costs: Mapping[int, Mapping[str, float]], others: Mapping[str, float]) -> StageCosts:
    """Returns costs rounded to two significant digits, so that measuring again seldom changes a choice.

    Args:
        costs: the seconds of the target's stages, by context length. A longer context costs no less.
        others: the seconds of the other stages.
    """
    found, least = list[StageSeconds](), dict[str, float]()
    for seconds in costs.values():
        least = {name: max(value, least.get(name, 0.0)) for name, value in seconds.items()}
        found.append(StageSeconds(**{name: float(f"{s:.1e}") for name, s in {**others, **least}.items()}))
    return StageCosts(tuple(costs), tuple(found))


def _drafter(program: DecodingProgram) -> str | None:
    model = getattr(program.drafter, "draft", None)
    own = f", {_model(model)}" if isinstance(model, HFModel) else ""
    return f"{type(program.drafter).__qualname__}{own}"


def _model(model: HFModel) -> str:
    """Returns the model's shape and bytes; the bytes distinguish quantised and sharded models."""
    return f"{shape_of(model.model)}, {model.parameter_bytes} bytes"

"""Makes a program's stages for one kind of sampling, and captures them on a GPU."""

import logging
import time
from collections.abc import Callable

import torch

from triforce_tree.decoding.buffers import Buffers, PreparedStages
from triforce_tree.decoding.stage_set import stages_of, tree_stages
from triforce_tree.decoding.stages import ChainVerifyStage, Stage, TreeVerifyStage
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import Cuts, executed_parts
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.row_bits import check_row_bits
from triforce_tree.verify.seeded import Seeded

# The seconds that a further shape takes, as a share of those of the first one. It needs no stages of its own
# for the plain pass and for chains, and the layers are compiled already.
_SHARE = 0.5
# The most seconds that a first shape took in this process, by device. If its kernels had to be compiled, so
# have those of a shape that no program has had yet.
_longest: dict[torch.device, float] = {}
# Devices, targets and nodes of the further shapes that this process has made.
_made: set[tuple[torch.device, str, int]] = set()

# The progress is logged after this many seconds.
_PATIENCE = 1.0
_LOG = logging.getLogger(__name__)


class StageProgress:
    """Logs which stage is being prepared if this takes long.

    Args:
        count: the number of stages, if it is known.
        doing: what is done with them.
        why: the reason, which the first line names.
    """

    def __init__(
        self,
        count: int | None,
        doing: str = "preparing",
        why: str = "kernels are compiled, once on a machine, and later taken from caches",
    ) -> None:
        self._start, self._count, self._begun, self._told = time.perf_counter(), count, 0, False
        self._doing, self._why = doing, why

    def next(self, name: str) -> None:
        self._begun += 1
        seconds = time.perf_counter() - self._start
        if seconds < _PATIENCE or not distributed.is_first_rank():
            return
        why, self._told = "" if self._told else f": {self._why}", True
        of = f" of {self._count}" if self._count else ""
        at = self._begun, of, name, seconds
        _LOG.warning("%s stage %d%s (%s), %.0f s so far%s", self._doing, *at, why)


def prepared(program: Buffers, to_probs: DeviceProbs) -> PreparedStages:
    """Returns the stages for one kind of sampling, with trees of the first shape.

    On a GPU they are captured on made-up sequences of the greatest length. Sequences must be prefilled
    afterwards.
    """
    start, device = time.perf_counter(), program.device
    stages = stages_of(program, to_probs)
    if program.config.exact:
        _check_exact(program, stages)
    runs: dict[str, list[Callable[[], None]]] = {}
    if device.type != "cuda":
        runs = {name: executed_parts(stage.steps(), device) for name, stage in stages.items()}
        return PreparedStages(to_probs, stages, runs, {0}, time.perf_counter() - start)
    with program.trial(program.max_seq_len - 1) as begin:
        progress = StageProgress(len(stages))
        for name, stage in stages.items():
            progress.next(name)
            begin(False)
            steps = stage.steps()
            runs[name] = executed_parts(steps, device)
            if program.cache.backend.transfers and name in ("target", "plain") and to_probs.capturable:
                # The first run compiles the kernels before decoding begins; a second one records pieces.
                for _ in range(2 if any(isinstance(step.capturable, Cuts) for step in steps) else 1):
                    for part in runs[name]:
                        part()
    seconds = time.perf_counter() - start
    _longest[device] = max(seconds, _longest.get(device, 0.0))
    return PreparedStages(to_probs, stages, runs, {0}, seconds)


def _check_exact(program: Buffers, stages: dict[str, Stage]) -> None:
    """Raises UnsupportedModelError if the logits of a token depend on how many tokens a forward has."""
    verified = [s.tree.nodes for s in stages.values() if isinstance(s, ChainVerifyStage | TreeVerifyStage)]
    vocabulary = program.target.vocab_size
    with program.trial(0):
        for nodes in sorted({*verified} or {program.batch}):
            name = program.target.name
            check_row_bits(program.full, program.full_view, program.batch, nodes, vocabulary, name)


def seeded(program: Buffers) -> Seeded:
    """Returns the noise for sequences with their own seeds, which all stages that are made later use.

    The existing stages are dropped. Sequences without a seed draw as before.
    """
    if program.seeded is None:
        program.seeded = program.noise = Seeded(program.state, program.target.vocab_size)
        program.prepared.clear()
    return program.seeded


def prepare_shape(program: Buffers, stages: PreparedStages, number: int) -> float:
    """Adds the stages for trees of one shape, unless they exist; returns the seconds that this took.

    The state of the sequences is as before afterwards, also if device memory runs out. A capture needs no
    made-up sequences, because everything that varies from pass to pass is in buffers on the device.
    """
    if number in stages.shapes:
        return 0.0
    start, state = time.perf_counter(), program.state
    made = tree_stages(program, stages.to_probs, number)
    progress = StageProgress(len(made))
    runs: dict[str, list[Callable[[], None]]] = {}
    saved, had_nan = state.save(), state.has_nan.clone()
    try:
        for name, stage in made.items():
            progress.next(name)
            # On a GPU this runs the stage, twice.
            runs[name] = executed_parts(stage.steps(), program.device)
            state.restore(saved)
    finally:
        state.restore(saved)
        state.has_nan.copy_(had_nan)
    stages.stages.update(made)
    stages.runs.update(runs)
    stages.shapes.add(number)
    _made.add(_kernels_of(program, number))
    return time.perf_counter() - start


def held_back(program: Buffers) -> dict[int, float]:
    """Returns the shapes whose stages do not exist and take long to make, with the expected seconds for each.

    Shapes of matched tokens are never in the result, because they use the kernels of the first shape. All
    ranks get the same result.
    """
    if not program.makes_slowly:
        return {}
    made = program.selected
    grown = (number for number, shape in enumerate(program.shapes) if not shape.matched)
    missing = [number for number in grown if number not in made.shapes]
    cold = max(made.seconds, _longest.get(program.device, 0.0))
    known = {number: _kernels_of(program, number) in _made for number in missing}
    seconds = {number: _SHARE * (made.seconds if known[number] else cold) for number in missing}
    return distributed.broadcast_object(seconds)


def _kernels_of(program: Buffers, number: int) -> tuple[torch.device, str, int]:
    """Returns a key of the kernels that the stages of a shape need."""
    return program.device, program.target.name, program.shapes[number].nodes

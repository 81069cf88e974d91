"""The stages of a program for one kind of sampling, made and on a GPU captured."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triforce_tree.decoding.stage_set import stages_of, tree_stages
from triforce_tree.decoding.stages import ChainVerifyStage, Stage, TreeVerifyStage
from triforce_tree.runtime.executor import executor
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.row_bits import check_row_bits
from triforce_tree.verify.seeded import Seeded

if TYPE_CHECKING:
    from triforce_tree.decoding.program import DecodingProgram


@dataclass(frozen=True)
class PreparedStages:
    """The stages for one kind of sampling, what runs each, and which shapes of tree have any."""

    to_probs: DeviceProbs
    stages: dict[str, Stage]
    runs: dict[str, Callable[[], None]]
    shapes: set[int]


def prepared(program: "DecodingProgram", to_probs: DeviceProbs) -> tuple[PreparedStages, float]:
    """The stages with the first shape of tree, and the seconds that this took.

    On a GPU they are captured on made-up sequences of the greatest length: sequences must be fed afterwards.
    """
    start, device = time.perf_counter(), program.device
    stages = stages_of(program, to_probs)
    if program.config.exact:
        _check_exact(program, stages)
    runs: dict[str, Callable[[], None]] = {}
    if device.type != "cuda":
        runs = {name: executor(stage.steps(), device) for name, stage in stages.items()}
        return PreparedStages(to_probs, stages, runs, {0}), time.perf_counter() - start
    with program.trial(program.max_seq_len - 1) as begin:
        for name, stage in stages.items():
            begin(False)
            runs[name] = executor(stage.steps(), device)
            if program.offloaded is not None and name in ("target", "plain") and to_probs.capturable:
                # These are called directly: one run compiles their kernels now, not while decoding.
                runs[name]()
    return PreparedStages(to_probs, stages, runs, {0}), time.perf_counter() - start


def _check_exact(program: "DecodingProgram", stages: dict[str, Stage]) -> None:
    """Raise UnsupportedModelError where the target's rows depend on how many stages compute together."""
    verified = [s.tree.nodes for s in stages.values() if isinstance(s, ChainVerifyStage | TreeVerifyStage)]
    vocabulary = program.target.vocab_size
    with program.trial(0):
        for nodes in sorted({*verified} or {program.batch}):
            name = program.target.name
            check_row_bits(program.full, program.full_view, program.batch, nodes, vocabulary, name)


def seeded(program: "DecodingProgram") -> Seeded:
    """What draws for sequences with seeds of their own; from now on the program's stages have it.

    Those of earlier kinds of sampling are dropped. Sequences without a seed draw as before.
    """
    if program.seeded is None:
        program.seeded = program.noise = Seeded(program.state, program.target.vocab_size)
        program.prepared.clear()
    return program.seeded


def prepare_shape(program: "DecodingProgram", stages: PreparedStages, number: int) -> float:
    """Add the stages for trees of one shape, unless they are there; returns the seconds that this took.

    The state of the sequences is as before afterwards. A capture needs no made-up sequences: what varies
    from pass to pass is in buffers on the device.
    """
    if number in stages.shapes:
        return 0.0
    start, state = time.perf_counter(), program.state
    made = tree_stages(program, stages.to_probs, number)
    runs: dict[str, Callable[[], None]] = {}
    saved, had_nan = state.save(), state.has_nan.clone()
    for name, stage in made.items():
        # On a GPU this runs the stage, twice.
        runs[name] = executor(stage.steps(), program.device)
        state.restore(saved)
    state.has_nan.copy_(had_nan)
    if state.rank_counts is not None:
        state.rank_counts.zero_()
    stages.stages.update(made)
    stages.runs.update(runs)
    stages.shapes.add(number)
    return time.perf_counter() - start

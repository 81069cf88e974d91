"""Costs that were not measured: those with trees of other shapes than the first one, and of short requests.

Measuring takes the time of several passes, and on a GPU seconds to make a shape's stages. The costs of a
further shape follow from those of the first one: a verification's time is interpolated by its number of
tokens between those that were measured; a draft's is in proportion to its forwards. Where nothing was
measured, the sizes of the models tell about what a stage takes beside the others, and decoding corrects it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import chain_nodes, drafted
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import parameter_bytes
from triforce_tree.trees.device_shapes import DeviceTreeShape

# The copy of matched tokens to the device, as a share of the draft of a tree.
_COPIED = 0.05
# Share of a plain pass that a forward of a drafter takes which is no draft model.
_OWN_DRAFTER = 0.05


class _Device(NamedTuple):
    """What a forward takes: seconds of each layer, bytes a second, and the share of a further token."""

    layer: float
    bandwidth: float
    token: float


_CPU, _GPU = _Device(5e-5, 2e10, 0.05), _Device(3e-5, 1.5e12, 0.003)


def guessed(program: DecodingProgram, longest: int) -> StageCosts:
    """Costs of a program's stages by the sizes of its models, of which nothing is measured.

    Args:
        longest: most tokens of context.
    """
    batch, target, shape = program.batch, program.target, program.shapes[0]
    weights, element_bytes = parameter_bytes(target.model), program.store.memory.itemsize
    bits = program.config.weight_bits if program.levels == 3 else 16

    def seconds(tokens: int, context: int, weights: float = weights) -> float:
        """Of a forward of the target."""
        seen = sum(s.elements * min(context, s.window or context) for s in target.kv_shapes)
        read = weights + batch * seen * element_bytes
        return _seconds_of(target, read, batch * tokens)

    plain = [seconds(1, length) for length in (1, longest)]
    draft = prepare = math.inf
    if program.drafter is not None:
        model = getattr(program.drafter, "draft", None)
        if isinstance(model, HFModel):
            forward = _seconds_of(model, parameter_bytes(model.model), batch * max(shape.widths, default=1))
        else:
            forward = _OWN_DRAFTER * plain[0]
        prepare, draft = forward, max(_COPIED * plain[0], forward * drafted(program, 2, 1, 0)[0])
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
    """Seconds of a forward over so many tokens that reads so many bytes."""
    device = _GPU if model.device.type == "cuda" else _CPU
    return model.layers * device.layer + read / device.bandwidth * (1 + device.token * (tokens - 1))


def predicted(
    first: StageCosts, known: DeviceTreeShape, shape: DeviceTreeShape, chain: int, tail: bool = False
) -> StageCosts:
    """Costs with trees of ``shape``; stages that the first shape does not have are left out as there.

    Matched tokens take no forward of the draft, and level 1 does not verify them.

    Args:
        first: measured with trees of ``known``.
        chain: tokens of the target's verification of a draft chain.
        tail: whether the stage that verifies a chain begins with the draft of a tree at its end.
    """
    measured = [_points(seconds, known.nodes, chain, tail) for seconds in first.seconds]
    trees = [_interpolated(points, shape.nodes) for points in measured]
    here = [_interpolated(points, known.nodes) for points in measured]
    forwards = _COPIED if shape.matched else max(1, len(shape.widths)) / max(1, len(known.widths))
    found = []
    for seconds, tree, same in zip(first.seconds, trees, here, strict=True):
        # The retrieval level reads the same weights, and a budget of the context: as at the shortest one.
        more = max(trees[0] - here[0], -seconds.retrieval / 2) if seconds.retrieval < math.inf else 0.0
        found.append(
            replace(
                seconds,
                draft=seconds.draft * forwards,
                retrieval=math.inf if shape.matched else seconds.retrieval + more,
                tree=max(seconds.plain / 2, seconds.tree + tree - same),
            )
        )
    # Longer contexts cost no less, also where the last two points are extrapolated.
    ascending = accumulate((seconds.tree for seconds in found), max)
    return StageCosts(
        first.lengths, tuple(replace(s, tree=tree) for s, tree in zip(found, ascending, strict=True))
    )


def _points(seconds: StageSeconds, nodes: int, chain: int, tail: bool) -> list[tuple[int, float]]:
    """(tokens, seconds) of the target's verifications, by ascending tokens; no more tokens take less time."""
    measured = {1: seconds.plain}
    of_chain = seconds.chain - seconds.draft if tail else seconds.chain
    for tokens, value in ((nodes, seconds.tree), (chain, of_chain)):
        if value < math.inf and tokens > 1:
            measured.setdefault(tokens, value)
    counts = sorted(measured)
    return list(zip(counts, accumulate((measured[count] for count in counts), max), strict=True))


def _interpolated(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Linear between two points, and beyond the last as between the first and the last: two measured points
    that are near each other say little about the slope."""
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (count, _) in enumerate(points) if i and count >= tokens), 0)
    (low, before), (high, after) = (points[right - 1], points[right]) if right else (points[0], points[-1])
    return before + (after - before) * (tokens - low) / (high - low)

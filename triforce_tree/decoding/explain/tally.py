"""Acceptance by level, depth and sibling rank, counted from the paths that the verifying stages accept."""

from collections import Counter
from dataclasses import dataclass, field

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage, TreeVerifyStage
from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels.step.accept import FIXED

LEVELS = {
    "retrieval_refresh": "retrieval",
    "retrieval": "retrieval",
    "target": "target",
    "target_tree": "target, trees",
}
"""The name of a verifying stage in an explanation."""
MATCHED = "target, matched tokens"
"""The same of those that verify matched tokens."""


@dataclass(frozen=True)
class Node:
    """A node of a drafted tree.

    Attributes:
        token: its id; the root's is the newest token of the sequence.
        parent: number of its parent; -1 for the root.
        rank: among its siblings, in the order of their draws.
        probability: by which the drafter drew it, 1 for one without reported probabilities.
        accepted: whether the verification accepted it.
    """

    token: int
    parent: int
    rank: int
    probability: float
    accepted: bool


@dataclass
class DepthCounts:
    """Verifications that reached a depth with proposed tokens there, and accepted ones by sibling rank."""

    tried: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.accepted.total() / self.tried if self.tried else 0.0


class AcceptanceTally:
    """Counts of one sequence; call it after each stage, before the next one runs. Waits for the device.

    Args:
        program: of one sequence.

    Attributes:
        depths: by level, then depth from 1 on.
        tree: the last tree of the drafter that was verified.
    """

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program
        self.depths: dict[str, list[DepthCounts]] = {}
        self.tree: list[Node] = []

    def __call__(self, stage: str) -> None:
        # Stages of other shapes of trees: ``target_tree/1``.
        name, _, shape = stage.partition("/")
        judged = self._program.stage(stage) if name in LEVELS else None
        if not isinstance(judged, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage):
            return
        tokens, parents = judged.tree.tokens[0].tolist(), judged.tree.parents[0].tolist()
        acceptance = judged.verifier.acceptance
        path = acceptance.path[0, : int(acceptance.counts[0])].tolist()
        seen: Counter[int] = Counter()
        ranks = []
        for node, parent in enumerate(parents):
            ranks.append(seen[parent])
            # The root's token is not a proposal.
            seen[parent] += int(node > 0 and tokens[node] >= 0)
        matched = bool(shape) and self._program.shapes[int(shape)].matched
        depths = self.depths.setdefault(MATCHED if matched else LEVELS[name], [])
        for depth, node in enumerate(path):
            if not seen[node] or depth >= judged.tree.depth:
                break
            if depth == len(depths):
                depths.append(DepthCounts())
            depths[depth].tried += 1
            if depth + 1 < len(path):
                depths[depth].accepted[ranks[path[depth + 1]]] += 1
        if not isinstance(judged, ChainVerifyStage) and not matched:
            self.tree = [
                Node(token, parent, rank, probability, node in path)
                for node, (token, parent, rank, probability) in enumerate(
                    zip(tokens, parents, ranks, draw_probabilities(judged.tree), strict=True)
                )
                if token >= 0 or node == 0
            ]


def draw_probabilities(tree: TokenTree) -> list[float]:
    """By which the drafter drew each node of the first sequence; 1 for the root and for what was not drawn.

    The last nodes of a tree have no distribution; a chain of matched tokens may begin there.
    """
    tokens, parents, rows = (each[0].tolist() for each in (tree.tokens, tree.parents, tree.probs_rows))
    return [
        float(tree.probs[0, rows[parent], token])
        if parent >= 0 and rows[parent] >= 0 and row != FIXED
        else 1.0
        for token, parent, row in zip(tokens, parents, rows, strict=True)
    ]

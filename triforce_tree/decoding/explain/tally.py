"""Counts of one sequence stage by stage: acceptance, and drafted trees."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage, TreeVerifyStage
from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels.step.accept import FIXED

# The name of a verifying stage in an explanation.
_LEVELS = {
    "retrieval_refresh": "retrieval", "retrieval": "retrieval", "target": "target",
    "target_tree": "target, trees",
}  # fmt: skip
MATCHED_TOKENS = "target, matched tokens"
"""The name of a stage that verifies matched tokens in an explanation."""


@dataclass(frozen=True)
class Node:
    """A node of a drafted tree.

    Attributes:
        token: the token id; the root's is the newest token of the sequence.
        parent: the number of the parent; -1 for the root.
        rank: the place among the siblings, in the order of their draws.
        probability: the drafter's probability of the token; 1 for a drafter that reports none.
    """

    token: int
    parent: int
    rank: int
    probability: float
    accepted: bool


@dataclass
class DepthCounts:
    """Counts the verifications that reached a depth, and the accepted tokens by sibling rank."""

    tried: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.accepted.total() / self.tried if self.tried else 0.0


class AcceptanceTally:
    """Counts what is accepted of a batch of one. It is called after each stage, and waits for the device.

    Attributes:
        depths: the counts by level, then by depth from 1 on.
        tree: the last tree of the drafter that was verified.
    """

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program
        self.depths: dict[str, list[DepthCounts]] = {}
        self.tree: list[Node] = []

    def __call__(self, stage: str) -> None:
        # Stages of other shapes of trees: ``target_tree/1``.
        name, _, shape = stage.partition("/")
        judged = self._program.stage(stage) if name in _LEVELS else None
        if not isinstance(judged, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage):
            return
        tokens, parents = judged.tree.tokens[0].tolist(), judged.tree.parents[0].tolist()
        acceptance = judged.verifier.acceptance
        path = acceptance.path[0, : int(acceptance.counts[0])].tolist()
        seen, ranks = Counter[int](), []
        for node, parent in enumerate(parents):
            ranks.append(seen[parent])
            # The root's token is not a proposal.
            seen[parent] += int(node > 0 and tokens[node] >= 0)
        matched = bool(shape) and self._program.shapes[int(shape)].matched
        depths = self.depths.setdefault(MATCHED_TOKENS if matched else _LEVELS[name], [])
        for depth, node in enumerate(path):
            if not seen[node] or depth >= judged.tree.depth:
                break
            if depth == len(depths):
                depths.append(DepthCounts())
            depths[depth].tried += 1
            if depth + 1 < len(path):
                depths[depth].accepted[ranks[path[depth + 1]]] += 1
        if not isinstance(judged, ChainVerifyStage) and not matched:
            nodes = zip(tokens, parents, ranks, draw_probabilities(judged.tree), strict=True)
            self.tree = [Node(*own, n in path) for n, own in enumerate(nodes) if own[0] >= 0 or n == 0]


def draw_probabilities(tree: TokenTree) -> list[float]:
    """Returns the probability with which each node of the first sequence was drawn, 1 for other nodes."""
    tokens, parents, rows = (each[0].tolist() for each in (tree.tokens, tree.parents, tree.probs_rows))
    return [
        float(tree.probs[0, rows[parent], token])
        if parent >= 0 and rows[parent] >= 0 and row != FIXED
        else 1.0
        for token, parent, row in zip(tokens, parents, rows, strict=True)
    ]


def as_lines(tree: Sequence[Node], words: Sequence[str]) -> list[str]:
    """Returns one line for each node, below its parent; accepted nodes are marked."""

    def below(parent: int, indent: str) -> Iterator[str]:
        children = [number for number, node in enumerate(tree) if node.parent == parent]
        for number in children:
            branch, inner = ("└─ ", "   ") if number == children[-1] else ("├─ ", "│  ")
            accepted = "  accepted" if tree[number].accepted else ""
            yield f"{indent}{branch}{words[number]!r}  {tree[number].probability:.2f}{accepted}"
            yield from below(number, indent + inner)

    return [repr(words[0]), *below(0, "")] if tree else []

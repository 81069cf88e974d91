"""Kinds of passes, and the seconds of the stages that they consist of."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple


class PassKind(NamedTuple):
    """Describes what one pass runs.

    Attributes:
        levels: 1: the target alone decodes a token. 2: the target verifies the drafter's tree. 3: the
            retrieval level verifies the drafter's trees in ``rounds`` rounds, the target what they accepted.
        rounds: the number of rounds of drafting; 0 with one level, 1 with two.
        shape: the number of the shape of the drafter's trees; 0 is the configured one.
    """

    levels: int
    rounds: int
    shape: int = 0

    def __str__(self) -> str:
        tree = f", tree {self.shape + 1}" if self.shape else ""
        if self.levels < 3:
            return "plain" if self.levels == 1 else f"2 levels{tree}"
        return f"3 levels, {self.rounds} round{'s' if self.rounds > 1 else ''}{tree}"


PLAIN = PassKind(1, 0)


class SpeculationLimit(NamedTuple):
    """What passes may draft at most.

    Attributes:
        levels: 1 for no drafts, 2 for none that the retrieval level has verified, 3 for all.
        length: the most draft tokens on one path that the target verifies in a pass; None for no limit.
    """

    levels: int = 3
    length: int | None = None


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage for a batch, with trees of one shape; infinite for a stage that does not exist.

    Attributes:
        plain: an autoregressive pass of the target.
        draft: the drafter's proposal of one tree.
        retrieval: the retrieval level's verification of a tree, averaged over those that refresh the
            retrieved chunks and those that do not.
        chain: the target's verification of a draft chain of full length.
        root: the target's verification of an empty chain, where a pass over fewer tokens is cheaper, as on a
            CPU; at least ``chain`` where it is not.
        tree: the target's verification of a tree.
        prepare: what the drafter does before its first proposal after autoregressive passes.

    Raises:
        ValueError: a stage takes no time, or a negative one.
    """

    plain: float
    draft: float = math.inf
    retrieval: float = math.inf
    chain: float = math.inf
    root: float = math.inf
    tree: float = math.inf
    prepare: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or (name == "prepare" and value == 0)):
                raise ValueError(f"{name}={value!r} seconds must be above 0")
        if self.plain == math.inf:
            raise ValueError(f"plain={self.plain!r} seconds must be finite")

    def of(self, kind: PassKind, filled: float = 1.0) -> float:
        """Returns the seconds of a whole pass, without ``prepare``.

        Args:
            filled: the most draft tokens that the target verifies, as a share of those of a full chain or
                tree. Of a chain on a GPU they make no difference.
        """
        if kind.levels == 1:
            return self.plain
        if kind.levels == 2:
            tree = self.tree
            if filled < 1:
                tree -= (1 - filled) * max(0.0, tree - self.plain)
            return kind.rounds * self.draft + tree
        chain = self.chain
        if self.root < chain:
            chain = self.root + (chain - self.root) * min(1.0, filled)
        return kind.rounds * (self.draft + self.retrieval) + chain if kind.rounds else chain


OF_SHAPE = ("draft", "retrieval", "tree")
"""The stages whose seconds depend on the shape of the trees."""
STAGE_FIELDS = tuple(field.name for field in fields(StageSeconds))

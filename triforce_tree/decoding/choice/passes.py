"""Kinds of passes, and the seconds that they take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple


class PassKind(NamedTuple):
    """What one pass runs.

    Attributes:
        levels: 1: the target alone decodes a token. 2: the target verifies the drafter's tree. 3: the
            retrieval level verifies the drafter's trees in ``rounds`` rounds, the target what they accepted.
        rounds: of drafting; 0 with one level, 1 with two.
        shape: number of the shape of the drafter's trees, the configured one first.
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


class Option(NamedTuple):
    """What is expected of a kind of pass: tokens of a sequence, and seconds.

    Attributes:
        most_tokens: at the upper end of the acceptance's confidence interval.
        doubt: factor by which the pass may yield more, beside passes of as many levels with other trees.
    """

    kind: PassKind
    tokens: float
    most_tokens: float
    seconds: float
    doubt: float = 1.0

    def within(self, remaining: float) -> "Option":
        """The same where a sequence gets no more than the remaining tokens."""
        if self.tokens <= remaining and self.most_tokens <= remaining:
            return self
        return self._replace(tokens=min(self.tokens, remaining), most_tokens=min(self.most_tokens, remaining))

    @property
    def rate(self) -> float:
        """Tokens per second and sequence."""
        return self.tokens / self.seconds

    @property
    def highest_rate(self) -> float:
        return self.most_tokens / self.seconds


# Weight of a newly measured time, which is clamped to this many times the mean, and to its inverse.
_NEW, _OUTLIER = 0.15, 2.0

CostFactors = dict[str, float]
"""Measured seconds of the stages as multiples of the expected ones, by field of :class:`StageSeconds`."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage for a batch, with trees of one shape; infinite for a stage that there is not.

    Attributes:
        plain: an autoregressive pass of the target.
        draft: the drafter's proposal of one tree.
        retrieval: the retrieval level's verification of a tree, in the mean of those that refresh the
            retrieved chunks and those that do not.
        chain: the target's verification of a draft chain of full length.
        root: the same of an empty chain, where a pass over fewer tokens is cheaper, as on a CPU; at least
            ``chain`` where it is not.
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

    def verification(self, kind: PassKind, filled: float = 1.0) -> float:
        """Of the target's stage in a pass.

        Args:
            filled: the chain's length as a share of the most that it can hold.
        """
        if kind.levels == 1:
            return self.plain
        if kind.levels == 2:
            return self.tree
        if self.root >= self.chain:
            return self.chain
        return self.root + (self.chain - self.root) * min(1.0, filled)

    def of(self, kind: PassKind, filled: float = 1.0) -> float:
        """Of a whole pass, without ``prepare``."""
        drafting = self.draft + (self.retrieval if kind.levels == 3 else 0.0) if kind.rounds else 0.0
        return kind.rounds * drafting + self.verification(kind, filled)

    def towards(
        self, kind: PassKind, filled: float, seconds: Mapping[str, float], resumed: bool
    ) -> dict[str, float]:
        """Fields moved towards the measured seconds of one pass; arguments as of ``PassController.refine``.

        Args:
            filled: as for :meth:`verification`.
        """
        drafting = ("draft", "retrieval") if kind.rounds else ()
        measured = {name: seconds[name] / kind.rounds for name in drafting if seconds.get(name)}
        factor = seconds["target"] / self.verification(kind, filled)
        for name in {1: ("plain",), 2: ("tree",), 3: ("chain", "root")}[kind.levels]:
            if (value := getattr(self, name)) < math.inf:
                measured[name] = value * factor
        if self.prepare and resumed and seconds.get("prepare"):
            measured["prepare"] = seconds["prepare"]
        return {name: _mean(getattr(self, name), value) for name, value in measured.items()}

    def relative_to(self, base: "StageSeconds") -> CostFactors:
        """Its seconds as multiples of those of ``base``, for the stages that have any."""
        own, other = vars(self), vars(base)
        return {
            name: own[name] / other[name]
            for name in own
            if 0 < other[name] < math.inf and own[name] < math.inf
        }

    def scaled(self, factors: Mapping[str, float]) -> "StageSeconds":
        """Each of its seconds times its factor, where there is one."""
        return StageSeconds(**{name: value * factors.get(name, 1.0) for name, value in vars(self).items()})


def refined(
    costs: Sequence[StageSeconds | None],
    kind: PassKind,
    new: Mapping[str, float],
    measured: set[tuple[str, int]],
) -> list[StageSeconds | None]:
    """Costs by shape of tree after a pass whose stages now take ``new`` seconds.

    The load of a machine changes the speed of all stages. Those of drafting that no pass has measured yet
    follow plain passes: these would else seem faster than drafting that was measured when the machine was
    busy, which would then never be tried.

    Args:
        kind: of the pass.
        measured: stages with the number of their shape; those of this pass are added.
    """

    def place(name: str, shape: int) -> tuple[str, int]:
        return name, shape if name in OF_SHAPE else 0

    old = costs[kind.shape]
    assert old is not None, "passes take only trees whose costs are known"
    drift = new["plain"] / old.plain if kind.levels == 1 else 1.0
    measured |= {place(name, kind.shape) for name in new}
    found: list[StageSeconds | None] = []
    for shape, own in enumerate(costs):
        if own is not None:
            # Between two passes the device waits: only what has changed is made anew.
            changed = {name: s for name, s in new.items() if shape == kind.shape or name not in OF_SHAPE}
            if drift != 1.0:
                changed |= {
                    name: value * drift
                    for name, value in vars(own).items()
                    if 0 < value < math.inf and place(name, shape) not in measured
                }
            own = replace(own, **changed) if changed else own
        found.append(own)
    return found


OF_SHAPE = ("draft", "retrieval", "tree")
"""The stages whose seconds depend on the shape of the trees."""
STAGE_FIELDS = tuple(field.name for field in fields(StageSeconds))


def _mean(old: float, new: float) -> float:
    return old + _NEW * (min(max(new, old / _OUTLIER), old * _OUTLIER) - old)

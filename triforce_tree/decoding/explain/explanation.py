"""An explanation of what decoding chose for one prompt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.choice.passes import OF_SHAPE, PassKind
from triforce_tree.decoding.explain.matched import MatchedPasses, MatchTally
from triforce_tree.decoding.explain.roofs import roofs_ms
from triforce_tree.decoding.explain.tally import AcceptanceTally, DepthCounts, Node
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import stage_name
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.trees.shapes import shape_name
from triforce_tree.verify.sampling import ProbsFromLogits

# Fields of StageSeconds: the stage whose bytes they read, with two levels and with three.
_STAGES = {
    "plain": ("plain", "plain"),
    "draft": ("draft", "draft"),
    "retrieval": ("retrieval", "retrieval_refresh"),
    "chain": ("target", "target"),
    "tree": ("target", "target_tree"),
}


@dataclass(frozen=True)
class Choice:
    """A kind of pass: what is expected of it, and how often it was made.

    Attributes:
        tokens: expected of a pass; ``ms`` of it, and ``ms_per_token``.
    """

    kind: str
    made: int
    tokens: float
    ms: float

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@dataclass(frozen=True)
class StageTime:
    """Milliseconds of one run of a stage, and the least it could take: its bytes over the read bandwidth.

    Attributes:
        roof_ms: None where it is not known, as for caches in host memory.
    """

    stage: str
    ms: float
    roof_ms: float | None


@dataclass(frozen=True)
class Explanation:
    """What was chosen for a prompt, and why.

    Attributes:
        prompt_tokens, new_tokens: of the sequence.
        options: settings of the engine, after defaults, profile and memory plan.
        reasons: where the settings come from, for those that have a reason (``reasons.NAMES``).
        passes: number of passes by kind; those that verified matched tokens as ``2 levels, matched tokens``.
        tokens_per_pass: new tokens for each pass of the target.
        acceptance: by level, then depth: verifications that reached it, and accepted tokens by sibling rank.
        stages: times by the table of stage costs; empty where rounds are given.
        choices: kinds of passes, the fastest one first; empty where rounds are given.
        trees: the shapes that passes may propose, the configured one first, and those of ``lookup:N`` last.
        matched: passes that verified matched tokens; None where the settings have none.
        tree: the last tree of the drafter that was verified.
        words: the text of each of its tokens.
        text: the new text; None without a tokenizer.
    """

    prompt_tokens: int
    new_tokens: int
    options: dict[str, Any]
    reasons: dict[str, str]
    passes: dict[str, int]
    tokens_per_pass: float
    acceptance: dict[str, list[DepthCounts]]
    stages: list[StageTime]
    choices: list[Choice]
    trees: list[str]
    matched: MatchedPasses | None
    tree: list[Node]
    words: list[str]
    text: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "options": {name: value for name, value in self.options.items() if not callable(value)}
            | {"tree": self.trees[0], "other_trees": self.trees[1:]},
            "acceptance": {
                level: [
                    {"tried": depth.tried, "accepted_by_rank": by_rank(depth.accepted)} for depth in depths
                ]
                for level, depths in self.acceptance.items()
            },
            "matched": self.matched.as_dict() if self.matched is not None else None,
            "choices": [{**asdict(choice), "ms_per_token": choice.ms_per_token} for choice in self.choices],
        }

    def why(self) -> str:
        """The choice in one sentence."""
        if not self.choices:
            return "Levels and rounds were given; nothing was chosen."
        plain = next(choice for choice in self.choices if choice.kind == "plain")
        best = self.choices[0]
        if best is plain:
            second = self.choices[1] if len(self.choices) > 1 else None
            rest = f"; {second.kind} would take {second.ms_per_token:.2f} ms" if second is not None else ""
            return f"Plain decoding is the fastest at {plain.ms_per_token:.2f} ms a token{rest}."
        if not best.made:
            return (
                f"{best.kind} should be the fastest at {best.ms_per_token:.2f} ms a token, but was not made: "
                "the loss budget does not cover it yet. Plain decoding takes "
                f"{plain.ms_per_token:.2f} ms."
            )
        others = f"the next best, {self.choices[1].kind}, would take {self.choices[1].ms_per_token:.2f} ms"
        return (
            f"{best.kind} is the fastest: {best.tokens:.2f} tokens in {best.ms:.2f} ms, "
            f"{best.ms_per_token:.2f} ms a token; {others}, plain decoding {plain.ms_per_token:.2f} ms."
        )


def by_rank(accepted: Counter[int]) -> list[int]:
    """Counts of ranks 0, 1, ... up to the last one that was accepted."""
    return [accepted[rank] for rank in range(max(accepted, default=-1) + 1)]


def explained(
    program: DecodingProgram,
    to_probs: ProbsFromLogits,
    prompt: Sequence[int],
    new_tokens: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Explanation:
    """Decode one prompt and explain the passes that were made.

    Args:
        program: for a batch of one.
        seed: of all draws; the choices follow from it and the table of stage costs.
        tokenizer: for the texts of tokens.
        progress: called with numbers of prompt tokens as they are prefilled.
        reasons: where the program's settings come from.
    """
    decoder = Decoder(program, to_probs, seed, repeatable=True)
    decoder.prefill([prompt], progress)
    tally = AcceptanceTally(program)
    decoder.after_stage = tally
    matches, new = MatchTally(decoder), list[int]()
    for [block] in decoder.decode([prompt], [Ending(new_tokens)]):
        matches.add(len(block))
        new += block
    length = len(prompt) + len(new)
    words = [str(tokenizer.decode([n.token])) if tokenizer else str(n.token) for n in tally.tree]
    trees = [shape_name(shape) for shape in program.config.shapes[: len(program.shapes)]]
    passes: Counter[str] = Counter()
    for kind, made in decoder.passes.items():
        passes[_name(kind, decoder)] += made
    return Explanation(
        prompt_tokens=len(prompt),
        new_tokens=len(new),
        options=program.config.as_options() | {"levels": program.levels},
        reasons=dict(reasons or {}),
        passes=dict(passes.most_common()),
        tokens_per_pass=len(new) / max(1, decoder.passes.total()),
        acceptance=tally.depths,
        stages=_stages(program, decoder, length),
        choices=_choices(decoder, decoder.passes),
        trees=trees,
        matched=matches.found(" ".join(trees[decoder.controller.lookup :])),
        tree=tally.tree,
        words=words,
        text=new_text(tokenizer, prompt, new) if tokenizer else None,
    )


def _name(kind: PassKind, decoder: Decoder) -> str:
    return f"{kind.levels} levels, matched tokens" if decoder.controller.matched(kind) else str(kind)


def _stages(program: DecodingProgram, decoder: Decoder, length: int) -> list[StageTime]:
    costs = decoder.controller.costs
    if costs is None:
        return []
    roofs: dict[str, float] = {}
    if program.offloaded is None and program.target.streamed is None:
        roofs = roofs_ms(program, [length], bandwidths(program.device)[1])
    found = []
    for name, stages in _STAGES.items():
        stage, seconds = stages[program.levels == 3], getattr(costs, name)
        if stage in program.stage_names and seconds < float("inf"):
            ms, roof = 1e3 * seconds, roofs.get(stage)
            # Costs are measured once, bandwidth now: on a busy machine it says nothing about them.
            found.append(StageTime(stage, ms, roof if roof is not None and roof <= ms else None))
    for shape, other in enumerate(decoder.controller.other_costs, 1):
        for name in OF_SHAPE if other is not None else ():
            if (seconds := getattr(other, name)) < float("inf"):
                named = stage_name(_STAGES[name][program.levels == 3], shape)
                found.append(StageTime(named, 1e3 * seconds, None))
    return found


def _choices(decoder: Decoder, made: Counter[PassKind]) -> list[Choice]:
    if decoder.controller.costs is None:
        return []
    options = sorted(decoder.controller.options(), key=lambda option: -option.rate)
    return [Choice(str(o.kind), made[o.kind], o.tokens, 1e3 * o.seconds) for o in options]

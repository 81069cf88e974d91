"""Explains which passes were chosen for one prompt, and why."""

from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.explain.tally import AcceptanceTally, DepthCounts, Node, OriginTally
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.decoding.stage_set import stage_name
from triforce_tree.policy.passes import OF_SHAPE, PassKind
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.trees.shapes import shape_name
from triforce_tree.verify.sampling import ProbsFromLogits

# Fields of StageSeconds, and the stage that each is the time of, with two levels and with three.
_STAGES = {
    "plain": ("plain", "plain"),
    "draft": ("draft", "draft"),
    "retrieval": ("retrieval", "retrieval_refresh"),
    "chain": ("target", "target"),
    "tree": ("target", "target_tree"),
}

MATCHED_PASSES = "2 levels, matched tokens"
"""The name of the passes that verify matched tokens, of whatever length."""


@dataclass(frozen=True)
class Choice:
    """A kind of pass: how often it was made, and how many tokens and milliseconds are expected of one."""

    kind: str
    made: int
    tokens: float
    ms: float

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@dataclass(frozen=True)
class Explanation:
    """Describes the passes that were chosen for a prompt, and why.

    Attributes:
        prompt_tokens, new_tokens: the sequence's numbers of tokens.
        options: settings of the engine, after defaults and memory plan.
        passes: number of passes by kind; see :data:`MATCHED_PASSES`.
        tokens_per_pass: new tokens for each pass of the target.
        origins: new tokens by what proposed them (``OriginTally``).
        acceptance: by level, then depth: verifications that reached it, and accepted tokens by sibling rank.
        stages: milliseconds of one run of each stage; empty where rounds are given.
        choices: kinds of passes, the fastest one first; empty where rounds are given.
        trees: the shapes that passes may propose, the configured one first, and those of ``lookup:N`` last.
        tree: the last tree of the drafter that was verified.
        words: the text of each of its tokens.
        text: the new text; None without a tokenizer.
    """

    prompt_tokens: int
    new_tokens: int
    options: dict[str, Any]
    passes: dict[str, int]
    tokens_per_pass: float
    origins: dict[str, int]
    acceptance: dict[str, list[DepthCounts]]
    stages: dict[str, float]
    choices: list[Choice]
    trees: list[str]
    tree: list[Node]
    words: list[str]
    text: str | None

    def as_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON can hold."""
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
            "choices": [{**asdict(choice), "ms_per_token": choice.ms_per_token} for choice in self.choices],
        }

    def why(self) -> str:
        """Why passes were chosen as they were, in one sentence."""
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
    prompt: Sequences[int],
    new_tokens: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Decode one prompt and explain the passes that were made.

    Args:
        program: for a batch of one.
        seed: of all draws; the choices follow from it and the table of stage costs.
        tokenizer: for the texts of tokens.
        progress: called with numbers of prompt tokens as they are prefilled.
    """
    loop = DecodingLoop.over(program, to_probs, seed, repeatable=True, progress=progress)
    tally, origins = AcceptanceTally(program), OriginTally(program)

    def after_stage(stage: str) -> None:
        tally(stage)
        origins(stage)

    loop.after_stage = after_stage
    sequence = Sequence(list(prompt), Ending(new_tokens))
    loop.begin([sequence])
    for _ in loop.decode():
        pass
    new = sequence.new
    passes: Counter[str] = Counter()
    for kind, made in loop.passes.items():
        passes[_name(kind, loop)] += made
    return Explanation(
        prompt_tokens=len(prompt),
        new_tokens=len(new),
        options=program.config.as_options() | {"levels": program.levels},
        passes=dict(passes.most_common()),
        tokens_per_pass=len(new) / max(1, loop.passes.total()),
        origins=dict(Counter(origins.names[: len(new)]).most_common()),
        acceptance=tally.depths,
        stages=_stages(program, loop),
        choices=_choices(loop, loop.passes),
        trees=[shape_name(shape) for shape in program.config.shapes[: len(program.shapes)]],
        tree=tally.tree,
        words=[str(tokenizer.decode([n.token])) if tokenizer else str(n.token) for n in tally.tree],
        text=new_text(tokenizer, prompt, new) if tokenizer else None,
    )


def _name(kind: PassKind, loop: DecodingLoop) -> str:
    return MATCHED_PASSES if loop.policy.matched(kind) else str(kind)


def _stages(program: DecodingProgram, loop: DecodingLoop) -> dict[str, float]:
    """Milliseconds of one run of each stage, by its name."""
    costs, found = loop.policy.costs, dict[str, float]()
    if costs is None:
        return {}
    for shape in costs.shapes:
        for field, names in _STAGES.items():
            name = names[program.levels == 3]
            if name not in program.stage_names or (shape and field not in OF_SHAPE):
                continue
            if (seconds := getattr(costs.stages(shape), field)) < float("inf"):
                found[stage_name(name, shape)] = 1e3 * seconds
    return found


def _choices(loop: DecodingLoop, made: Counter[PassKind]) -> list[Choice]:
    if loop.policy.costs is None:
        return []
    options = sorted(loop.policy.options(), key=lambda option: -option.rate)
    return [Choice(str(o.kind), made[o.kind], o.tokens, 1e3 * o.seconds) for o in options]

"""Explains which passes were chosen for one prompt, and why."""

import math
from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.explain.tally import AcceptanceTally, DepthCounts, Node
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.origins import Origins
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.policy.passes import OF_SHAPE
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.trees.shapes import shape_name
from triforce_tree.verify.sampling import ProbsFromLogits

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
        options: settings of the engine, after defaults and memory plan.
        passes: number of passes by kind; see :data:`MATCHED_PASSES`.
        tokens_per_pass: new tokens for each pass of the target.
        origins: new tokens by what proposed them (``Origins``).
        acceptance: by level, then depth: verifications that reached it, and accepted tokens by sibling rank.
        stages: milliseconds of each stage (``StageSeconds``); empty where rounds are given.
        choices: kinds of passes, the fastest one first; empty where rounds are given.
        trees: the shapes that passes may propose, the configured one first, and those of ``lookup:N`` last.
        tree: the last tree of the drafter that was verified, and ``words`` the text of each of its tokens.
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
        """Returns the explanation as values that JSON can hold."""
        options = {name: value for name, value in self.options.items() if not callable(value)}
        counts = {
            level: [{"tried": depth.tried, "accepted_by_rank": by_rank(depth.accepted)} for depth in depths]
            for level, depths in self.acceptance.items()
        }
        return {
            **asdict(self),
            "options": options | {"tree": self.trees[0], "other_trees": self.trees[1:]},
            "acceptance": counts,
            "choices": [{**asdict(choice), "ms_per_token": choice.ms_per_token} for choice in self.choices],
        }

    def why(self) -> str:
        """Returns one sentence on why passes were chosen as they were."""
        if not self.choices:
            return "Levels and rounds were given; nothing was chosen."
        best, *others = self.choices
        fastest = f"at {best.ms_per_token:.2f} ms a token"
        rest = "".join(f"; {c.kind} would take {c.ms_per_token:.2f} ms" for c in others[:1])
        if best.kind == "plain":
            return f"Plain decoding is the fastest {fastest}{rest}."
        plain = next(c.ms_per_token for c in others if c.kind == "plain")
        if others[0].kind != "plain":
            rest += f", plain decoding {plain:.2f} ms"
        if not best.made:
            return (
                f"{best.kind} should be the fastest {fastest}{rest}. The loss budget does not cover it yet."
            )
        return f"{best.kind} is the fastest {fastest}: {best.tokens:.2f} tokens in {best.ms:.2f} ms{rest}."


def by_rank(accepted: Counter[int]) -> list[int]:
    """Returns the counts of ranks 0, 1, ... up to the last one that was accepted."""
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
    """Decodes one prompt with a program for a batch of one, and explains the passes that were made.

    The choices follow from the seed and the table of stage costs.
    """
    loop = DecodingLoop.over(program, to_probs, seed, repeatable=True, progress=progress)
    tally, origins = AcceptanceTally(program), Origins(loop)

    def after_stage(stage: str) -> None:
        tally(stage)
        origins(stage)

    loop.after_stage = after_stage
    sequence = Sequence(list(prompt), Ending(new_tokens))
    loop.begin([sequence])
    for _ in loop.decode():
        pass
    new, policy, [names] = sequence.new, loop.policy, origins.take()
    passes: Counter[str] = Counter()
    for kind, made in loop.passes.items():
        passes[MATCHED_PASSES if policy.matched(kind) else str(kind)] += made
    stages, choices = {}, list[Choice]()
    if policy.costs is not None:
        for shape in policy.costs.shapes:
            tree = f", tree {shape + 1}" if shape else ""
            for name, seconds in vars(policy.costs.stages(shape)).items():
                if 0 < seconds < math.inf and (not shape or name in OF_SHAPE):
                    stages[name + tree] = 1e3 * seconds
        options = sorted(policy.options(), key=lambda option: -option.rate)
        choices = [Choice(str(o.kind), loop.passes[o.kind], o.tokens, 1e3 * o.seconds) for o in options]
    return Explanation(
        prompt_tokens=len(prompt),
        new_tokens=len(new),
        options=program.config.as_options() | {"levels": program.levels},
        passes=dict(passes.most_common()),
        tokens_per_pass=len(new) / max(1, loop.passes.total()),
        origins=dict(Counter(names[: len(new)]).most_common()),
        acceptance=tally.depths,
        stages=stages,
        choices=choices,
        trees=[shape_name(shape) for shape in program.config.shapes[: len(program.shapes)]],
        tree=tally.tree,
        words=[str(tokenizer.decode([n.token])) if tokenizer else str(n.token) for n in tally.tree],
        text=new_text(tokenizer, prompt, new) if tokenizer else None,
    )

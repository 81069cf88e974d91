"""``Engine.explain``: continues one prompt, and says which passes were chosen and why."""

from contextlib import AbstractContextManager
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.generation.inputs import Inputs, prompt_of
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.sampling import ProbsFromLogits


class Explained(Protocol):
    """What an explanation needs of an :class:`~triforce_tree.engine.Engine`."""

    hierarchy: Hierarchy
    tokenizer: PreTrainedTokenizerBase | None

    def program(
        self, prompts: list[list[int]], new_tokens: int, to_probs: ProbsFromLogits | None
    ) -> AbstractContextManager[DecodingProgram]:
        """The program that would decode these prompts."""


def explanation_of(
    engine: Explained,
    inputs: Inputs,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explanation:
    """Continue one prompt, and say which passes were chosen and why.

    Args:
        progress: called with numbers of prompt tokens as they are prefilled.
    """
    to_probs = ProbsFromLogits.at(temperature)
    prompt = prompt_of(engine.hierarchy.target, engine.tokenizer, inputs)
    with engine.program([prompt], max_new_tokens, to_probs) as program:
        return explained(program, to_probs, prompt, max_new_tokens, seed, engine.tokenizer, progress)

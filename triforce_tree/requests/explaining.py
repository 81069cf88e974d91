"""Continues one prompt for ``Engine.explain``, and reports which passes were chosen and why."""

from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.requests.inputs import Inputs, prompt_of
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.sampling import ProbsFromLogits


def explanation_of(
    engine: LoadedEngine,
    inputs: Inputs,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explanation:
    """Continue one prompt, and return which passes were chosen and why.

    Args:
        progress: called with numbers of prompt tokens as they are prefilled.
    """
    to_probs = ProbsFromLogits.at(temperature)
    prompt = prompt_of(engine.target, engine.tokenizer, inputs)
    with engine.program([prompt], max_new_tokens, to_probs) as program:
        return explained(program, to_probs, prompt, max_new_tokens, seed, engine.tokenizer, progress)

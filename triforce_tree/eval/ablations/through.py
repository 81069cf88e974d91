"""What may answer a question about a long text: all levels, the target alone, or the target on a window."""

from collections.abc import Callable, Sequence

from transformers import StoppingCriteria, StoppingCriteriaList

from triforce_tree.engine import Engine
from triforce_tree.eval.ablations import streaming
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.verify.sampling import ProbsFromLogits

Answer = Callable[[Sequence[int], int, StoppingCriteria | None, Progress | None], str]
"""The greedy text after a prompt, of at most so many tokens, up to the model's end token."""

HIERARCHY, TARGET, STREAMING = "hierarchy", "target", "streaming-llm"


def answer_by(engine: Engine, name: str) -> Answer:
    """The function of this name: ``HIERARCHY``, ``TARGET``, or ``STREAMING``, which is lossy."""
    if name == STREAMING:
        return _streaming(engine)
    chosen = engine if name == HIERARCHY else engine.with_options(levels=1)

    def answer(
        prompt: Sequence[int], tokens: int, stop: StoppingCriteria | None, progress: Progress | None
    ) -> str:
        out = chosen.generate(
            list(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            stopping_criteria=StoppingCriteriaList([stop] if stop else []),
            progress=progress,
        )
        return str(out.text or "")

    return answer


def _streaming(engine: Engine) -> Answer:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    eos = engine.hierarchy.target.model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]

    def answer(
        prompt: Sequence[int], tokens: int, stop: StoppingCriteria | None, progress: Progress | None
    ) -> str:
        greedy = ProbsFromLogits(greedy=True)
        found, _, _ = streaming.decode(engine, prompt, tokens, greedy, seed=0, stop=stop, ends=ends)
        return new_text(tokenizer, prompt, found, ends)

    return answer

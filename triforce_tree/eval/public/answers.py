"""Answers to questions about long texts, by all levels and by the target alone, with their scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList

from triforce_tree.engine import Engine
from triforce_tree.eval.public.catalogue import Task
from triforce_tree.eval.public.rows import Example
from triforce_tree.eval.results import Record, Records
from triforce_tree.runtime.stats import Progress

OURS, PLAIN = "hierarchy", "target"
ANSWER = "answer"  # the kind of these records


@dataclass(frozen=True)
class Questions:
    """What is asked.

    Attributes:
        examples: rows of the data set.
        prompts: token ids of each, by most tokens of a prompt.
        task: its metric and the length of answers.
    """

    examples: Sequence[Example]
    prompts: Mapping[int, Sequence[list[int]]]
    task: Task


def keys(questions: Questions, temperatures: Iterable[float], through: Iterable[str]) -> list[Record]:
    """Of all records, in the order of the measurements."""
    cells = product(questions.prompts, range(len(questions.examples)), temperatures, through)
    return [
        {"kind": ANSWER, "length": length, "prompt": number, "temperature": temperature, "through": by}
        for length, number, temperature, by in cells
    ]


def measure(
    engine: Engine,
    questions: Questions,
    temperatures: Sequence[float],
    records: Records,
    seed: int = 0,
    stop: StoppingCriteria | None = None,
    progress: Progress | None = None,
    done: Callable[[Record], None] = lambda record: None,
    wanted: Callable[[], bool] = lambda: True,
    through: Sequence[str] = (OURS, PLAIN),
) -> None:
    """Measure the answers that ``records`` lacks; other arguments as in ``eval.speed.Timing``.

    Answers end with the model's end token, or after the task's number of tokens.
    """
    engines = {OURS: engine, PLAIN: engine.with_options(levels=1)}

    def answer(key: Record) -> Record:
        number = key["prompt"]
        prompt, example = questions.prompts[key["length"]][number], questions.examples[number]
        assert example.expected is not None
        out = engines[key["through"]].generate(
            prompt,
            max_new_tokens=questions.task.answer_tokens,
            stopping_criteria=StoppingCriteriaList([stop] if stop else []),
            progress=progress,
            seed=seed + number,
            **_sampling(key["temperature"]),
        )
        text = str(out.text or "")
        return {
            "prompt_tokens": len(prompt),
            "score": questions.task.metric(text, example.expected),
            "answer": text,
            "tokens": out.sequences[0, len(prompt) :].tolist(),
        }

    records.fill(keys(questions, temperatures, through), answer, wanted, done)


def _sampling(temperature: float) -> dict[str, Any]:
    """The temperature alone, whatever the checkpoint's generation_config says."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

"""Answers to questions about long texts, by all levels and by the target alone, with their scores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from triforce_tree.engine import Engine
from triforce_tree.eval.public.catalogue import Task
from triforce_tree.eval.public.rows import Example
from triforce_tree.eval.results import Record, Series
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
    series: Series,
    progress: Progress | None = None,
    through: Sequence[str] = (OURS, PLAIN),
) -> None:
    """Measure the answers that the series lacks.

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
            stopping_criteria=series.criteria,
            progress=progress,
            seed=series.seed + number,
            **_sampling(key["temperature"]),
        )
        text = str(out.text or "")
        return {
            "prompt_tokens": len(prompt),
            "score": questions.task.metric(text, example.expected),
            "answer": text,
            "tokens": out.sequences[0, len(prompt) :].tolist(),
        }

    series.fill(keys(questions, temperatures, through), answer)


def _sampling(temperature: float) -> dict[str, Any]:
    """The temperature alone, whatever the checkpoint's generation_config says."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

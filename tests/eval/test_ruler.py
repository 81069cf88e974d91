"""Synthetic tasks: prompts of the length asked for, which hold their answers."""

from collections import Counter

import pytest

import triforce_tree
from tests.support.processes.messages import says
from triforce_tree.cli.bench import arguments
from triforce_tree.engine import Engine
from triforce_tree.eval import ruler
from triforce_tree.eval.ablations.through import answer_by


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load(device="cpu", levels=1)


@pytest.fixture(scope="module")
def made(engine: Engine) -> ruler.Ruler:
    assert engine.tokenizer is not None
    return ruler.Ruler("A line of some other text.\n" * 40, engine.tokenizer, 6000)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_questions_have_their_length_and_hold_their_answers(task: str, made: ruler.Ruler) -> None:
    for length in (4001, 6000):
        question = made.question(task, length, 0)
        text = made.tokenizer.decode(question.prompt)
        assert len(question.prompt) == length
        assert len(set(question.answers)) == len(question.answers) >= 1
        assert all(answer in text for answer in question.answers)
        # Not in what is asked: an answer that repeats the question finds nothing.
        assert question.score(text[text.rindex("Question:") :]) == 0
        assert question.score(" ".join(question.answers).upper()) == 1
    assert made.question(task, 6000, 0) == question != made.question(task, 6000, 1)


def test_values_and_keys(made: ruler.Ruler) -> None:
    counts = {task: len(made.question(task, 4000, 3).answers) for task in ruler.TASKS}
    assert counts == {
        "single": 1, "multi-key": 1, "multi-value": 4, "multi-query": 4, "variables": 5, "common-words": 10,
        "frequent-words": 3,
    }  # fmt: skip
    text = made.tokenizer.decode(made.question("multi-key", 4000, 3).prompt)
    assert text.count("One of the special numbers") == 4


def test_variables_come_after_those_they_are_assigned(made: ruler.Ruler) -> None:
    question = made.question("variables", 4000, 5)
    text = made.tokenizer.decode(question.prompt)
    places = [text.index(f"VAR {name} =") for name in question.answers]
    assert places == sorted(places)
    assert text.count("VAR ") == 2 * 5 + 2 * 4


def test_common_words_are_the_most_common(made: ruler.Ruler) -> None:
    question = made.question("common-words", 6000, 0)
    text = made.tokenizer.decode(question.prompt)
    words = Counter(word for word in text.split() if "-" in word)
    assert {word for word, _ in words.most_common(10)} == set(question.answers)
    question = made.question("frequent-words", 6000, 0)
    text = made.tokenizer.decode(question.prompt)
    words = Counter(word for word in text.split() if "-" in word)
    assert [word for word, _ in words.most_common(4)[1:]] == list(question.answers)


def test_short_lengths_are_refused(made: ruler.Ruler) -> None:
    with pytest.raises(ValueError, match=says("'multi-value'", "length=90")):
        made.question("multi-value", 90, 0)
    with pytest.raises(ValueError, match=says("'common-words'", "more than 300 tokens")):
        made.question("common-words", 300, 0)


def test_the_command_line_names_every_task() -> None:
    assert arguments.TASKS == ruler.TASKS


@pytest.mark.slow
def test_levels_give_the_same_answers(made: ruler.Ruler, engine: Engine) -> None:
    question = made.question("single", 1200, 0)
    two = engine.with_options(levels=2)
    answers = [
        ruler.answered(answer_by(two, name), question, made.tokenizer, None, None)
        for name in ("hierarchy", "target")
    ]
    assert answers[0] == answers[1]

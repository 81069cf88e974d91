"""Synthetic long-context tasks after RULER (Hsieh et al., arXiv 2404.06654, section 3), for any tokenizer.

Each task plants what it asks for into a text of exactly as many tokens as wanted, and expects a few strings
in the answer. Words, sentences and numbers are generated here, so that no data has to be fetched; accuracies
are therefore not comparable with those of the published data.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase, StoppingCriteria

from triforce_tree.eval.ablations.through import Answer
from triforce_tree.eval.results import Record
from triforce_tree.eval.text import surrounding, token_ids
from triforce_tree.pair.needle import DIGITS, names
from triforce_tree.runtime.stats import Progress

# Values of a key, keys that are asked for, keys that are not, assignments of a chain.
_VALUES, _ASKED, _OTHERS, _ASSIGNMENTS = 4, 4, 3, 5
# Words to name, and how often they and the other words of the list occur.
_COMMON, _COMMON_TIMES, _RARE_TIMES = 10, 30, 3
_FREQUENT, _ZIPF = 3, 2.0
# Tokens for the words around the strings of an answer.
_SPARE_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """A prompt, and the strings that its answer should contain."""

    prompt: list[int]
    answers: tuple[str, ...]

    def score(self, text: str) -> float:
        """Share of the answers that occur in ``text``, whatever their case."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class _Planted:
    """What a task plants into the text, in this order, what it asks at the end, and the answers."""

    facts: list[str]
    question: str
    answers: list[str]


class Ruler:
    """Questions of any length from one text.

    Args:
        text: what surrounds the planted sentences.
        tokenizer: of the model under test.
        longest: most tokens of a prompt.

    Raises:
        ValueError: the text is empty.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        self.tokenizer = tokenizer
        self.ids = surrounding(tokenizer, text, longest, "planted sentences")

    def question(self, task: str, length: int, trial: int, seed: int = 0) -> Question:
        """A question of ``length`` tokens.

        Args:
            task: one of :data:`TASKS`.
            trial: questions of other trials have other words, numbers and places.

        Raises:
            ValueError: ``length`` is too short for what the task plants.
        """
        draw = random.Random(f"{seed}/{task}/{length}/{trial}")
        if task in _WORD_LISTS:
            return self._of_words(task, length, draw)
        planted = _PLANTED[task](draw)
        facts = [token_ids(self.tokenizer, f"\n\n{fact}\n\n") for fact in planted.facts]
        asked = token_ids(self.tokenizer, planted.question)
        free = length - len(asked) - sum(map(len, facts))
        if free < len(facts):
            raise ValueError(
                f"task {task!r} needs more than {length - free + len(facts)} tokens, but length={length}; "
                "use a longer one"
            )
        start = draw.randrange(len(self.ids) - free)
        prompt: list[int] = []
        done = 0
        for fact, place in zip(facts, sorted(draw.sample(range(free), len(facts))), strict=True):
            prompt += [*self.ids[start + done : start + place], *fact]
            done = place
        prompt += [*self.ids[start + done : start + free], *asked]
        return Question(prompt, tuple(planted.answers))

    def _of_words(self, task: str, length: int, draw: random.Random) -> Question:
        """A question about a list of words, as long as fits."""
        instruction, question, make = _WORD_LISTS[task]
        head, asked = (token_ids(self.tokenizer, part) for part in (instruction, question))
        free = length - len(head) - len(asked)
        count = free // 3  # more words than fit: most tokenizers take a few tokens for each
        while count > 0:
            words, answers = make(random.Random(draw.random()), count)
            ids = token_ids(self.tokenizer, " ".join(words))
            if answers and len(ids) <= free:
                # The text fills what is left before the instruction.
                return Question([*self.ids[: free - len(ids)], *head, *ids, *asked], answers)
            count = min(count - 1, int(count * free / max(len(ids), 1)))
        raise ValueError(f"task {task!r} needs more than {length} tokens; use a longer prompt")


def _word(name: str) -> str:
    return name.replace(" ", "-")


def _number(draw: random.Random) -> str:
    return "".join(draw.choices("0123456789", k=DIGITS))


def _fact(key: str, number: str) -> str:
    return f"One of the special numbers for {key} is {number}."


def _asks(keys: Sequence[str], values: str) -> str:
    listed = ", ".join(keys)
    return (
        f"\n\nQuestion: What {values} for {listed} mentioned in the text above?\n"
        f"Answer: The special numbers for {listed} mentioned in the text are"
    )


def _needles(draw: random.Random, asked: int, others: int, values: int) -> _Planted:
    """``asked + others`` keys with so many values each, in any order."""
    keys = [_word(name) for name in draw.sample(names(), asked + others)]
    pairs = [(key, _number(draw)) for key in keys for _ in range(values)]
    answers = [number for key, number in pairs if key in keys[:asked]]
    draw.shuffle(pairs)
    question = _asks(keys[:asked], "are all the special numbers")
    return _Planted([_fact(*pair) for pair in pairs], question, answers)


def _variables(draw: random.Random) -> _Planted:
    """A chain of assignments that begins with a number, and a shorter one with another number."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    found: set[str] = set()
    while len(found) < 2 * _ASSIGNMENTS:
        found.add("".join(draw.choices(letters, k=5)))
    every = sorted(found)
    draw.shuffle(every)
    chains, numbers = (every[:_ASSIGNMENTS], every[_ASSIGNMENTS:]), (_number(draw), _number(draw))
    facts = [
        [
            f"VAR {name} = {f'VAR {before}' if before else number}"
            for before, name in zip([None, *chain], chain, strict=False)
        ]
        for chain, number in zip(chains, numbers, strict=True)
    ]
    # Each chain in its own order, the two mixed.
    order = draw.sample([0] * _ASSIGNMENTS + [1] * _ASSIGNMENTS, 2 * _ASSIGNMENTS)
    mixed = [facts[which].pop(0) for which in order]
    question = (
        f"\n\nQuestion: Which variables are assigned the value {numbers[0]}, directly or through other "
        f"variables?\nAnswer: The variables that are assigned the value {numbers[0]} are"
    )
    return _Planted(mixed, question, chains[0])


def _common_words(draw: random.Random, count: int) -> tuple[list[str], tuple[str, ...]]:
    """About ``count`` words, numbered; ten of them occur ten times as often as the others."""
    rare = (count - _COMMON * _COMMON_TIMES) // _RARE_TIMES
    if rare < 1:
        return [], ()
    chosen = [_word(name) for name in draw.sample(names(), min(len(names()), _COMMON + rare))]
    common = chosen[:_COMMON]
    words = common * _COMMON_TIMES + chosen[_COMMON:] * _RARE_TIMES
    draw.shuffle(words)
    return [f"{number}. {word}" for number, word in enumerate(words, 1)], tuple(common)


def _frequent_words(draw: random.Random, count: int) -> tuple[list[str], tuple[str, ...]]:
    """``count`` words whose frequency falls with the square of their rank (Zipf)."""
    chosen = [_word(name) for name in draw.sample(names(), min(len(names()), max(count // 10, _FREQUENT)))]
    weights = [(rank + 1) ** -_ZIPF for rank in range(len(chosen))]
    words: list[str] = []
    for word, weight in zip(chosen, weights, strict=True):
        words += [word] * round(weight / sum(weights) * count)
    draw.shuffle(words)
    # The most frequent word stands for the noise between words in RULER, and is not asked for.
    return words, tuple(chosen[1 : 1 + _FREQUENT]) if len(set(words)) > _FREQUENT else ()


_PLANTED: dict[str, Callable[[random.Random], _Planted]] = {
    "single": lambda draw: _needles(draw, 1, 0, 1),
    "multi-key": lambda draw: _needles(draw, 1, _OTHERS, 1),
    "multi-value": lambda draw: _needles(draw, 1, 0, _VALUES),
    "multi-query": lambda draw: _needles(draw, _ASKED, 0, 1),
    "variables": _variables,
}
_WORD_LISTS = {
    "common-words": (
        "\n\nBelow is a numbered list of words. Some words appear more often than others. Memorize the ones "
        "that appear most often.\n",
        f"\n\nQuestion: What are the {_COMMON} most common words in the list?\nAnswer: The {_COMMON} words "
        "that appear most often in the list are:",
        _common_words,
    ),
    "frequent-words": (
        "\n\nRead the following coded text and track the frequency of each coded word.\n",
        f"\n\nQuestion: Leaving out the most frequent one, what are the {_FREQUENT} most frequent words "
        "in the coded text?\nAnswer: These words are:",
        _frequent_words,
    ),
}
TASKS = (*_PLANTED, *_WORD_LISTS)


def answered(
    answer: Answer,
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    stop: StoppingCriteria | None,
    progress: Progress | None,
) -> Record:
    """The greedy answer and its score."""
    needed = sum(len(token_ids(tokenizer, f" {expected},")) for expected in question.answers)
    text = answer(question.prompt, needed + _SPARE_TOKENS, stop, progress)
    return {"score": question.score(text), "answer": text}

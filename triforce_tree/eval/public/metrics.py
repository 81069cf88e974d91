"""Scores of answers, 0 to 1, by the rules that the data sets' papers publish.

Token F1 is that of SQuAD (Rajpurkar et al., arXiv 1606.05250). ROUGE-L is that of Lin (2004): F1 of the
longest common subsequence of words, here of whole texts; LongBench's library joins that of each sentence.
The other rules are those of LongBench (Bai et al., arXiv 2308.14508) and of InfiniteBench (Zhang et al.,
arXiv 2402.13718). Where there are several right answers the best score counts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LETTERS = "ABCD"
# Where an answer names its letter: after such a word, at its start, or alone.
_CHOSEN = (
    re.compile(r"(?:answer|option)(?:\s+is)?\s*:?\s*\(?([A-D])\b", re.IGNORECASE),
    re.compile(r"\W*([A-D])\b"),
    re.compile(r"\b([A-D])\b"),
)
_NUMBER = re.compile(r"\d+\.\d+|\d+")


@dataclass(frozen=True)
class Expected:
    """What a row of a data set expects.

    Attributes:
        answers: one or more right ones, as the data hold them.
        options: of a multiple choice, or all classes of a classification.
    """

    answers: list[Any]
    options: list[str]

    @property
    def texts(self) -> list[str]:
        return [str(answer) for answer in self.answers]


Metric = Callable[[str, Expected], float]


def words_of(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", plain).split()


def f1(text: str, expected: Expected) -> float:
    """F1 of the words, as bags."""
    return max(_f1(words_of(text), words_of(answer)) for answer in expected.texts)


def character_f1(text: str, expected: Expected) -> float:
    """F1 of the characters, as bags: for Chinese."""

    def characters(given: str) -> list[str]:
        return [c for c in given.lower() if c.isalnum()]

    return max(_f1(characters(text), characters(answer)) for answer in expected.texts)


def _f1(found: Sequence[str], right: Sequence[str]) -> float:
    return _harmonic(sum((Counter(found) & Counter(right)).values()), len(found), len(right))


def _harmonic(same: int, found: int, right: int) -> float:
    """F1 of ``same`` common elements: twice their number over all."""
    return 2 * same / (found + right) if same else 0.0


def rouge_l(text: str, expected: Expected) -> float:
    """F1 of the longest common subsequence of words."""
    found = re.findall(r"\w+", text.lower())
    return max(_rouge_l(found, re.findall(r"\w+", answer.lower())) for answer in expected.texts)


def _rouge_l(found: Sequence[str], right: Sequence[str]) -> float:
    lengths = [0] * (len(right) + 1)
    for word in found:
        before = 0
        for at, other in enumerate(right, 1):
            longest = before + 1 if word == other else max(lengths[at], lengths[at - 1])
            before, lengths[at] = lengths[at], longest
    return _harmonic(lengths[-1], len(found), len(right))


def classification(text: str, expected: Expected) -> float:
    """1 over the number of classes that the text names, if the right one is among them.

    A class whose name is part of the right one's does not count.
    """
    right = expected.texts[0]
    named = [c for c in expected.options if c in text and (c == right or c not in right)]
    return 1 / len(named) if right in named else 0.0


def numbers(text: str, expected: Expected) -> float:
    """Share of the numbers in the text that are the answer's."""
    right = re.findall(r"\d+", expected.texts[0])[:1]
    found = re.findall(r"\d+", text)
    return sum([number] == right for number in found) / len(found) if found else 0.0


def code_similarity(text: str, expected: Expected) -> float:
    """Similarity of the first line that is no comment, in hundredths."""
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return max(round(SequenceMatcher(None, line, answer).ratio(), 2) for answer in expected.texts)


def choice(text: str, expected: Expected) -> float:
    """Whether the text chooses the right option: its letter, or what the option says after "answer:"."""
    right = expected.texts[0]
    letter = right if right in _LETTERS else _LETTERS[expected.options.index(right)]
    named = right if right != letter else expected.options[_LETTERS.index(letter)]
    if re.search(r"answer(?:\s+is)?\s*:?\s*" + re.escape(named), text, re.IGNORECASE):
        return 1.0
    start = _CHOSEN[1].match(text)
    found = start or _CHOSEN[0].search(text) or _CHOSEN[2].search(text)
    return float(found is not None and found[1].upper() == letter)


def first_number(text: str, expected: Expected) -> float:
    """Whether the first number in the text is the answer."""
    found = _NUMBER.search(text)
    return float(found is not None and float(found[0]) == float(expected.answers[0]))


def first_digits(text: str, expected: Expected) -> float:
    """Whether the first digits in the text are the answer's, leading zeros included."""
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == expected.texts[0])


def last_number(text: str, expected: Expected) -> float:
    """Whether the last word of the text is the answer, a whole number."""
    words = re.sub(r"[\n.`'\":]", " ", text).split()
    return float(bool(words) and words[-1] == expected.texts[0])


def leading_numbers(text: str, expected: Expected) -> float:
    """Share of the expected numbers that the text begins with, in their order."""
    same = 0
    for found, right in zip(re.findall(r"\d+", text), expected.texts, strict=False):
        if found != right:
            break
        same += 1
    return same / len(expected.answers)


def names_word(text: str, expected: Expected) -> float:
    """Whether the first answer is a word of the text, whatever its case."""
    words = re.sub(r"[\n:\"'.,?!{}]", " ", text).upper().split()
    return float(expected.texts[0].upper() in words)


def first_line(metric: Metric) -> Metric:
    """A metric of the first line that is not empty: after few-shot examples a model goes on with more."""

    def score(text: str, expected: Expected) -> float:
        return metric(text.lstrip("\n").split("\n")[0], expected)

    return score

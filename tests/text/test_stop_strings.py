"""Stop strings in pieces of text, compared with a search in every prefix of the whole text."""

import random

import pytest

from tests.support.models.tokenizer_kinds import tokenizer_of
from triforce_tree.text.new_text import NewText
from triforce_tree.text.stop_strings import StopMatcher
from triforce_tree.text.vocabulary import Vocabulary


def naive(text: str, strings: list[str]) -> str | None:
    """Returns the text before the stop string that ends first (the longest of several), or None."""
    for end in range(1, len(text) + 1):
        sizes = [len(string) for string in strings if text[:end].endswith(string)]
        if sizes:
            return text[: end - max(sizes)]
    return None


def test_texts_end_before_the_string_that_ends_first() -> None:
    stopped = 0
    for seed in range(3000):
        draw = random.Random(seed)
        text = "".join(draw.choices("aab", k=draw.randint(1, 30)))
        strings = ["".join(draw.choices("ab", k=draw.randint(1, 8))) for _ in range(draw.randint(1, 4))]
        matcher, given, at = StopMatcher(strings), "", 0
        while at < len(text):
            size = draw.randint(1, 5)
            given += matcher.put(text[at : at + size])
            at += size
            assert len(given) > min(at, len(text)) - max(map(len, strings)) or matcher.found
        given += matcher.end()
        expected = naive(text, strings)
        assert matcher.found is (expected is not None)
        assert given == (text if expected is None else expected)
        stopped += matcher.found
    assert 500 < stopped < 2900


@pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "WordPiece"])
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("<|user|>", "time there"),
        ("there<|user|>", "time "),
        ("re<|us", "time the"),
        ("<|user|><|tool|>", "time there"),
        ("<|tool|>", "time there"),
        ("r|>on", None),
        ("|>", "time there"),
    ],
)
def test_special_tokens_are_found_by_their_names(kind: str, stop: str, left: str | None) -> None:
    """A stop string may also be a part of a name, or cross it; names are never part of the text."""
    tokenizer = tokenizer_of(kind)
    if kind == "WordPiece":
        # The tokens of this tokenizer are words, which are decoded with a space between them.
        stop = stop.replace("there<", "there <").replace("re<", "re <").replace("><", "> <")
    user, tool = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    words = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Once upon a", " time there")
    ]
    new = NewText(Vocabulary(tokenizer), words[0], (), [stop])
    text = ""
    for token in [*words[1], user, tool, *words[1]]:
        text += new.put(token)
    text += new.end()
    assert new.stopped is (left is not None)
    if left is None:
        assert "<|tool|>" in text
        assert "user" not in text
    else:
        assert text.strip() == left.strip()


def test_what_begins_in_the_prompt_does_not_count() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer("Once upon a time")["input_ids"]
    new = NewText(Vocabulary(tokenizer), ids[:-1], (), ["a time", "upon"])
    assert new.put(ids[-1]) + new.end() == tokenizer.decode(ids[-1:])
    assert not new.stopped

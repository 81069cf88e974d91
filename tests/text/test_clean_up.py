"""Clean-up of spaces in pieces of text, compared with transformers' clean-up of the whole text."""

import random

from tests.support.models.tokenizer_kinds import tokenizer_of
from triforce_tree.text.clean_up import CleanUp

# Characters of the clean-up rules, and others.
CHARACTERS = "    ''nntvrmse.,?x"


def test_pieces_are_the_cleaned_text() -> None:
    clean, changed = tokenizer_of("WordPiece, cleaned up").clean_up_tokenization, 0
    for seed in range(20_000):
        draw = random.Random(seed)
        text = "".join(draw.choices(CHARACTERS, k=draw.randint(1, 14)))
        pieces, given, at = CleanUp(clean), "", 0
        while at < len(text):
            size = draw.randint(1, 3)
            given += pieces.put(text[at : at + size])
            at += size
            assert len(given) <= pieces.length == len(clean(text[:at]))
        given += pieces.end()
        assert given == clean(text), text
        changed += given != text
    assert changed > 1000


def test_only_what_may_change_is_held_back() -> None:
    pieces = CleanUp(tokenizer_of("WordPiece, cleaned up").clean_up_tokenization)
    assert [pieces.put(each) for each in ("a", " b", " ", ".", " n", "o", " " * 5000)][:6] == [
        *("a", " b", "", ".", "", " no")
    ]
    assert pieces.length == 5007
    assert len(pieces.end()) < 5

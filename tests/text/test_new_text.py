"""The text of new tokens after any prompt, with any tokenizer, and the time when its pieces are returned."""

import codecs
import copy
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.support.models.tokenizer_kinds import CORPUS, KINDS, llama, tokenizer_of
from triforce_tree.server.text_stream import ServedText, TextStream
from triforce_tree.text.new_text import NewText, new_text
from triforce_tree.text.vocabulary import Vocabulary

kinds = pytest.mark.parametrize("kind", KINDS)
TEXTS = [*CORPUS, "".join(CORPUS), "\n".join(CORPUS) * 2]
# A text without space and newline, with characters of several bytes.
DENSE = [
    '{"a":1,"b":[2,{"c":"d"}]}',
    "https://x.org/?q=a%20b",
    "こんにちは世界你好",
    "ภาษาไทย",
    "😀🎉👩‍👩‍👧🇩🇪",
]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def cases(kind: str, count: int = 60) -> list[tuple[list[int], list[int]]]:
    """Returns prompts and new tokens: texts cut at any token, and random tokens."""
    tokenizer, found = tokenizer_of(kind), []
    for seed in range(count):
        draw = random.Random(seed)
        ids = ids_of(tokenizer, draw.choice(TEXTS))
        if seed % 3 == 0:
            ids = [draw.randrange(len(tokenizer)) for _ in range(50)]
        cut = draw.randrange(len(ids))
        found.append((ids[:cut], ids[cut : cut + draw.randint(1, 60)]))
    return found


@kinds
def test_new_text_goes_on_from_the_prompts(kind: str) -> None:
    tokenizer, checked = tokenizer_of(kind), 0
    for number, (prompt, new) in enumerate(cases(kind, 200)):
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + new))
        broken = "\ufffd" in whole and (number % 3 == 0 or kind == "Llama 2")
        # A prompt may end within a character, or in a space that the next character removes by the clean-up.
        if not broken and whole.startswith(before):
            assert before + new_text(tokenizer, prompt, new) == whole
            checked += 1
    assert checked > 30


@kinds
def test_pieces_are_the_text_whatever_the_passes_are(kind: str) -> None:
    """The joined pieces equal the whole text, and do not depend on how tokens are divided into passes."""
    tokenizer = tokenizer_of(kind)
    for number, (prompt, new) in enumerate(cases(kind)):
        draw = random.Random(number)
        pieces: list[str | None] = []
        served = ServedText(prompt, {}, (), pieces.append)
        stream = TextStream(served, Vocabulary(tokenizer), lambda _: False)
        stream.put_prompt(prompt, frozenset())
        at = 0
        while at < len(new):
            size = draw.randint(1, 6)
            stream.put(torch.tensor(new[at : at + size]))
            at += size
        stream.end()
        assert "".join(pieces) == stream.text == new_text(tokenizer, prompt, new)


@pytest.mark.parametrize("kind", ["byte-level", "Llama 2"])
@pytest.mark.parametrize("text", DENSE)
def test_characters_come_with_the_token_that_completes_them(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, vocabulary = ids_of(tokenizer, "Once upon"), Vocabulary(tokenizer)
    new, given, decoder = NewText(vocabulary, prompt), "", codecs.getincrementaldecoder("utf-8")()
    certain = ""
    for token in ids_of(tokenizer, text):
        _, spelled = new.spelled(token)
        assert spelled is not None
        certain += decoder.decode(spelled)
        given += new.put(token)
        assert given == certain, "no complete character is held back, and no other is given"
    assert new.end() == ""
    assert given.lstrip(" ") == text


@kinds
def test_bytes_of_tokens_are_the_texts(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    vocabulary = Vocabulary(tokenizer)
    for number, (prompt, tokens) in enumerate(cases(kind)):
        new, joined, text = NewText(vocabulary, prompt), b"", ""
        for token in tokens:
            spelled, own = new.spelled(token)
            if own is None:
                known = not vocabulary.token(token).special
                assert known <= (kind == "slow"), "the bytes of users' own parts of characters are not known"
            elif not spelled.startswith("bytes:"):
                assert spelled.encode() == own
            joined += own or b""
            text += new.put(token)
        text += new.end()
        within = tokenizer.decode(prompt).endswith("\ufffd") or "\ufffd" in text
        if number % 3 and kind != "slow" and vocabulary.clean_up is None and not within:
            assert joined.decode("utf-8", "ignore") == text


def test_spaces_and_indentation_of_a_decoder_that_strips() -> None:
    tokenizer = tokenizer_of("Llama 2")
    for text in (" there was a house.", "\n    if x:\n        return 'y'\n", "  two spaces"):
        ids = ids_of(tokenizer, "Once upon a time" + text)
        before = ids_of(tokenizer, "Once upon a time")
        assert ids[: len(before)] == before
        assert new_text(tokenizer, before, ids[len(before) :]) == text
        special = [*before, tokenizer.bos_token_id] * 3
        assert new_text(tokenizer, special, ids[len(before) :]) == text, "special tokens have no text"
    # Without a prompt the first token is decoded as transformers decodes it.
    assert new_text(tokenizer, [tokenizer.bos_token_id], ids_of(tokenizer, "Once")) == "Once"


@kinds
def test_end_tokens_have_no_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, new = ids_of(tokenizer, "Once upon"), ids_of(tokenizer, "a time there")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "<|im_end|>" in new_text(tokenizer, prompt, [*new, end])
    assert new_text(tokenizer, prompt, [*new, end], {end}) == new_text(tokenizer, prompt, new)


def test_a_prompt_that_ends_within_a_character() -> None:
    for kind in ("byte-level", "Llama 2"):
        tokenizer = tokenizer_of(kind)
        ids = ids_of(tokenizer, "a 🎉b")
        at = next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1]).endswith("\ufffd")) + 1
        assert new_text(tokenizer, ids[:at], ids[at:]) == "🎉b"
        assert new_text(tokenizer, ids[:at], ids_of(tokenizer, "b")).strip() == "b"
    # The first two bytes of a surrogate are two broken characters, unlike those of other characters.
    tokenizer = tokenizer_of("byte-level")
    broken = tokenizer.convert_tokens_to_ids(["í", "¹"])
    assert tokenizer.decode([*broken, *ids_of(tokenizer, "b")]) == "\ufffd\ufffdb"
    assert new_text(tokenizer, broken, ids_of(tokenizer, "b")) == "b"


@kinds
@pytest.mark.parametrize("stop", [(), ("never", "<|user|>")])
def test_the_work_for_a_token_does_not_grow(
    kind: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of decoded tokens is counted for a text without spaces and newlines."""
    tokenizer, decoded = tokenizer_of(kind), [0]
    own = type(tokenizer)._decode

    def counted(self: Any, token_ids: Any, *args: Any, **options: Any) -> str:
        decoded[0] += len(token_ids) if isinstance(token_ids, list) else 1
        return own(self, token_ids, *args, **options)

    monkeypatch.setattr(type(tokenizer), "_decode", counted)
    [token] = ids_of(tokenizer, "x")[-1:]
    new, given, most = NewText(Vocabulary(tokenizer), ids_of(tokenizer, "Once"), (), stop), 0, []
    for number in range(1500):
        decoded[0] = 0
        given += len(new.put(token))
        most.append(decoded[0])
        assert given >= number - 1
    assert max(most[20:]) <= 64


def test_the_same_text_from_a_tokenizer_read_again(tmp_path: Any) -> None:
    """A tokenizer of a subclass with its own decoding, whose tokens may not be bytes, gives the same text."""
    tokenizer = llama()
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)

    class Louder(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **options: Any) -> str:
            return str(super()._decode(*args, **options)).upper()

    ids = ids_of(tokenizer, "Once upon a time there")
    assert new_text(again, ids[:2], ids[2:]) == new_text(tokenizer, ids[:2], ids[2:])
    upper = Louder.from_pretrained(tmp_path)
    assert new_text(upper, ids[:2], ids[2:]) == new_text(tokenizer, ids[:2], ids[2:]).upper()


@kinds
def test_special_tokens_that_are_shown_have_their_names_as_text(kind: str) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.add_special_tokens({"extra_special_tokens": ["[CALLS]", "[END]"]})
    calls, end = tokenizer.convert_tokens_to_ids(["[CALLS]", "[END]"])
    ids = ids_of(tokenizer, CORPUS[0])
    before, after = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    for shown in ({calls, end}, {calls}, set()):
        text = NewText(Vocabulary(tokenizer), [], (), (), shown)
        pieces = "".join(map(text.put, [*before, calls, *after, end])) + text.end()
        assert (pieces.count("[CALLS]"), pieces.count("[END]")) == (calls in shown, end in shown)
        rest = pieces.replace("[CALLS]", "").replace("[END]", "")
        # WordPiece writes a piece of a word in another way after another token.
        assert "".join(rest.split()) == "".join(new_text(tokenizer, [], ids).split()) or "WordPiece" in kind
    ended = NewText(Vocabulary(tokenizer), [], {end}, (), {calls, end})
    assert ("".join(map(ended.put, [calls, end])) + ended.end()).strip() == "[CALLS]"

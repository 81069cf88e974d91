"""Texts that go on are tokenized in part, with the ids of whole tokenization."""

import argparse
import inspect
import random
import threading
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.support.models.api_cases import characters
from triforce_tree.requests.chat import chat_ids
from triforce_tree.requests.tokenized_texts import TokenizedTexts

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# No special token between the messages.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Earlier answers lose what is before a mark, as thoughts are dropped in Qwen3's.
SHORTENED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content.split('0')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|end|>"
    "{% endfor %}<|start|>assistant\n"
)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PIECES = [
    "import", " the", "parser", "  ", "    ", "\n", "\n\n", "\t", "12345", "0", " 7", "ü", "日本語", "🙂",
    "'s", "don't", "<|end|>", "<|start|>", "<|en", "aaaaaaaaaaaa", "return self.", "==", ".", " ",
    "ArgumentParser(", "",
]  # fmt: skip
KINDS = ["byte-level", "llama-3", "sentencepiece"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    specials = [AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True, rstrip=True)]
    if kind == "sentencepiece":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        specials.append(AddedToken("<unk>", special=True))
    else:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-3"))
        split = [pre_tokenizers.Split(Regex(LLAMA_3), "isolated")] if kind == "llama-3" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
        )
        tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if kind == "sentencepiece" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(inspect.getsource(argparse).split("\n\n"), trainer)
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Counted:
    """Stands for a tokenizer, and counts the characters that it tokenizes."""

    def __init__(self, texts: TokenizedTexts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        encoded = texts._encoded

        def counted(text: str, special: bool) -> Any:
            self.characters += len(text)
            return encoded(text, special)

        monkeypatch.setattr(texts, "_encoded", counted)


def text(draw: random.Random, pieces: int) -> str:
    return "".join(draw.choices(PIECES, k=pieces))


@pytest.mark.parametrize("template", [CHATML, PLAIN, SHORTENED], ids=["chatml", "plain", "shortened"])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_have_the_ids_of_whole_tokenization(
    kind: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(kind)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    draw, whole, parts = random.Random(f"{kind} {template}"), 0, 0
    for _ in range(4):
        texts = TokenizedTexts(tokenizer)
        counted = Counted(texts, monkeypatch)
        chat: list[dict[str, Any]] = [{"role": "user", "content": text(draw, 3000)}]
        for _ in range(6):
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert chat_ids(texts, chat) == expected
            whole += len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            chat.append({"role": "assistant", "content": text(draw, draw.choice([0, 1, 30]))})
            if draw.random() < 0.2:
                # The client has changed an earlier answer.
                chat[-3 if len(chat) > 3 else -1] = {"role": "assistant", "content": text(draw, 9)}
            chat.append({"role": "user", "content": text(draw, draw.choice([0, 1, 2, 30]))})
        parts += counted.characters
    assert parts < 0.5 * whole


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_end_anywhere_go_on(kind: str) -> None:
    """Within words, numbers, spaces, special tokens and characters of several bytes; with a BOS token."""
    tokenizer, draw = tokenizer_of(kind), random.Random(kind)
    texts = TokenizedTexts(tokenizer)
    whole = text(draw, 3000)
    for _ in range(60):
        end = draw.randrange(len(whole) // 2, len(whole))
        for given in (whole[:end], whole[: end + draw.randrange(9)] + text(draw, draw.randrange(4))):
            assert texts(given)["input_ids"] == tokenizer(given)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["a", "7", " ", "\n", "ab "])
def test_long_runs_before_the_end(kind: str, run: str) -> None:
    """Tokens of a run depend on where it begins: three digits each, say."""
    tokenizer, texts = tokenizer_of(kind), TokenizedTexts(tokenizer_of(kind))
    for length in (9_000, 9_001, 9_002, 9_100):
        given = f"return the{run * length}"
        for end in ("", "x", "77", "  ", " the parser"):
            assert texts(given + end)["input_ids"] == tokenizer(given + end)["input_ids"]


def test_a_second_question_about_a_document_costs_its_own_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("llama-3")
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    texts, document = TokenizedTexts(tokenizer, texts=2), inspect.getsource(argparse)
    counted = Counted(texts, monkeypatch)
    for number, question in enumerate(["What is it?", "And who wrote it?", "Why?"]):
        chat = [{"role": "user", "content": f"{document}\n\n{question}"}]
        assert (
            chat_ids(texts, chat)
            == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        )
        rendered = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        assert counted.characters == rendered if number == 0 else 0 < counted.characters < 5000
        counted.characters = 0
    # Other texts take its place.
    for other in ("a" * 9000, "b" * 9000, "c" * 9000):
        texts(other)
    counted.characters = 0
    chat_ids(texts, chat)
    assert counted.characters >= len(document)


def test_tokenizers_without_merges_are_asked_for_whole_texts() -> None:
    texts = TokenizedTexts(characters())
    for given in ("the cat" * 2000, "the cat" * 2000 + " and"):
        assert texts(given)["input_ids"] == characters()(given)["input_ids"]
    assert not texts._known


def test_threads_share_the_texts() -> None:
    tokenizer, texts = tokenizer_of("byte-level"), TokenizedTexts(tokenizer_of("byte-level"), texts=2)
    whole, wrong = text(random.Random(1), 2500), []

    def ask(number: int) -> None:
        draw = random.Random(number)
        for _ in range(15):
            given = whole[: draw.randrange(len(whole) // 2, len(whole))]
            wrong.extend([given] if texts(given)["input_ids"] != tokenizer(given)["input_ids"] else [])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong

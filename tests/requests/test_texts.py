"""The text of outputs in every kind of call: the continuation of the prompt's, without end tokens."""

import copy
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import TextIteratorStreamer

import triforce_tree
from tests.support.models.scripted import scripted
from tests.support.models.tokenizer_kinds import tokenizer_of
from triforce_tree import Engine
from triforce_tree.config import load_arguments

PROMPT = "Once upon a"
WORDS = " time there\n    x"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}user: Once upon a"
kinds = pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "Unigram", "WordPiece, cleaned up", "slow"])


def ids_of(kind: str, text: str) -> list[int]:
    return list(dict.fromkeys(tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"]))


def script_of(kind: str, *names: str) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and those that follow it: words, an emoji, then the tokens of these names."""
    tokenizer, prompt = tokenizer_of(kind), tokenizer_of(kind)(PROMPT, add_special_tokens=False)["input_ids"]
    prompt = [*prompt[-1:]] if kind == "slow" else prompt
    new = [t for t in ids_of(kind, f"{PROMPT}{WORDS} 🎉") if t not in prompt]
    return prompt, [*new, *tokenizer.convert_tokens_to_ids(list(names))]


def engine_of(kind: str, *names: str, eos: str | None = None, levels: int = 2) -> Engine:
    tokenizer = tokenizer_of(kind)
    prompt, new = script_of(kind, *names)
    target = scripted(tokenizer, [prompt[-1], *new], eos and tokenizer.convert_tokens_to_ids(eos))
    # The target drafts for itself: a pass brings several tokens.
    drafting: dict[str, Any] = {"draft": target, "tree": "chain:3", "rounds": 1} if levels > 1 else {}
    return triforce_tree.load(target, tokenizer=tokenizer, levels=levels, **load_arguments(drafting))


def shown(kind: str, prompt: list[int], new: list[int]) -> str:
    tokenizer = tokenizer_of(kind)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *new]))
    assert whole.startswith(before)
    return whole[len(before) :]


@kinds
@pytest.mark.parametrize("levels", [1, 2])
def test_texts_go_on_from_the_prompts(kind: str, levels: int) -> None:
    engine = engine_of(kind, "<|user|>", "<|tool|>", levels=levels)
    prompt, new = script_of(kind, "<|user|>", "<|tool|>")
    expected = shown(kind, prompt, new)
    assert "<|tool|>" in expected
    assert "<|user|>" not in expected
    greedy = {"max_new_tokens": len(new), "do_sample": False}
    assert engine.generate(prompt, **greedy).text == expected
    assert engine.generate([prompt, prompt[-1:]], **greedy).text[0] == expected
    padded = torch.tensor([[0, 0, *prompt], [1, 1, *prompt]])
    mask = torch.tensor([[0, 0, *[1] * len(prompt)]] * 2)
    assert engine.generate(padded, attention_mask=mask, **greedy).text == [expected] * 2
    # One by one, as the processor reads the texts.
    assert engine.generate([prompt] * 2, no_repeat_ngram_size=9, **greedy).text == [expected] * 2
    assert engine.generate(prompt, num_beams=2, **greedy).text == expected
    sure = {"max_new_tokens": len(new), "do_sample": True, "temperature": 1e-3}
    assert engine.generate(prompt, num_return_sequences=2, **sure).text == [expected] * 2
    [branch] = (tree := engine.tree(prompt)).generate(tree.root, **greedy)
    assert branch.text == expected
    session = engine.session(prompt)
    assert session.generate(max_new_tokens=3, do_sample=False).text + session.generate(
        max_new_tokens=len(new) - 3, do_sample=False
    ).text in (expected, expected.replace("🎉", "\ufffd"))
    assert engine.explain(prompt, max_new_tokens=len(new)).text == expected


@kinds
def test_end_tokens_are_no_text(kind: str) -> None:
    prompt, new = script_of(kind, "<|im_end|>")
    engine, expected = engine_of(kind, "<|im_end|>", eos="<|im_end|>"), shown(kind, prompt, new[:-1])
    in_call = engine_of(kind, "<|im_end|>")
    for made, more in ((engine, {}), (in_call, {"eos_token_id": [0, new[-1]]})):
        greedy = {"max_new_tokens": 50, "do_sample": False, **more}
        out = made.generate(prompt, **greedy)
        assert out.finish_reason == "eos"
        assert out.sequences[0].tolist() == [*prompt, *new], "ids are those of transformers"
        assert (out.text, out.new_tokens) == (expected, len(new))
        assert made.generate(prompt, num_beams=2, **greedy).text == expected
        [branch] = (tree := made.tree(prompt)).generate(tree.root, **greedy)
        assert branch.text == expected


def test_a_conversation_has_its_end_tokens_once() -> None:
    engine = engine_of("Llama 2", "<|im_end|>", eos="<|im_end|>")
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = TEMPLATE
    try:
        session = engine.session([{"role": "system", "content": "Be short."}])
        out = session.generate("Who?", max_new_tokens=50, do_sample=False)
        assert session.messages is not None
        assert session.messages[-1] == {"role": "assistant", "content": out.text}
        following = engine.tokenizer.decode(session.prompt("And then?"))
    finally:
        engine.tokenizer.chat_template = None
    assert out.text == shown("Llama 2", *script_of("Llama 2"))
    assert out.text.startswith(" time there")
    assert f"assistant:{out.text}<|im_end|> user:And then?<|im_end|>" in following


@kinds
def test_stop_strings_are_found_where_the_text_ends(kind: str) -> None:
    """Special tokens by their names, spanning ones, ordinary added ones, within words."""
    engine = engine_of(kind, "<|user|>", "<|tool|>")
    prompt, new = script_of(kind, "<|user|>", "<|tool|>")
    words = shown(kind, prompt, new[:-2])
    part = words.strip()[2:5]
    space = " " if kind.startswith("WordPiece") else ""
    for stop, count in (
        (["<|user|>"], len(new) - 1),
        ([f"<|user|>{space}<|to", "never"], len(new)),
        ("<|tool|>", len(new)),
        (part, next(n for n in range(len(new)) if part in shown(kind, prompt, new[:n]))),
    ):
        asked = {"max_new_tokens": 40, "do_sample": False, "stop_strings": stop}
        out = engine.generate(prompt, **asked)
        assert (out.new_tokens, out.finish_reason) == (count, "stop")
        assert out.text == shown(kind, prompt, new[:count])
        beams = engine.generate(prompt, num_beams=2, early_stopping=True, **asked)
        assert new[: count - 1] == beams.sequences[0, len(prompt) :][: count - 1].tolist()
        assert beams.finish_reason == "stop"
        assert beams.new_tokens == count
        [branch] = (tree := engine.tree(prompt)).generate(tree.root, **asked)
        assert branch.tokens == new[:count]


@kinds
def test_a_token_for_broken_bytes_is_text_at_once(kind: str) -> None:
    """The character that stands for them may be part of a vocabulary, and of a stop string."""
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.add_tokens([AddedToken("\ufffd", special=False, normalized=False)])
    prompt, words = script_of(kind)
    script = [prompt[-1], *words[:2], tokenizer.convert_tokens_to_ids("\ufffd"), *words[2:4]]
    engine = triforce_tree.load(scripted(tokenizer, script), tokenizer=tokenizer, levels=1)
    greedy: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert engine.generate(prompt, **greedy).text.count("\ufffd") == 1
    for more in ({}, {"num_beams": 2, "early_stopping": True}, {"no_repeat_ngram_size": 9}):
        out = engine.generate(prompt, stop_strings="\ufffd", **greedy, **more)
        assert (out.new_tokens, out.finish_reason) == (3, "stop"), more
        assert out.text.endswith("\ufffd")


def test_what_begins_in_the_prompt_does_not_stop() -> None:
    engine = engine_of("byte-level")
    prompt, new = script_of("byte-level")
    crossing = PROMPT[-2:] + shown("byte-level", prompt, new[:1])
    for more in ({}, {"num_beams": 2}):
        asked = {"max_new_tokens": 3, "do_sample": False, "stop_strings": [PROMPT, crossing], **more}
        assert engine.generate(prompt, **asked).finish_reason == "length"


def test_custom_generate_has_the_text() -> None:
    tokenizer = tokenizer_of("Llama 2")
    prompt, new = script_of("Llama 2", "<|user|>")
    model = scripted(tokenizer, [prompt[-1], *new])
    hook = triforce_tree.custom_generate(tokenizer=tokenizer, stop_strings="<|user|>", levels=2)
    out = model.generate(
        torch.tensor([prompt]), custom_generate=hook, max_new_tokens=40, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.text == shown("Llama 2", prompt, new)
    assert out.sequences[0].tolist() == [*prompt, *new]


def test_streamers_of_transformers_go_on_as_they_are() -> None:
    engine = engine_of("byte-level")
    prompt, new = script_of("byte-level")
    streamer = TextIteratorStreamer(engine.tokenizer, skip_prompt=True)
    out = engine.generate(prompt, max_new_tokens=len(new), do_sample=False, streamer=streamer)
    assert "".join(streamer) == out.text

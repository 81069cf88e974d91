"""Messages are prompts by the tokenizer's chat template, as in transformers' pipelines."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, TextGenerationPipeline

import triforce_tree
from tests.support.models.api_cases import TARGET, characters, new, small_engine, text_of
from tests.support.models.families import greedy
from triforce_tree import Engine

NEW = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no\n tools here') }}{% endif %}"
    "{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}. "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
USER = {"role": "user", "content": "Where is the cat now"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": "Answer at once"}, USER],
    "turns": [USER, {"role": "assistant", "content": "On the roof"}, {"role": "user", "content": "Why"}],
    "answer to continue": [USER, {"role": "assistant", "content": "On the roof of"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Where is the cat now"}]}],
}


def templated() -> PreTrainedTokenizerFast:
    tokenizer = characters()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load(TARGET, tokenizer=templated(), levels=2)


def ids_of(chat: list[dict[str, Any]]) -> list[int]:
    continued = chat[-1]["role"] == "assistant"
    text = templated().apply_chat_template(
        chat, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
    )
    assert isinstance(text, str)
    assert text.endswith("roof of" if continued else "assistant ")
    ids: list[int] = templated()(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_continued(engine: Engine, name: str) -> None:
    prompt = ids_of(CHATS[name])
    out = engine.generate(CHATS[name], **GREEDY)
    assert new(out, prompt) == greedy(TARGET, prompt, NEW)
    assert out.text == text_of(new(out, prompt))


def test_a_pipeline_of_transformers_gives_the_same_text(engine: Engine) -> None:
    pipeline = TextGenerationPipeline(model=TARGET, tokenizer=templated(), device=torch.device("cpu"))
    for chat in CHATS.values():
        theirs = pipeline(chat, return_full_text=False, **GREEDY)[0]["generated_text"]
        assert engine.generate(chat, **GREEDY).text == theirs


def test_several_chats_are_a_batch(engine: Engine) -> None:
    chats = [CHATS["question"], CHATS["turns"]]
    out = engine.generate(chats, pad_token_id=9, **GREEDY)
    short, long = map(ids_of, chats)
    assert out.sequences[:, -NEW:].tolist() == [greedy(TARGET, short, NEW), greedy(TARGET, long, NEW)]
    assert out.sequences[0, :-NEW].tolist() == [9] * (len(long) - len(short)) + short
    assert len(out.text) == 2
    single = engine.generate([CHATS["turns"]], **GREEDY)
    assert new(single, long) == greedy(TARGET, long, NEW)


def test_a_template_of_the_users_own_arguments_goes_through_the_tokenizer(engine: Engine) -> None:
    """The tokenizer gets what a template takes beside messages, and its output is a prompt."""
    batch = templated().apply_chat_template(
        CHATS["question"], add_generation_prompt=False, return_dict=True, return_tensors="pt"
    )
    batch.pop("token_type_ids", None)
    prompt = batch["input_ids"][0].tolist()
    assert new(engine.generate(batch, **GREEDY), prompt) == greedy(TARGET, prompt, NEW)


IMAGE = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
REFUSED: dict[str, tuple[Any, str]] = {
    "a message without role": ([{"content": "hi"}], "message 0 of a chat has 'content' and no role"),
    "an empty message": ([USER, {}], "message 1 of a chat has nothing and no role"),
    "a role that is no text": ([{"role": 3, "content": "hi"}], "no role"),
    "messages and text": ([USER, "hi"], "message 1 of a chat is of type str; give"),
    "chats and text": ([[USER], "hi"], "a batch of chats holds str; give lists of messages"),
    "chats and ids": ([[USER], [1, 2]], "message 0 of a chat is of type int"),
    "an empty chat": ([[USER], []], "a chat is empty; give at least one message"),
    "an image": (IMAGE, "message 0 of a chat holds content of type 'image', and .* text alone"),
    "no content": ([USER, {"role": "user", "content": None}], "content of message 1 of a chat is null"),
    "a part that is a string": ([{"role": "user", "content": ["hi"]}], "holds content of type 'str'"),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "a part without text"),
    "a content that is no text": ([{"role": "user", "content": 3}], "content of message 0 .* is int"),
    "what the template refuses": (
        [{"role": "tool", "content": "3"}],
        "chat template refuses these messages: no tools here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_chat_is_refused_in_one_line(engine: Engine, case: str) -> None:
    given, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        engine.generate(given, **GREEDY)
    assert "\n" not in str(caught.value)


def test_messages_need_a_tokenizer_with_a_template() -> None:
    with pytest.raises(ValueError, match=r"^this tokenizer has no chat template, .* give text, or"):
        small_engine().generate([USER], **GREEDY)
    with pytest.raises(ValueError, match=r"^messages need a tokenizer: load\(\.\.\., tokenizer=\.\.\.\)$"):
        triforce_tree.load(TARGET).generate([USER], **GREEDY)


def test_messages_are_text_and_take_no_mask(engine: Engine) -> None:
    with pytest.raises(ValueError, match="attention_mask belongs to token ids"):
        engine.generate([USER], attention_mask=[[1]], **GREEDY)


def test_a_much_too_long_chat_is_refused_by_its_beginning(engine: Engine) -> None:
    limit = TARGET.config.max_position_embeddings
    count = 17 * limit
    with pytest.raises(ValueError, match=f"prompt of {count:,} characters has more than"):
        engine.generate([{"role": "user", "content": "a" * count}], **GREEDY)

"""Parsing of requests: fields, messages and prompts."""

import json
from typing import Any

import pytest

from tests.support.processes.served import NAME, PROMPT, TEMPLATE
from triforce_tree.engine import Engine
from triforce_tree.requests.tokenized_texts import PromptError, TokenizedTexts
from triforce_tree.server.reading import Read, Reader, Route, Sizes
from triforce_tree.server.refusals import RefusedError

SIZES = Sizes(NAME, vocabulary=4096, positions=131_072, texts=4)
USER = {"role": "user", "content": "hello"}
# Like that of Llama 3.2 Vision, this template supports lists of parts only in messages of users.
BY_PARTS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.content is string or m.role == 'system' %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "assistant:"
)


@pytest.fixture(scope="module")
def reader(engine: Engine) -> Reader:
    assert engine.tokenizer is not None
    return Reader(engine.tokenizer, SIZES)


def read(reader: Reader, chat: bool, **fields: Any) -> Read:
    needed = {"messages": [USER]} if chat else {"prompt": PROMPT}
    return reader.read(
        json.dumps({"model": NAME, **needed, **fields}).encode(), Route.CHAT if chat else Route.COMPLETIONS
    )


def refused(reader: Reader, chat: bool, **fields: Any) -> str:
    with pytest.raises((RefusedError, PromptError)) as raised:
        read(reader, chat, **fields)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


# Fields that chat and completion requests refuse, and a word of the message.
WRONG: dict[str, list[Any]] = {
    "temperature": [True, "0.5", -1, 1e300, 1e-300, 10**400, [1], {}],
    "top_p": [True, "1", 0, 1.1, 1e-320, -0.5],
    "top_k": [True, 1.5, "4", -2, 2**40],
    "repetition_penalty": [True, 0, 1e-300, 1e300, "1", -1],
    "max_tokens": [True, "8", 8.0, 0, -1, 2**40, []],
    "n": [True, 1.0, "1", 0, 129],
    "seed": [True, "1", 1.0, -1, 2**63],
    "stop": [1, True, "", ["a", 1], ["a", ""], [["a"]], {"a": 1}, ["a"] * 5, "\ud83d", ["a\udc00"]],
    "stream": [1, 0, "yes", "true", []],
    "stream_options": [True, [], {"include_usage": 1}, {"other": True}],
    "model": [1, True, ["pair"], None],
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_values_of_wrong_types_and_sizes_are_refused_by_name(reader: Reader, name: str, chat: bool) -> None:
    for value in WRONG[name]:
        more = {"stream": True} if name == "stream_options" else {}
        assert name in refused(reader, chat, **{name: value}, **more) or name == "stream_options"


def test_log_probabilities_of_chats_are_a_switch_and_of_completions_a_number(reader: Reader) -> None:
    for value in (1, 0, "true", [True]):
        assert "logprobs" in refused(reader, True, logprobs=value)
    for value in (True, False, "1", 1.0, 21, -1):
        assert "logprobs" in refused(reader, False, logprobs=value)
    assert read(reader, True, logprobs=True, top_logprobs=2).asked.alternatives == 2
    assert read(reader, True, logprobs=False, top_logprobs=0).asked.alternatives is None
    assert read(reader, False, logprobs=0).asked.alternatives == 0


def test_bad_words_of_blanks_have_tokens(reader: Reader, engine: Engine) -> None:
    for word in (" ", "\n", "\n\n"):
        ids = tuple(engine.tokenizer.encode(word, add_special_tokens=False))
        assert ids in read(reader, False, bad_words=[word]).asked.bad_word_ids
    of_text = [read(reader, False, bad_words=[word]).asked.bad_word_ids for word in ("the", " the")]
    assert of_text[0] == of_text[1]


NOTHING: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "echo": False, "suffix": "",
    "tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"},
    "modalities": ["text"], "best_of": 1, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "add_generation_prompt": True, "continue_final_message": False, "ignore_eos": False, "min_tokens": 0,
    "min_p": 0.0, "length_penalty": 1.0, "stop_token_ids": [], "metadata": {"a": "b"},
    "store": True, "top_k": -1, "unknown": None, "max_completion_tokens": None, "guided_json": None,
    "verbosity": "medium", "use_beam_search": False,
}  # fmt: skip
# Values that ask for something although they are false, 0 or empty; and 1 instead of true.
SOMETHING: dict[str, list[Any]] = {
    "skip_special_tokens": [False, 0, "", 1],
    "spaces_between_special_tokens": [False],
    "add_generation_prompt": [False, 0, []],
    "continue_final_message": [True, 0],
    "add_special_tokens": [False, True, 0],
    "echo": [True, 0, ""],
    "suffix": ["end", [], False, 0],
    "best_of": [0, 2, True, False],
    "frequency_penalty": [2.5, False, "0", []],
    "include_reasoning": [False],
    "length_penalty": [0, True],
    "min_tokens": [-3, False],
    "unknown": [False, 0, "", [], {}, 0.0],
    "parallel": [False],
    "truncate_prompt_tokens": [0],
    "chat_template": ["", False],
    "top_logprob": [0],
}


def test_values_that_ask_for_nothing_are_taken(reader: Reader) -> None:
    own = {"add_generation_prompt", "continue_final_message"}
    assert read(reader, True, **NOTHING).asked == read(reader, True).asked
    given = {name: value for name, value in NOTHING.items() if name not in own}
    assert read(reader, False, **given).asked == read(reader, False).asked


@pytest.mark.parametrize("name", SOMETHING)
def test_values_that_ask_for_something_are_refused(reader: Reader, name: str) -> None:
    for value in SOMETHING[name]:
        said = refused(reader, True, **{name: value})
        assert said.startswith(name)
        assert "not supported" in said or "must be" in said


def test_a_last_answer_is_continued_and_other_wishes_are_refused(reader: Reader) -> None:
    chat = [USER, {"role": "assistant", "content": "Well"}]
    read(reader, True, messages=chat, add_generation_prompt=False, continue_final_message=True)
    assert "add_generation_prompt" in refused(reader, True, messages=chat, add_generation_prompt=True)
    assert "continue_final_message" in refused(reader, True, messages=chat, continue_final_message=False)


def test_fields_of_chats_and_of_completions_are_not_each_others(reader: Reader) -> None:
    for value in (0, 5, False, []):
        assert "max_completion_tokens" in refused(reader, False, max_completion_tokens=value)
        assert "messages" in refused(reader, False, messages=value)
        assert "prompt" in refused(reader, True, prompt=value)


BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no JSON"),
    "a number": (b"1", "no JSON object"),
    "not ended": (b"{", "no JSON"),
    "no UTF-8": (b'{"model": "\xff"}', "no JSON"),
    "deep": (b'{"a":' * 100_000, "nested too deeply"),
    "deep lists": (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "many digits": (b'{"seed": ' + b"9" * 100_000 + b"}", "thousands of digits"),
    "many digits in a name": (b'{"' + b"9" * 100_000 + b'": 1}', "model is missing"),
    "more than a number": (b'{"model":"pair","prompt":"a","temperature":1e400}', "1e400 is no finite number"),
    "not a number": (b'{"model":"pair","prompt":"a","metadata":{"a":[NaN]}}', "NaN is no finite number"),
    "infinity": (b'{"model":"pair","prompt":"a","logit_bias":{"1":-Infinity}}', "is no finite number"),
    "a long number": (b'{"model":"pair","prompt":"a","top_p":' + b"9" * 10**5 + b".0}", "no finite number"),
    "names of any characters": (
        '{"model":"pair","prompt":"a","a\\nb\\ud800é":1}'.encode(),
        "is not supported",
    ),
    "a long name": (b'{"model":"pair","prompt":"a","' + b"a" * 10**6 + b'":1}', "is not supported"),
    "another model": (b'{"model":"' + b"a" * 10**6 + b'","prompt":"a"}', "is not served here"),
    "half a model": (b'{"model":"\\ud800","prompt":"a"}', "is not served here"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_requests_are_refused_in_one_short_line(reader: Reader, name: str) -> None:
    body, words = BODIES[name]
    with pytest.raises(RefusedError) as raised:
        reader.read(body, Route.COMPLETIONS)
    said = str(raised.value)
    assert words in said
    assert len(said) < 300
    said.encode()


PROMPTS: list[tuple[Any, str]] = [
    (1, "must be a text"),
    (True, "must be a text"),
    ({"a": 1}, "must be a text"),
    ([], "must be a text"),
    ([True], "must be a text"),
    ([1, True], "must be a text"),
    ([1.0, 2], "must be a text"),
    (["a", 1], "must be a text"),
    ([[1], "a"], "must be a text"),
    ([[1, True]], "must be a text"),
    ([[[1]]], "must be a text"),
    ([{}], "must be a text"),
    ([None], "must be a text"),
    ("", "is empty"),
    ([[1], []], "is empty"),
    ([1, 4096], "4096 lies outside the vocabulary of 4096"),
    ([-1], "-1 lies outside"),
    ([10**400], "of many digits lies outside"),
    ("a\ud800b", "no UTF-8"),
    (["a", "\udfff"], "no UTF-8"),
]


@pytest.mark.parametrize("prompt, words", PROMPTS, ids=lambda value: repr(value)[:24])
def test_prompts_of_other_forms_are_refused(reader: Reader, prompt: Any, words: str) -> None:
    assert words in refused(reader, False, prompt=prompt)


MESSAGES: list[tuple[Any, str]] = [
    ("hello", "messages"),
    ([], "messages"),
    ([1], "message 0 of a chat is of type int"),
    ([[USER]], "message 0 of a chat is of type list"),
    ([USER, None], "message 1 of a chat is of type NoneType"),
    ([{}], "no role"),
    ([{"content": "a"}], "no role"),
    ([{"role": None, "content": "a"}], "no role"),
    ([{"role": 1, "content": "a"}], "no role"),
    ([{"role": "user"}], "content of message 0 of a chat is null"),
    ([{"role": "user", "content": None}], "content of message 0 of a chat is null"),
    ([{"role": "system", "content": None}, USER], "content of message 0 of a chat is null"),
    ([{"role": "user", "content": []}], "content of message 0 of a chat is empty"),
    ([{"role": "user", "content": 3}], "content of message 0 of a chat is int"),
    ([{"role": "user", "content": {"type": "text", "text": "a"}}], "content of message 0 of a chat is dict"),
    ([{"role": "user", "content": ["a"]}], "of type 'str'"),
    ([{"role": "user", "content": [{"text": "a"}]}], "of type None"),
    ([{"role": "user", "content": [{"type": "text"}]}], "a part without text"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "a part without text"),
    ([{"role": "user", "content": [{"type": "text", "text": ["a"]}]}], "a part without text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "'image_url'"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio'"),
    ([USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "'refusal'"),
    ([{"role": "\ud800", "content": "a"}], "no UTF-8"),
    ([{"role": "user", "content": "a\udc00"}], "no UTF-8"),
    ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "no UTF-8"),
    (
        [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}, USER],
        "message 1 of a chat has wrong tool_calls",
    ),
    ([{**USER, "audio": {"id": "a"}}], "message 0 has audio"),
]


@pytest.mark.parametrize("messages, words", MESSAGES, ids=lambda value: str(ascii(value))[:40])
def test_messages_of_other_forms_are_refused(reader: Reader, messages: Any, words: str) -> None:
    assert words in refused(reader, True, messages=messages)


def prompt_of(tokenizer: Any, template: str, *messages: dict[str, Any]) -> str:
    tokenizer.chat_template, before = template, tokenizer.chat_template
    try:
        [ids] = read(Reader(tokenizer, SIZES), True, messages=list(messages)).prompts
        return str(tokenizer.decode(ids))
    finally:
        tokenizer.chat_template = before


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TEMPLATES = {
    "prints": TEMPLATE,
    "trims": TEMPLATE.replace("m.content", "m.content | trim"),
    "concatenates": TEMPLATE.replace("{{ m.content }}", "{{ '' + m.content }}"),
    "as JSON": TEMPLATE.replace("m.content", "m.content if m.content is string else m.content | tojson"),
    "by parts": BY_PARTS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_in_parts_is_text(engine: Engine, name: str) -> None:
    tokenizer, template = engine.tokenizer, TEMPLATES[name]
    whole = prompt_of(tokenizer, template, USER)
    assert whole == "user: hello\nassistant:"
    assert prompt_of(tokenizer, template, {"role": "user", "content": parts("hello")}) == whole
    found = prompt_of(tokenizer, template, {"role": "user", "content": parts("first", "second")})
    joined = "<first><second>" if name == "by parts" else "first\nsecond"
    assert found == f"user: {joined}\nassistant:"
    found = prompt_of(tokenizer, template, {"role": "system", "content": parts("a", "b")}, USER)
    assert found == "system: a\nb\nuser: hello\nassistant:"


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_without_content_is_empty(engine: Engine, name: str) -> None:
    null = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None}
    for answer in (null, {"role": "assistant"}):
        found = prompt_of(engine.tokenizer, TEMPLATES[name], USER, answer, USER)
        assert found == "user: hello\nassistant: \nuser: hello\nassistant:"


def test_what_a_template_raises_is_told_and_what_happens_in_it_is_not(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    with pytest.raises(PromptError, match=r"refuses these messages: only users \(not tool\)$") as raised:
        prompt_of(
            tokenizer, "{{ raise_exception('only users\n(not ' + messages[0].role + ')') }}",
            {"role": "tool", "content": "a"},
        )  # fmt: skip
    assert raised.value.sentence == str(raised.value)
    for template in ("{{ 1 + messages[0].content }}", "{{ none.field.other }}", "{% for m in %}"):
        with pytest.raises(PromptError, match=r"fails on these messages; check .*: \w+Error \(") as raised:
            prompt_of(tokenizer, template, USER)
        assert raised.value.sentence.endswith("check their roles and contents")


def test_a_conversation_is_tokenized_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, asked = TokenizedTexts._encoded, []

    def counted(texts: TokenizedTexts, text: str, special: bool) -> Any:
        asked.append(len(text))
        return encoded(texts, text, special)

    monkeypatch.setattr(TokenizedTexts, "_encoded", counted)
    assert engine.tokenizer is not None
    own = Reader(engine.tokenizer, SIZES)
    chat = [{"role": "user", "content": PROMPT * 200}]
    read(own, True, messages=chat)
    assert sum(asked) >= len(PROMPT) * 200
    asked.clear()
    chat += [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "And then?"}]
    read(own, True, messages=chat)
    assert 0 < sum(asked) < len(PROMPT) * 120

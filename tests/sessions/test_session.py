"""Sessions: fork, trim, what may be asked, messages, memory in reserve."""

import argparse
import copy
import inspect
from typing import Any

import pytest

import triforce_tree
from tests.support.models.api_cases import characters
from tests.support.models.families import prompt_of
from tests.support.models.session_cases import NINE, PROMPT, TEMPLATE, cold, engine, made

pytestmark = pytest.mark.usefixtures("small_rings")


def test_forks_go_on_by_themselves() -> None:
    session = engine().session(PROMPT)
    session.generate(**NINE)
    other = session.fork()
    tokens = list(session.tokens)
    session.generate([1, 2, 3], **NINE)
    out = other.generate([4, 5], **NINE)
    assert out.reused_tokens >= len(tokens) - 1, "what they have in common"
    assert other.tokens == cold([*tokens, 4, 5])
    assert session.tokens == cold([*tokens, 1, 2, 3])
    asked = [*session.tokens, 6]
    out = session.generate([6], **NINE)
    assert out.reused_tokens >= len(tokens) - 1
    assert session.tokens == cold(asked)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_forks_of_windows_and_states(family: str) -> None:
    """They go on from the end of the prompt that they have in common, which is copied."""
    session = made(family).with_options().session(PROMPT)
    session.generate(**NINE)
    other = session.fork()
    tokens = list(session.tokens)
    session.generate(prompt_of(60), **NINE)
    for each, question in ((other, [4, 5]), (session.fork(), [6]), (other.fork(), [7])):
        asked = [*each.tokens, *question]
        assert each.generate(question, **NINE).reused_tokens >= 149
        assert each.tokens == cold(asked, family)
    session.trim(len(tokens) - 9)
    assert session.generate(**NINE).reused_tokens == 149
    assert session.tokens == tokens


def test_trimmed_tokens_are_forgotten() -> None:
    session = engine().session(PROMPT)
    session.generate(**NINE)
    session.trim(101)
    assert session.tokens == PROMPT[:101]
    out = session.generate([7, 7, 7], **NINE)
    assert out.reused_tokens == 101
    assert session.tokens == cold([*PROMPT[:101], 7, 7, 7])
    session.trim(len(session.tokens) - 4)
    asked = list(session.tokens)
    assert session.generate(**NINE).reused_tokens == len(asked) - 1, "nothing to prefill"
    assert session.tokens == cold(asked)
    wrong: Any
    for wrong in (-1, len(session.tokens) + 1, 1.5):
        with pytest.raises(ValueError, match=f"length={wrong} must lie between 0 and the"):
            session.trim(wrong)


def test_memory_in_reserve_is_taken_at_once() -> None:
    own = engine()
    session = own.session(PROMPT, reserve=1500)
    session.generate(**NINE)
    program = own._hierarchy.last_program
    assert 150 + 1500 <= program.max_seq_len <= 2048
    session.generate(prompt_of(1200), **NINE)
    assert own._hierarchy.last_program is program


def test_prefill_before_the_first_question() -> None:
    session = engine().session(PROMPT)
    counted: list[int] = []
    assert session.prefill(counted.append) == 0
    assert sum(counted) == 149
    assert session.prefill() == 149
    assert session.generate([3], **NINE).reused_tokens == 149
    assert session.tokens == cold([*PROMPT, 3])


def test_text_and_its_continuation() -> None:
    session = engine().session("A text that goes on for a while. ")
    out = session.generate("And on. ", **NINE)
    assert (
        session.tokens[:-9]
        == made("llama-gqa").tokenizer("A text that goes on for a while. And on. ")["input_ids"]
    )
    assert out.new_tokens == 9
    assert session.messages is None


def test_a_conversation() -> None:
    """Each call renders all messages; what the template has written before is kept."""
    own = engine()
    tokenizer = own.tokenizer
    session = own.session([{"role": "system", "content": "Be brief. " * 12}])
    assert session.tokens == []
    first = session.generate("Who is it", **NINE)
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    assert session.messages[-1]["content"] == first.text
    messages = [*session.messages, {"role": "user", "content": "Why"}]
    out = session.generate(messages[-1:], **NINE)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert session.tokens == cold(list(rendered))
    assert out.reused_tokens >= len(first.sequences[0]) - 9 - 1
    length = len(first.sequences[0])
    session.trim(length)
    assert len(session.messages) == 3
    session.trim(3)
    assert [m["role"] for m in session.messages] == ["system"]


@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
def test_a_message_that_is_continued_keeps_its_form(parts: bool) -> None:
    own = made("llama-gqa").with_options()
    own.tokenizer = characters()
    own.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )

    def content(text: str) -> Any:
        return [{"type": "text", "text": "Well"}, {"type": "text", "text": text}] if parts else text

    session = own.session(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content("So")}]
    )
    out = session.generate(**NINE)
    assert out.text
    assert session.messages[-1] == {"role": "assistant", "content": content(f"So{out.text}")}


WRONG: dict[str, tuple[Any, Any, str]] = {
    "rows": ([[1, 2], [3, 4]], None, "a session is one sequence, not 2; open one for each"),
    "texts": (["a", "b"], None, "a session is one sequence, not 2"),
    "chats": ([[{"role": "user", "content": "a"}]] * 2, None, "a session is one conversation, not 2"),
    "messages after text": ([1, 2], [{"role": "user", "content": "a"}], "this session continues a text"),
    "ids after messages": ([{"role": "user", "content": "a"}], [1, 2], "this session is a conversation"),
    "nothing": (None, None, "there is nothing to continue"),
    **{
        f"an assistant's message with {content!r}": (
            None,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}],
            message,
        )
        for content, message in (
            (None, "the last message is the assistant's, and has no text"),
            ([], "the content of message 1 of a chat is empty"),
            ([{"type": "text"}], "message 1 of a chat holds a part without text"),
        )
    },
    "no UTF-8": ("a", "b\udcff", r"the text holds '\\udcff' at character 1, .* no UTF-8"),
    "no UTF-8 in messages": (None, [{"role": "user", "content": "\udcff"}], "at character 0, .* no UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals(case: str) -> None:
    document, question, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        engine().session(document).generate(question, **NINE)


@pytest.mark.parametrize("name", ["inputs", "input_ids", "attention_mask"])
def test_a_question_by_a_keyword_is_refused(name: str) -> None:
    session = engine().session(PROMPT)
    with pytest.raises(ValueError, match=f"^{name} is no argument of a session; give the question first"):
        session.generate(**{name: [[1, 1]]}, **NINE)
    assert session.tokens == PROMPT


@pytest.mark.parametrize("reserve", [-1, 1.5, "x"])
def test_a_wrong_reserve_is_refused(reserve: Any) -> None:
    with pytest.raises(ValueError, match=r"^reserve=.* must be"):
        engine().session(PROMPT, reserve=reserve)


def test_a_refused_call_leaves_the_session_as_it_was() -> None:
    session = engine().session(PROMPT)
    session.generate(**NINE)
    before = list(session.tokens)
    with pytest.raises(ValueError, match="exceed the model's 2048 positions"):
        session.generate(max_new_tokens=4000)
    assert session.tokens == before
    session.generate([2], **NINE)
    assert session.tokens == cold([*before, 2])


def test_a_question_that_was_changed_is_read_again() -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Who is it"}]
    session, other = engine().session(), engine().session()
    session.prompt(asked)
    asked[0]["content"] = "Why not"
    asked.append({"role": "user", "content": "And when"})
    session.generate(asked, **NINE)
    other.generate(asked, **NINE)
    assert (session.messages, session.tokens) == (other.messages, other.tokens)
    text, ids = engine().session(PROMPT), [1, 2]
    text.prompt(ids)
    ids.append(3)
    text.generate(ids, **NINE)
    assert text.tokens == cold([*PROMPT, 1, 2, 3])


def test_a_question_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second turn does not read it if :meth:`Session.prompt` has read an equal one."""
    for question in ("Who is it", [{"role": "user", "content": "Who is it"}]):
        session = engine().session([{"role": "system", "content": "Be brief"}])
        session.prompt(question)
        with monkeypatch.context() as patched:
            patched.setattr(session, "_asked", None)
            session.generate(copy.deepcopy(question), **NINE)


def test_a_conversation_without_messages_has_nothing_to_continue() -> None:
    session = engine().session()
    session.generate([{"role": "user", "content": "a"}], **NINE)
    session.trim(2)
    assert session.messages == []
    with pytest.raises(ValueError, match="there is nothing to continue"):
        session.generate(**NINE)


def test_refused_messages_do_not_begin_a_conversation() -> None:
    session = engine().session()
    with pytest.raises(ValueError, match="one conversation, not 2"):
        session.generate([[{"role": "user", "content": "a"}]] * 2, **NINE)
    assert session.messages is None
    session.generate([1, 2, 3], **NINE)
    assert session.tokens == cold([1, 2, 3])


def test_a_fork_reads_its_own_question_again() -> None:
    """An answer begun by the user is taken out of the messages of the session that continues it alone."""
    begun = [{"role": "user", "content": "Who"}, {"role": "assistant", "content": "It is"}]
    session = engine().session([{"role": "system", "content": "Be brief"}])
    session.prompt(begun)
    other = session.fork()
    for each in (session, other):
        each.generate(begun, **NINE)
        assert [m["role"] for m in each.messages] == ["system", "user", "assistant"]


def test_a_conversation_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn tokenizes what is new; forks know the same text."""
    own = triforce_tree.load(device="cpu", levels=1)
    assert own.tokenizer is not None
    own.tokenizer.chat_template = TEMPLATE
    session = own.session([{"role": "user", "content": inspect.getsource(argparse)[:20_000]}])
    prompt = session.prompt()
    call, asked = type(own.tokenizer).__call__, []

    def counted(tokenizer: Any, text: str, **options: Any) -> Any:
        asked.append(len(text))
        return call(tokenizer, text, **options)

    monkeypatch.setattr(type(own.tokenizer), "__call__", counted)
    for each in (session, session.fork()):
        found = each.prompt("And why?")
        assert 0 < sum(asked) < 6_000
        asked.clear()
        expected = own.tokenizer.apply_chat_template(
            [*(each.messages or []), {"role": "user", "content": "And why?"}], add_generation_prompt=True
        )
        assert found == expected["input_ids"]
        assert len(found) > len(prompt)
        asked.clear()

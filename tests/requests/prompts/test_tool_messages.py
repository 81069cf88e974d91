"""Messages with tool calls, their results and reasoning, in chat templates of several conventions."""

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import triforce_tree
from triforce_tree.requests.chat import chat_ids, check_chat
from triforce_tree.requests.tokenized_texts import PromptError

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "Yes."},
]
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
OBJECTS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
TEXTS = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
# As those of Qwen 3, which take both.
BOTH = (
    "{% for c in m.tool_calls or [] %}{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
)
END = "{% if m.name %}<{{ m.name }}>{% endif %}|{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = triforce_tree.load(device="cpu", levels=2).tokenizer
    assert found is not None
    return copy.deepcopy(found)


def rendered(tokenizer: PreTrainedTokenizerBase, template: str, chat: Any = CHAT, **variables: Any) -> str:
    tokenizer.chat_template = template
    return str(tokenizer.decode(chat_ids(tokenizer, chat, **variables)))


@pytest.mark.parametrize(
    "calls, shown",
    [(OBJECTS, '{"city": "Bonn"}'), (TEXTS, 'call {"city": "Bonn"}'), (BOTH, '{"city": "Bonn"}')],
    ids=["objects", "texts", "both"],
)
def test_arguments_are_given_as_the_template_reads_them(
    tokenizer: PreTrainedTokenizerBase, calls: str, shown: str
) -> None:
    expected = f"system: Be short.|user: Rain?|assistant: {shown}|tool: Yes.<weather>|"
    assert rendered(tokenizer, ROLES + calls + END) == expected


@pytest.mark.parametrize(
    "given, shown", [({"city": "Bonn"}, '{"city": "Bonn"}'), (None, "{}"), ("no object", '"no object"')]
)
def test_arguments_of_other_types(tokenizer: PreTrainedTokenizerBase, given: Any, shown: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": given}}
    chat = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}, CHAT[3]]
    assert f"assistant: {shown}|" in rendered(tokenizer, ROLES + OBJECTS + END, chat)


def test_reasoning_has_the_name_that_the_template_reads(tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("reasoning_content", "thinking"):
        template = ROLES + f"{{% if m.{name} %}}[{{{{ m.{name} }}}}]{{% endif %}}" + OBJECTS + END
        assert "assistant: [Hm.]" in rendered(tokenizer, template)
    assert "Hm." not in rendered(tokenizer, ROLES + OBJECTS + END)


def test_developers_and_tools_are_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{# developer #}{% for t in tools %}{{ t.name }} {% endfor %}" + ROLES + OBJECTS + END
    text = rendered(tokenizer, template, tools=[{"name": "weather"}])
    assert text.startswith("weather developer: Be short.|")


@pytest.mark.parametrize(
    "calls",
    [
        "a", [1], [{"id": "a"}], [{"function": {"name": 1}}], [{"function": {"name": "a", "arguments": 1}}],
        [{"id": {}, "function": {"name": "a"}}],
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(calls: Any) -> None:
    with pytest.raises(PromptError, match="message 1 of a chat has wrong tool_calls"):
        check_chat([CHAT[1], {"role": "assistant", "tool_calls": calls}, CHAT[1]])


def test_wrong_identifiers_of_results_are_refused() -> None:
    with pytest.raises(PromptError, match="tool_call_id of message 3 of a chat is no text"):
        check_chat([*CHAT[:3], {"role": "tool", "tool_call_id": ["a"], "content": "b"}])

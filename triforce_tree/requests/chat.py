"""Chats (lists of messages) as prompts, through the tokenizer's chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from triforce_tree.requests.tokenized_texts import (
    PASSED_ON,
    PromptError,
    TokenizedTexts,
    Tokenizer,
    check_text,
    text_ids,
)

Message = Mapping[str, Any]
Chat = Sequence[Message]

# A token has fewer characters than this, except in long runs of one character.
_MANY_CHARACTERS = 16
# The most characters of names and values in errors.
_SHOWN_CHARACTERS = 60


def chats_of(given: Any) -> list[Chat] | None:
    """Returns the chats in a prompt (a list of messages, or a list of such lists), or None if it has no
    messages.

    Raises:
        PromptError: the list has entries that are not messages; a message lacks its role or content, or its
            content is not text; a chat is empty.
    """
    if not isinstance(given, (list, tuple)) or not given:
        return None
    rows = [item for item in given if isinstance(item, list | tuple)] if _has(given, list, tuple) else []
    if not any(_has(items, Mapping) for items in (given, *rows)):
        return None
    chats: list[Any] = [given] if isinstance(given[0], Mapping) else list(given)
    for chat in chats:
        check_chat(chat)
    return chats


def check_chat(chat: Any) -> None:
    """Checks that ``chat`` is a list of messages whose content is text.

    Raises:
        PromptError: an entry is not such a message; the error names the first one.
    """
    if not isinstance(chat, (list, tuple)):
        raise PromptError(f"a batch of chats holds {type(chat).__name__}; give lists of messages")
    if not chat:
        raise PromptError("a chat is empty; give at least one message")
    for number, message in enumerate(chat):
        _check_message(message, number)


def encoded(
    tokenizer: Tokenizer, given: str | Chat, positions: int | None = None, **variables: Any
) -> list[int]:
    """Returns the token ids of a text or a chat, without the warning that a text exceeds the model.

    Args:
        variables: for the template of a chat, see :func:`chat_ids`.

    Raises:
        PromptError: the beginning of the text alone has more than ``positions`` tokens (tokenizing takes
            seconds per megabyte, so a text that is much too long is not tokenized to its end); the text is
            not valid UTF-8; the tokenizer fails; or, for a chat, there is no chat template or it refuses
            these messages.
    """
    text = given if isinstance(given, str) else characters(given)
    if positions is not None and len(text) > _MANY_CHARACTERS * positions:
        start = text_ids(tokenizer, text[: 3 * _MANY_CHARACTERS * positions // 8])
        if len(start) > positions:
            raise PromptError(
                f"the prompt of {len(text):,} characters has more than {len(start):,} tokens, and the model "
                f"{positions:,} positions; shorten it"
            )
    return text_ids(tokenizer, given) if isinstance(given, str) else chat_ids(tokenizer, given, **variables)


def chat_ids(tokenizer: Tokenizer, chat: Chat, **variables: Any) -> list[int]:
    """Returns the token ids of a chat, up to the place where the assistant's answer begins.

    As in transformers' pipelines, a last message of the assistant is continued. The template receives the
    content of a message as one string, with its parts joined by newlines, unless the template reads several
    parts itself. It receives the arguments of tool calls as objects or as JSON text, the names of called
    tools in their results, and reasoning, each as it reads them; a role ``developer`` that it does not know
    is ``system``.

    Args:
        variables: further variables for the template, as ``tools``.

    Raises:
        PromptError: the tokenizer has no chat template, or the template refuses these messages; a text is not
            valid UTF-8; or the tokenizer fails on it.
    """
    check_text(characters(chat))
    check_text("\n".join(message["role"] for message in chat))
    continued = chat[-1]["role"] == "assistant"
    messages = _with_calls(tokenizer, [_shown(tokenizer, message) for message in chat])
    # Renders first, so that an error is either the template's or the tokenizer's.
    texts = tokenizer if isinstance(tokenizer, TokenizedTexts) else TokenizedTexts(tokenizer)
    try:
        # transformers annotates one of the many types that this returns.
        encoded: Any = texts.apply_chat_template(
            messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=True,
            **variables,
        )
    except PASSED_ON:
        raise
    except BaseException as error:  # a template is a program of the checkpoint's authors
        # Tokenizers without templates may render chats by other means.
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "this tokenizer has no chat template, which messages need; give text, or a tokenizer that "
                "has one (tokenizer.chat_template)"
            ) from error
        why = " ".join(str(error).split())[:400]
        # The class of what a template itself raises, for whoever wrote the messages.
        if type(error) is TemplateError and why:
            raise PromptError(f"the tokenizer's chat template refuses these messages: {why}") from error
        raise PromptError(
            "the tokenizer's chat template fails on these messages; check their roles and contents",
            f"{type(error).__name__} ({why})",
        ) from error
    return list(encoded["input_ids"])


def characters(chat: Chat) -> str:
    """Returns all text of a chat's messages, without its template."""
    return "\n".join(part for message in chat for part in _texts(message.get("content")))


def _shown(tokenizer: Tokenizer, message: Message) -> dict[str, Any]:
    """Returns the message that a template receives, without entries that are None, which templates would
    print.
    """
    content = message.get("content")
    texts = _texts(content)
    template = str(getattr(tokenizer, "chat_template", None))
    kept = {name: value for name, value in message.items() if value is not None}
    if kept["role"] == "developer" and "developer" not in template:
        kept["role"] = "system"
    thoughts = [kept.pop(name, None) for name in ("reasoning_content", "reasoning")]
    if text := thoughts[0] or thoughts[1]:
        # Templates of gpt-oss take the reasoning of a call or a text before it, but not both.
        both = bool(kept.get("tool_calls") and content)
        names = ["reasoning_content", *([] if both else ["thinking"])]
        kept |= {name: text for name in names if name in template}
    several = len(texts) > 1 and _reads_parts(tokenizer, message["role"])
    return {**kept, "content": list(content) if several and content else "\n".join(texts)}


def _with_calls(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with arguments of tool calls as the template reads them, and with names of results."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if not calls:
        return messages
    as_text = _reads_arguments_as_text(tokenizer)
    names = {call.get("id"): str(call["function"]["name"]) for call in calls}
    shown = []
    for message in messages:
        if message.get("tool_calls"):
            own = [
                {**call, "function": {**call["function"], "arguments": _arguments(call, as_text)}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": own}
        elif message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message = {"name": name, **message}
        shown.append(message)
    return shown


def _arguments(call: Message, as_text: bool) -> Any:
    """Returns the arguments of a call as an object or as JSON text. A text that is none is not changed."""
    given = call["function"].get("arguments")
    if given is None:
        given = {}
    if as_text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return read if isinstance(read, Mapping) else given


def _reads_arguments_as_text(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template joins the arguments of tool calls to texts, as those of DeepSeek do.
    This is tested by rendering a call in both ways.
    """
    own = tokenizer.tokenizer if isinstance(tokenizer, TokenizedTexts) else tokenizer

    def reads(arguments: Any) -> bool:
        # Templates of Mistral refuse other identifiers.
        call = {
            "id": "abcdefghi", "type": "function", "function": {"name": "marka", "arguments": arguments}
        }  # fmt: skip
        chat: list[Any] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "name": "marka", "tool_call_id": "abcdefghi"},
        ]
        try:
            text = str(own.apply_chat_template(chat, tokenize=False))
        except Exception:  # it reads them in the other way
            return False
        # A text that is printed as JSON has backslashes, and an object that is printed by Python has none.
        return '"markb"' in text

    return not reads({"markb": "markc"}) and reads('{"markb": "markc"}')


def _reads_parts(tokenizer: Tokenizer, role: str) -> bool:
    """Returns whether the chat template itself joins the parts of a message of this role. This is tested by
    rendering a message with two parts.
    """
    own = tokenizer.tokenizer if isinstance(tokenizer, TokenizedTexts) else tokenizer
    parts = [{"type": "text", "text": mark} for mark in ("marka", "markb")]
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
    message = {"role": role, "content": parts}
    chats: dict[str, list[Any]] = {"user": [message], "assistant": [question, message, question]}
    try:
        text = own.apply_chat_template(chats.get(role, [message, question, answer]), tokenize=False)
    except Exception:  # it does not take a list
        return False
    # If the template prints the list itself, its notation in Python or JSON stands between the two words.
    between = str(text).partition("marka")[2].partition("markb")
    return bool(between[1]) and "type" not in between[0]


def _has(items: Sequence[Any], *kinds: type) -> bool:
    """Returns whether an item is of one of these types. Looking at each id of a long prompt would be slow."""
    return any(issubclass(kind, kinds) for kind in set(map(type, items)))


def _check_message(message: Any, number: int) -> None:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"message {number} of a chat is of type {type(message).__name__}; give "
            '{"role": "user", "content": "..."}'
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        names = ", ".join(map(ascii, list(message)[:8]))[:_SHOWN_CHARACTERS] or "nothing"
        has = "no role" if role is None else "no role that is text"
        raise PromptError(
            f'message {number} of a chat has {names} and {has}; give {{"role": "user", "content": "..."}}'
        )
    _check_calls(message, number)
    # An answer that called tools has no text.
    if content is None and role == "assistant":
        return
    if isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)) or not content:
        found = "null" if content is None else "empty" if content == [] else type(content).__name__
        raise PromptError(f"the content of message {number} of a chat is {found}; give text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise PromptError(
                f"message {number} of a chat holds content of type {ascii(kind)[:_SHOWN_CHARACTERS]}, and "
                "triforce_tree continues text alone; leave it out, or use the model's own generate()"
            )
        if not isinstance(part.get("text"), str):
            raise PromptError(
                f"message {number} of a chat holds a part without text; give "
                '{"type": "text", "text": "..."}'
            )


def _check_calls(message: Message, number: int) -> None:
    if not isinstance(message.get("tool_call_id"), str | None):
        raise PromptError(f"tool_call_id of message {number} of a chat is no text; give that of the call")
    calls = message.get("tool_calls")
    if calls is None:
        return
    for call in calls if isinstance(calls, (list, tuple)) else [None]:
        own = call if isinstance(call, Mapping) else {}
        function = own.get("function")
        known = function if isinstance(function, Mapping) else {}
        arguments = known.get("arguments")
        wrong = not isinstance(known.get("name"), str) or not isinstance(arguments, str | Mapping | None)
        if wrong or not isinstance(own.get("id"), str | None):
            raise PromptError(
                f"message {number} of a chat has wrong tool_calls; give a list as "
                '[{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}]'
            )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or ()]

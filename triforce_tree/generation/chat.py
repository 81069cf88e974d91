"""Chats (lists of messages) as prompts, through the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from triforce_tree.generation.tokenized_texts import Tokenizer, check_text

Message = Mapping[str, Any]
Chat = Sequence[Message]


def chats_of(given: Any) -> list[Chat] | None:
    """The chats in a prompt: a list of messages, or a list of such lists; None where it holds no message.

    Raises:
        ValueError: something beside messages; a message without its role, or with images; an empty chat.
    """
    if not isinstance(given, (list, tuple)) or not given:
        return None
    # By types first: a long prompt of token ids is looked through at the interpreter's speed.
    if not any(issubclass(kind, (Mapping, list, tuple)) for kind in set(map(type, given))):
        return None
    if not any(map(_holds_message, given)):
        return None
    chats: list[Any] = [given] if isinstance(given[0], Mapping) else list(given)
    for chat in chats:
        if not isinstance(chat, (list, tuple)):
            raise ValueError(f"a batch of chats holds {type(chat).__name__}; give lists of messages")
        if not chat:
            raise ValueError("a chat is empty; give at least one message")
        for number, message in enumerate(chat):
            _check_message(message, number)
    return chats


def chat_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins.

    As in transformers' pipelines, a last message of the assistant is continued.

    Raises:
        ValueError: the tokenizer has no chat template, or its template refuses these messages; a text that
            was no UTF-8.
    """
    check_text(characters(chat))
    continued = chat[-1]["role"] == "assistant"
    try:
        # transformers annotates one of the many types that this returns.
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in chat],
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=True,
        )
    except ImportError:
        raise
    except Exception as error:  # a template is a program of the checkpoint's authors
        # Tokenizers without templates may render chats by other means.
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "this tokenizer has no chat template, which messages need; give text, or a tokenizer that "
                "has one (tokenizer.chat_template)"
            ) from error
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the tokenizer's chat template refuses these messages: {why}") from error
    return list(encoded["input_ids"])


def characters(chat: Chat) -> str:
    """All text of a chat's messages, without its template."""
    return "\n".join(part for message in chat for part in _texts(message.get("content")))


def _holds_message(item: Any) -> bool:
    if isinstance(item, Mapping):
        return True
    return isinstance(item, (list, tuple)) and any(isinstance(message, Mapping) for message in item)


def _check_message(message: Any, number: int) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"message {number} of a chat is of type {type(message).__name__}; give "
            '{"role": "user", "content": "..."}'
        )
    if not isinstance(message.get("role"), str):
        names = ", ".join(map(repr, message)) or "nothing"
        raise ValueError(
            f'message {number} of a chat has {names} and no role; give {{"role": "user", "content": "..."}}'
        )
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"message {number} of a chat holds content of type {kind!r}, and triforce_tree continues "
                "text alone; leave it out, or use the model's own generate()"
            )
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise ValueError(f"the content of message {number} of a chat is {type(content).__name__}; give text")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", "")) for part in content or ()]

"""``POST /v1/responses``: its requests as chats. Nothing is kept of a response."""

from typing import Any

from triforce_tree.server.refusals import RefusedError, wrong

# Fields that have the same name and meaning in chats.
_SAME = frozenset(
    """
    chat_template_kwargs frequency_penalty logit_bias metadata min_p model parallel_tool_calls
    presence_penalty prompt_cache_key prompt_cache_retention repetition_penalty safety_identifier seed
    service_tier stop store stream temperature top_k top_p user
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
# Other fields are accepted with these values, which ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,), "include": ([],), "truncation": ("disabled",), "conversation": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_usage": True}),
    "logprobs": (False,), "n": (1,), "top_logprobs": (0,),
}  # fmt: skip
# Fields of chats that responses do not have, or by another name.
_OF_CHATS = frozenset(
    """
    logprobs max_completion_tokens max_tokens messages n reasoning_effort response_format stream_options
    top_logprobs verbosity
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
# Fields of the request that the reply repeats.
_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature",
    "text", "tool_choice", "tools", "top_p", "user",
)  # fmt: skip
# The chat template of the model decides what it reads of a reasoning item.
_ROLES = ("user", "assistant", "system", "developer")


def chat_of(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of the chat that a request for a response means, and those that the reply repeats.

    Raises:
        RefusedError: a field is wrong or not supported.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "previous_response_id" in given:
        raise RefusedError(
            "previous_response_id is not supported, as no response is kept; send the whole conversation as "
            "input",
            param="previous_response_id",
        )
    echoed = {name: given[name] for name in _ECHOED if name in given}
    chat = {name: given.pop(name) for name in list(given) if name in _SAME}
    chat["messages"] = _messages(given.pop("instructions", None), given.pop("input", None))
    if "max_output_tokens" in given:
        limit = given.pop("max_output_tokens")
        if type(limit) is not int or not 1 <= limit <= 2**31:
            raise wrong("max_output_tokens", limit, f"must be a whole number from 1 to {2**31}")
        chat["max_completion_tokens"] = limit
    if "tools" in given:
        chat["tools"] = _tools(given.pop("tools"))
    if "tool_choice" in given:
        choice = given.pop("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    if "text" in given:
        text = given.pop("text")
        if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
            raise wrong("text", text, 'must be an object, as {"format": {"type": "text"}}')
        chat["response_format"], chat["verbosity"] = text.get("format"), text.get("verbosity")
    if "reasoning" in given:
        reasoning = given.pop("reasoning")
        if not isinstance(reasoning, dict):
            raise wrong("reasoning", reasoning, 'must be an object, as {"effort": "low"}')
        chat["reasoning_effort"] = reasoning.get("effort")
    for name, value in given.items():
        if any(value == each for each in _NOTHING.get(name, ())):
            continue
        if name in _OF_CHATS:
            raise RefusedError(f"{name} is not supported for responses; leave it out", param=name)
        # An unknown field is refused by its name, as in a chat.
        chat[name] = value
    return chat, echoed


def _tools(given: Any) -> Any:
    """Returns the tools of a chat; those of a response have no object for the function."""
    if not isinstance(given, list):
        return given
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in given
    ]


def _messages(instructions: Any, given: Any) -> list[Any]:
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", instructions, "must be a text")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "must be a text or a list of items")
    thoughts = ""
    for number, item in enumerate(given):
        message = _message(item, number)
        if message is None:
            thoughts += _reasoning(item)
            continue
        last = messages[-1] if messages else {}
        if message["role"] == "assistant":
            if thoughts:
                message["reasoning_content"], thoughts = thoughts, ""
            # The text and the calls of one answer are items of their own, and one message of a chat.
            if last.get("role") == "assistant" and "tool_calls" in message:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
        messages.append(message)
    return messages


def _message(item: Any, number: int) -> dict[str, Any] | None:
    """Returns the message of an item; None for reasoning, which belongs to the next message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "reasoning":
        return None
    if kind == "message" and item.get("role") in _ROLES:
        return {"role": item["role"], "content": _content(item.get("content"), number)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool", "tool_call_id": item.get("call_id"),
            "content": _content(item.get("output"), number),
        }  # fmt: skip
    raise RefusedError(
        f"input[{number}] is no message, function_call, function_call_output or reasoning; leave it out",
        param="input",
    )


def _content(given: Any, number: int) -> Any:
    """Returns the content of a message with parts as a chat has them; the chat checks them."""
    if not isinstance(given, list):
        return given
    texts = ("input_text", "output_text", "text")
    for part in given:
        if not isinstance(part, dict) or part.get("type") not in texts:
            raise RefusedError(
                f"input[{number}] has content that is no text; triforce_tree continues text alone",
                param="input",
            )
    return [{"type": "text", "text": part.get("text")} for part in given]


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))

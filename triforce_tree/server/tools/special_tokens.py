"""Special tokens in the structure of a text: they are tokens of their own, whose names are no text."""

import re
from collections.abc import Mapping
from typing import Any

from triforce_tree.server.tools.calls import Shape, constant, sequence


def with_tokens(shape: Shape, tokens: Mapping[str, int]) -> Shape:
    """Returns a structure in which the names of special tokens in constant texts are replaced by the tokens.

    Args:
        shape: a structure of which no schema is changed.
        tokens: the ids of special tokens by name.
    """
    if not tokens:
        return shape
    names = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def replaced(part: Any, as_tag: bool = False) -> Any:
        if part["type"] == "const_string":
            return split(part["value"])
        if part["type"] == "triggered_tags":
            return triggered(part)
        if part["type"] == "tag":
            content = replaced(part["content"])
            if not names.search(part["begin"] + part["end"]):
                return {**part, "content": content}
            inner = sequence(split(part["begin"]), content, split(part["end"]))
            return {"type": "tag", "begin": "", "content": inner, "end": ""} if as_tag else inner
        lists = {
            key: [replaced(each, key == "tags") for each in part[key]]
            for key in ("elements", "tags") if key in part
        }  # fmt: skip
        return {**part, **lists, **({"content": replaced(part["content"])} if "content" in part else {})}

    def triggered(part: Shape) -> Shape:
        [trigger], changed = part["triggers"], dict(part)
        begin: Any = trigger
        if trigger in tokens:
            begin = {"type": "token", "token": tokens[trigger]}
            changed |= {"type": "token_triggered_tags", "trigger_tokens": [tokens[trigger]]}
            del changed["triggers"]
        changed["tags"] = [after(begin, each["begin"].removeprefix(trigger), each) for each in part["tags"]]
        return changed

    def after(begin: Any, rest: str, part: Shape) -> Shape:
        """Returns a tag that begins with a trigger alone, and ends with the last part of its own end."""
        *ending, end = split(part["end"])["elements"]
        inner = sequence(split(rest), replaced(part["content"]), *ending)
        return {"type": "tag", "begin": begin, "content": inner, "end": end.get("value", end)}

    def split(text: str) -> Shape:
        elements, end = [], 0
        for found in names.finditer(text):
            elements += [constant(text[end : found.start()])] * (found.start() > end)
            elements.append({"type": "token", "token": tokens[found[0]]})
            end = found.end()
        elements += [constant(text[end:])] * (end < len(text) or not elements)
        return sequence(*elements)

    changed: Shape = replaced(shape)
    return changed

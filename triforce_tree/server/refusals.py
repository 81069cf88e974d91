"""Refusals of requests, and the names and values in their messages. Nothing here imports torch."""

import json
import re
from typing import Any

# Messages cut names to this length, and leave out longer values.
SHOWN_CHARACTERS = 60


class RefusedError(Exception):
    """The refusal of a request. Its message is written for the client.

    Attributes:
        status: the HTTP status of the reply.
        param: the name of the wrong field, if there is one.
        retry: seconds after which the client may try again, or None.
    """

    def __init__(
        self, sentence: str, status: int = 400, param: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.param, self.retry = status, param, retry


def error(message: str, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    """Returns the body of an error reply in the form of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def not_served(name: str, served: str) -> str:
    """Returns the message that refuses a request for another model."""
    return f"model {name[:SHOWN_CHARACTERS]!a} is not served here; use {served!r}"


def shown(name: str) -> str:
    """Returns a name from a request for a message, in one short line."""
    plain = re.fullmatch(r"[\w./:-]+", name[: SHOWN_CHARACTERS + 1], re.ASCII)
    return name if plain and len(name) <= SHOWN_CHARACTERS else ascii(name[:SHOWN_CHARACTERS])


def wrong(name: str, value: Any, sentence: str) -> RefusedError:
    """Returns the refusal of a field's value, which includes the value if it is short."""
    if isinstance(value, (list, dict)):
        rest = f" is {'a list' if isinstance(value, list) else 'an object'}, and {sentence}"
    else:
        # A long text or number is not converted to JSON, which might take long.
        small = not isinstance(value, str) or len(value) <= SHOWN_CHARACTERS
        small = small and (not isinstance(value, int) or abs(value) < 10**18)
        rest = f"={json.dumps(value)} {sentence}" if small else f" {sentence}"
    return RefusedError(f"{name}{rest}", param=name)

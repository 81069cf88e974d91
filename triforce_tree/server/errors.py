"""Errors inside the server: the client receives an identifier, under which the log has the traceback."""

import logging
import traceback
import uuid

from triforce_tree.runtime.devices import memory_is_short

_LOG = logging.getLogger("triforce_tree.server")


class LateError(Exception):
    """A text has not ended in the time that the server gives it."""


def logged(trace: str, why: str = "an error within the server has ended this request") -> str:
    """Logs a traceback, and returns a sentence for the client with the identifier of the log entry."""
    identifier = f"error-{uuid.uuid4().hex[:16]}"
    _LOG.error("%s: %s\n%s", identifier, why, trace)
    return f"{why}; its log says more under {identifier}"


def client_message(error: BaseException) -> str:
    """Logs an error, and returns a sentence for the client.

    The sentence does not contain the error's message, which may contain another client's prompt.
    """
    if isinstance(error, LateError):
        return str(error)
    trace = "".join(traceback.format_exception(error))
    if memory_is_short(error):
        return logged(trace, "the server is short of memory for this request")
    return logged(trace)

"""Errors that are no client's fault: a client gets an identifier, and the log has the rest under it."""

import logging
import traceback
import uuid

import torch

_LOG = logging.getLogger("triforce_tree.server")


def logged(trace: str, why: str = "an error within the server has ended this request") -> str:
    """A sentence for a client, with the identifier under which the log has a traceback."""
    identifier = f"error-{uuid.uuid4().hex[:16]}"
    _LOG.error("%s: %s\n%s", identifier, why, trace)
    return f"{why}; its log says more under {identifier}"


def told(error: BaseException) -> str:
    """The same of an error; nothing of its own text, which may hold another client's prompt."""
    short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    trace = "".join(traceback.format_exception(error))
    if short:
        return logged(trace, "the server is short of memory for this request")
    return logged(trace)

"""Kernels as operators of torch: ``torch.compile`` keeps them in its graphs, and ``opcheck`` checks them."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
_NAMESPACE = "triforce_tree"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(name: str, writes: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of tensors and numbers the operator ``triforce_tree::name``, without a derivative.

    Like ``torch.library.custom_op``, whose operators count versions of what they write in a time that grows
    with the square of their arguments: for two dozen a tenth of a millisecond, much longer than a launch
    takes. Nobody asks for versions here, since nothing is differentiated.

    Args:
        writes: names of the arguments that are written. What returns tensors needs a :func:`fake` as well.
    """

    def registered(function: Callable[P, R]) -> Callable[P, R]:
        schema = torch.library.infer_schema(function, mutates_args=writes)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        if schema.endswith("-> ()"):
            fake(name)(lambda *_, **__: None)
        return cast(Callable[P, R], getattr(getattr(torch.ops, _NAMESPACE), name).default)

    return registered


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what the operator returns, by a function that computes nothing."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]]
    register = torch.library.register_fake(f"{_NAMESPACE}::{name}")
    return register


def numbers(config: Any) -> list[int]:
    """The fields of a dataclass of numbers, as an operator takes them.

    ``astuple`` copies every one of them, which takes as long as all else before a launch, and of ``vars``
    torch's compiler makes nothing.
    """
    return [getattr(config, name) for name in type(config).__match_args__]

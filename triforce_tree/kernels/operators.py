"""Kernels as operators of torch: ``torch.compile`` keeps them in its graphs, and ``opcheck`` checks them."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
_NAMESPACE = "triforce_tree"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


class Operator(Protocol[P, R]):
    """What :func:`operator` makes of a function.

    Attributes:
        definition: the function itself, on any device.
        overload: torch's operator, without the Python call around it.
    """

    definition: Callable[P, R]
    overload: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def operator(
    name: str, writes: tuple[str, ...] = (), triton: str | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make a function of tensors and numbers the operator ``triforce_tree::name``, without a derivative.

    Like ``torch.library.custom_op``, whose operators count versions of what they write in a time that grows
    with the square of their arguments: for two dozen a tenth of a millisecond, much longer than a launch
    takes. Nobody asks for versions here, since nothing is differentiated.

    Args:
        writes: names of the arguments that are written. What returns tensors needs a :func:`fake` as well.
        triton: the module beside the function's own, as ``".module"``, that holds a function of this name and
            these arguments, which serves CUDA tensors. It is imported at the first call on a GPU, so that
            machines without Triton can import the package. None: the function itself serves all devices.
    """

    def registered(function: Callable[P, R]) -> Operator[P, R]:
        schema = torch.library.infer_schema(function, mutates_args=writes)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        if triton is not None:
            _LIBRARY.impl(name, _launcher(triton, function.__module__, name), "CUDA")
        if schema.endswith("-> ()"):
            fake(name)(lambda *_, **__: None)
        overload = getattr(getattr(torch.ops, _NAMESPACE), name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, overload(*args, **kwargs))

        made = cast(Operator[P, R], call)
        made.definition, made.overload = function, overload
        return made

    return registered


def _launcher(module: str, beside: str, name: str) -> Callable[..., Any]:
    @cache
    def found() -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(import_module(module, beside.rpartition(".")[0]), name))

    return lambda *args, **kwargs: found()(*args, **kwargs)


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

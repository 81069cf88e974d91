"""Kernels as torch operators, which ``torch.compile`` keeps in its graphs and ``opcheck`` checks."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from triforce_tree.kernels.ahead import compiles_only

P = ParamSpec("P")
R = TypeVar("R")
_NAMESPACE = "triforce_tree"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


class Operator(Protocol[P, R]):
    """A function registered by :func:`operator`.

    Attributes:
        definition: the function itself, which runs on any device.
        overload: torch's operator, without the Python function that calls it.
    """

    definition: Callable[P, R]
    overload: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def operator(
    name: str, writes: tuple[str, ...] = (), triton: str | None = None, cpu: str | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that registers a function of tensors and numbers as ``triforce_tree::name``.

    The operator has no autograd. Unlike ``torch.library.custom_op``, it does not increment the version
    counters of the tensors that are written, which only autograd needs. Incrementing them takes time
    quadratic in the number of arguments: 0.1 ms for two dozen arguments, much longer than a launch.

    Args:
        writes: names of the arguments that are written. Operators that return tensors need a :func:`fake`.
        triton: a module of the same package, as ``".module"``, with a function of the same name and
            arguments, which serves CUDA tensors. It is imported at the first call on a GPU, so that
            machines without Triton can import the package. None: the function itself serves all devices.
        cpu: a module like ``triton`` for tensors on the CPU. Its function calls the definition for arguments
            that its kernel does not serve.
    """

    def register_operator(function: Callable[P, R]) -> Operator[P, R]:
        schema = torch.library.infer_schema(function, mutates_args=writes)
        _LIBRARY.define(name + schema)
        serves = _or_compiles(function) if triton is None else function
        _LIBRARY.impl(name, serves, "CompositeExplicitAutograd")
        if triton is not None:
            launch = _launcher(triton, function.__module__, name)
            _LIBRARY.impl(name, _or_compiles(launch, function), "CUDA")
        host = None if cpu is None else _launcher(cpu, function.__module__, name)
        if host is not None:
            _LIBRARY.impl(name, host, "CPU")
        if schema.endswith("-> ()"):
            fake(name)(lambda *_, **__: None)
        overload = getattr(getattr(torch.ops, _NAMESPACE), name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if host is not None and _on_host(args[0]):
                return cast(R, host(*args, **kwargs))
            return cast(R, overload(*args, **kwargs))

        wrapped = cast(Operator[P, R], call)
        wrapped.definition, wrapped.overload = function, overload
        return wrapped

    return register_operator


def _on_host(x: Any) -> bool:
    """Returns whether torch's dispatcher, which takes 10 us, would only find the function for the CPU."""
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()


def _launcher(module: str, beside: str, name: str) -> Callable[..., Any]:
    @cache
    def function() -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(import_module(module, beside.rpartition(".")[0]), name))

    return lambda *args, **kwargs: function()(*args, **kwargs)


def _or_compiles(
    launch: Callable[..., Any], definition: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns ``launch`` with the results of the definition, or with zeros if there is none, where launches
    only compile their kernels.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        out = launch(*args, **kwargs)
        if not compiles_only():
            return out
        if definition is not None:
            return definition(*args, **kwargs)
        for each in (out,) if isinstance(out, Tensor) else out or ():
            each.zero_()
        return out

    return call


def fake(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for the fake implementation, whose results have the right shape and dtype.

    It is a kernel for meta tensors, which serves ``torch.compile`` as well. ``torch.library.register_fake``
    looks for the source file of each function among all imported modules, which takes 2 ms.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        _LIBRARY.impl(name, function, "Meta")
        return function

    return register


def numbers(config: Any) -> list[int]:
    """Returns the fields of a dataclass of numbers as a list, which operators accept as an argument.

    ``astuple`` deep-copies each field, which takes as long as everything else before a launch, and
    ``torch.compile`` does not support ``vars``.
    """
    return [getattr(config, name) for name in type(config).__match_args__]

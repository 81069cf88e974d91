"""Finds the recurrent mixers of a model, and makes copies that use the states of the running forward.

transformers writes all mixers to one pattern: projections; a causal convolution over the result of the
cache's ``update_conv_state``; one function that scans the recurrence; projections. Our pass-through cache
provides the convolution's input. In our copies the names of the scan function and, for decoding passes, of
the convolution refer to functions of ours (``scans``). Linear layers, norms and gates run unchanged over all
tokens of a pass at once.
"""

import inspect
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from triforce_tree.models.recurrent.scans import SCANS, convolution_tokens

_CONVOLUTION = "causal_conv1d_fn"
# The methods by which transformers' layers store states; lightning attention uses the last one.
_STATES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}


def mixers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model whose forward has a causal convolution, and either a known recurrence or
    none.
    """
    return [module for module in model.modules() if _known(_names(module))]


def unknown_mixers(model: nn.Module) -> set[str]:
    """Returns the names of the classes in a model that keep a recurrent state in some other way."""
    return {type(m).__name__ for m in model.modules() if _STATES & _names(m) and not _known(_names(m))}


def attach(model: nn.Module, in_chunks: bool) -> None:
    """Makes the mixers of a copy of a model use the states of the running forward.

    Args:
        model: from ``shallow_copy`` or ``few_row_copy``; its mixers are changed permanently.
        in_chunks: whether recurrences are computed by transformers' own functions (for prompts). Otherwise
            they are computed token by token.

    Raises:
        ValueError: another library has replaced a mixer's forward.
    """
    forwards: dict[type, FunctionType] = {}
    for module in mixers(model):
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} was replaced (by accelerate, for example); load "
                "the model without hooks"
            )
        if type(module) not in forwards:
            forwards[type(module)] = _with_scans(_forward(module), in_chunks)
        module.forward = MethodType(forwards[type(module)], module)


def _forward(module: nn.Module) -> Any:
    """Returns the forward of a module's class, without transformers' decorators."""
    return inspect.unwrap(type(module).forward)


def _names(module: nn.Module) -> set[str]:
    """Returns the names of functions and attributes that a module's forward uses."""
    code = getattr(_forward(module), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _known(names: set[str]) -> bool:
    if not {_CONVOLUTION, "update_conv_state"} <= names:
        return False
    return "update_recurrent_state" not in names or bool(names & SCANS.keys())


def _with_scans(forward: FunctionType, in_chunks: bool) -> FunctionType:
    names = dict(forward.__globals__)
    for name, (tokens, chunks) in SCANS.items():
        if name in names:
            names[name] = chunks(names[name]) if in_chunks else tokens
    if not in_chunks:
        names[_CONVOLUTION] = convolution_tokens(names[_CONVOLUTION])
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy

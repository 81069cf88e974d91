"""The part of a model that decodes text, its layers, and copies of models over shared tensors.

Copies have new module objects, so the user's model is never changed.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

# Kinds of most attributes, which copies share.
_SHARED = {bool, int, float, str, type(None), dict, OrderedDict, set, tuple, list}
# Modules of this package whose hooks copy weights from host memory.
_STREAMING = {f"triforce_tree.kv.offload.weights.streamed_{name}" for name in ("experts", "weights")}
ROTARY = "apply_rotary_pos_emb"
"""The name under which attention modules of transformers find their rotary embedding."""


def text_decoder(model: nn.Module) -> nn.Module:
    """Returns the part of a multimodal model that decodes text, without its encoders. A text-only model is
    returned itself.
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    # Some call their output layer so (ModernBERT's decoder).
    return model if isinstance(decoder, nn.Linear) else decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the ``ModuleList`` of decoder layers, which is found by its length. An image encoder may have
    one of the same length.

    Raises:
        ValueError: there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    modules = text_decoder(model).modules()
    found = [module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count]
    if found:
        # Modules that cache keys and values know their layer's index; those of encoders do not.
        return max(found, key=lambda layers: _indexed(layers[0]))
    raise ValueError(f"{type(model).__name__} has no list of its {count} decoder layers")


def listed_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Returns :func:`decoder_layers`, or None if the model has no such list (a LongCat layer has two
    attention modules).
    """
    try:
        return decoder_layers(model)
    except ValueError:
        return None


@contextmanager
def other_layers(layers: nn.ModuleList, others: dict[str, nn.Module]) -> Iterator[None]:
    """Is a context in which a list of layers has other members."""
    every = layers._modules
    layers._modules = others
    try:
        yield
    finally:
        layers._modules = every


def _indexed(layer: nn.Module) -> bool:
    return any(getattr(module, "layer_idx", None) is not None for module in layer.modules())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns ``list(model.modules())``. The nested generators of torch take five times as long for 500
    modules.
    """
    found: dict[int, nn.Module] = {}
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            pending += reversed(module._modules.values())
    return list(found.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns ``list(model.parameters())``, which takes thirty times as long in torch."""
    parameters = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    return list({id(parameter): parameter for parameter in parameters}.values())


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters_of(model))


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes that one forward reads of a model: all weights except an input embedding that is not
    also the head.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    read = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    # Some multimodal models name no head.
    tied = {id(t) for t in head.parameters()} if head is not None else set()
    for weight in embedding.parameters():
        if id(weight) not in tied:
            read.pop(id(weight), None)
    return sum(t.numel() * t.element_size() for t in read.values())


def shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of every module and configuration of a model, over the same parameters and buffers.

    Hooks are copied; a hook that is added to one of the two later is not seen by the other.

    It takes almost no memory and a few milliseconds for 500 modules. Attributes that refer to modules of the
    model (bound methods, partials: hooks of other libraries) refer to the copies afterwards. Compiled modules
    run uncompiled.
    """
    copies = {id(module): object.__new__(type(module)) for module in model.modules()}
    configs: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copies.get(id(value), value)
        if isinstance(value, PreTrainedConfig):
            made = copy.deepcopy(value, configs)
            # With tuples, which a checkpoint may ask for, transformers' own layers fail.
            made.return_dict = True
            return made
        compiled_from = getattr(value, "_torchdynamo_orig_callable", None)
        if compiled_from is not None:
            return copied(compiled_from)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, copied(value.__self__))
        if isinstance(value, partial):
            keywords = {name: copied(argument) for name, argument in value.keywords.items()}
            return partial(copied(value.func), *map(copied, value.args), **keywords)
        return value

    for module in model.modules():
        attributes = {
            name: value if type(value) in _SHARED else copied(value) for name, value in vars(module).items()
        }
        attributes["_modules"] = {name: copied(child) for name, child in module._modules.items()}
        for name in [name for name in attributes if "_hooks" in name]:
            hooks = attributes[name]
            # ``copy.copy`` takes ten times as long, and a model has thousands of them.
            attributes[name] = hooks.copy() if isinstance(hooks, dict) else copy.copy(hooks)
        attributes["_parameters"], attributes["_buffers"] = dict(module._parameters), dict(module._buffers)
        attributes.pop("_compiled_call_impl", None)
        vars(copies[id(module)]).update(attributes)
    return cast(PreTrainedModel, copies[id(model)])


def hooked(module: nn.Module) -> bool:
    """Returns whether a call of a module runs a user's hook before or after its forward.

    The hooks by which weights are streamed from host memory change no result, and are not counted.
    """
    own = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        any(getattr(hook, "__module__", None) not in _STREAMING for hook in own)
        or bool(torch_module._global_forward_hooks)
        or bool(torch_module._global_forward_pre_hooks)
    )


def class_forward(module: nn.Module) -> Any:
    """Returns the forward of a module's class, without decorators that only rename deprecated arguments."""
    forward: Any = type(module).forward
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


def rotary_of(forward: Any) -> Callable[..., Any] | None:
    """Returns the function that an attention module's forward finds as :data:`ROTARY`, or None if there is
    none or the forward is wrapped.
    """
    plain = isinstance(forward, FunctionType) and inspect.unwrap(forward) is forward
    return forward.__globals__.get(ROTARY) if plain else None


def with_rotary(forward: Any, rotary: Callable[..., Any]) -> FunctionType:
    """Returns a copy of an attention module's forward that finds ``rotary`` as :data:`ROTARY`."""
    names = {**forward.__globals__, ROTARY: rotary}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def with_own_code(forward: Callable[..., Any], codes: dict[CodeType, CodeType]) -> Callable[..., Any]:
    """Returns a function or bound method over a copy of its code, so that torch.compile starts without
    compiled versions.

    torch.compile selects a compiled version of a layer's code by its inputs and modules, but not by its hooks
    or by methods that were replaced in a class. Versions that were compiled for another model, or for this
    model before it changed, may lack these.

    Args:
        codes: copies by original code; missing copies are added.
    """
    if isinstance(forward, MethodType):
        return MethodType(with_own_code(forward.__func__, codes), forward.__self__)
    if not isinstance(forward, FunctionType):
        return forward
    code = codes.setdefault(forward.__code__, forward.__code__.replace())
    made = FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made

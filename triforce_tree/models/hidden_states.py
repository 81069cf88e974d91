"""Hidden states of a model's forwards, for drafters that read them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

Keep = Callable[[int, Tensor], None]


def keep_hidden(
    model: PreTrainedModel, layers: nn.ModuleList, features: Sequence[int], keep: Keep
) -> list[RemovableHandle]:
    """Registers hooks that call ``keep`` with hidden states ``[B, T, hidden_size]`` in every forward of a
    model.

    Args:
        layers: the decoder layers of the model.
        features: indices of layers whose outputs are kept. The number of layers stands for the state after
            the final norm, which the language model head reads.
        keep: called with an element of ``features`` and its hidden states.
    """
    handles = []
    for index in sorted({*features}):
        module = layers[index] if index < len(layers) else _parent(model, layers)
        handles.append(module.register_forward_hook(partial(_pass_on, keep, index)))
    return handles


@contextmanager
def hidden_states(
    model: PreTrainedModel, layers: nn.ModuleList, features: Sequence[int]
) -> Iterator[dict[int, Tensor]]:
    """Yields a dict that has the hidden states of the last forward inside the context, by element of
    ``features``.
    """
    hidden: dict[int, Tensor] = {}
    handles = keep_hidden(model, layers, features, hidden.__setitem__)
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def _parent(model: PreTrainedModel, layers: nn.ModuleList) -> nn.Module:
    """Returns the module that applies the layers and then the final norm. What transformers' ``get_decoder``
    returns may have a language model head as well, as for Llama 4.
    """
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def _pass_on(keep: Keep, index: int, module: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        states = getattr(output, "last_hidden_state", None)
        output = output[0] if states is None else states
    keep(index, output)

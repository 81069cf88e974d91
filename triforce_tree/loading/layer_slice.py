"""Runs a model with only a few of its layers, one of each kind; the other layers return their input.

The rest of the model's forward runs unchanged: masks, rotary tables, layer types.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import decoder_layers, listed_layers

_MOST_KINDS = 6


class LayerSlice:
    """Chooses the first layer of each kind, and at least two layers.

    Args:
        model: a model. All its layers are chosen if they share keys and values, form no ``ModuleList``, or
            are recurrent (recurrent states are assigned to layers by counting the layers that ran).

    Attributes:
        layers: indices of the chosen layers.
        shares_kv: whether some layers attend to the keys and values of others.
        parameters: number of parameters of the chosen layers and the language model head.
    """

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self.shares_kv = any(
            getattr(call.module, "is_kv_shared_layer", False) for call in model.calls.values()
        )
        self._stack = listed_layers(model.model)
        self.layers = tuple(self._representatives(model))
        modules = [self._stack[i] for i in self.layers] if self._stack is not None else [model.model]
        self.parameters = model.vocab_size * model.model.config.get_text_config(decoder=True).hidden_size
        self.parameters += sum(p.numel() for module in modules for p in module.parameters())

    @contextmanager
    def alone(self, copy: PreTrainedModel) -> Iterator[None]:
        """Makes all layers of ``copy`` that were not chosen return their input.

        Args:
            copy: a ``shallow_copy`` of the model, which is changed permanently.
        """
        skipped = [i for i in range(self._model.layers) if i not in self.layers]
        if self._stack is None or not skipped:
            yield
            return
        outputs: list[Any] = []
        stack: Any = decoder_layers(copy)
        stack[0].register_forward_hook(lambda _, args, out: outputs.append(out))
        for i in skipped:
            stack[i].forward = _pass_through(outputs)
        streamed = self._model.streamed
        if streamed is None:
            yield
            return

        def copy_weights(layer: nn.Module, _: Any) -> None:
            for weight in layer.parameters():
                streamed.bring(weight)

        for i in self.layers:
            stack[i].register_forward_pre_hook(copy_weights)
        # Streaming is paused: the hooks copy only the weights of the chosen layers to the device.
        with streamed.paused():
            yield

    def _representatives(self, model: HFModel) -> list[int]:
        """Returns the first layer of each kind, and at least two, as errors of a layer appear in the next."""
        every = list(range(model.layers))
        if self._stack is None or self.shares_kv or model.states is not None:
            return every
        kinds = getattr(model.model.config.get_text_config(decoder=True), "layer_types", None)
        first: dict[object, int] = {}
        for index in every:
            call = model.calls[index]
            settings = {
                name: value
                for name, value in vars(call.module).items()
                if isinstance(value, bool | int | float | str) and not re.search("idx|index|layer_id", name)
            }
            parts = tuple(type(module).__name__ for module in self._stack[index].modules())
            how = (*vars(replace(call.how, sinks=None)).values(), call.how.sinks is None)
            first.setdefault((kinds and kinds[index], how, parts, tuple(settings.items()), call.heads), index)
        chosen = set(sorted(first.values())[:_MOST_KINDS])
        return sorted(chosen | set(every[:2]))


def _pass_through(outputs: list[Any]) -> Callable[..., Any]:
    """Returns a layer's forward that returns its input, as a tuple if ``outputs[-1]`` is a tuple."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = outputs[-1]
        if not isinstance(out, tuple):
            return hidden_states
        # Layers without an indexer attend to what the last one before them has chosen.
        return hidden_states, *[kwargs.get("prev_topk_indices")] * (len(out) - 1)

    return forward

"""Linear layers for inputs of few rows (the tokens of a tree), and copies of a model that use them.

A copy shares every parameter and buffer with its original, which is not changed. The plain linear layers
inside the decoder layers are replaced, in copies of few bits fused experts and the head too: embeddings and
norms are the original's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.linear import reference
from triforce_tree.kernels.linear.configs import MOST_PLAIN_ROWS, MOST_ROWS, counters_for
from triforce_tree.models.experts.few_row import LowBitExperts
from triforce_tree.models.experts.modules import is_fused
from triforce_tree.models.host.gguf_linears import in_gguf_blocks
from triforce_tree.models.host.linears import Int8Linear, is_plain_linear
from triforce_tree.models.model_copy import hooked, shallow_copy, text_decoder

_HALF = (torch.bfloat16, torch.float16)


class FewRowLinear(nn.Module):
    """An ``nn.Linear`` that runs few rows through our kernel; it shares the weight and the bias.

    More than ``MOST_PLAIN_ROWS`` rows, dtypes other than bf16 and fp16, and tensors on the CPU use torch's
    own product.

    Args:
        linear: the layer to replace.
    """

    bits = 16

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.counters: Tensor
        counters = counters_for(linear.out_features, linear.weight.device)
        self.register_buffer("counters", counters, persistent=False)

    def few(self, x: Tensor) -> bool:
        """Returns whether our kernel computes the rows of x."""
        return _fits(x, MOST_PLAIN_ROWS) and self.weight.dtype == x.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.few(x):
            # Imported at the first use, so that machines without Triton can import the package.
            from triforce_tree.kernels.linear.launch import linear

            return linear(x, self.weight, self.bias, self.counters)
        return nn.functional.linear(x, self.weight, self.bias)

    @staticmethod
    def together(x: Tensor, layers: Sequence[Any]) -> Tensor:
        """Returns the outputs of layers like this one for the same few rows, concatenated."""
        from triforce_tree.kernels.linear.launch import linears

        return linears(x, [each.weight for each in layers], [], *biases_and_counters(layers), 16)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class LowBitLinear(nn.Module):
    """An ``nn.Linear`` with weights of 8 bits (a scale per row) or 4 (one per 128 columns of a row).

    On a GPU up to ``MOST_ROWS`` rows are multiplied by the packed weights directly; more rows, and every call
    on other devices, by a dequantised copy that exists for the call only.

    Args:
        linear: the layer to quantise; its bias is shared, its weight is not kept.
        bits: 8 or 4.
    """

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, bits
        words, scales = reference.quantise(linear.weight, bits)
        self.words: Tensor
        self.scales: Tensor
        self.counters: Tensor
        self.register_buffer("words", words)
        self.register_buffer("scales", scales)
        counters = counters_for(linear.out_features, linear.weight.device)
        self.register_buffer("counters", counters, persistent=False)
        self.bias, self._dtype = linear.bias, linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        """Returns the dequantised weight ``[out_features, in_features]``; some families read it or its
        dtype.
        """
        return reference.dequantise(self.words, self.scales, self.bits, self.in_features, self._dtype)

    def few(self, x: Tensor) -> bool:
        """Returns whether our kernel computes the rows of x."""
        return _fits(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.few(x):
            from triforce_tree.kernels.linear.launch import low_bit_linear

            return low_bit_linear(x, self.words, self.scales, self.bias, self.bits, self.counters)
        weight = reference.dequantise(self.words, self.scales, self.bits, self.in_features, x.dtype)
        return nn.functional.linear(x, weight, self.bias)

    @staticmethod
    def together(x: Tensor, layers: Sequence[Any]) -> Tensor:
        """Returns the outputs of layers like this one for the same few rows, concatenated."""
        from triforce_tree.kernels.linear.launch import linears

        words, scales = [each.words for each in layers], [each.scales for each in layers]
        return linears(x, words, scales, *biases_and_counters(layers), layers[0].bits)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class LowBitHead(LowBitLinear):
    """A language model head with weights of 8 bits for few rows, beside the original one for more.

    The target keeps the original, so it takes no memory; unpacked, a head of 128,256 entries takes gigabytes.

    Args:
        head: the head to quantise.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head, 8)
        self.original = head

    @property
    def weight(self) -> Tensor:
        return self.original.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.few(x) else self.original(x)


FewRow = FewRowLinear | LowBitLinear


def biases_and_counters(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the biases of layers, none if they have none, and their counters, as kernels take them."""
    biases = [each.bias for each in layers if each.bias is not None]
    return biases, [each.counters for each in layers]


def with_linears(
    model: PreTrainedModel,
    make: Callable[[nn.Linear], nn.Module],
    make_experts: Callable[[nn.Module], nn.Module] | None = None,
    with_hooks: bool = False,
) -> PreTrainedModel:
    """Returns a copy of a model over the same parameters and buffers, with other linear layers.

    Args:
        model: any transformers model; it is not changed.
        make: returns the replacement of a plain ``nn.Linear`` inside a list of layers.
        make_experts: returns the replacement of a module of fused experts; None keeps them.
        with_hooks: also replace linear layers that have hooks, which their replacements run; by default these
            layers are kept, as a hook may ask for the class of its module.

    Returns:
        A model of the same class. Its configuration is a copy, so that its attention implementation may
        differ.

    Raises:
        ValueError: see :func:`why_not_replaceable`.
    """
    if reason := why_not_replaceable(model, with_hooks):
        raise ValueError(f"the linear layers cannot be replaced: {reason}")
    clone = shallow_copy(model)
    replaced: dict[nn.Linear, nn.Module] = {}
    for parent, name, linear in _layer_linears(clone, with_hooks):
        if linear not in replaced:
            replaced[linear] = make(linear)
            vars(replaced[linear]).update({n: own for n, own in vars(linear).items() if "_forward_" in n})
        setattr(parent, name, replaced[linear])
    if make_experts is not None:
        for parent, name, module in _children_of_layers(clone):
            if is_fused(module) and not hooked(module):
                setattr(parent, name, make_experts(module))
    return clone


def why_not_replaceable(model: nn.Module, with_hooks: bool = False) -> str | None:
    """Returns the reason why a model's linear layers cannot be replaced, or None if they can be."""
    name = type(model).__name__
    if (method := quantisation(model)) is not None:
        return f"{name} is quantised ({method})"
    if _layer_linears(model, with_hooks):
        return None
    hooks = " without hooks" if _layer_linears(model, with_hooks=True) else ""
    return f"{name} has no nn.Linear{hooks} inside a list of layers"


def quantisation(model: nn.Module) -> str | None:
    """Returns how a model is quantised (the method's name, or the class of a layer or of its weight), or None
    if it is not.
    """
    if getattr(model, "is_quantized", False):
        settings = getattr(getattr(model, "config", None), "quantization_config", None)
        method = getattr(settings, "quant_method", None)
        return str(getattr(method, "value", method or "is_quantized"))
    for *_, child in _children_of_layers(model):
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(child, nn.Embedding):
            if type(weight.data) is not Tensor:
                return type(weight.data).__name__
            if not (weight.is_floating_point() and weight.element_size() > 1):
                return type(child).__name__
    return None


def foreign_quantisation(model: nn.Module) -> str | None:
    """Returns :func:`quantisation` if another library computes with the weights, else None.

    Blocks of a GGUF file give the bits of fp32 weights.
    """
    return None if in_gguf_blocks(model) else quantisation(model)


def few_row_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy over the same weights whose linear layers run few rows through our kernel."""
    return with_linears(model, FewRowLinear)


def low_bit_copy(
    model: PreTrainedModel, bits: int, before: Callable[[Tensor], None] | None = None
) -> PreTrainedModel:
    """Returns a copy with linear layers and experts of 8 or 4 bits for drafting: nearly the same model in
    fewer bytes. On a GPU the head has 8 bits, unless weights are streamed.

    Args:
        before: called with each weight before it is read, layer by layer; copies streamed weights in.

    Raises:
        ValueError: see :func:`check_low_bits`.
    """
    check_low_bits(model, bits)

    def make(linear: nn.Linear) -> nn.Module:
        if before is not None:
            before(linear.weight)
        return LowBitLinear(linear, bits)

    clone = with_linears(model, make, lambda module: LowBitExperts(module, bits, before), with_hooks=True)
    if before is not None:
        return clone  # Beside streamed weights memory is short, and the head's bytes are few.
    return with_low_bit_head(clone)


def with_low_bit_head(clone: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy, on a GPU with a head of 8 bits for few rows. Other devices have no kernel for it."""
    return with_head(clone, lambda head: LowBitHead(head) if head.weight.is_cuda else head)


def check_low_bits(model: nn.Module, bits: int) -> None:
    """Raises ValueError if a model's linear layers cannot be copied in ``bits`` bits. 16 means no copy."""
    if bits != 16 and (reason := why_not_replaceable(model, with_hooks=True)):
        raise ValueError(
            f"retrieval_weight_bits={bits} copies the target's own linear layers in fewer bits, but "
            f"{reason}; use retrieval_weight_bits=16, which runs the retrieval level on the target's weights "
            "as they are"
        )


def _layer_linears(model: nn.Module, with_hooks: bool) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Returns (parent, name, linear) of the plain linear layers inside a ``ModuleList`` (of decoder
    layers).
    """
    return [
        (parent, name, child)
        for parent, name, child in _children_of_layers(model)
        if is_plain_linear(child) and (with_hooks or not hooked(child))
    ]


def _children_of_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Returns (parent, name, module) of everything inside a ``ModuleList`` (of decoder layers)."""
    lists = [each for each in text_decoder(model).modules() if isinstance(each, nn.ModuleList)]
    members = [member for each in lists for member in each]
    parents = {id(parent): parent for member in members for parent in member.modules()}
    for parent in parents.values():
        for name, child in parent.named_children():
            yield parent, name, child


def _fits(x: Tensor, most: int = MOST_ROWS) -> bool:
    return x.is_cuda and x.dtype in _HALF and 0 < x.numel() <= most * x.shape[-1]


def has_int8_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a copy of a model that computes so can have weights of 8 bits that the C kernel
    reads.
    """
    return device.type == "cpu" and dtype is torch.float32 and library() is not None


def int8_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy over the same embeddings and norms with linear layers, head and experts of 8 bits.

    It is for level 1 on the CPU. A pass over a few tokens takes as long as reading its weights, and int8
    weights have a quarter of fp32's bytes. The head is copied too, because it is a fifth of the weights or
    more in small models with large vocabularies.

    Args:
        model: on the CPU; it is not changed.

    Raises:
        ValueError: its linear layers cannot be replaced.
    """
    check_low_bits(model, 8)
    clone = with_linears(model, Int8Linear, lambda module: LowBitExperts(module, 8), with_hooks=True)
    return with_head(clone, Int8Linear)


def with_head(clone: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    """Returns the copy with another head, if its head is a plain linear layer without hooks."""
    head: Any = clone.get_output_embeddings()
    if head is not None and is_plain_linear(head) and not hooked(head):
        clone.set_output_embeddings(make(head))
    return clone

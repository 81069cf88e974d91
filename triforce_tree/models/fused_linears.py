"""Fuses few-row linear layers of the same input into one launch, as a pass over a traced graph.

A launch costs microseconds in addition to the bytes that it reads. Queries, keys and values, or gate and up,
have the same input; the traced graph shows that for every model family.
"""

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.linear.configs import MOST_FUSED

# The operator is given by name, because it is registered only if Triton is installed.
_SINGLE = "triforce_tree.few_row_linear.default"


def fused_exactly(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Returns :func:`fused` with the roundings of uncompiled layers.

    Which operations one kernel computes may depend on the shape, and by default values between them stay in
    fp32: the bits of a row would depend on the number of rows.
    """
    return fused(graph, inputs, {"emulate_precision_casts": True})


def fused(
    graph: fx.GraphModule, inputs: Sequence[Tensor], more: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a backend of ``torch.compile``: the default one, applied after ``fuse_linears``.

    On a Hopper GPU torch's kernels use programmatic dependent launch (``TORCHINDUCTOR_ENABLE_PDL=0`` turns it
    off): the layers of a 7B model take 3 to 5% less time. This is safe next to our kernels, which trigger the
    launch of the next one only after the kernel before them has finished writing.
    """
    # The import takes seconds, so it waits until something is compiled.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    dependent_launch = (
        "TORCHINDUCTOR_ENABLE_PDL" not in os.environ
        and hasattr(config.triton, "enable_pdl")
        and torch.cuda.is_available()
        and describe("cuda").dependent_launch
    )
    patches = {**(more or {}), **({"triton.enable_pdl": True} if dependent_launch else {})}
    compiled: Any = compile_fx(fuse_linears(graph), list(inputs), config_patches=patches or None)
    run: Callable[..., Any] = compiled
    return run


def mark_lengths(length: int, tensors: Any) -> None:
    """Lets ``torch.compile`` make one kernel for any ``length`` of dimension 1, if the operators allow it.

    Every tree size is another length. Compiling a version for each would take seconds per version, and there
    would be dozens of versions.

    Args:
        length: tokens of a sequence. 1 always has a version of its own.
        tensors: a layer's arguments, in tuples, lists and dictionaries.
    """
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[1] == length:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)


def fuse_linears(module: fx.GraphModule) -> fx.GraphModule:
    """Replaces few-row linears, in place, that differ in their output features only by one operator.

    Args:
        module: a graph as ``torch.compile`` passes it to a backend.

    Returns:
        The same module.
    """
    graph = module.graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target) == _SINGLE and (key := _fusion_key(node)) is not None:
            groups.setdefault(key, []).append(node)
    for group in groups.values():
        # A weight that is computed inside the graph may come after the first of the linears.
        ready = [node for node in group if all(order[a] < order[group[0]] for a in node.all_input_nodes)]
        for start in range(0, len(ready), MOST_FUSED):
            if len(nodes := ready[start : start + MOST_FUSED]) > 1:
                _replace(graph, nodes)
    graph.lint()
    module.recompile()
    return module


def _fusion_key(node: fx.Node) -> Any:
    """Returns the arguments that linears of one launch must have in common, or None if the graph lacks the
    shapes.
    """
    if len(node.args) != 7 or node.kwargs:
        return None
    x, words, scales, bias, _, bits, config = node.args
    weight = words.meta.get("example_value") if isinstance(words, fx.Node) else None
    if weight is None or weight.ndim != 2:
        return None
    return x, weight.shape[1], weight.stride(), scales is None, bias is None, bits, tuple(config)  # type: ignore[arg-type]


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Replaces ``nodes`` by one operator, whose output is split into theirs."""
    x, _, _, _, _, bits, config = nodes[0].args
    words, scales, biases, counters = (
        [node.args[at] for node in nodes if node.args[at] is not None] for at in range(1, 5)
    )
    outs = [word.meta["example_value"].shape[0] for word in words]  # type: ignore[union-attr]
    with graph.inserting_before(nodes[0]):
        arguments = (x, words, scales, biases, counters, bits, config)
        out = graph.call_function(torch.ops.triforce_tree.few_row_linears.default, arguments)
        parts = graph.call_function(torch.split, (out, outs, -1))
        splits = [graph.call_function(operator.getitem, (parts, at)) for at in range(len(nodes))]
    for node, part in zip(nodes, splits, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)

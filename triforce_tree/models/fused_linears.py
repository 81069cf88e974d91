"""Few-row linear layers of one input in one launch, as a pass over a traced graph.

A launch costs microseconds beside the bytes it reads. Queries, keys and values, or gate and up, multiply the
same input, which a traced graph shows for every family of models alike.
"""

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.linear.configs import MOST_FUSED

# By its name: the operator exists only where Triton does.
_ONE = "triforce_tree.few_row_linear.default"


def fused(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend of ``torch.compile``: the default one, behind ``fuse_linears``.

    On a Hopper GPU torch's own kernels let our linears launch early (``TORCHINDUCTOR_ENABLE_PDL=0`` forbids
    it): a 7B's layers take 3 to 5% less time. That is right beside ours, which wait before they read what a
    kernel wrote and let none behind them start before.
    """
    # Imported when something is compiled: it takes seconds.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    early = (
        "TORCHINDUCTOR_ENABLE_PDL" not in os.environ
        and hasattr(config.triton, "enable_pdl")
        and torch.cuda.is_available()
        and describe("cuda").dependent_launch
    )
    patches = {"triton.enable_pdl": True} if early else None
    compiled: Any = compile_fx(fuse_linears(graph), list(inputs), config_patches=patches)
    run: Callable[..., Any] = compiled
    return run


def fuse_linears(module: fx.GraphModule) -> fx.GraphModule:
    """Few-row linears of one input, alike but for their outputs, become one operator, in place.

    Args:
        module: a graph as ``torch.compile`` hands it to a backend.

    Returns:
        The same module.
    """
    graph = module.graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target) == _ONE and (key := _alike(node)) is not None:
            groups.setdefault(key, []).append(node)
    for group in groups.values():
        # A weight that the graph itself makes could come behind the first of the linears.
        ready = [node for node in group if all(place[a] < place[group[0]] for a in node.all_input_nodes)]
        for first in range(0, len(ready), MOST_FUSED):
            if len(nodes := ready[first : first + MOST_FUSED]) > 1:
                _replace(graph, nodes)
    graph.lint()
    module.recompile()
    return module


def _alike(node: fx.Node) -> Any:
    """What linears of one launch have in common; None where the graph does not say it."""
    if len(node.args) != 7 or node.kwargs:
        return None
    x, words, scales, bias, _, bits, config = node.args
    weight = words.meta.get("example_value") if isinstance(words, fx.Node) else None
    if weight is None or weight.ndim != 2:
        return None
    return x, weight.shape[1], weight.stride(), scales is None, bias is None, bits, tuple(config)  # type: ignore[arg-type]


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One operator in place of several; its output is cut into theirs."""
    x, _, _, _, _, bits, config = nodes[0].args
    words, scales, biases, counters = (
        [node.args[at] for node in nodes if node.args[at] is not None] for at in range(1, 5)
    )
    outs = [word.meta["example_value"].shape[0] for word in words]  # type: ignore[union-attr]
    with graph.inserting_before(nodes[0]):
        arguments = (x, words, scales, biases, counters, bits, config)
        both = graph.call_function(torch.ops.triforce_tree.few_row_linears.default, arguments)
        parts = graph.call_function(torch.split, (both, outs, -1))
        cut = [graph.call_function(operator.getitem, (parts, at)) for at in range(len(nodes))]
    for node, part in zip(nodes, cut, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)

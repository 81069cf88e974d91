"""Verification of token trees on the CPU by ``traversal.h``, for probs in fp32."""

import struct

from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import run_with_work, usable
from triforce_tree.kernels.step import accept, traversal

_TRAVERSE = struct.Struct("25q")
_GREEDY = struct.Struct("12q")


def traverse_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.step.traverse_tree``."""
    compiled = usable(p, q, uniforms, exponential)
    if compiled is None or any(x.stride(1) != 1 for x in (tokens, parents, q_rows)):
        return traversal.traverse_tree.definition(tokens, parents, p, q, q_rows, uniforms, exponential, depth)
    made = accept.empty_results(tokens, depth)
    batch, nodes, vocabulary = p.shape
    run_with_work(compiled.traverse_tree, _TRAVERSE, (
        tokens.data_ptr(), parents.data_ptr(), q_rows.data_ptr(), tokens.stride(0), parents.stride(0),
        q_rows.stride(0), p.data_ptr(), q.data_ptr(), *p.stride()[:2], *q.stride()[:2],
        uniforms.data_ptr(), exponential.data_ptr(), uniforms.stride(0), exponential.stride(0),
        *(x.data_ptr() for x in made), batch, nodes, vocabulary, depth,
    ))  # fmt: skip
    return made


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.step.accept_greedy``."""
    compiled, read = usable(), (tokens, parents, best)
    if compiled is None or any(x.stride(1) != 1 for x in read):
        return accept.accept_greedy.definition(tokens, parents, best, depth)
    made = accept.empty_results(tokens, depth)
    compiled.accept_greedy(
        _GREEDY.pack(
            *(x.data_ptr() for x in read), *(x.stride(0) for x in read), *(x.data_ptr() for x in made),
            *tokens.shape, depth,
        )
    )  # fmt: skip
    return made

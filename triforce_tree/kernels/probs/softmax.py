"""Softmax over a vocabulary."""

from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


@operator("softmax_rows", triton=".softmax_kernels")
def softmax_rows(scores: Tensor) -> Tensor:
    """Computes softmax over the last dimension; the bits of a row do not depend on other rows.

    Args:
        scores: fp32 ``[..., V]``.

    Returns:
        fp32 ``[..., V]``; a row that has NaN, or only -inf, is all NaN.
    """
    return scores.softmax(-1)


@fake("softmax_rows")
def _(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)

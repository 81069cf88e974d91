"""Softmax over a vocabulary."""

from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


@operator("softmax_rows", triton=".softmax_kernels")
def softmax_rows(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, each row by itself: its bits do not depend on the other rows.

    Args:
        scores: fp32 ``[..., V]``.

    Returns:
        fp32 ``[..., V]``; a row with NaN, or of -inf alone, is all NaN.
    """
    return scores.softmax(-1)


@fake("softmax_rows")
def _(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)

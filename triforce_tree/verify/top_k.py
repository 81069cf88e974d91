"""Top-k sampling that searches long rows of logits in slices.

On a GPU torch searches a single row with few multiprocessors, and its slices with as many as there are.
"""

from torch import Tensor
from transformers import TopKLogitsWarper

# Slices of a row, the k largest of each of which hold those of the row; shorter rows have none.
_SLICES = 32
_LEAST = 16384


class SlicedTopK(TopKLogitsWarper):
    """transformers' ``TopKLogitsWarper`` with its results, in less time where rows are long.

    Args:
        original: whose settings these are.
    """

    def __init__(self, original: TopKLogitsWarper) -> None:
        vars(self).update(vars(original))

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Scores fp32 ``[N, V]`` with ``filter_value`` below the k-th largest of each row."""
        rows, vocab = scores.shape
        if vocab < _LEAST or vocab % _SLICES or self.top_k * _SLICES > vocab:
            processed: Tensor = super().__call__(input_ids, scores)
            return processed
        largest = scores.view(rows, _SLICES, -1).topk(self.top_k).values
        least = largest.flatten(1).topk(self.top_k).values[:, -1:]
        return scores.masked_fill(scores < least, self.filter_value)

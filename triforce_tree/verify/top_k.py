"""Top-k sampling that searches long rows of logits in slices.

On a GPU ``torch.topk`` uses few multiprocessors for a single row. A row cut into slices uses all of them.
"""

from torch import Tensor
from transformers import TopKLogitsWarper

# A row is cut into this many slices. The k largest logits of the row are among the k largest of each slice.
# Rows shorter than _LEAST are not cut.
_SLICES = 32
_LEAST = 16384


class SlicedTopK(TopKLogitsWarper):
    """Returns the same results as transformers' ``TopKLogitsWarper`` in less time for long rows.

    Args:
        original: the processor whose settings are taken over.
    """

    def __init__(self, original: TopKLogitsWarper) -> None:
        vars(self).update(vars(original))

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Returns scores, fp32 ``[N, V]``, in which all below the k-th largest are ``filter_value``."""
        rows, vocab = scores.shape
        if vocab < _LEAST or vocab % _SLICES or self.top_k * _SLICES > vocab:
            processed: Tensor = super().__call__(input_ids, scores)
            return processed
        largest = scores.view(rows, _SLICES, -1).topk(self.top_k).values
        least = largest.flatten(1).topk(self.top_k).values[:, -1:]
        return scores.masked_fill(scores < least, self.filter_value)

"""P-EAGLE heads, which draft all depths in one forward by mask tokens (arXiv 2602.01469)."""

from functools import partial

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.eagle_layer import EagleLayer
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler


class ParallelEagle3(Eagle3):
    """Drafts with layers that were trained on pairs of a mask token and a learnt hidden state as well.

    One such pair for each further depth follows the pairs of the text, and attends to all before it. The
    distribution at a depth does not depend on the drafted tokens. So all nodes of a depth have the same one,
    and their children are drawn from it independently.

    Args:
        folder, options: as for :class:`Eagle3`. Trees are at most as deep as the head was trained for, if its
            configuration says so.

    Raises:
        OSError, ValueError: as for :class:`Eagle3`.
    """

    kind = "p-eagle"
    network: EagleLayer

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        growth, end = self._growths[tree.shape], state.end[:, None]
        tree.tokens[:, 0] = state.newest
        fresh = self._newest(end, self._fresh)
        _, normed = self._advance(end, fresh, fresh >= 0, newest=True)[-1]
        if growth.depth > 1:
            normed = torch.cat([normed, self._after_masks(end, growth.depth - 1)], 1)
        logits = broadcast_tensor(self.network.logits(normed).contiguous())
        growth.place_all(logits, state, tree, sampler)

    def _after_masks(self, end: Tensor, count: int) -> Tensor:
        """Returns what the logits after ``count`` pairs with the mask token are computed from,
        ``[B, count, H]``.
        """
        network, batch, mask_token = self.network, end.shape[0], self.format.mask_token
        assert network.masked is not None
        assert mask_token is not None
        tokens = torch.full((batch, count), mask_token, device=end.device)
        pairs = end + torch.arange(count, device=end.device)
        earlier = torch.ones(count, count, dtype=torch.bool, device=end.device).tril()
        mask = torch.cat([self._visible(0, pairs, follow=True), earlier.expand(batch, -1, -1)], 2)
        hidden = normed = network.masked.expand(batch, count, -1)
        for layer in range(network.layers):
            # Their keys and values take the slots of nodes.
            attended = partial(self._attend_to_tree, layer, slice(1, 1 + count), slice(0, count), mask)
            hidden, normed = network.forward(layer, tokens, hidden, pairs + 1, attended, count)
        return normed

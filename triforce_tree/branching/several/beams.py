"""Beam search: transformers' own, over forwards of a tree of texts.

``model.generate(num_beams=...)`` selects beams and scores them. It gets a copy of the model whose forward is
:class:`BeamTree`: each prompt is stored and read once for all its beams, a beam that goes on alone grows a
node, and beams that part become children of one. What no beam goes through any more is freed.
"""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from triforce_tree.branching.node import Node
from triforce_tree.branching.pool import KVPool
from triforce_tree.branching.slots import TreeSlots, needs_before
from triforce_tree.models.hf_model import HFModel
from triforce_tree.requests.inputs import real_rows
from triforce_tree.requests.own_forward import OwnForward
from triforce_tree.runtime.stats import Progress


class BeamTree(OwnForward):
    """The texts of all beams as one tree, as a cache that transformers reorders.

    Args:
        slots: keys and values.
        width: beams of each prompt.
        progress: called with the tokens of each chunk of a long prompt.
    """

    def __init__(self, slots: TreeSlots, width: int, progress: Progress | None = None) -> None:
        super().__init__()
        self._slots, self._width, self._progress = slots, width, progress
        # An empty node before all prompts.
        self._root = Node(None)
        # By row of transformers' batch: the node at whose end the beam's text ends.
        self._beams: list[Node] = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i continue the former beam ``beam_idx[i]``; int64 ``[beams]``."""
        before = self._beams
        self._beams = [before[int(index)] for index in beam_idx.tolist()]
        # All that nobody needs goes first: what is left of a node's children decides what is joined.
        above = [self._released(node) for node in dict.fromkeys(before)]
        for node in above:
            self._join(node)

    def step(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """See :class:`OwnForward`."""
        if not self._beams:
            mask = None if attention_mask is None else attention_mask[:: self._width]
            for prompt in real_rows(input_ids[:: self._width], mask):
                node = Node(self._root, prompt)
                self._root.children.append(node)
                self._beams += [node] * self._width
            self._slots.fill(needs_before(self._root.children), self._progress)
        else:
            self._append(input_ids[:, -1].tolist())
        found: Tensor | None = None
        for numbers, logits in self._slots.last_logits(self._beams):
            if found is None:
                found = logits.new_zeros(len(self._beams), logits.shape[1])
            found[numbers] = logits
        assert found is not None
        return found

    def _append(self, tokens: Sequence[int]) -> None:
        shared = Counter(self._beams)
        for row, (node, token) in enumerate(zip(self._beams, tokens, strict=True)):
            if shared[node] > 1:
                child = Node(node)
                node.children.append(child)
                self._beams[row] = node = child
            node.append([token])

    def _released(self, node: Node) -> Node:
        """Free the nodes from this one upwards that no beam passes through. Returns the first node that is
        kept.
        """
        kept = set(self._beams)
        while node not in kept and not node.children and node.parent is not None:
            parent = node.parent
            self._slots.release(node)
            node = parent
        return node

    def _join(self, node: Node) -> None:
        """Merge a node with its only child, so that texts do not become chains of short nodes."""
        if not node.alive or node is self._root or node in self._beams:
            return
        while len(node.children) == 1:
            [child] = node.children
            self._slots.join(node)
            self._beams = [node if beam is child else beam for beam in self._beams]


def beam_pool(target: HFModel, prompts: Sequence[Sequence[int]], width: int, new_tokens: int) -> KVPool:
    """Returns pages for ``width`` beams after each prompt, if the beams share no new tokens."""
    pool = KVPool(target, 0)
    pages = sum(pool.pages_of(len(prompt)) for prompt in prompts)
    # A beam's tokens lie in up to three nodes whose last page is not full, and one that is being joined.
    pages += len(prompts) * width * (pool.pages_of(new_tokens) + 4)
    return KVPool(target, pages * pool.page)

"""A model that judges token trees over some KV slots: one forward, then acceptance."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels import step
from triforce_tree.kv.view import KVView
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.executor import Step
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import DeviceProbs


class Verdict(NamedTuple):
    """On the trees of a batch.

    Attributes:
        path: int64 ``[B, D + 1]``, accepted nodes from the root on, -1 after the last.
        counts: int64 ``[B]``, how many these are, and how many tokens are emitted.
        emitted: int64 ``[B, D + 1]``: tokens of the accepted nodes but the root, and the one after them.
        scores: fp32 ``[B, N, V]`` of all nodes that were judged, distributions where tokens are sampled.
    """

    path: Tensor
    counts: Tensor
    emitted: Tensor
    scores: Tensor


class Verifier:
    """A model that judges trees over some KV slots: one forward, then acceptance.

    Args:
        model: which one.
        to_probs: logits to distributions.
        texts: what is judged.
        nodes: of a tree.
        vocabulary: V.

    Attributes:
        verdict: the last one.
    """

    def __init__(
        self, model: StepModel, to_probs: DeviceProbs, state: SequenceState, nodes: int, vocabulary: int
    ) -> None:
        self.model, self.to_probs, self.state = model, to_probs, state
        self.vocabulary = vocabulary
        self.noise = to_probs.noise(state.batch, 1, vocabulary, nodes)
        self.verdict: Verdict
        self._logits: Tensor

    def steps(self, forward: Callable[[], None], judge: Callable[[], None], view: KVView) -> list[Step]:
        """A stage that calls :meth:`forward` over ``view`` in its first part, :meth:`judge` in its second."""
        capturable = self.model.capturable and view.capturable
        # Logits of a direct forward are at another address each time.
        alone = self.to_probs.capturable and self.noise.capturable
        return [Step(forward, capturable), Step(judge, capturable and alone)]

    def forward(self, tree: TokenTree, root: Tensor, view: KVView, words: Tensor | None) -> None:
        """Logits of all nodes, or, where shapes may change, of all up to the last slot that is taken.

        Args:
            tree: to verify; its root stands at ``root`` in each text.
            words: masks where they change.
        """
        if view.resizable:
            tree = tree.first(tree.taken)
            words = words[:, : tree.nodes] if words is not None else None
        view.begin(root, words)
        self._logits = self.model(tree.tokens.clamp_min(0), root[:, None] + tree.depths, view)

    def judge(self, tree: TokenTree, root: Tensor) -> Verdict:
        """Which nodes are accepted, and what follows them, by the logits of the last forward."""
        tree = tree.first(self._logits.shape[1])
        depth, paths = tree.depth, partial(tree.paths, self.state, root)
        if self.to_probs.greedy:
            p = self.to_probs.scores(self._logits, paths)
            top, best = p.max(-1)
            # NaN counts as the largest of all, and spreads over a whole law.
            self.state.check(top)
            path, count, last = step.accept_greedy(tree.tokens, tree.parents, best, depth)
        else:
            p = self.to_probs(self._logits, paths)
            self.state.check(p[..., 0])
            path, count, last = self.noise.accept_tree(
                tree.tokens, tree.parents, p, tree.probs, tree.probs_rows, depth
            )
        accepted = tree.tokens.gather(1, path[:, 1:].clamp_min(0))
        emitted = torch.cat([accepted, last[:, None]], 1).scatter(1, count[:, None] - 1, last[:, None])
        self.state.keep_features(self.model.hidden, path, count)
        self.verdict = Verdict(path, count, emitted, p)
        return self.verdict

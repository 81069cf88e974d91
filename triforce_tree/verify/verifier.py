"""Verifies token trees with a model over a view of its KV cache: one forward, then acceptance."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels import step
from triforce_tree.kernels.probs.softmax import softmax_rows
from triforce_tree.kv.view import KVView
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.executor import Cuts, Step
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.probs import DeviceProbs


class Acceptance(NamedTuple):
    """The result of verifying the trees of a batch.

    Attributes:
        path: int64 ``[B, D + 1]``, indices of the accepted nodes from the root on, -1 after the last.
        counts: int64 ``[B]``, number of accepted nodes including the root, which equals the number of emitted
            tokens.
        emitted: int64 ``[B, D + 1]``, the accepted tokens without the root, then one token from the model:
            the bonus token, or a draw from the residual distribution.
    """

    path: Tensor
    counts: Tensor
    emitted: Tensor


class Verifier:
    """Verifies token trees with a model: one forward, then acceptance.

    Args:
        model: the target, or the target over the retrieval cache.
        to_probs: computes probabilities from logits.
        state: the sequences.
        nodes: most nodes of a tree.

    Attributes:
        acceptance: the result of the last verification.
    """

    def __init__(self, model: StepModel, to_probs: DeviceProbs, state: SequenceState, nodes: int) -> None:
        self.model, self.to_probs, self.state = model, to_probs, state
        self.noise, self._masks = to_probs.noise(1, nodes), to_probs.masks(nodes)
        self.acceptance: Acceptance
        self._logits: Tensor
        self._hidden: dict[int, Tensor] = {}

    def steps(
        self,
        forward: Callable[[], None],
        accept: Callable[[], None],
        view: KVView,
        paths: Callable[[], NodePaths],
    ) -> list[Step]:
        """Returns the steps of a verification stage, and whether a CUDA graph can capture each.

        With grammars the host computes the masks of the nodes while the device computes their logits.

        Args:
            forward: calls :meth:`forward` over ``view``.
            accept: calls :meth:`accept`.
            paths: returns the tokens up to each node, before ``forward`` is called.
        """
        capturable: bool | Cuts = self.model.capturable and view.capturable
        # Acceptance is captured only after a captured forward: the logits of others change their address.
        accept_capturable = self.to_probs.capturable and self.noise.capturable
        verify = Step(forward, capturable), Step(accept, capturable if accept_capturable else False)
        if (masks := self._masks) is None:
            return [*verify]
        read = Step(lambda: masks.read(paths())), Step(masks.mark, False)
        return [*read, verify[0], Step(masks.fill, False), verify[1]]

    def forward(self, tree: TokenTree, root: Tensor, view: KVView, mask_words: Tensor | None) -> None:
        """Computes the logits of all nodes, or, if the view is resizable, up to the last used node.

        Args:
            tree: the trees to verify.
            root: int64 ``[B]``, the position of each root in its sequence.
            view: the keys and values that the model attends to.
            mask_words: ``tree.mask_words`` if masks change from tree to tree; None for the view's fixed mask.
        """
        if view.resizable:
            tree = tree.first(tree.used_nodes)
            mask_words = mask_words[:, : tree.tokens.shape[1]] if mask_words is not None else None
        view.begin(root, mask_words)
        self._logits = self.model(
            tree.tokens.clamp_min(0), root[:, None] + tree.depths, view, states=view.recurrent,
            indexed=view.indexed,
        )  # fmt: skip
        # The forward or the capture of another stage replaces the hidden states that the model holds.
        self._hidden = dict(self.model.hidden)

    def accept(self, tree: TokenTree, root: Tensor) -> tuple[Acceptance, Tensor]:
        """Accepts nodes and draws the token after them from the logits of the last forward.

        Args:
            root: int64 ``[B]``, the position of each root in its sequence.

        Returns:
            what was accepted, and the scores of all nodes, fp32 ``[B, N, V]``: probabilities, or processed
            logits if greedy. Nothing keeps the scores, which are large.
        """
        tree = tree.first(self._logits.shape[1])
        depth, paths, logits = tree.depth, tree.paths(self.state, root), self._logits
        if self._masks is not None:
            logits = self._masks.applied(logits)
        if self.to_probs.greedy:
            p = self.to_probs.scores(logits, paths)
            top, best = p.max(-1)
            # max returns NaN if any logit is NaN; softmax makes the whole distribution NaN.
            self.state.check_nan(top)
            path, count, last = step.accept_greedy(tree.tokens, tree.parents, best, depth)
        else:
            scores = self.to_probs.scores(logits, paths)
            p = softmax_rows(scores)
            self.state.check_nan(p[..., 0])
            self.noise.align(root[:, None] + 1 + tree.depths)
            path, count, last = self.noise.traverse_tree(
                tree.tokens, tree.parents, p, tree.probs, tree.probs_rows, depth
            )
            if self.to_probs.mixed:
                # The softmax may round different scores to equal probabilities.
                greedy = step.accept_greedy(tree.tokens, tree.parents, scores.argmax(-1), depth)
                rows = self.to_probs.greedy_rows
                path, count, last = (
                    torch.where(rows.view(-1, *[1] * (drawn.ndim - 1)), best, drawn)
                    for best, drawn in zip(greedy, (path, count, last), strict=True)
                )
        accepted = tree.tokens.gather(1, path[:, 1:].clamp_min(0))
        emitted = torch.cat([accepted, last[:, None]], 1).scatter(1, count[:, None] - 1, last[:, None])
        self.state.keep_features(self._hidden, path, root)
        self.acceptance = Acceptance(path, count, emitted)
        return self.acceptance, p

    def emitted_logits(self, count: int) -> Tensor:
        """Returns the logits of the first ``count`` emitted tokens of the last verification.

        They are fp32 ``[B, count, V]``, with arbitrary values if a sequence emitted fewer tokens.
        """
        path = self.acceptance.path[:, :count].clamp_min(0)
        return self._logits.gather(1, path[..., None].expand(-1, -1, self._logits.shape[2])).float()

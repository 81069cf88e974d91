"""The stages of decoding. Each is a list of steps over fixed buffers that an executor captures or calls.

* :class:`DraftStage`, :class:`RetrievalVerifyStage`: the drafter proposes trees, level 1 verifies them and
  appends what it accepts to the draft chains. Repeated for each round.
* :class:`ChainVerifyStage`: level 2 verifies the chain, its runner-ups and a tree at its end, and commits
  what it accepts.
* :class:`TreeVerifyStage`: level 2 verifies the drafter's tree itself (passes of two levels).
* :class:`PlainStage`: level 2 alone: autoregressive decoding.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.decoding.chain_tree import ChainTree
from triforce_tree.drafters.base import Drafter, TokenTree, grown_shapes
from triforce_tree.kv.view import KVView, RetrievalView
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.executor import Step
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.probs import DeviceProbs, Sampler
from triforce_tree.verify.verifier import Acceptance, Verifier

FullView = Callable[[int, Tensor | None, Sequence[int] | None], KVView]
"""Makes a view of the full cache for T new tokens, from T, their mask if it is fixed, and their depths."""


class Stage(Protocol):
    """One part of a pass, such as drafting. ``noise`` holds the random numbers that it reads."""

    noise: list[Noise]

    def steps(self) -> list[Step]: ...


class DraftStage:
    """Lets the drafter propose a tree for each sequence; ``tree`` holds the last trees.

    Args:
        number: the number of the tree's shape among those of the drafter.
        probs: fp32 ``[B, M, V]``, a buffer whose last entries receive the tree's distributions; by default
            the tree has a buffer of its own.
    """

    def __init__(
        self,
        drafter: Drafter,
        to_probs: DeviceProbs,
        state: SequenceState,
        number: int = 0,
        probs: Tensor | None = None,
    ) -> None:
        self.drafter, self.state = drafter, state
        reported = 0 if drafter.deterministic else to_probs.vocabulary
        shape = grown_shapes(drafter)[number]
        self.tree = TokenTree.of(shape, state.batch, reported, state.device, number)
        rows = self.tree.probs.shape[1]
        if probs is not None:
            self.tree.probs = probs[:, probs.shape[1] - rows :]
        self.noise = [to_probs.noise(0 if drafter.deterministic else rows)]
        self.sampler = Sampler(to_probs, self.noise[0], rows)

    def steps(self) -> list[Step]:
        capturable = self.drafter.capturable and (self.drafter.deterministic or self.sampler.capturable)
        return [Step(self._propose, capturable)]

    def _propose(self) -> None:
        self.noise[0].align(self.state.end[:, None] + 1 + self.tree.depths)
        self.drafter.propose(self.state, self.tree, self.sampler)


class RetrievalVerifyStage:
    """Verifies the drafter's trees by level 1, and appends 1 to depth + 1 tokens to the draft chains.

    Args:
        draft: the stage that proposes the trees.
        verifier: the forward and acceptance of level 1.
        view: the retrieval view of the full cache, or of chunks copied from it.
        runner_ups: whether the runner-up of every appended token is kept.
        choosing: whether each forward selects the retrieved chunks again.
    """

    def __init__(
        self,
        draft: DraftStage,
        verifier: Verifier,
        view: RetrievalView,
        runner_ups: bool,
        choosing: bool,
    ) -> None:
        self.tree, self.state, self.verifier, self.view = draft.tree, draft.state, verifier, view
        self.runner_ups, self.choosing = runner_ups, choosing
        drawn = self.tree.depth + 1 if runner_ups else 0
        self._runner_up_noise = verifier.to_probs.noise(drawn)
        self.noise = [verifier.noise, self._runner_up_noise]
        self._offsets = torch.arange(self.tree.depth + 1, device=self.state.device)
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(
            self._forward, self._lengthen, self.view, lambda: self.tree.paths(self.state, self.state.end)
        )

    def _forward(self) -> None:
        self._root = self.state.end
        self.view.refreshing = self.choosing
        if self.choosing:
            self.view.refresh(self._root, self.state.length)
        self.verifier.forward(self.tree, self._root, self.view, self.tree.mask_words)

    def _lengthen(self) -> None:
        (path, count, emitted), p = self.verifier.accept(self.tree, self._root)
        self.view.move(path)
        probs = p.gather(1, path.clamp_min(0)[..., None].expand(-1, -1, p.shape[2]))
        if self.runner_ups:
            self._runner_up_noise.align(self._root[:, None] + 1 + self._offsets)
            self.state.add_runner_ups(self._runner_up_noise.second_choice(probs, emitted))
        self.state.append_drafted(emitted, count, None if self.verifier.to_probs.greedy else probs)


class ChainVerifyStage:
    """Verifies the draft chains by level 2, and commits what it accepts.

    Args:
        model: the target.
        full: makes views of the full cache.
        means: the view whose chunk means are updated after each commit; None without a retrieval level.
        runner_ups: whether the runner-ups are verified too.
        tail: proposes a tree at the end of each chain, which level 2 verifies too; may be None.
    """

    def __init__(
        self,
        model: StepModel,
        full: FullView,
        means: RetrievalView | None,
        to_probs: DeviceProbs,
        state: SequenceState,
        runner_ups: bool,
        tail: DraftStage | None,
    ) -> None:
        self.state, self.means, self.tail = state, means, tail
        self.laid_out = ChainTree(state, runner_ups, tail.tree if tail is not None else None)
        self.tree = self.laid_out.tree
        self.view = full(self.tree.nodes, self.laid_out.mask, self.laid_out.depths)
        self.verifier = Verifier(model, to_probs, state, self.tree.nodes)
        self.noise = [*(tail.noise if tail is not None else ()), self.verifier.noise]
        self._root: Tensor

    def steps(self) -> list[Step]:
        drafting = self.tail.steps() if self.tail is not None else []
        verifying = self.verifier.steps(self._forward, self._commit, self.view, self._paths)
        return [*drafting, Step(self.laid_out.fill), *verifying]

    def _paths(self) -> NodePaths:
        return self.tree.paths(self.state, self.state.length)

    def _forward(self) -> None:
        self._root = self.state.length.clone()
        self.verifier.forward(
            self.tree, self._root, self.view, None if self.tail is None else self.tree.mask_words
        )

    def _commit(self) -> None:
        acceptance, _ = self.verifier.accept(self.tree, self._root)
        _commit(self.state, self.view, acceptance)
        if self.tail is not None:
            self.state.proposed += _used_depth(self.tail.tree)
        if self.means is not None:
            chunk = self.means.config.chunk
            self.means.update_chunk_means(self._root // chunk, (self.tree.depth + 1) // chunk + 2)


class TreeVerifyStage:
    """Verifies the drafter's trees by level 2, and commits what it accepts."""

    def __init__(self, draft: DraftStage, verifier: Verifier, full: FullView) -> None:
        self.tree, self.state, self.verifier = draft.tree, draft.state, verifier
        self.view = full(self.tree.nodes, None, self.tree.depths.tolist())
        self.noise = [verifier.noise]
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(
            self._forward, self._commit, self.view, lambda: self.tree.paths(self.state, self.state.length)
        )

    def _forward(self) -> None:
        self._root = self.state.length.clone()
        self.verifier.forward(self.tree, self._root, self.view, self.tree.mask_words)

    def _commit(self) -> None:
        acceptance, _ = self.verifier.accept(self.tree, self._root)
        _commit(self.state, self.view, acceptance)
        # Only used nodes count as proposed.
        self.state.proposed.copy_(_used_depth(self.tree))


def _used_depth(tree: TokenTree) -> Tensor:
    """Returns int64 ``[B]``, the depth of the deepest used node: the most tokens that can be accepted."""
    return torch.where(tree.tokens >= 0, tree.depths, 0).amax(1)


def _commit(state: SequenceState, view: KVView, acceptance: Acceptance) -> None:
    """Commits the tokens that level 2 accepted, and their KV slots, in sequences that have not ended."""
    view.move(torch.where(state.active[:, None] > 0, acceptance.path, -1))
    state.commit(acceptance.emitted, acceptance.counts)


class PlainStage:
    """Runs level 2 alone, which adds one token per pass.

    Args:
        full: makes views of the full cache.
    """

    def __init__(self, model: StepModel, full: FullView, to_probs: DeviceProbs, state: SequenceState) -> None:
        self.state = state
        self.view = full(1, None, None)
        self.verifier = Verifier(model, to_probs, state, 1)
        self.noise = [self.verifier.noise]
        self.tree = TokenTree.of(DeviceTreeShape(()), state.batch, 0, model.device)
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(
            self._forward, self._commit, self.view, lambda: self.tree.paths(self.state, self.state.length)
        )

    def _forward(self) -> None:
        self._root = self.state.length.clone()
        self.tree.tokens.copy_(self.state.tokens.gather(1, self._root[:, None]))
        self.verifier.forward(self.tree, self._root, self.view, None)

    def _commit(self) -> None:
        # No KV slot moves, because the root is in its place already.
        acceptance, _ = self.verifier.accept(self.tree, self._root)
        self.state.commit(acceptance.emitted, acceptance.counts)

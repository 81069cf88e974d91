"""The stages of decoding: work over fixed buffers, as steps that an executor captures or calls.

* :class:`DraftStage`, :class:`RetrievalVerifyStage`: the drafter proposes trees, level 1 verifies them and
  appends what it accepts to the draft chains. Repeated for each round.
* :class:`ChainVerifyStage`: level 2 verifies the chain and its runner-ups, and commits what it accepts.
* :class:`TreeVerifyStage`: level 2 verifies the drafter's tree itself (passes of two levels).
* :class:`PlainStage`: level 2 alone: autoregressive decoding.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.drafters.base import Drafter, TokenTree, grown_shapes
from triforce_tree.kv.view import ChunkedView, KVView, RetrievalView
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.executor import Step
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.ancestors import ancestor_mask
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.probs import DeviceProbs, Sampler
from triforce_tree.verify.verifier import Acceptance, Verifier

FullView = Callable[[int, Tensor | None, Sequence[int] | None], KVView]
"""Makes a view of the full cache for T new tokens, from T, a fixed mask, and the depths of the tokens."""


class Stage(Protocol):
    """One part of a pass; ``noise`` holds the random numbers that it reads."""

    noise: list[Noise]

    def steps(self) -> list[Step]: ...


class DraftStage:
    """The drafter proposes a tree for each sequence; ``tree`` holds the last ones.

    Args:
        number: of the tree's shape among those of the drafter.
    """

    def __init__(
        self, drafter: Drafter, to_probs: DeviceProbs, state: SequenceState, vocabulary: int, number: int = 0
    ) -> None:
        self.drafter, self.state = drafter, state
        reported = 0 if drafter.deterministic else vocabulary
        shape = grown_shapes(drafter)[number]
        self.tree = TokenTree.of(shape, state.batch, reported, state.device, number)
        self.noise = [to_probs.noise(state.batch, self.tree.probs.shape[1], reported)]
        self.sampler = Sampler(to_probs, self.noise[0])

    def steps(self) -> list[Step]:
        capturable = self.drafter.capturable and (self.drafter.deterministic or self.sampler.capturable)
        return [Step(self._propose, capturable)]

    def _propose(self) -> None:
        self.noise[0].align(self.state.end[:, None] + 1 + self.tree.depths)
        self.drafter.propose(self.state, self.tree, self.sampler)


class RetrievalVerifyStage:
    """Level 1 verifies the drafter's trees and appends 1 to depth + 1 tokens to the draft chains.

    Args:
        draft: the stage that proposes the trees.
        verifier: level 1's forward and acceptance.
        view: its retrieval view of the full cache, or of chunks copied from it.
        runner_ups: keep the runner-up of every token that is appended.
        choosing: whether each forward refreshes the retrieved chunks.
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
        self._runner_up_noise = verifier.to_probs.noise(self.state.batch, drawn, verifier.vocabulary)
        self.noise = [verifier.noise, self._runner_up_noise]
        self._offsets = torch.arange(self.tree.depth + 1, device=self.state.device)
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(self._forward, self._lengthen, self.view)

    def _forward(self) -> None:
        self._root = self.state.end
        self.view.refreshing = self.choosing
        if self.choosing:
            self.view.refresh(self._root, self.state.length)
        self.verifier.forward(self.tree, self._root, self.view, self.tree.mask_words)

    def _lengthen(self) -> None:
        path, count, emitted, p = self.verifier.accept(self.tree, self._root)
        self.state.count_ranks(self.tree.tokens, self.tree.parents, path)
        self.view.move(path)
        probs = p.gather(1, path.clamp_min(0)[..., None].expand(-1, -1, p.shape[2]))
        if self.runner_ups:
            self._runner_up_noise.align(self._root[:, None] + 1 + self._offsets)
            self.state.add_runner_ups(self._runner_up_noise.second_choice(probs, emitted))
        self.state.append_drafted(emitted, count, None if self.verifier.to_probs.greedy else probs)


class ChainVerifyStage:
    """Level 2 verifies the draft chains, and commits what it accepts.

    Args:
        model: the target.
        full: makes views of the full cache.
        means: the view whose chunk means are updated after each commit; None where the cache does so itself.
        runner_ups: verify the runner-ups too.
    """

    def __init__(
        self,
        model: StepModel,
        full: FullView,
        means: ChunkedView | None,
        to_probs: DeviceProbs,
        state: SequenceState,
        vocabulary: int,
        runner_ups: bool,
    ) -> None:
        self.state, self.means, self.runner_ups = state, means, runner_ups
        max_draft_tokens, device = state.max_draft_tokens, model.device
        parents = list(range(-1, max_draft_tokens)) + (list(range(max_draft_tokens)) if runner_ups else [])
        depths = list(range(max_draft_tokens + 1)) + (
            list(range(1, max_draft_tokens + 1)) if runner_ups else []
        )
        batch, count = state.batch, len(parents)
        # Its shape is fixed, and so is the view's mask: only distributions and tokens vary.
        self.tree = TokenTree(
            tokens=torch.full((batch, count), -1, device=device),
            parents=torch.tensor(parents, device=device).expand(batch, -1),
            depths=torch.tensor(depths, device=device),
            mask_words=torch.zeros(batch, 0, dtype=torch.int64, device=device),
            probs=state.chain_probs,
            probs_rows=torch.arange(count, device=device).expand(batch, -1),
            depth=max_draft_tokens,
        )
        self.view = full(count, ancestor_mask(parents), depths)
        self.verifier = Verifier(model, to_probs, state, count, vocabulary)
        self.noise = [self.verifier.noise]
        self._offsets = torch.arange(max_draft_tokens + 1, device=device)
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(self._forward, self._commit, self.view)

    def _forward(self) -> None:
        state, max_draft_tokens = self.state, self.state.max_draft_tokens
        self._root = state.length.clone()
        tokens = state.tokens.gather(1, self._root[:, None] + self._offsets)
        chain = state.chain[:, None]
        self.tree.tokens[:, : max_draft_tokens + 1] = torch.where(self._offsets <= chain, tokens, -1)
        if self.runner_ups:
            runner_ups = state.runner_ups[:, :max_draft_tokens]
            self.tree.tokens[:, max_draft_tokens + 1 :] = torch.where(
                self._offsets[:-1] < chain, runner_ups, -1
            )
        self.verifier.forward(self.tree, self._root, self.view, None)

    def _commit(self) -> None:
        _commit(self.state, self.view, self.verifier.accept(self.tree, self._root))
        if self.means is not None:
            chunk = self.means.config.chunk
            self.means.update_chunk_means(self._root // chunk, (self.state.max_draft_tokens + 1) // chunk + 2)


class TreeVerifyStage:
    """Level 2 verifies the drafter's trees, and commits what it accepts."""

    def __init__(self, draft: DraftStage, verifier: Verifier, full: FullView) -> None:
        self.tree, self.state, self.verifier = draft.tree, draft.state, verifier
        self.view = full(self.tree.nodes, None, self.tree.depths.tolist())
        self.noise = [verifier.noise]
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(self._forward, self._commit, self.view)

    def _forward(self) -> None:
        self._root = self.state.length.clone()
        self.verifier.forward(self.tree, self._root, self.view, self.tree.mask_words)

    def _commit(self) -> None:
        acceptance = self.verifier.accept(self.tree, self._root)
        self.state.count_ranks(self.tree.tokens, self.tree.parents, acceptance.path)
        _commit(self.state, self.view, acceptance)
        # A drafter that finds nothing to propose was not rejected.
        self.state.proposed.copy_(torch.where(self.tree.tokens >= 0, self.tree.depths, 0).amax(1))


def _commit(state: SequenceState, view: KVView, acceptance: Acceptance) -> None:
    """Commit the tokens that level 2 accepted, and their KV slots, in sequences that are still running."""
    view.move(torch.where(state.active[:, None] > 0, acceptance.path, -1))
    state.commit(acceptance.emitted, acceptance.counts)


class PlainStage:
    """Level 2 alone, one token a pass.

    Args:
        full: makes views of the full cache.
    """

    def __init__(
        self,
        model: StepModel,
        full: FullView,
        to_probs: DeviceProbs,
        state: SequenceState,
        vocabulary: int,
    ) -> None:
        self.state = state
        self.view = full(1, None, None)
        self.verifier = Verifier(model, to_probs, state, 1, vocabulary)
        self.noise = [self.verifier.noise]
        self.tree = TokenTree.of(DeviceTreeShape(()), state.batch, 0, model.device)
        self._root: Tensor

    def steps(self) -> list[Step]:
        return self.verifier.steps(self._forward, self._commit, self.view)

    def _forward(self) -> None:
        self._root = self.state.length.clone()
        self.tree.tokens.copy_(self.state.tokens.gather(1, self._root[:, None]))
        self.verifier.forward(self.tree, self._root, self.view, None)

    def _commit(self) -> None:
        # The root is in its place already: no KV slot moves.
        acceptance = self.verifier.accept(self.tree, self._root)
        self.state.commit(acceptance.emitted, acceptance.counts)

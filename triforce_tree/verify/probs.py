"""Computes probabilities from logits and draws tokens from them, in a form that CUDA graphs can capture."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from triforce_tree.kernels.probs.softmax import softmax_rows
from triforce_tree.runtime.executor import Cuts
from triforce_tree.verify.masks import GrammarMasks, StageMasks
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.sampling import ProbsFromLogits

Paths = Callable[[], Sequence[Tensor | None]]
"""A function that returns all tokens up to each of B * T nodes, int64 ``[L]``; None for an unused node."""


class DeviceProbs:
    """Computes probabilities from logits on the device.

    If the first logits processor is a temperature, it is read from a device buffer, so that one captured
    graph serves all temperatures.

    Args:
        to_probs: the logits processors of the request.
        device: device of the logits.
        noise: makes the random numbers of the stages that draw from these distributions.
        masks: masks of the sequences' grammars; None if no sequence may have one.

    Attributes:
        capturable: whether a CUDA graph can capture the computation, that is, no logits processor depends on
            the tokens.
        masked: whether sequences may have grammars.
    """

    def __init__(
        self,
        to_probs: ProbsFromLogits,
        device: torch.device,
        noise: NoiseFactory,
        masks: GrammarMasks | None = None,
    ) -> None:
        self.masked, self._masks = masks is not None, masks
        self.greedy, self._device, self._noise = to_probs.greedy, device, noise
        self.capturable = to_probs.context_free
        self._bound = None if to_probs.context_free else to_probs
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self._rest = LogitsProcessorList(to_probs.others)
        self.set(to_probs)

    def set(self, to_probs: ProbsFromLogits) -> None:
        """Takes over the settings of ``to_probs``, which must have the same ``key``."""
        self.temperature.fill_(to_probs.temperature)
        if self._bound is not None:
            self._bound = to_probs

    def noise(self, batch: int, rows: int, vocabulary: int, uniforms: int = 0) -> Noise:
        """Makes the :class:`Noise` of a stage that draws from these distributions; empty if greedy."""
        if self.greedy:
            rows = uniforms = 0
        return self._noise(batch, rows, vocabulary, uniforms, self._device)

    def masks(self, nodes: int) -> StageMasks | None:
        """Makes the masks of a stage whose trees have at most ``nodes`` nodes; None without grammars."""
        return None if self._masks is None else StageMasks(self._masks, nodes)

    def scores(self, logits: Tensor, paths: Paths) -> Tensor:
        """Returns processed logits, fp32 ``[B, T, V]``.

        Args:
            paths: called only if a processor depends on the tokens.
        """
        scores = logits.float()
        if self._bound is not None:
            return self._bound.scores(scores.flatten(0, 1), paths).view_as(scores)
        if not self.greedy:
            scores = scores / self.temperature
        if self._rest:
            scores = self._rest(None, scores.flatten(0, 1)).view_as(scores)  # type: ignore[arg-type]
        return scores

    def unscaled(self, logits: Tensor, paths: Paths) -> tuple[Tensor, Tensor | None]:
        """Returns x and t such that the distributions are softmax(x / t), for kernels that fuse both.

        x is ``[B, T, V]``, and t is a scalar tensor on the device or None, which means 1.
        """
        if self._rest or self._bound is not None:
            return self.scores(logits, paths), None
        return logits, None if self.greedy else self.temperature

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Returns probabilities, fp32 ``[B, T, V]``."""
        return softmax_rows(self.scores(logits, paths))


class Sampler:
    """Draws the tokens that a drafter proposes, by the sampling options of the request.

    Args:
        to_probs: computes probabilities from logits; draft, retrieval model and target share it.
        noise: the random numbers of the draft stage.
        nodes: most nodes of a tree that get children.

    Attributes:
        greedy: whether the most probable tokens, in descending order, are taken instead of drawn ones.
        capturable: whether drawing can be captured as a CUDA graph. It is cut where the host computes the
            masks of grammars.
    """

    def __init__(self, to_probs: DeviceProbs, noise: Noise, nodes: int) -> None:
        self.to_probs, self.noise, self._masks = to_probs, noise, to_probs.masks(nodes)
        self.greedy = to_probs.greedy
        self.capturable: bool | Cuts = to_probs.capturable and noise.capturable
        self._cuts = Cuts(lambda: None)
        if self._masks is not None and self.capturable:
            self.capturable = self._cuts

    def children(
        self, logits: Tensor, probs: Tensor, count: int, nodes: slice, paths: NodePaths
    ) -> tuple[Tensor, Tensor]:
        """Draws candidates for the children of F nodes, without replacement.

        The drafter's choice of the number of children must not depend on the candidates, see
        ``drafters.base``.

        Args:
            logits: ``[B, F, V]``, logits of the draft model.
            probs: fp32 ``[B, F, V]``, an output: receives the distributions drawn from. It is a slice of
                ``tree.probs``.
            count: K, the number of candidates per node.
            nodes: indices of the F nodes in the tree; each index has random numbers of its own.
            paths: the tokens up to each of these nodes, see ``TokenTree.paths``; read only if a logits
                processor or a grammar depends on the tokens.

        Returns:
            int64 ``[B, F, K]``, the candidates in the order of the draws, -1 after the last token with a
            probability above 0; and fp32 ``[B, F, K]``, the K largest probabilities of each distribution,
            which do not depend on the draws.
        """
        if (masks := self._masks) is not None:
            self._cuts.outside(partial(_fill, masks, paths))
            logits = masks.applied(logits, nodes)
        tokens, by_rank = self.noise.expand_nodes(
            *self.to_probs.unscaled(logits, paths), probs, count, nodes.start
        )
        if self.greedy and not self.to_probs.capturable:
            # The paths of the next depth must not contain tokens that a processor forbids.
            tokens = tokens.masked_fill(by_rank <= 0, -1)
        return tokens, by_rank


def _fill(masks: StageMasks, paths: NodePaths) -> None:
    """Computes the masks after nodes of a tree that is being drafted."""
    masks.read(paths)
    masks.fill()

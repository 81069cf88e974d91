"""Computes probabilities from logits and draws tokens from them, in a form that CUDA graphs can capture."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from triforce_tree.kernels.probs.truncation import truncate_scores
from triforce_tree.runtime.executor import Cuts
from triforce_tree.runtime.packed import Packed
from triforce_tree.verify.adjustments import Adjustments
from triforce_tree.verify.masks import GrammarMasks, StageMasks
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.sampling import ProbsFromLogits, kind_of
from triforce_tree.verify.sampling_options import SamplingOptions


class DeviceProbs:
    """Computes probabilities from logits on the device, by options of each sequence's own.

    The options are read from device buffers, so that one captured graph serves all their values.

    Args:
        settings: of the sequences of a batch; they determine the kind of the computation. :meth:`begin` sets
            those of each sequence.
        batch: B.
        vocabulary: V.
        device: device of the logits.
        noise: makes the random numbers of the stages that draw from these distributions.
        masks: masks of the sequences' grammars; None if no sequence may have one.

    Attributes:
        greedy: whether every sequence takes the most probable token.
        mixed: whether some sequences do, and others draw; ``greedy_rows`` bool ``[B]`` says which.
        capturable: whether a CUDA graph can capture the computation, that is, no logits processor is called
            on the host.
        masked: whether sequences may have grammars.
        batch, vocabulary: as given.
    """

    def __init__(
        self,
        settings: Sequence[ProbsFromLogits],
        batch: int,
        vocabulary: int,
        device: torch.device,
        noise: NoiseFactory,
        masks: GrammarMasks | None = None,
    ) -> None:
        self.batch, self.vocabulary, self.masked, self._masks = batch, vocabulary, masks is not None, masks
        self.kind, self._device, self._noise = kind_of(settings), device, noise
        self.greedy, self.mixed = self.kind.greedy, self.kind.mixed
        self.capturable = settings[0].in_stages
        self._bound = None if self.capturable else settings[0]
        self._rest = LogitsProcessorList(settings[0].others if self.capturable else ())
        dtypes = torch.float32, torch.bool, torch.int64, torch.float64, torch.float64
        self._packed = Packed(device, *(((batch,), dtype) for dtype in dtypes))
        self.temperature, self.greedy_rows, *self._truncation = self._packed.tensors
        self._set(slice(None), SamplingOptions(), False)
        self._greedy_indices: set[int] = set()
        sizes = batch, vocabulary, device
        self._adjust = Adjustments(self.kind, *sizes, self.masked) if self.kind.adjusts else None

    def begin(self, index: int, settings: ProbsFromLogits, tokens: Sequence[int] = ()) -> None:
        """Sets the options of the sequence at a batch index; the kind of ``settings`` must be served.

        Args:
            tokens: all committed tokens of the sequence.
        """
        if self._bound is not None:
            self._bound = settings
            return
        options = settings.options
        self._set(index, options, settings.greedy)
        if self.mixed:
            (self._greedy_indices.add if settings.greedy else self._greedy_indices.discard)(index)
        if self._adjust is not None:
            self._adjust.begin(index, options, tokens)

    def _set(self, index: int | slice, options: SamplingOptions, greedy: bool) -> None:
        values = options.temperature, greedy, options.top_k, options.top_p, options.min_p
        for numbers, value in zip(self._packed.arrays, values, strict=True):
            numbers[index] = value
        self._packed.send()

    def committed(self, new: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Counts the tokens that a pass has added to the sequences at these batch indices."""
        if self._adjust is not None:
            self._adjust.committed(new)

    def noise(self, rows: int, uniforms: int = 0) -> Noise:
        """Makes the :class:`Noise` of a stage that draws from these distributions; empty if greedy."""
        if self.greedy:
            rows = uniforms = 0
        noise = self._noise(self.batch, rows, self.vocabulary, uniforms, self._device)
        noise.still = self._greedy_indices
        return noise

    def masks(self, nodes: int) -> StageMasks | None:
        """Makes the masks of a stage whose trees have at most ``nodes`` nodes; None without grammars."""
        return None if self._masks is None else StageMasks(self._masks, nodes)

    def scores(self, logits: Tensor, paths: NodePaths) -> Tensor:
        """Returns processed logits, fp32 ``[B, T, V]``.

        Args:
            paths: called only if an option depends on the tokens.
        """
        scores = logits.float()
        if self._bound is not None:
            return self._bound.scores(scores.flatten(0, 1), paths).view_as(scores)
        if self._adjust is not None:
            scores = self._adjust(scores, paths)
        if not self.greedy:
            scores = scores / self.temperature[:, None, None]
        if self.kind.truncates:
            scores = truncate_scores(scores, *self._truncation)
        if self._rest:
            scores = self._rest(None, scores.flatten(0, 1)).view_as(scores)  # type: ignore[arg-type]
        return scores

    def unscaled(self, logits: Tensor, paths: NodePaths) -> tuple[Tensor, Tensor | None]:
        """Returns x and t such that the distributions are softmax(x / t), for kernels that fuse both.

        x is ``[B, T, V]``, and t is fp32 ``[B]`` on the device or None, which means 1.
        """
        if self._rest or self._bound is not None or self.kind.truncates:
            return self.scores(logits, paths), None
        if self._adjust is not None:
            logits = self._adjust(logits.float(), paths)
        return logits, None if self.greedy else self.temperature


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
            probability above 0; and their chances, see ``step.expand_nodes``.
        """
        if (masks := self._masks) is not None:
            self._cuts.outside(partial(masks.draft, paths))
            logits = masks.applied(logits)
        tokens, chances = self.noise.expand_nodes(
            *self.to_probs.unscaled(logits, paths), probs, count, nodes.start
        )
        if self.greedy and not self.to_probs.capturable:
            # The paths of the next depth must not contain tokens that a processor forbids.
            tokens = tokens.masked_fill(chances <= 0, -1)
        return tokens, chances

"""Logits to probabilities, and draws from them, with settings in buffers that CUDA graphs read."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from triforce_tree.kernels.probs.softmax import softmax_rows
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.sampling import ProbsFromLogits

Paths = Callable[[], Sequence[Tensor | None]]
"""Returns the tokens up to each of B * T nodes, int64 ``[L]``; None for a node that is not used."""


class DeviceProbs:
    """Logits to probabilities on the device.

    A leading temperature is read from a device buffer, so that one captured graph serves all temperatures.

    Args:
        to_probs: what to compute.
        device: of the logits.
        noise: makes the random numbers of the stages that draw from these distributions.

    Attributes:
        capturable: whether a CUDA graph can hold it: no logits processor depends on the tokens.
    """

    def __init__(self, to_probs: ProbsFromLogits, device: torch.device, noise: NoiseFactory) -> None:
        self.greedy, self._device, self._noise = to_probs.greedy, device, noise
        self.capturable = to_probs.context_free
        self._bound = None if to_probs.context_free else to_probs
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self._rest = LogitsProcessorList(_split(to_probs)[1])
        self.set(to_probs)

    def set(self, to_probs: ProbsFromLogits) -> None:
        """Use the settings of ``to_probs``, which has the same ``key``: only its temperature may differ."""
        self.temperature.fill_(_split(to_probs)[0])
        if self._bound is not None:
            self._bound = to_probs

    @staticmethod
    def key(to_probs: ProbsFromLogits) -> Hashable:
        """Distributions with equal keys differ in their temperature alone, and can share CUDA graphs."""
        rest = _split(to_probs)[1]
        if not to_probs.context_free:
            # Such processors hold state that cannot be compared; they run outside of graphs, so any will do.
            return to_probs.greedy, "text"
        settings = [sorted((name, _hashable(value)) for name, value in vars(p).items()) for p in rest]
        return to_probs.greedy, tuple((type(p), *values) for p, values in zip(rest, settings, strict=True))

    @staticmethod
    def kind(to_probs: ProbsFromLogits) -> str:
        """The names of the logits processors, on which the time that a stage takes depends."""
        names = [type(processor).__name__ for processor in _split(to_probs)[1]]
        return " ".join(["greedy" if to_probs.greedy else "sampled", *names])

    def noise(self, batch: int, rows: int, vocabulary: int, uniforms: int = 0) -> Noise:
        """The :class:`Noise` of a stage that draws from these distributions; greedy decoding needs none."""
        if self.greedy:
            rows = uniforms = 0
        return self._noise(batch, rows, vocabulary, uniforms, self._device)

    def scores(self, logits: Tensor, paths: Paths) -> Tensor:
        """Processed logits, fp32 ``[B, T, V]``.

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
        """x and a temperature t (None for 1) such that the distributions are softmax(x / t): for kernels that
        fuse both."""
        if self._rest or self._bound is not None:
            return self.scores(logits, paths), None
        return logits, None if self.greedy else self.temperature

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Probabilities, fp32 ``[B, T, V]``."""
        return softmax_rows(self.scores(logits, paths))


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    return repr(value)


def _split(to_probs: ProbsFromLogits) -> tuple[float, list[object]]:
    """(leading temperature, the other processors); greedy choices do not depend on a temperature."""
    rest: list[object] = list(to_probs.processors)
    temperature = 1.0
    # Not of a class derived from it, which may use its temperature otherwise.
    if rest and type(rest[0]) is TemperatureLogitsWarper:
        temperature = 1.0 if to_probs.greedy else float(rest[0].temperature)
        rest = rest[1:]
    return temperature, rest


class Sampler:
    """Draws the tokens that a drafter proposes, by the sampling options of the request.

    Args:
        to_probs: logits to probabilities, the same for all levels.
        noise: the random numbers of the drafter's stage.

    Attributes:
        greedy: whether the most probable tokens are taken, in descending order, instead of drawn ones.
        capturable: whether drawing can be captured as a CUDA graph.
    """

    def __init__(self, to_probs: DeviceProbs, noise: Noise) -> None:
        self.to_probs, self.noise = to_probs, noise
        self.greedy, self.capturable = to_probs.greedy, to_probs.capturable and noise.capturable

    def children(
        self, logits: Tensor, probs: Tensor, count: int, nodes: slice, paths: Paths
    ) -> tuple[Tensor, Tensor]:
        """Draw candidates for the children of F nodes, without replacement.

        Which of them become children must not depend on the candidates, see ``drafters.base``.

        Args:
            logits: ``[B, F, V]`` of the draft model.
            probs: fp32 ``[B, F, V]``, written: the distributions drawn from; a slice of ``tree.probs``.
            count: K candidates per node.
            nodes: the tree's nodes that these are; each has random numbers of its own.
            paths: returns the tokens up to each of them, see ``TokenTree.paths``; called only if a logits
                processor depends on the tokens.

        Returns:
            int64 ``[B, F, K]``, the candidates in the order of the draws, -1 if there are no more; fp32
            ``[B, F, K]``, the K largest probabilities, whatever was drawn.
        """
        tokens, by_rank = self.noise.expand_nodes(
            *self.to_probs.unscaled(logits, paths), probs, count, nodes.start
        )
        if self.greedy and not self.to_probs.capturable:
            # The paths of the next depth must not contain tokens that a processor forbids.
            tokens = tokens.masked_fill(by_rank <= 0, -1)
        return tokens, by_rank

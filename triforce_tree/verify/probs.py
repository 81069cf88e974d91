"""Logits to distributions, and draws from them, over fixed buffers."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.sampling import ProbsFromLogits

Paths = Callable[[], Sequence[Tensor | None]]
"""The text up to each of B * T nodes, int64 ``[L]``; None where there is no token."""


class DeviceProbs:
    """Logits to laws.

    A leading temperature is read from a device buffer, so that one captured graph serves them all.

    Args:
        to_probs: what to compute.
        device: where logits live.
        noise: makes the random numbers of the stages that draw from these laws.

    Attributes:
        capturable: whether a CUDA graph can hold it: no processor looks at the text.
    """

    def __init__(self, to_probs: ProbsFromLogits, device: torch.device, noise: NoiseFactory) -> None:
        self.greedy, self._device, self._noise = to_probs.greedy, device, noise
        self.capturable = to_probs.context_free
        self._bound = None if to_probs.context_free else to_probs
        self.temperature = torch.ones((), device=device)
        self._rest = LogitsProcessorList(_split(to_probs)[1])
        self.set(to_probs)

    def set(self, to_probs: ProbsFromLogits) -> None:
        """Take over the temperature of a law with the same ``key``."""
        self.temperature.fill_(_split(to_probs)[0])
        if self._bound is not None:
            self._bound = to_probs

    @staticmethod
    def key(to_probs: ProbsFromLogits) -> Hashable:
        """Laws with equal keys differ in their temperature alone."""
        rest = _split(to_probs)[1]
        if not to_probs.context_free:
            # Such processors keep what nobody can compare, and nothing of them is built into a graph.
            return to_probs.greedy, "text"
        settings = [sorted((name, _hashable(value)) for name, value in vars(p).items()) for p in rest]
        return to_probs.greedy, tuple((type(p), *values) for p, values in zip(rest, settings, strict=True))

    @staticmethod
    def kind(to_probs: ProbsFromLogits) -> str:
        """What of a law decides about the time it takes: its processors by name."""
        names = [type(processor).__name__ for processor in _split(to_probs)[1]]
        return " ".join(["greedy" if to_probs.greedy else "sampled", *names])

    def noise(self, batch: int, rows: int, vocabulary: int, uniforms: int = 0) -> Noise:
        """For a stage that draws from these laws, see :class:`Noise`; greedy ones need no numbers."""
        if self.greedy:
            rows = uniforms = 0
        return self._noise(batch, rows, vocabulary, uniforms, self._device)

    def scores(self, logits: Tensor, paths: Paths) -> Tensor:
        """Processed logits, fp32, of ``[B, T, V]``.

        Args:
            paths: asked only where a processor looks at the text.
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
        """Numbers x and a temperature t (None for 1) whose softmax(x / t) are the laws: for fused kernels."""
        if self._rest or self._bound is not None:
            return self.scores(logits, paths), None
        return logits, None if self.greedy else self.temperature

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Laws, fp32 ``[B, T, V]``."""
        return self.scores(logits, paths).softmax(-1)


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    return repr(value)


def _split(to_probs: ProbsFromLogits) -> tuple[float, list[object]]:
    """(leading temperature, what follows); greedy choices do not depend on a temperature."""
    rest: list[object] = list(to_probs.processors)
    temperature = 1.0
    if rest and isinstance(rest[0], TemperatureLogitsWarper):
        temperature = 1.0 if to_probs.greedy else float(rest[0].temperature)
        rest = rest[1:]
    return temperature, rest


class Sampler:
    """What a drafter draws with: the processed distributions of a request, and random numbers.

    Args:
        to_probs: logits to distributions, the same for all levels.
        noise: the numbers of one stage.

    Attributes:
        greedy: the most probable tokens are taken, in order.
        capturable: whether drawing may become part of a CUDA graph.
    """

    def __init__(self, to_probs: DeviceProbs, noise: Noise) -> None:
        self.to_probs, self.noise = to_probs, noise
        self.greedy, self.capturable = to_probs.greedy, to_probs.capturable and noise.capturable

    def children(
        self, logits: Tensor, probs: Tensor, count: int, nodes: slice, paths: Paths
    ) -> tuple[Tensor, Tensor]:
        """Candidates for the children of F nodes, drawn without replacement.

        Args:
            logits: ``[B, F, V]`` of the draft model.
            probs: fp32 ``[B, F, V]``, written: what they are drawn from.
            count: K candidates a node.
            nodes: which of the tree's nodes these are; each has random numbers of its own.
            paths: the text up to each of them, asked where a logits processor needs it.

        Returns:
            int64 ``[B, F, K]``, in the order of the draws, -1 where there are no more; fp32 ``[B, F, K]``,
            the K largest probabilities.
        """
        tokens, by_rank = self.noise.expand_nodes(
            *self.to_probs.unscaled(logits, paths), probs, count, nodes.start
        )
        if self.greedy and not self.to_probs.capturable:
            # The next depth's paths must not hold tokens that a processor forbids.
            tokens = tokens.masked_fill(by_rank <= 0, -1)
        return tokens, by_rank

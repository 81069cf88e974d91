"""Logits to laws without the host: the device's side of ``triforce_tree.sampling``."""

from collections.abc import Hashable

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from triforce_tree.cycle.noise import Noise, NoiseFactory
from triforce_tree.sampling import TokenLaw


class DeviceLaw:
    """Logits to laws for processors that look at one row of logits alone.

    A leading temperature is read from a device buffer, so that one captured graph serves them all.

    Args:
        law: what to compute; ``law.context_free`` must hold.
        device: where logits live.
        noise: makes the random numbers of the stages that draw from these laws.
    """

    def __init__(self, law: TokenLaw, device: torch.device, noise: NoiseFactory) -> None:
        self.greedy, self._device, self._noise = law.greedy, device, noise
        self.temperature = torch.ones((), device=device)
        self._rest = LogitsProcessorList(_split(law)[1])
        self.set(law)

    def set(self, law: TokenLaw) -> None:
        """Take over the temperature of a law with the same ``key``."""
        self.temperature.fill_(_split(law)[0])

    @staticmethod
    def key(law: TokenLaw) -> Hashable:
        """Laws with equal keys differ in their temperature alone."""
        rest = _split(law)[1]
        settings = [sorted((name, _hashable(value)) for name, value in vars(p).items()) for p in rest]
        return law.greedy, tuple((type(p), *values) for p, values in zip(rest, settings, strict=True))

    def noise(self, batch: int, rows: int, vocabulary: int, uniforms: int = 0) -> Noise:
        """For a stage that draws from these laws, see :class:`Noise`; greedy ones need no numbers."""
        if self.greedy:
            rows = uniforms = 0
        return self._noise(batch, rows, vocabulary, uniforms, self._device)

    def scores(self, logits: Tensor) -> Tensor:
        """Processed logits, fp32, of ``[B, T, V]``."""
        scores = logits.float()
        if not self.greedy:
            scores = scores / self.temperature
        if self._rest:
            scores = self._rest(None, scores.flatten(0, 1)).view_as(scores)  # type: ignore[arg-type]
        return scores

    def unscaled(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Numbers x and a temperature t (None for 1) whose softmax(x / t) are the laws: for fused kernels."""
        if self._rest:
            return self.scores(logits), None
        return logits, None if self.greedy else self.temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """Laws, fp32 ``[B, T, V]``."""
        return self.scores(logits).softmax(-1)


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    return repr(value)


def _split(law: TokenLaw) -> tuple[float, list[object]]:
    """(leading temperature, what follows); greedy choices do not depend on a temperature."""
    rest: list[object] = list(law.processors)
    temperature = 1.0
    if rest and isinstance(rest[0], TemperatureLogitsWarper):
        temperature = 1.0 if law.greedy else float(rest[0].temperature)
        rest = rest[1:]
    return temperature, rest

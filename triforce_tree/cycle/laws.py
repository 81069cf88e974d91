"""Laws and draws without the host: the device's side of ``triforce_tree.sampling``."""

from collections.abc import Hashable

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from triforce_tree.sampling import TokenLaw


class DeviceLaw:
    """Logits to laws for processors that look at one row of logits alone.

    A leading temperature is read from a device buffer, so that one captured graph serves them all.

    Args:
        law: what to compute; ``law.context_free`` must hold.
        device: where logits live.
    """

    def __init__(self, law: TokenLaw, device: torch.device) -> None:
        self.greedy = law.greedy
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

    @staticmethod
    def kind(law: TokenLaw) -> str:
        """What of a law decides about the time it takes: its processors by name."""
        names = [type(processor).__name__ for processor in _split(law)[1]]
        return " ".join(["greedy" if law.greedy else "sampled", *names])

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


class Noise:
    """The random numbers of one stage, drawn anew before each of its runs.

    ``race`` fp32 ``[B, R, V]``: Exp(1); the largest law / race is a draw from the law. ``uniform`` fp32
    ``[B, N]`` in [0, 1). Both are empty where decoding is greedy.
    """

    def __init__(self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device) -> None:
        self.race = torch.ones(batch, rows, vocabulary, device=device)
        self.uniform = torch.zeros(batch, uniforms, device=device)

    def draw(self, generator: torch.Generator) -> None:
        if self.race.numel():
            self.race.exponential_(generator=generator)
        if self.uniform.numel():
            self.uniform.uniform_(generator=generator)

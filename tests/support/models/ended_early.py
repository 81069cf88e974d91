"""Faults in callbacks and forwards of calls, which end early by them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from tests.support.models.api_cases import Collect
from tests.support.models.families import tiny


class LeftError(Exception):
    """Is raised by a callback when nobody waits any more."""


def some_error(draw: random.Random) -> BaseException:
    """Returns a callback's error: its own, Ctrl-C, or memory that runs out."""
    return draw.choice([LeftError("nobody waits"), KeyboardInterrupt(), torch.OutOfMemoryError("short")])


class Fault:
    """Raises an error the n-th time that it is called, with whatever arguments; ``raised`` tells whether."""

    def __init__(self, left: int, error: BaseException) -> None:
        self.left, self.error, self.raised = left, error, False

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise self.error


def nothing(*_: Any, **__: Any) -> None:
    """No fault."""


class Wire(nn.Module):
    """An activation that may raise, as memory runs out and Ctrl-C comes within a forward.

    An engine may compute with copies of it, which raise with it.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        # An array's content is not looked at for changes of the model, by which all would be made anew.
        self._faults = np.array([nothing])

    def set(self, fault: Callable[..., None] = nothing) -> None:
        """Calls ``fault`` in each forward from now on."""
        self._faults[:] = [fault]

    def forward(self, x: Tensor) -> Tensor:
        self._faults[0]()
        out: Tensor = self.activation(x)
        return out


def wired(family: str) -> tuple[PreTrainedModel, Wire]:
    """Returns a tiny target, and what raises in the middle of its last layer."""
    target = tiny(family)
    mlp = target.model.layers[-1].mlp
    mlp.act_fn = Wire(mlp.act_fn)
    return target, mlp.act_fn


class FaultyStreamer(Collect):
    """A streamer of which one method asks for a fault."""

    def __init__(self, fault: Callable[..., None], place: str) -> None:
        super().__init__()
        self._put, self._end = (fault if place == name else nothing for name in ("put", "end"))
        if place == "put_scores":
            self.put_scores = fault

    def put(self, value: Tensor) -> None:
        self._put()
        super().put(value)

    def end(self) -> None:
        self._end()
        super().end()


class FaultyCriterion(StoppingCriteria):
    def __init__(self, fault: Callable[..., None]) -> None:
        self._fault = fault

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self._fault()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FaultyProcessor(LogitsProcessor):
    def __init__(self, fault: Callable[..., None]) -> None:
        self._fault = fault

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._fault()
        return scores


PLACES = ["progress", "put", "put_scores", "end", "criterion", "processor", "forward"]


def faulty_options(place: str, fault: Callable[..., None], wire: Wire, rows: int = 1) -> dict[str, Any]:
    """Options of a call for ``rows`` prompts that ask for a fault at one of ``PLACES``; sets the wire."""
    wire.set(fault if place == "forward" else nothing)
    if place == "progress":
        return {"progress": fault}
    if place in ("put", "put_scores", "end"):
        streamers = [FaultyStreamer(fault, place), *(Collect() for _ in range(rows - 1))]
        return {"streamer": streamers, "logprobs": place == "put_scores"}
    if place == "criterion":
        return {"stopping_criteria": [FaultyCriterion(fault)]}
    if place == "processor":
        return {"logits_processor": [FaultyProcessor(fault)]}
    return {}

"""Layers on a CPU whose calls of C functions are repeated: the same logits, and what is not repeated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.families import tiny
from triforce_tree import load
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import step_model

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
FORWARDS = 6


class Attend:
    """Attention to fixed values; it counts its calls.

    Args:
        repeats: what views say of themselves.
        computes: whether torch computes the result.
    """

    def __init__(self, repeats: bool = True, computes: bool = False) -> None:
        self.repeats, self._computes, self.calls = repeats, computes, 0
        self._values = torch.linspace(-1, 1, 4096)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
        self.calls += 1
        batch, heads, tokens, _ = q.shape
        size = batch, tokens, heads, v.shape[3]
        out = self._values[: batch * tokens * heads * v.shape[3]].view(size)
        return out + k.mean() if self._computes else out


def model() -> HFModel:
    torch.manual_seed(0)
    return HFModel(tiny("llama-gqa").eval())


def forwards(step: Any, attend: Any, tokens: int) -> list[Tensor]:
    """Returns the logits of other tokens at other positions in each forward."""
    given = torch.Generator().manual_seed(tokens)
    made = []
    for number in range(FORWARDS):
        ids = torch.randint(step.model.config.vocab_size, (1, tokens), generator=given)
        made.append(step(ids, torch.arange(number, number + tokens)[None], attend).clone())
    return made


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_later_forwards_repeat_the_calls_of_a_forward(tokens: int) -> None:
    own, attend = model(), Attend()
    expected = forwards(step_model(own, False), Attend(repeats=False), tokens)
    found = forwards(step_model(own, False), attend, tokens)
    assert attend.calls == 3 * own.layers
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[-1], expected[-2])


def test_sizes_take_turns() -> None:
    own, attend = model(), Attend()
    step = step_model(own, False)
    for tokens in (2, 5, 2):
        expected = forwards(step, Attend(repeats=False), tokens)
        assert all(map(torch.equal, forwards(step, attend, tokens), expected))
    assert attend.calls == 6 * own.layers


def test_work_of_torch_is_never_left_out() -> None:
    own, attend = model(), Attend(computes=True)
    expected = forwards(step_model(own, False), Attend(repeats=False, computes=True), 2)
    assert all(map(torch.equal, forwards(step_model(own, False), attend, 2), expected))
    assert attend.calls == FORWARDS * own.layers


def test_workspaces_stay() -> None:
    """A longer text replaces the workspace of attention, but not for calls that were noted before."""
    engine = load(levels=1, dtype="float32")
    short, long = [5, 6, 7] * 60, [5, 6, 7, 8] * 1500
    first, *_, last = [
        engine.generate([ids], max_new_tokens=20, do_sample=False).sequences[0, -20:].tolist()
        for ids in (short, long, short)
    ]
    expected = engine.target.model.generate(torch.tensor([short]), max_new_tokens=20, do_sample=False)
    assert first == last == expected[0, len(short) :].tolist()


@pytest.mark.parametrize("place", ["mlp.down_proj", "post_attention_layernorm"])
def test_changed_weights_take_effect(place: str) -> None:
    own, attend = model(), Attend()
    step = step_model(own, False)
    before = forwards(step, attend, 2)
    with torch.no_grad():
        own.model.model.layers[1].get_submodule(place).weight.mul_(1.5)
    found, expected = forwards(step, attend, 2), forwards(step, Attend(repeats=False), 2)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], before[0])

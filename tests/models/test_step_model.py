"""The compiled layers of a StepModel: failures of compilation, and other failures."""

import logging
from typing import Any

import pytest
import torch
from families import tiny as family
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from triforce_tree.models.attention import effective_window, keep_chunks
from triforce_tree.models.compiled import layers
from triforce_tree.models.step_model import StepModel

TOKENS = torch.arange(3)[None]


def tiny(layers: int = 2, hidden_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Attention:
    """Attends to the new tokens only; raises ``error`` in call number ``failing``."""

    def __init__(self, failing: int | None = None, error: type[Exception] = RuntimeError) -> None:
        self.layers: list[int] = []
        self.failing, self.error = failing, error

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        self.layers.append(layer)
        if len(self.layers) - 1 == self.failing:
            raise self.error("the device is lost")
        return v.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@pytest.fixture
def compile_as(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces ``torch.compile`` by a function of the layer's forward."""

    def put(make: Any) -> None:
        monkeypatch.setattr(layers.torch, "compile", lambda forward, **how: make(forward))

    return put


def broken(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    return run


def test_layers_that_cannot_be_compiled_run_uncompiled(
    compile_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, attention = Attention(), Attention()
    expected = StepModel(tiny())(TOKENS, TOKENS, plain)
    compile_as(broken)
    step = StepModel(tiny(), compiled=True)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(step(TOKENS, TOKENS, attention), expected)
        assert torch.equal(step(TOKENS, TOKENS, attention), expected)
    assert attention.layers == [0, 1] * 2
    # One warning per layer.
    assert len([r for r in caplog.records if "no compiler" in r.getMessage()]) == 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_in_attention_is_raised_and_no_layer_runs_twice(
    compile_as: Any, caplog: pytest.LogCaptureFixture, failing: int, error: type[Exception]
) -> None:
    compile_as(lambda forward: forward)
    step, attention = StepModel(tiny(), compiled=True), Attention(failing, error)
    expected = step(TOKENS, TOKENS, Attention())
    with caplog.at_level(logging.WARNING), pytest.raises(error, match="the device is lost"):
        step(TOKENS, TOKENS, attention)
    assert attention.layers == [0, 1][: failing + 1]
    assert not caplog.records
    assert torch.equal(step(TOKENS, TOKENS, attention), expected)


def test_out_of_memory_before_attention_is_not_a_compilation_failure(
    compile_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    short = True

    def make(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if short:
                raise torch.OutOfMemoryError("no more")
            return forward(*args, **kwargs)

        return run

    compile_as(make)
    step = StepModel(tiny(), compiled=True)
    with caplog.at_level(logging.WARNING), pytest.raises(torch.OutOfMemoryError):
        step(TOKENS, TOKENS, Attention())
    assert not caplog.records
    short = False
    assert step(TOKENS, TOKENS, Attention()).shape == (1, 3, 16)


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that each graph was compiled for; graphs run as they were traced."""
    found: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        found.append(next(t.shape[1] for t in inputs if isinstance(t, Tensor) and t.dim() == 3))
        return module.forward

    torch.compiler.reset()
    monkeypatch.setattr(layers, "fused", backend)
    return found


def test_layers_and_numbers_of_tokens_share_two_compiled_graphs(compiled_graphs: list[int]) -> None:
    step, plain = StepModel(tiny(layers=3), compiled=True), StepModel(tiny(layers=3))
    for count in (1, 16, 5, 41, 1, 7):
        tokens = torch.arange(count).remainder(16)[None]
        positions = torch.arange(count)[None]
        attention = Attention()
        assert torch.equal(step(tokens, positions, attention), plain(tokens, positions, Attention()))
        assert attention.layers == [0, 1, 2]
    assert len(compiled_graphs) == 2, "one of a token, one of more, whichever layer and number it is"
    # The other model's sizes take graphs of their own, and do not make those of this one general.
    other = StepModel(tiny(layers=1, hidden_size=16), compiled=True)
    for count in (6, 4):
        other(torch.arange(count)[None], torch.arange(count)[None], Attention())
    step(TOKENS, TOKENS, Attention())
    assert len(compiled_graphs) == 3


def test_layers_that_need_a_number_of_tokens_are_compiled_for_each(
    compiled_graphs: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = layers.fused

    def static_only(module: Any, inputs: Any) -> Any:
        if any(isinstance(value, torch.SymInt) for value in inputs):
            raise RuntimeError("sizes must be numbers")
        return count(module, inputs)

    monkeypatch.setattr(layers, "fused", static_only)
    step, plain = StepModel(tiny(), compiled=True), StepModel(tiny())
    with caplog.at_level(logging.WARNING):
        for tokens in (torch.arange(5)[None], TOKENS):
            assert torch.equal(step(tokens, tokens, Attention()), plain(tokens, tokens, Attention()))
    assert sorted(set(compiled_graphs)) == [3, 5]
    assert not caplog.records, "they still run compiled"


def test_chunks_are_found_without_the_index_of_a_layer() -> None:
    model = family("llama4")
    modules = [m for m in model.modules() if hasattr(m, "layer_idx")]
    before = [effective_window(m, None) for m in modules]
    assert {chunked for _, chunked in before} == {False, True}
    keep_chunks(model)
    for module in modules:
        module.layer_idx = None
    assert [effective_window(m, None) for m in modules] == before

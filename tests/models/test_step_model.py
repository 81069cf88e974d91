"""The compiled layers of a StepModel: how many versions there are, and failures."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.models import families
from triforce_tree.models import step_model
from triforce_tree.models.attention import keep_chunks
from triforce_tree.models.step_model import StepModel

TOKENS = torch.arange(3)[None]


def tiny(hidden_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
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
        monkeypatch.setattr(step_model.torch, "compile", lambda forward, **how: make(forward))

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "versions"),
    [((tiny, partial(tiny, 64)), 2), ((partial(families.tiny, "llama4"),), 2)],
    ids=["two sizes", "chunks"],
)
def test_layers_share_versions_and_one_serves_all_lengths_but_one(
    models: Sequence[Callable[[], PreTrainedModel]], versions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_length: list[bool] = []

    def queries(layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        return q.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def counting(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        any_length.append(any(isinstance(x, torch.SymInt) for x in inputs))
        return graph

    monkeypatch.setattr(step_model, "fused", counting)
    steps = [[StepModel(make(), compiled=compiled) for compiled in (True, False)] for make in models]
    for length in (5, 1, 9, 2, 16):
        tokens = torch.arange(length)[None] % 16
        for pair in steps:
            found, expected = (step(tokens, tokens, queries) for step in pair)
            torch.testing.assert_close(found, expected)
    assert any_length == [True] * versions + [False] * versions


@pytest.mark.parametrize("index, layers, chunk", [(1, 3, 8), (-2, 3, None), (-2, 0, None), (3, 3, None)])
def test_an_index_counted_from_the_last_layer_is_none_of_the_decoder(
    index: int, layers: int, chunk: int | None
) -> None:
    """Encoders of Phi-4-multimodal have one."""
    module: Any = nn.Module()
    module.layer_idx = index
    module.config = SimpleNamespace(layer_types=("chunked_attention",) * layers, attention_chunk_size=8)
    keep_chunks(nn.ModuleList([module]))
    assert module.triforce_chunk == chunk

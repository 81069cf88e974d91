"""Streamed weights by option: in Python and on the command line."""

import copy
import gc
import json
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from tests.support.models.tiny_pair import TinyPair
from triforce_tree import load
from triforce_tree.api import Engine
from triforce_tree.cli.entry import main
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.pinned import HostMemoryError
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.loading import checkpoints

PROMPT, NEW = prompt_of(120), 30


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama-gqa", num_hidden_layers=4)
    return target, perturbed(target, 0.05)


@cache
def expected() -> list[int]:
    return greedy(models()[0], PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


def engine_of(**options: Any) -> Engine:
    target, draft = models()
    return load(copy.deepcopy(target), draft, device="cpu", **load_arguments({**SMALL, **options}))


def weights_of(engine: Engine) -> StreamedWeights:
    streamed = engine.target.streamed
    assert isinstance(streamed, StreamedWeights)
    return streamed


def test_an_engine_with_streamed_weights() -> None:
    engine = engine_of(offload_weights=True, gpu_memory="2GiB")
    plan = engine.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert out.memory == plan.as_dict()
    weights = weights_of(engine)
    assert plan.host["weights"] == weights.bytes
    assert plan.device["weight slots"] == weights.slot_bytes
    assert (plan.config.retrieval_weight_bits, plan.levels) == (8, 3)
    auto = engine_of(offload_weights=True, gpu_memory="2GiB", retrieval_weight_bits="auto")
    assert auto.generate(PROMPT, max_new_tokens=NEW, do_sample=False).sequences.equal(out.sequences)
    assert auto.config.retrieval_weight_bits == 8
    assert out.memory["pass_weights_gib"] > 0
    assert 0 < out.memory["pass_weights_ms"] <= out.memory["pass_ms"]
    for levels in (1, 2):
        other = engine.with_options(levels=levels)
        again = other.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert again.sequences.equal(out.sequences)
    short = engine.generate(PROMPT[:2], max_new_tokens=3, do_sample=False)
    assert short.memory is not None
    assert short.memory["levels"] == 2
    assert short.sequences.tolist() == [[*PROMPT[:2], *greedy(models()[0], PROMPT[:2], 3)]]
    other = engine.with_options(budget=32, advanced={"offload_weights": True})
    assert other.generate(PROMPT, max_new_tokens=8, do_sample=False).new_tokens == 8


@pytest.mark.parametrize("bits", ["auto", 8])
def test_three_levels_for_a_prompt_shorter_than_the_budget(bits: int | str) -> None:
    """Its cache stays on the device; the retrieval model has a copy of the weights all the same."""
    engine = engine_of(offload_weights=True, levels=3, budget=512, recent=64, retrieval_weight_bits=bits)
    out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()


def test_weights_are_offloaded_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch, pair: TinyPair) -> None:
    assert pair.load(gpu_memory="2GiB").target.streamed is None
    monkeypatch.setattr(
        checkpoints, "weights_fit", lambda weights, max_seq_len: (weights, max_seq_len) == (0, 0)
    )
    assert pair.load().target.streamed is None
    # Without a bound a CPU has one memory.
    assert pair.load(offload="auto").target.streamed is None
    for options in ({"offload": True, "offload_weights": False}, {}):
        own = pair.load(gpu_memory="2GiB", **options)
        assert (own.target.streamed is None) == bool(options)
        assert own.generate([5, 6, 7, 8] * 20, max_new_tokens=4, do_sample=False).new_tokens == 4
    on_device = own.with_options(offload=False, gpu_memory=None)
    assert on_device.generate([5, 6, 7, 8] * 20, max_new_tokens=4).memory is None
    given = engine_of(gpu_memory="2GiB")
    assert given.target.streamed is None, "a model object is changed only where offload_weights=True is given"


def test_close_frees_everything() -> None:
    engine = engine_of(offload_weights=True)
    weights = weights_of(engine)
    blocks = [weakref.ref(block) for block in (*weights._host, *weights._slots)]
    engine.generate(PROMPT, max_new_tokens=4, do_sample=False)
    engine.close()
    engine.close()
    gc.collect()
    assert all(block() is None for block in blocks)
    assert weights._memory.bytes == 0
    layers = engine.target.model.model.layers
    assert all(
        m.weight.numel() == 0 for layer in layers for m in layer.modules() if type(m) is torch.nn.Linear
    )
    with pytest.raises(RuntimeError, match=r"freed by close\(\); load the model again"):
        engine.generate(PROMPT, max_new_tokens=4, do_sample=False)
    with pytest.raises(RuntimeError, match="load the model again"):
        engine.target.model(torch.tensor([PROMPT]))


def test_the_command_streams_weights(capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str) -> None:
    sizes = ["--budget", "64", "--advanced", "recent=16", "--levels", "3", "--max-new-tokens", "12"]
    words = [
        "generate",
        prompt,
        *pair.options,
        *sizes,
        "--json",
        "--compare",
        "--advanced",
        "offload_weights=true",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "host: weights" in err
    assert "weights into host memory" in err
    assert "for weights, budget 64" in err
    result = json.loads(out.splitlines()[-1])
    assert result["identical"] is True
    assert result["memory"]["pass_weights_ms"] > 0


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"retrieval_weight_bits=16 .* use retrieval_weight_bits=8 or 4.* or levels=1 or 2"
    ):
        engine_of(offload_weights=True, retrieval_weight_bits=16).memory_plan(len(PROMPT), NEW)
    own = engine_of(offload_weights=True)
    with pytest.raises(ValueError, match=r"offload_weights=False differs from True.*load the models anew"):
        own.with_options(advanced={"offload_weights": False})
    target, config = own.target, HierarchyConfig.from_options(**SMALL)
    with pytest.raises(ValueError, match="retrieval_weight_bits=8 or 4"):
        DecodingProgram(target, SuffixMatching(), config, 1, 200, 3, Offload())
    with pytest.raises(ValueError, match=r"use triforce_tree.load"):
        Engine(models()[0], config=HierarchyConfig(offload_weights=True))
    with pytest.raises(ValueError, match=r"offload_weights='yes' must be"):
        HierarchyConfig(offload_weights="yes")
    with pytest.raises(ValueError, match="offload=False asks for none"):
        HierarchyConfig(offload_weights=True, offload=False)


def test_a_device_too_small_for_the_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(StreamedWeights, "_move_the_rest", full)
    with pytest.raises(
        ValueError, match=r"embeddings, head and two layers of this LlamaForCausalLM do not fit on"
    ):
        engine_of(offload_weights=True)


def test_more_weights_than_the_user_allows_are_refused_before_any_moves() -> None:
    model = tiny("llama-gqa")
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(
        HostMemoryError, match=r"host_memory allows 0\.0 GiB; allow more, or free host memory"
    ):
        StreamedWeights(model, "cpu", most=1000)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places

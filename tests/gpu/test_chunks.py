"""Chunks of prompts on a GPU: graphs between calls of attention, and chunks that begin behind passes."""

import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.joining import Coming
from tests.support.models.pair_on_gpu import FIXED, long_text, pair_on
from triforce_tree import Engine
from triforce_tree.check.ties import first_difference
from triforce_tree.requests.joining import Joined

pytestmark = pytest.mark.gpu

NEW = 48
HOW: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
# Sizes of padded chunks, short and longer ones, and the end of a chunk of 4,096 tokens.
LENGTHS = (700, 701, 1990, 2049, 3000, 5000, 8192)


def engine_of(dtype: torch.dtype, **options: Any) -> Engine:
    return pair_on("cuda", dtype, **{**FIXED, "prefix_cache": False, **options})


def added(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    tokens: list[int] = engine.generate(prompt, **HOW, **options).sequences[0, len(prompt) :].tolist()
    return tokens


def unchanged(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    """A hook without effect, with which forwards of chunks are not captured."""


def halved(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out / 2


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_captured_chunks_have_the_bits_of_the_first_ones(dtype: torch.dtype, ahead: bool) -> None:
    """The first forward of a size is called, the second one captured, and the others are replayed. A server
    captures all ahead, those of whole chunks as well.
    """
    engine, direct, text = engine_of(dtype), engine_of(dtype), long_text()
    if ahead:
        engine.target.capture_chunks()
    direct.target.model.model.layers[0].mlp.register_forward_hook(unchanged)
    for length in LENGTHS:
        outs = [engine.generate(text[:length], output_logits=True, **HOW) for _ in range(4)]
        for out in outs[1:]:
            assert torch.equal(out.sequences, outs[0].sequences)
            assert all(map(torch.equal, out.logits, outs[0].logits))
        expected = added(direct, text[:length])
        difference = first_difference(engine, text[:length], outs[0].sequences[0, length:].tolist(), expected)
        assert difference is None or difference.tie, difference
    engine.close()
    direct.close()


def test_hooks_take_effect_after_chunks_were_captured() -> None:
    engine, fresh, prompt = engine_of(torch.float32), engine_of(torch.float32), long_text()[:900]
    before = [added(engine, prompt) for _ in range(3)]
    for each in (engine, fresh):
        each.target.model.model.layers[1].mlp.register_forward_hook(halved)
    found, expected = added(engine, prompt), added(fresh, prompt)
    assert before[0] == before[1] == before[2] != found
    difference = first_difference(fresh, prompt, found, expected)
    assert difference is None or difference.tie, difference
    engine.close()
    fresh.close()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_prompts_that_join_give_the_texts_of_lone_ones(levels: int) -> None:
    """Chunks begin behind a pass, before its results are read; level 1 accepts as much as alone."""
    text, alone = long_text(), engine_of(torch.float32, levels=levels)
    begins = {0: 9000, 20_000: 1500, 30_000: 6000, 40_000: 2048, 50_000: 300}
    prompts = [text[start : start + length] for start, length in begins.items()]
    expected = [alone.generate(prompt, max_new_tokens=200, do_sample=False) for prompt in prompts]
    coming = Coming([Joined(prompt, 200, None) for prompt in prompts[1:]], 3)
    batched = engine_of(torch.float32, levels=levels)
    batched.generate(prompts[:1], max_new_tokens=200, do_sample=False, joining=coming, max_batch=3)
    for number, (prompt, own) in enumerate(zip(prompts, expected, strict=True)):
        out = coming.outputs[number]
        new, one = (each.sequences[0, len(prompt) :].tolist() for each in (out, own))
        difference = first_difference(alone, prompt, new, one)
        assert difference is None or difference.tie, difference
        assert out.levels is not None
        assert own.levels is not None
        if levels > 1 and difference is None:
            assert out.levels[-1].forwards <= 1.1 * own.levels[-1].forwards + 2
    alone.close()
    batched.close()


def test_no_pass_waits_for_the_device_where_prompts_join() -> None:
    """Torch reports copies and reads that wait for all work of the device, chunks of prompts included."""
    text, engine = long_text(), engine_of(torch.bfloat16)
    options = [{"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7, "repetition_penalty": 1.1}]

    def run() -> None:
        prompts = [text[start : start + 6000] for start in range(0, 60_000, 10_000)]
        joined = [Joined(own, 100, options=options[n % 3]) for n, own in enumerate(prompts[1:])]
        own: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1}
        coming = Coming(joined, 3)
        engine.generate(prompts[:1], max_new_tokens=100, joining=coming, max_batch=3, seed=1, **own)
        assert len(coming.outputs) == len(prompts)

    run()  # kernels are compiled and stages captured
    waits = list[str]()

    def noted(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if "triforce_tree" in frame.filename]
        if "synchronizing" in str(message) and any(frame.name == "step" for frame in frames):
            waits.append(" < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[:-8:-1]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not waits, "\n".join(sorted(set(waits)))
    engine.close()

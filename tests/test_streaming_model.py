"""A model on a streaming cache: its logits are those of a plain forward over the tokens still held.

One layer, so that a row depends on its own token alone.
"""

import pytest
import torch
from families import prompt_of, tiny

from triforce_tree.caches import StreamingCache
from triforce_tree.config import StreamingConfig
from triforce_tree.hf_model import HFModel
from triforce_tree.level import Level
from triforce_tree.token_tree import Context


def test_a_streaming_model_sees_its_sinks_and_recent_rows_alone() -> None:
    """After many evictions the logits are those of a plain forward over the tokens still held."""
    sinks, window = 3, 6
    model = tiny("llama-gqa", num_hidden_layers=1)
    checked = HFModel(model)
    level = Level(checked, StreamingCache(1, StreamingConfig(sinks, window), checked.rope()), prefill_chunk=4)
    tokens = prompt_of(90)
    held = tokens[:9]
    with checked.active():
        level.prefill(Context(tokens[:10]))
        for end in range(10, 90, 4):
            logits, _ = level.catch_up(Context(tokens[:end]))
            assert level.cache.held == len(held)
            seen = [*held, *tokens[level.cache.length : end]]
            with torch.no_grad():
                model.set_attn_implementation("sdpa")
                expected = model(torch.tensor([seen])).logits[0, -1]
                model.set_attn_implementation("triforce_tree")
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
            held += tokens[level.cache.length : end]
            level.commit(Context([*tokens[:end], 0]))
            if len(held) > sinks + 2 * window:
                held = [*held[:sinks], *held[-window:]]
    assert level.cache.length == 86


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 100])
@pytest.mark.parametrize("prefill_chunk", [1, 3, 1000])
def test_streaming_prefill_passes_over_what_nobody_would_see(length: int, prefill_chunk: int) -> None:
    sinks, window = 3, 6
    model = tiny("llama", num_hidden_layers=1)
    checked = HFModel(model)
    level = Level(checked, StreamingCache(1, StreamingConfig(sinks, window), checked.rope()), prefill_chunk)
    tokens = prompt_of(length)
    fed: list[int] = []
    with checked.active():
        level.prefill(Context(tokens), fed.append)
        assert level.cache.length == sum(fed) == length - 1
        assert level.cache.held <= sinks + 2 * window
        logits, _ = level.catch_up(Context(tokens))
    recent = level.cache.held - min(sinks, length - 1)
    seen = [*tokens[: min(sinks, length - 1)], *tokens[length - 1 - recent :]]
    assert recent >= min(window, length - 1 - sinks)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([seen])).logits[0, -1], atol=2e-5, rtol=1e-4)

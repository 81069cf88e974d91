"""Weights in host memory give the bits of the whole model."""

from typing import Any

import pytest
import torch

from tests.support.models.pair_on_gpu import OFFLOADED, inflated, long_text
from triforce_tree import load
from triforce_tree.config import load_arguments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streamed_weights_give_the_bits_of_the_whole_model(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    target, draft, _ = inflated(device, dtype)
    prompt = long_text()[:512]
    ids = torch.tensor([prompt], device=device)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    with torch.inference_mode():
        logits = target(ids).logits
    text = load(target, draft, **load_arguments(OFFLOADED)).generate(prompt, **how).sequences
    target, draft, _ = inflated(device, dtype)
    engine = load(target, draft, **load_arguments({**OFFLOADED, "offload_weights": True}))
    assert engine.target.streamed is not None
    with torch.inference_mode():
        assert torch.equal(engine.target.model(ids).logits, logits)
    if dtype == torch.float32:
        assert torch.equal(engine.generate(prompt, **how).sequences, text)
    engine.close()

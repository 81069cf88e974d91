"""Weights without a given dtype keep that of the checkpoint."""

from pathlib import Path

import pytest
import torch

import triforce_tree
from tests.support.models.families import prompt_of, tiny
from triforce_tree.kernels.cpu.fp32.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")


@pytest.mark.parametrize(
    "family, stored, dtype",
    [
        ("llama-gqa", torch.bfloat16, torch.bfloat16),
        ("llama-gqa", torch.float16, torch.float16),
        ("llama-gqa", torch.float32, torch.float32),
        ("mixtral", torch.bfloat16, torch.float32),
    ],
)
def test_on_a_cpu(tmp_path: Path, family: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    """All compute in fp32, so a text does not depend on it; experts would compute in bf16."""
    tiny(family).to(stored).save_pretrained(tmp_path)
    own, given = (triforce_tree.load(tmp_path, device="cpu", dtype=each) for each in (None, torch.float32))
    assert own.target.model.dtype == dtype
    texts = [
        each.generate(prompt_of(40), max_new_tokens=24, temperature=0.0).sequences for each in (own, given)
    ]
    assert torch.equal(*texts)

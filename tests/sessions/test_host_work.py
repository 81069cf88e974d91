"""Tests what the host does for another turn of a long session: few looks at all of its tokens, counted."""

import sys
from typing import Any

import pytest

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree.config import load_arguments
from triforce_tree.kv import cached_tokens

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}


def test_a_turn_compares_its_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama-gqa")
    engine = triforce_tree.load(target, perturbed(target, 0.05), **load_arguments({**SMALL, "levels": 3}))
    session = engine.session(prompt_of(700))
    session.generate(**GREEDY)
    counts = {"compared": 0}
    common = cached_tokens.common_prefix

    def compared(a: Any, b: Any, *most: Any) -> int:
        counts["compared"] += min(len(a), len(b)) > 600
        return common(a, b, *most)

    for module in [m for name, m in sys.modules.items() if name.startswith("triforce_tree")]:
        if getattr(module, "common_prefix", None) is common:
            monkeypatch.setattr(module, "common_prefix", compared)
    out = session.generate(prompt_of(9), **GREEDY)
    assert out.reused_tokens >= 700
    # With what the cache holds alone.
    assert counts == {"compared": 1}

"""``prefix_cache`` with a size: texts before the last one, kept in host memory."""

import logging
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.kv import kept_prefixes
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError

BOOK, OTHER, THIRD = prompt_of(150), [*reversed(prompt_of(140))], prompt_of(155)
HOW: dict[str, Any] = {"max_new_tokens": 5, "output_logits": True, "do_sample": False}


def engine(family: str = "llama-gqa", **options: Any) -> Engine:
    target = tiny(family)
    own = {**SMALL, "levels": 3, "window": 40, "prefix_cache": "1GiB", **options}
    return triforce_tree.load(target, perturbed(target, 0.05), **load_arguments(own))


def check(warm: Engine, prompt: Any, kept: Any) -> None:
    cold = warm.with_options(advanced={"prefix_cache": False})
    out, other = warm.generate(prompt, **HOW), cold.generate(prompt, **HOW)
    assert out.sequences.tolist() == other.sequences.tolist()
    for ours, theirs in zip(out.logits, other.logits, strict=True):
        assert torch.equal(ours, theirs)
    assert out.reused_tokens == kept
    cold.release()


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"key_variance": True}, {"levels": 1}], ids=str)
def test_two_documents_take_turns(options: dict[str, Any], poisoned_empty: None) -> None:
    """Each is prefilled once; the bits are those of a cold run."""
    warm = engine(**options)
    check(warm, BOOK, 0)
    check(warm, OTHER, 0)
    check(warm, [*BOOK, 3, 4], 144)
    check(warm, [*OTHER[:100], *prompt_of(9)], 96)
    check(warm, [*BOOK[:64], *OTHER], 64)
    check(warm, [*OTHER, 1], 128)


def test_other_batches_and_sessions_find_them() -> None:
    warm = engine()
    check(warm, BOOK, 0)
    check(warm, [OTHER, BOOK[:61]], [0, 48])
    check(warm, [[*BOOK, 1], [*OTHER, 2]], [144, 128])
    session = warm.session(OTHER)
    asked = [*OTHER, *prompt_of(7)]
    out = session.generate(prompt_of(7), **HOW)
    assert out.reused_tokens == 128
    cold = warm.with_options(advanced={"prefix_cache": False}).generate(asked, **HOW)
    assert out.sequences.tolist() == cold.sequences.tolist()


def test_the_size_is_a_limit() -> None:
    """The text used longest ago is dropped from its end; what a prompt begins with stays for it."""
    warm = engine()
    for prompt in (BOOK, OTHER):
        check(warm, prompt, 0)
    prefixes = warm._hierarchy.prefixes
    a_chunk = prefixes.taken // 9
    assert prefixes.taken == 9 * a_chunk > 0
    prefixes.bound(14 * a_chunk)
    check(warm, THIRD, 0)
    assert prefixes.taken == 14 * a_chunk
    check(warm, [*BOOK, 3], 96)
    assert prefixes.taken == 14 * a_chunk
    check(warm, OTHER, 0)
    prefixes.bound(5 * a_chunk)
    assert prefixes.taken == 5 * a_chunk
    check(warm, [*BOOK, 4], 80)
    check(warm, THIRD, 0)
    assert prefixes.taken == 5 * a_chunk
    warm.close()
    assert prefixes.taken == 0


def test_memory_that_is_short_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(self: HostMemory, size: int) -> None:
        raise HostMemoryError("none is left")

    warm = engine()
    monkeypatch.setattr(kept_prefixes.HostMemory, "check", short)
    with caplog.at_level(logging.WARNING):
        for prompt in (BOOK, OTHER, BOOK, OTHER):
            check(warm, prompt, 0)
    assert [r.getMessage() for r in caplog.records] == [
        "prefix_cache: earlier texts are not kept any more: none is left"
    ]


def test_changed_weights_find_nothing() -> None:
    warm = engine(levels=1)
    check(warm, BOOK, 0)
    check(warm, OTHER, 0)
    with torch.no_grad():
        warm.target.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    check(warm, BOOK, 0)


@pytest.mark.parametrize("family, options", [("gemma3", {}), ("llama-gqa", {"offload": True})])
def test_caches_that_are_not_kept(family: str, options: dict[str, Any]) -> None:
    """Rings hold a window alone, and an offloaded cache is in host memory itself."""
    warm = engine(family, **options)
    for prompt in (BOOK, OTHER, BOOK):
        assert warm.generate(prompt, max_new_tokens=3, do_sample=False).reused_tokens == 0
    assert warm._hierarchy.prefixes.taken == 0


@pytest.mark.parametrize(
    "size, said", [(3, "write 3GiB"), ("much", "is no size of memory"), (0, "is no size")]
)
def test_a_size_is_checked(size: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"prefix_cache=.*{said}.*; or give True or False"):
        HierarchyConfig(prefix_cache=size)

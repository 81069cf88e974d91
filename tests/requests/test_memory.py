"""Memory of many calls is that of the first ones: what is kept by settings is bounded."""

import gc
import weakref
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import CHUNKED_DRAFTED, TARGET
from tests.support.models.families import perturbed, prompt_of
from triforce_tree.config import load_arguments

TEXT = prompt_of(60)


def kept() -> tuple[int, int]:
    """Objects that the garbage collector follows, and bytes of all tensors."""
    gc.collect()
    found = gc.get_objects()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (each.untyped_storage() for each in found if type(each) is torch.Tensor)
    }
    return len(found), sum(storages.values())


def test_kinds_of_sampling_keep_no_more_and_more() -> None:
    """Each call has settings that none had before, with stages of their own."""
    options = {**CHUNKED_DRAFTED, "levels": 2, "rounds": 1}
    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **load_arguments(options))
    found = []
    for number in range(60):
        if number == 20:
            found.append(kept())
        engine.generate(TEXT[:50], max_new_tokens=4, do_sample=True, top_p=0.3 + 0.005 * number)
    (objects, size), (after, later) = found[0], kept()
    assert after - objects < 2000, found
    assert later <= 1.05 * size, found


@pytest.mark.parametrize("options", [{}, {"levels": 1}, {"kv_bits": 8}, {"offload": True}], ids=str)
def test_buffers_are_freed_without_a_garbage_collection(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no graphs: it would take a quarter of a second of the first token's time."""
    arguments = load_arguments({**CHUNKED_DRAFTED, **options})
    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **arguments)
    engine.generate(TEXT[:10], max_new_tokens=4)
    program = engine.last_program
    assert program is not None
    freed = [weakref.ref(part) for part in (program, program.cache, program.state)]
    del program
    gc.collect()
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("not needed"))
    gc.disable()
    try:
        engine.generate(20 * TEXT, max_new_tokens=4)
        assert not any(each() is not None for each in freed)
    finally:
        gc.enable()

"""Device memory that runs out during offloaded decoding, and interrupts: right tokens, memory is freed."""

import gc
import logging
from typing import Any

import pytest
import torch

from tests.support.models.offloaded_engine import NEW, PROMPT, engine, expected
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.program import DecodingProgram

pytestmark = pytest.mark.usefixtures("small_pieces")


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: set[int]) -> None:
    """Lets some calls of a method run out of memory."""
    method, calls = getattr(owner, name), 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in times:
            raise torch.OutOfMemoryError("no more")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize(
    ("place", "times"),
    [("__init__", {1}), ("preparation", {1, 2}), ("prefill", {1}), ("committed", {3}), ("run", {5, 60})],
)
def test_a_smaller_plan_follows_memory_that_runs_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, times: set[int]
) -> None:
    failing(monkeypatch, FullCache if place == "committed" else DecodingProgram, place, times)
    streamed: list[int] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            streamed.extend(tokens.flatten().tolist())

        def end(self) -> None: ...

    with caplog.at_level(logging.WARNING):
        out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=False, streamer=Streamer())  # type: ignore[arg-type]
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert streamed[len(PROMPT) :] == expected()
    warnings = [r.message for r in caplog.records if "device memory ran out" in r.message]
    assert len(warnings) == len(times)
    assert "resident KV 0.0 GiB -> 0.0 GiB" in warnings[0]
    assert out.levels is not None
    assert out.levels[-1].emitted == NEW


def test_memory_that_keeps_running_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DecodingProgram, "prefill", set(range(100)))
    own = engine()
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert not own._hierarchy._offloaded
    monkeypatch.undo()
    failing(monkeypatch, DecodingProgram, "prefill", {1})
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        engine(offload=False).generate(PROMPT, max_new_tokens=NEW, do_sample=False)


def test_sampling_continues_with_new_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, FullCache, "committed", {2})
    out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=0, seed=3)
    assert out.new_tokens == NEW


@pytest.mark.parametrize("what", ["pinned", "progress"])
def test_an_interrupt_frees_the_memory(what: str) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    own = engine()
    with pytest.raises(KeyboardInterrupt):
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False, **{what: stop})
    assert all(program.cache.closed for program in own._hierarchy._offloaded)
    gc.collect()
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()

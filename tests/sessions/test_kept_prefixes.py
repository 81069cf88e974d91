"""Prompts that begin with what the buffers hold: the same tokens as without it, in every kind of cache."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny, without_tree
from tests.support.models.program_cases import SMALL
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kv import store as store_module
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.store import KVStore

CHUNK = SMALL["prefill_chunk"]
PROMPT, QUESTION = prompt_of(150), prompt_of(21)


def _of(family: str, **options: Any) -> Callable[[], Engine]:
    def made() -> Engine:
        target = tiny(family)
        own = {**SMALL, "window": 40, **options}
        return triforce_tree.load(target, perturbed(target, 0.05), **load_arguments(own))

    return made


def _recurrent(family: str, levels: int = 1) -> Callable[[], Engine]:
    own = {"prefill_chunk": CHUNK, "levels": levels, "rounds": 1}
    return lambda: triforce_tree.load(recurrent(family), **load_arguments(own))


def _looked_up() -> Engine:
    own = without_tree({**SMALL, "levels": 3})
    return triforce_tree.load(tiny("llama-gqa"), **load_arguments(own))


KINDS: dict[str, Callable[[], Engine]] = {
    "prompt lookup": _looked_up,
    "plain": _of("llama-gqa", levels=1),
    "three levels": _of("llama-gqa", levels=3),
    "8 bits": _of("llama-gqa", levels=3, kv_bits=8),
    "windows": _of("gemma3", levels=3),
    "windows in 8 bits": _of("gemma2", levels=2, kv_bits=8),
    "offloaded": _of("llama-gqa", levels=3, offload=True),
    "offloaded windows": _of("gemma3", levels=3, offload=True),
    "gated delta rule": _recurrent("qwen3.5"),
    "gated delta rule, two levels": _recurrent("qwen3.5", 2),
    "short convolutions": _recurrent("lfm2"),
}
# Which keep nothing but what their last pass has left.
AT_THE_END = {"windows", "windows in 8 bits", "chunked windows", "offloaded windows"}
AT_THE_END |= {name for name in KINDS if KINDS[name].__qualname__.startswith("_recurrent")}


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch, poisoned_empty: None) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)


@cache
def engine(kind: str) -> Engine:
    return KINDS[kind]()


@cache
def cold(kind: str) -> Engine:
    # Of its own models: host memory holds one offloaded cache of a model at a time.
    return KINDS[kind]().with_options(advanced={"prefix_cache": False})


def new(out: Any, prompt: list[int]) -> list[int]:
    return out.sequences[0, len(prompt) :].tolist()


GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5}


@pytest.mark.parametrize(
    "kind, sampling",
    [*((kind, GREEDY) for kind in KINDS), *((kind, SAMPLED) for kind in ("three levels", "windows"))],
)
def test_a_session_draws_what_a_cold_engine_draws(kind: str, sampling: dict[str, Any]) -> None:
    """Three calls, each of which prefills the new tokens alone."""
    session = engine(kind).with_options().session(PROMPT)
    expected = list(PROMPT)
    for number, question in enumerate([None, QUESTION, QUESTION[:3]]):
        expected += question or []
        asked = list(expected)
        out = session.generate(question, max_new_tokens=9, **sampling)
        other = cold(kind).generate(asked, max_new_tokens=9, **sampling)
        assert new(out, asked) == new(other, asked), number
        assert other.reused_tokens == 0
        expected = out.sequences[0].tolist()
        assert session.tokens == expected
        if number == 0:
            assert out.reused_tokens == 0
        else:
            # The last pass may have committed tokens after the last one that was asked for. Windows and
            # states may then have gone on too far, and the end of the last prompt is the next best place.
            before = len(asked) - len(question or [])
            assert before - (10 if kind in AT_THE_END else 1) <= out.reused_tokens <= before


@pytest.mark.parametrize("kind", ["three levels", "8 bits", "offloaded", "windows", "short convolutions"])
def test_generate_keeps_whole_chunks(kind: str) -> None:
    """Logits are the same bits: the chunks after the kept ones are those of a cold prefill."""
    warm = engine(kind).with_options()
    how: dict[str, Any] = {"max_new_tokens": 5, "output_logits": True, "do_sample": False}
    first = warm.generate(PROMPT, **how)
    again = [*PROMPT[:130], *QUESTION]
    for prompt, kept in ((again, 128), ([*again, 3], 144), (PROMPT[:50], 48), (QUESTION, 0)):
        out, other = warm.generate(prompt, **how), cold(kind).generate(prompt, **how)
        assert out.sequences.tolist() == other.sequences.tolist()
        if warm.target.dtype == torch.float32:
            for ours, theirs in zip(out.logits, other.logits, strict=True):
                assert torch.equal(ours, theirs)
        assert out.reused_tokens == (0 if kind in AT_THE_END else kept), prompt
    assert first.reused_tokens == 0


@pytest.mark.parametrize("kind", ["three levels", "offloaded"])
def test_a_batch_keeps_a_prefix_of_each_sequence(kind: str) -> None:
    warm = engine(kind).with_options()
    prompts = [prompt_of(length) for length in (90, 61, 120)]
    how: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False}
    assert warm.generate(prompts, **how).reused_tokens == [0, 0, 0]
    changed = [prompts[0], [*prompts[1][:33], *prompt_of(60)], [*prompts[2], 5]]
    out, other = warm.generate(changed, **how), cold(kind).generate(changed, **how)
    assert out.sequences.tolist() == other.sequences.tolist()
    assert out.reused_tokens == [80, 32, 112]
    assert warm.generate(changed[0], **how).reused_tokens == 0, "another number of sequences"


def test_a_last_layer_on_the_device_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill computes every layer in its memory."""
    made: list[OffloadedCache] = []
    init = OffloadedCache.__init__

    def recorded(self: OffloadedCache, *args: Any, **kwargs: Any) -> None:
        settings = next(a for a in args if hasattr(a, "last_resident"))
        object.__setattr__(settings, "last_resident", True)
        object.__setattr__(settings, "resident_bytes", 1 << 20)
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(OffloadedCache, "__init__", recorded)
    session = engine("offloaded").with_options().session(PROMPT, reserve=40)
    session.generate(max_new_tokens=9, do_sample=False)
    asked = [*session.tokens, *QUESTION]
    out = session.generate(QUESTION, max_new_tokens=9, do_sample=False)
    assert made[-1].host.last_resident
    assert out.reused_tokens >= len(asked) - len(QUESTION) - 1
    monkeypatch.undo()
    assert new(out, asked) == new(cold("plain").generate(asked, max_new_tokens=9, do_sample=False), asked)


@pytest.mark.parametrize("kind", ["8 bits", "windows", "short convolutions"])
def test_buffers_grow_and_change_their_settings(kind: str) -> None:
    """Larger ones get a copy of what they hold, or the same memory serves programs of other levels."""
    own = engine(kind).with_options()
    session = own.session(PROMPT, reserve=0)
    session.generate(max_new_tokens=9, do_sample=False)
    before = own._hierarchy.last_program
    asked = [*session.tokens, *prompt_of(1000)]
    out = session.generate(prompt_of(1000), max_new_tokens=9, do_sample=False)
    assert own._hierarchy.last_program is not before
    assert out.reused_tokens > 150
    assert new(out, asked) == new(cold(kind).generate(asked, max_new_tokens=9, do_sample=False), asked)


def test_a_growing_conversation_seldom_makes_buffers() -> None:
    target, options = tiny("llama-gqa", max_position_embeddings=16_384), {"prefill_chunk": CHUNK}
    own, other = (triforce_tree.load(target, levels=1, advanced=options) for _ in range(2))
    text, programs = list(PROMPT), []
    for turn in range(12):
        text += prompt_of(1000)
        out = own.generate(text, max_new_tokens=3, do_sample=False)
        assert out.reused_tokens >= (len(text) - 1010 - CHUNK if turn else 0)
        if own.last_program not in programs:
            programs.append(own.last_program)
        last, text = text, [*text, *new(out, text)]
    assert len(programs) <= 5
    assert new(out, last) == new(other.generate(last, max_new_tokens=3, do_sample=False), last)


def test_another_number_of_levels_takes_over_the_memory() -> None:
    own = engine("three levels").with_options(levels="auto", budget=128, advanced={"chunk": 64, "recent": 64})
    session = own.session(PROMPT, reserve=0)
    levels, memories = [], []
    for number, question in enumerate([[], prompt_of(120), [1]]):
        if number == 2:
            session = own.session(session.tokens[:200], reserve=0)
        before, asked = len(session.tokens), [*session.tokens, *question]
        out = session.generate(question or None, max_new_tokens=9, do_sample=False)
        assert out.reused_tokens >= (before - 1 if number else 0)
        assert new(out, asked) == new(cold("plain").generate(asked, max_new_tokens=9, do_sample=False), asked)
        program = own.last_program
        levels.append(program.levels)
        memories.append(program.store.memory)
    assert levels == [2, 3, 2]
    assert memories[0] is not memories[1], "three levels write further"
    assert memories[1] is memories[2]


def test_a_copy_that_does_not_fit_is_prefilled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: KVStore, source: KVStore, sequence: int, length: int) -> bool:
        raise torch.OutOfMemoryError("no room for both")

    monkeypatch.setattr(KVStore, "take", full)
    session = engine("plain").with_options().session(PROMPT, reserve=0)
    session.generate(max_new_tokens=9, do_sample=False)
    asked = [*session.tokens, *prompt_of(1000)]
    out = session.generate(prompt_of(1000), max_new_tokens=9, do_sample=False)
    assert out.reused_tokens == 0
    assert new(out, asked) == new(cold("plain").generate(asked, max_new_tokens=9, do_sample=False), asked)


@pytest.mark.parametrize("kind", ["windows", "short convolutions"])
def test_a_trial_leaves_rings_and_states_as_they_were(kind: str) -> None:
    """Another kind of sampling captures its stages between two calls of a session.

    Slots after the text's own get finite values for the trial, as nothing may have written them.
    """
    own = engine(kind).with_options()
    session = own.session(PROMPT)
    session.generate(max_new_tokens=9, do_sample=False)
    program = own.last_program
    held = len(session.tokens) - 1
    parts = [part[:, :, :, :held] for group in program.store.groups for part in group.parts]
    parts += program.states.buffers if program.states is not None else []
    before = [part.clone() for part in parts]
    with own.target.active(), program.trial(70) as begin:
        begin(False)
        program.run("plain", torch.Generator())
        assert not all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    for part, old in zip(parts, before, strict=True):
        torch.testing.assert_close(part, old, rtol=0, atol=0, equal_nan=True)
    tokens = len(session.tokens)
    assert session.generate([1], max_new_tokens=2, do_sample=False).reused_tokens >= tokens - 1


def test_frequencies_that_depend_on_the_length() -> None:
    """Nothing is kept of a text that uses the other set."""
    target = tiny("phi3-longrope")
    limit = target.config.rope_parameters["original_max_position_embeddings"]
    own = triforce_tree.load(target, levels=1, advanced={"prefill_chunk": CHUNK})
    text = prompt_of(limit + 40)
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    own.generate(text[: limit - 5], **how)
    session = own.session()
    out = session.generate(text, **how)
    assert out.reused_tokens == 0
    more = [*session.tokens, 1, 2, 3]
    out = session.generate([1, 2, 3], **how)
    assert out.reused_tokens == limit + 42
    other = own.with_options(advanced={"prefix_cache": False}).generate(more, **how)
    assert new(out, more) == new(other, more)


def test_equal_settings_share_buffers() -> None:
    """Prompt lookup's trees are made anew for each call."""
    own = engine("prompt lookup").with_options()
    programs = []
    for _ in range(2):
        own.generate(PROMPT, max_new_tokens=3, do_sample=False)
        programs.append(own._hierarchy.last_program)
    assert programs[0] is programs[1]


def test_a_failed_generation_leaves_nothing_to_keep() -> None:
    own = engine("plain").with_options()

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    own.generate(PROMPT, max_new_tokens=3, do_sample=False)
    with pytest.raises(KeyboardInterrupt):
        own.generate([*PROMPT[:50], *QUESTION], max_new_tokens=3, do_sample=False, progress=interrupt)
    out = own.generate(PROMPT, max_new_tokens=3, do_sample=False)
    other = cold("plain").generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert out.sequences.tolist() == other.sequences.tolist()

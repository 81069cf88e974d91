"""Prompts that join a batch are prefilled in chunks between the passes of the sequences that run."""

import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import CHUNK, CHUNKED, SHARING, TARGET
from tests.support.models.families import prompt_of, tiny
from tests.support.models.joining import Coming
from tests.support.models.program_cases import reference
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.streamers import TokenStreamer

# Most chunks between two passes: each takes 1/64 s of the tests' clock.
AT_ONCE = 4


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_tree.decoding.chunked_prefill._PAUSE", AT_ONCE / 64)


LONG, SHORT = prompt_of(300)[::-1], prompt_of(70)
OWN_SLOTS = {
    "window": lambda: tiny("mistral-window"),
    "gated delta rule": lambda: recurrent("qwen3.5"),
    "Mamba": lambda: recurrent("falcon-h1"),
}


def engine_over(target: Any, **options: Any) -> Engine:
    return triforce_tree.load(target, **load_arguments({**CHUNKED, **options}))


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Engine]]] = {
    **{kind: (lambda: TARGET, lambda _, made=made: made()) for kind, made in SHARING.items()},
    "own slots": (lambda: TARGET, lambda target: engine_over(target, levels=1, prefix_cache=False)),
    **{
        f"{kind}, levels={levels}": (made, lambda target, n=levels: engine_over(target, levels=n))
        for kind, made in OWN_SLOTS.items()
        for levels in (1, 2)
    },
}  # fmt: skip


class Told(TokenStreamer):
    """Records events, and ends its sequence once ``ending`` is true."""

    def __init__(self, name: str, events: list[str], ending: Callable[[], bool] = lambda: False) -> None:
        self._name, self._events, self._ending = name, events, ending

    def put_prompt(self, *_: Any) -> None:
        pass

    def put_tokens(self, tokens: Any) -> bool:
        self._events.append(self._name)
        return self._ending()

    def wants_end(self) -> bool:
        return self._ending()

    def end(self) -> None:
        self._events.append(f"end of {self._name}")


def decoded(engine: Engine, coming: Coming, events: list[str], new: int) -> None:
    """Decodes a sequence, beside which others join."""

    def progress(tokens: int) -> None:
        # Tokens that the cache holds already are reported at once.
        if tokens <= CHUNK:
            events.append("chunk")

    engine.generate(
        [SHORT], max_new_tokens=new, do_sample=False, joining=coming, max_batch=coming.rows,
        streamer=[Told("running", events)], progress=progress,
    )  # fmt: skip


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", CASES)
def test_a_running_text_goes_on_while_a_long_prompt_joins(case: str) -> None:
    """The texts of both are those of lone requests, and no chunk is computed twice."""
    made, load = CASES[case]
    target = made()
    engine, events = load(target), list[str]()
    other = prompt_of(60)[::-1]
    coming = Coming([Joined(LONG, 12, Told("long", events)), Joined(other, 8, Told("other", events))], 3)
    decoded(engine, coming, events, 60)
    if case == "8 bits":
        alone = [load(target).generate([p], max_new_tokens=n, do_sample=False).sequences[0, -n:].tolist()
                 for p, n in ((SHORT, 60), (LONG, 12), (other, 8))]  # fmt: skip
    else:
        alone = [reference(target, p, n) for p, n in ((SHORT, 60), (LONG, 12), (other, 8))]
    assert [coming.new(number) for number in range(3)] == alone
    joined = events[events.index("running") :]
    prompts = (SHORT, LONG, other)
    if case not in ("EAGLE", "block"):  # They need the states of the newest positions.
        assert events.count("chunk") == sum(-(-(len(prompt) - 1) // CHUNK) for prompt in prompts)
    runs = [len(list(run)) for event, run in groupby(joined) if event == "chunk"]
    assert len(runs) > 4
    assert max(runs) <= AT_ONCE
    assert joined.index("other") < joined.index("long"), "the shorter prompt does not wait for the longer one"


def test_prompts_of_about_one_length_come_in_their_order() -> None:
    """A prompt does not wait for all later ones that are a little shorter."""
    engine, events = SHARING["plain"](), list[str]()
    lengths = 250, 240, 230
    joined = [Joined(prompt_of(n)[::-1], 4, Told(f"{n} tokens", events)) for n in lengths]
    coming = Coming(joined, 4)
    decoded(engine, coming, events, 60)
    firsts = [events.index(f"{n} tokens") for n in lengths]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("kind", ["plain", "three levels"])
def test_a_prompt_whose_client_has_left_is_prefilled_no_further(kind: str) -> None:
    """What was computed of it is used by a later prompt, and all slots are free again."""
    engine, events = SHARING[kind](), list[str]()
    left = Told("left", events, lambda: events.count("chunk") >= 10)
    coming = Coming([Joined(LONG, 12, left)], 2)
    decoded(engine, coming, events, 40)
    assert coming.new(0) == reference(TARGET, SHORT, 40)
    assert coming.outputs[1].new_tokens == 0
    assert events.count("end of left") == 1
    assert events.count("chunk") < 10 + AT_ONCE
    program = engine.last_program
    assert program is not None
    later = Coming([Joined(LONG, 12)], 2)
    events.clear()
    decoded(engine, later, events, 30)
    assert later.new(1) == reference(TARGET, LONG, 12)
    assert later.outputs[1].reused_tokens >= CHUNK


def test_prompts_that_begin_alike_are_computed_once() -> None:
    engine, events = SHARING["plain"](), list[str]()
    coming = Coming([Joined([*LONG, n], 6) for n in range(3)], 4)
    decoded(engine, coming, events, 60)
    assert [coming.new(n) for n in range(1, 4)] == [reference(TARGET, [*LONG, n], 6) for n in range(3)]
    reused = sorted(coming.outputs[n].reused_tokens for n in range(1, 4))
    assert reused == [0, *[len(LONG) // CHUNK * CHUNK] * 2]


def test_keys_and_values_are_those_of_a_prefill_without_passes_between() -> None:
    """They are equal bit by bit, because the chunks are the same."""
    engine, events = SHARING["plain"](), list[str]()
    decoded(engine, Coming([Joined(LONG, 100)], 2), events, 40)
    slots = []
    for other in (engine, SHARING["plain"]()):
        if other is not engine:
            coming = Coming([Joined(LONG, 100)], 2)
            other.generate([SHORT], max_new_tokens=40, do_sample=False, joining=coming, max_batch=2)
        program = other.last_program
        assert program is not None
        pool = program.cache.backend.pool
        blocks = [block for block in pool.blocks() if block.tokens == tuple(LONG[block.start : block.stop])]
        assert len(blocks) == (len(LONG) - 1) // CHUNK
        rows = program.store.slots_of([page for block in blocks for page in block.pages])
        slots.append([layer[:, rows] for layer in program.store.stored])
    assert all(torch.equal(a, b) for a, b in zip(*slots, strict=True))


class Later(Coming):
    """Prompts of which all but the first come once ``begins`` is true."""

    def __init__(self, waiting: list[Joined], rows: int, begins: Callable[[], bool]) -> None:
        super().__init__(waiting, rows)
        self.all, self.begins = len(waiting), begins

    def next(self, fits: Fits) -> Joined | None:
        return super().next(fits) if len(self.waiting) == self.all or self.begins() else None


def test_the_time_of_a_chunk_is_foreseen_by_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk far into a long prompt takes longer than the last one, at the beginning of another prompt."""
    monkeypatch.setattr("triforce_tree.decoding.chunked_prefill._ALIKE", CHUNK)
    target, events = tiny("llama-gqa"), list[str]()
    # Arrays of numpy are no state of a hook, whose changes would keep prompts from joining.
    far, more = np.zeros(1, dtype=int), AT_ONCE - 2

    def slower(_: Any, args: Any, given: dict[str, Any]) -> None:
        positions = given["position_ids"]
        if positions.shape[1] > 1 and positions.max() >= 160:
            far[0] += 1
            for _ in range(more):
                time.perf_counter()

    def progress(tokens: int) -> None:
        if tokens <= CHUNK:
            events.append("far" if far[0] > events.count("far") else "near")

    target.model.register_forward_pre_hook(slower, with_kwargs=True)
    engine = triforce_tree.load(target, levels=1, **load_arguments(CHUNKED))
    others = [Joined([n, *prompt_of(40)[n:]], 4) for n in range(1, 4)]
    coming = Later([Joined(LONG, 4), *others], 3, lambda: far[0] >= 2)
    engine.generate(
        [SHORT], max_new_tokens=80, do_sample=False, joining=coming, max_batch=coming.rows,
        streamer=[Told("running", events)], progress=progress,
    )  # fmt: skip
    assert far[0] == events.count("far") == 9
    joined = events[events.index("running") :]
    runs = [[*run] for chunks, run in groupby(joined, lambda event: event != "running") if chunks]
    # The first slow chunk is not foreseen. Slow chunks take AT_ONCE - 1 readings of the clock, others one.
    first = next(number for number, run in enumerate(runs) if "far" in run)
    taken = [len(run) + more * run.count("far") for run in runs[first + 1 :]]
    assert max(taken) == AT_ONCE, "chunks that are foreseen to fit do follow"

"""The decoding loop where device memory runs out, and sequences that join and end."""

import gc
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any

import pytest
import torch

from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    draft_of,
    model,
    program_of,
    references,
    sequences_of,
)
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram


class Shrinking:
    """Makes programs, the first of which runs out of memory in a later stage; its memory is needed then."""

    def __init__(self, levels: int) -> None:
        self.levels, self.made, self.freed = levels, 0, list[bool]()
        self.last: weakref.ref[DecodingProgram]

    def make(self, texts: Sequences[list[int]]) -> DecodingProgram:
        program = program_of(model("llama-gqa"), draft_of("llama-gqa"), self.levels, len(texts))
        self.made += 1
        self.last = weakref.ref(program)
        if self.made == 1:
            vars(program)["run"] = failing(type(program).run, self.last)
        return program

    def shrink(self) -> bool:
        gc.collect()
        self.freed.append(self.last() is None)
        return True


def failing(run: Callable[..., None], of: weakref.ref[DecodingProgram]) -> Callable[..., None]:
    left = [7]

    def ran(name: str, *generators: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no more")
        run(of(), name, *generators)

    return ran


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_pass_that_ran_out_of_memory_is_repeated_by_another_program(levels: int) -> None:
    """All tokens so far are kept, and nothing of the first program is held when the plan is reduced."""
    programs, sequences = Shrinking(levels), sequences_of(PROMPTS, NEW)
    loop = DecodingLoop(programs, sequences, GREEDY, 0)
    for fresh in loop.decode():
        assert all(new for _, new in fresh)
    assert [sequence.new for sequence in sequences] == references()
    assert programs.freed == [True]
    assert programs.made == 2
    assert loop.levels[-1].emitted == sum(NEW)


def test_a_sequence_that_joins_takes_the_row_of_one_that_has_ended() -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 2)
    first, second, third = sequences_of(PROMPTS, [3, NEW[1], NEW[2]])
    loop = DecodingLoop.over(program, GREEDY, 0)
    loop.begin([first, second])
    while first.finish_reason is None:
        loop.step()
    assert loop.free == [0]
    loop.add(third)
    for _ in loop.decode():
        pass
    assert third.index == 0
    assert [each.new for each in (first, second, third)] == references(new=[3, NEW[1], NEW[2]])
    assert [each.finish_reason for each in (first, second, third)] == ["length"] * 3


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_sequence_that_ends_during_a_pass_gets_no_token_of_it(levels: int) -> None:
    """The others get theirs, and a later sequence takes its place."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 2)
    first, second, third = sequences_of(PROMPTS, NEW)
    loop = DecodingLoop.over(program, GREEDY, 0)
    loop.begin([first, second])
    loop.step()
    before, other = list(first.new), len(second.new)

    def meanwhile() -> None:
        assert (first.new, len(second.new)) == (before, other), "the pass has no result yet"
        loop.end(first)

    [(only, new)] = loop.step(None, meanwhile)
    assert only is second
    assert new
    assert (first.new, first.finish_reason) == (before, "stop")
    loop.add(third)
    for _ in loop.decode():
        pass
    assert [second.new, third.new] == references()[1:]
    assert first.new == before == references()[0][: len(before)]

"""Slots of chunks that rows share, and of what each has alone: one thing in each, nothing lost by moving."""

import random

import pytest

from triforce_tree.kv.pool.blocks import PoolFullError, PrefixPool

UNIT, PAGE, SCRATCH = 4, 2, 5


class Slots:
    """A pool, and what would be written to its slots."""

    def __init__(self, slots: int, rows: int) -> None:
        self.held: list[object] = [None] * slots
        self.moves = 0
        self.pool = PrefixPool(slots, UNIT, PAGE, SCRATCH, max(2, rows.bit_length()), self.move)
        self.prompts: dict[int, list[int]] = {}

    def move(self, stored: list[tuple[int, int]]) -> None:
        parts = [self.held[place : place + size] for place, size in stored]
        assert all(len(part) == size for part, (_, size) in zip(parts, stored, strict=True))
        moved = [each for part in parts for each in part]
        self.held[: len(moved)] = moved
        self.moves += 1

    def admit(self, row: int, prompt: list[int], new_tokens: int) -> int:
        """Admits a prompt and writes it as a prefill would; returns how many tokens were stored already."""
        self.pool.admit(row, prompt, new_tokens)
        self.prompts[row] = prompt
        kept = self.pool.held(row)
        for run in self.pool.runs(row):
            for position in range(max(run.start, kept), run.stop):
                self.held[run.place + position - run.start] = tuple(prompt[: position + 1])
        place = self.pool.place(row)
        self.held[place : place + self.pool.size(row)] = [("own", row)] * self.pool.size(row)
        self.pool.written(row)
        return kept

    def check(self) -> None:
        taken: dict[int, object] = {}
        for row, prompt in self.prompts.items():
            end, runs = 0, self.pool.runs(row)
            assert len(runs) <= self.pool._depth
            for run in runs:
                assert run.start == end
                end = run.stop
                for position in range(run.start, run.stop):
                    slot = run.place + position - run.start
                    assert self.held[slot] == tuple(prompt[: position + 1])
                    assert taken.setdefault(slot, position) == position
            assert end == (len(prompt) - 1) // UNIT * UNIT
            place, size = self.pool.place(row), self.pool.size(row)
            assert place % PAGE == 0
            assert size >= len(prompt) - end + SCRATCH
            for slot in range(place, place + size):
                assert self.held[slot] == ("own", row)
                assert slot not in taken
                taken[slot] = row
        # Chunks that no row uses can be found as well.
        for block in self.pool.blocks():
            for slot in range(block.place, block.end):
                assert 0 <= slot < len(self.held)
                assert block.users or taken.setdefault(slot, block) is block


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_random_rows_come_and_go(rows: int) -> None:
    """Prompts fit if ``needed`` says so. Texts branch at any chunk, so that runs have to be put together."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    slots = Slots(60 * rows, rows)
    texts, reused, shared = [[]], 0, 0
    for _ in range(400):
        row = draw.randrange(rows)
        slots.pool.release([row])
        slots.prompts.pop(row, None)
        base = draw.choice(texts)
        prompt = base[: draw.randrange(len(base) + 1)] + [
            draw.randrange(9) for _ in range(draw.randrange(1, 14))
        ]
        new_tokens = draw.randrange(12)
        fits = slots.pool.needed(list(slots.prompts), [(prompt, new_tokens)], 0) <= len(slots.held)
        if fits:
            before = {block for other in slots.prompts for block in slots.pool.path(other)}
            reused += slots.admit(row, prompt, new_tokens)
            shared += sum(block in before for block in slots.pool.path(row))
            texts = [*texts[-20:], prompt]
        else:
            with pytest.raises(PoolFullError, match=r"KV slots, .* more than are left of"):
                slots.pool.admit(row, prompt, new_tokens)
        slots.check()
    assert reused, seed
    assert shared, seed
    assert slots.moves, seed


def test_a_conversation_is_few_runs() -> None:
    """Each turn goes on from the one before it, whose end lies in the way; two rows hold the last two."""
    slots = Slots(200, 2)
    prompt = [1]
    for turn in range(12):
        prompt = prompt + [turn] * 6
        slots.pool.release([turn % 2])
        slots.prompts.pop(turn % 2, None)
        kept = slots.admit(turn % 2, prompt, 3)
        assert kept == (len(prompt) - 7) // UNIT * UNIT
        slots.check()


def test_texts_used_longest_ago_are_dropped_first() -> None:
    slots = Slots(3 * 8 + 8, 1)
    texts = {n: [n] * 9 for n in range(4)}
    for n in (0, 1, 2, 0, 3):
        slots.pool.release([0])
        slots.admit(0, texts[n], 1)
        slots.check()
    found = {n: len(slots.pool.matched(text)) for n, text in texts.items()}
    assert found[0] == found[3] == 2
    assert found[1] == 0


def test_what_is_forgotten_is_written_again() -> None:
    slots = Slots(60, 2)
    assert slots.admit(0, [1] * 9, 1) == 0
    slots.pool.forget()
    slots.prompts.clear()
    assert slots.admit(1, [1] * 9, 1) == 0
    slots.check()
    slots.pool.release([1])
    assert slots.admit(0, [1] * 9, 1) == 8


def test_another_pool_goes_on_with_it() -> None:
    """It has more sequences, and may have too few slots to keep what no sequence uses."""
    for size, kept in ((52, True), (32, False)):
        slots, other = Slots(60, 2), Slots(size, 3)
        slots.admit(0, [7] * 13, 1)
        slots.pool.release([0])
        slots.admit(0, [1] * 9, 1)
        slots.admit(1, [1] * 8 + [2] * 2, 1)
        copies, rows = other.pool.take(slots.pool, 3, alike=True)
        assert rows == [0, 1]
        for place, count, to in copies:
            other.held[to : to + count] = slots.held[place : place + count]
        other.prompts = dict(slots.prompts)
        other.check()
        assert bool(other.pool.matched([7] * 13)) == kept
        assert other.pool.size(2) == other.pool.own_size([0], 0)

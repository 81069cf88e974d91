"""Pages of chunks that sequences share, and of what each has alone: each page has one owner."""

import random

import numpy as np
import pytest

from triforce_tree.kv.pool.blocks import PoolFullError, PrefixPool
from triforce_tree.kv.pool.pages import FreePages, slots_in

UNIT, PAGE, SCRATCH = 4, 2, 5


class Slots:
    """A pool, and what would be written to its slots."""

    def __init__(self, slots: int) -> None:
        self.held: list[object] = [None] * slots
        self.pool = PrefixPool(slots, UNIT, PAGE, SCRATCH)
        self.prompts: dict[int, list[int]] = {}

    def places(self, b: int) -> tuple[list[int], list[int]]:
        """Slots of the chunks of a sequence, and its own ones."""
        shared, own = (slots_in(p, 0, len(p) * PAGE, PAGE) for p in (self.pool.shared(b), self.pool.own(b)))
        return shared.tolist(), own.tolist()

    def admit(self, b: int, prompt: list[int], new_tokens: int) -> int:
        """Admits a prompt and writes it as a prefill would; returns how many tokens were stored already."""
        self.pool.admit(b, prompt, new_tokens)
        self.prompts[b] = prompt
        kept, (shared, own) = self.pool.held(b), self.places(b)
        for position in range(kept, len(shared)):
            self.held[shared[position]] = tuple(prompt[: position + 1])
        for slot in own:
            self.held[slot] = ("own", b)
        self.pool.written(b)
        return kept

    def dropped_for(self, b: int, prompt: list[int]) -> tuple[int, int]:
        """Admits a prompt; returns how many chunks were dropped for it, and how many are at least."""
        pool, before = self.pool, set(self.pool.blocks())
        needed = pool.needed([], [(prompt, 1)], 0) - len(pool.matched(prompt)) * UNIT
        least = max(0, -(-(pool.taken + needed - pool.slots) // UNIT))
        self.admit(b, prompt, 1)
        return len(before.difference(pool.blocks())), least

    def check(self) -> None:
        taken: dict[int, object] = {}
        for b, prompt in self.prompts.items():
            shared, own = self.places(b)
            assert len(shared) == (len(prompt) - 1) // UNIT * UNIT
            for position, slot in enumerate(shared):
                assert self.held[slot] == tuple(prompt[: position + 1])
                assert taken.setdefault(slot, position) == position
            assert len(own) >= len(prompt) - len(shared) + SCRATCH
            for slot in own:
                assert self.held[slot] == ("own", b)
                assert slot not in taken
                taken[slot] = b
        # Chunks that no sequence uses can be found as well.
        for block in self.pool.blocks():
            for slot in slots_in(block.pages, 0, len(block.tokens), PAGE).tolist():
                assert block.users or taken.setdefault(slot, block) is block
        assert self.pool.taken == len(taken)


@pytest.mark.parametrize("sequences", [2, 3, 8])
def test_random_sequences_come_and_go(sequences: int) -> None:
    """Prompts fit if ``needed`` says so. Texts branch at any chunk."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    slots = Slots(60 * sequences)
    texts, reused, shared, apart = [[]], 0, 0, 0
    for _ in range(400):
        b = draw.randrange(sequences)
        slots.pool.release([b])
        slots.prompts.pop(b, None)
        base = draw.choice(texts)
        prompt = base[: draw.randrange(len(base) + 1)] + [
            draw.randrange(9) for _ in range(draw.randrange(1, 14))
        ]
        new_tokens = draw.randrange(12)
        fits = slots.pool.needed(list(slots.prompts), [(prompt, new_tokens)], 0) <= len(slots.held)
        if fits:
            before = {block for other in slots.prompts for block in slots.pool.path(other)}
            reused += slots.admit(b, prompt, new_tokens)
            shared += sum(block in before for block in slots.pool.path(b))
            apart += bool(slots.pool.own(b)) and int(np.diff(slots.pool.own(b)).max(initial=1)) > 1
            texts = [*texts[-20:], prompt]
        else:
            kept = list(slots.pool.blocks())
            with pytest.raises(PoolFullError, match=r"KV slots, .* more than are left of"):
                slots.pool.admit(b, prompt, new_tokens)
            assert list(slots.pool.blocks()) == kept
        slots.check()
    assert reused, seed
    assert shared, seed
    assert apart, f"{seed}: pages were always consecutive"


def test_a_conversation_is_in_consecutive_pages() -> None:
    """Each turn goes on where the one before it ends; two sequences hold the last two turns."""
    slots = Slots(200)
    prompt = [1]
    for turn in range(12):
        prompt = prompt + [turn] * 6
        slots.pool.release([turn % 2])
        slots.prompts.pop(turn % 2, None)
        kept = slots.admit(turn % 2, prompt, 3)
        assert kept == (len(prompt) - 7) // UNIT * UNIT
        slots.check()
        shared, own = slots.places(turn % 2)
        assert shared == list(range(len(shared)))
        assert own == list(range(own[0], own[0] + len(own)))


def test_texts_used_longest_ago_are_dropped_first() -> None:
    slots = Slots(3 * 8 + 8)
    texts = {n: [n] * 9 for n in range(4)}
    for n in (0, 1, 2, 0, 3):
        slots.pool.release([0])
        slots.admit(0, texts[n], 1)
        slots.check()
    found = {n: len(slots.pool.matched(text)) for n, text in texts.items()}
    assert found[0] == found[3] == 2
    assert found[1] == 0


def test_a_prompt_gets_consecutive_pages_in_a_pool_full_of_texts() -> None:
    """The chunks used longest ago are not neighbours. Scattered pages would need as many dropped chunks."""
    slots = Slots(8 * 8 + 8)
    texts = {n: [n] * 9 for n in range(8)}
    for n in (*range(8), 1, 3, 5, 7, 0, 2, 4, 6):
        slots.pool.release([0])
        slots.admit(0, texts[n], 1)
    slots.pool.release([0])
    assert slots.dropped_for(0, [9] * 17) == (4, 4)
    slots.check()
    assert np.diff(slots.pool.shared(0)).tolist() == [1] * 7
    assert all(len(slots.pool.matched(texts[n])) == 2 for n in (4, 6)), "the newest texts stay"


def test_a_prompt_gets_the_ends_of_texts_that_grew_together() -> None:
    """Their chunks alternate, so pages of one of them are never consecutive."""
    slots = Slots(2 * 6 * UNIT + 16)
    for turn in range(1, 7):
        for b in range(2):
            slots.pool.release([b])
            slots.admit(b, [b] * (turn * UNIT + 1), 1)
    slots.pool.release([0, 1])
    slots.prompts.clear()
    dropped, least = slots.dropped_for(0, [9] * (5 * UNIT + 1))
    slots.check()
    assert np.diff(slots.pool.shared(0)).tolist() == [1] * 9
    assert dropped == least == 3
    assert all(len(slots.pool.matched([b] * 25)) >= 4 for b in range(2))


def test_few_more_chunks_are_dropped_for_consecutive_pages() -> None:
    """Prompts of any length come and go."""
    seed = random.randrange(2**32)
    draw, slots, together, count = random.Random(seed), Slots(400), 0, 300
    for n in range(count):
        b, prompt = draw.randrange(3), [n] * draw.randrange(6, 60)
        slots.pool.release([b])
        slots.prompts.pop(b, None)
        dropped, least = slots.dropped_for(b, prompt)
        assert dropped <= least + 1.5 * ((len(prompt) - 1) // UNIT), seed
        slots.check()
        together += int(np.diff(slots.pool.shared(b)).max(initial=1)) == 1
    assert together > 0.8 * count, f"{seed}: {together}"


def test_what_is_forgotten_is_written_again() -> None:
    slots = Slots(60)
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
        slots, other = Slots(60), Slots(size)
        slots.admit(0, [7] * 13, 1)
        slots.pool.release([0])
        slots.admit(0, [1] * 9, 1)
        slots.admit(1, [1] * 8 + [2] * 2, 1)
        there, here, going_on = other.pool.take(slots.pool, 3, alike=True)
        assert going_on == [0, 1]
        old, new = (slots_in(pages, 0, len(pages) * PAGE, PAGE) for pages in (there, here))
        for source, target in zip(old, new, strict=True):
            other.held[target] = slots.held[source]
        other.prompts = dict(slots.prompts)
        assert bool(other.pool.matched([7] * 13)) == kept
        assert other.pool.size(2) == other.pool.own_size([0], 0)
        other.pool.release([2])
        other.check()


def test_chunks_go_to_pages_of_another_size() -> None:
    """Whole chunks are whole pages of both. One that ends with a tail, and what follows it, is left out."""
    old, new = PrefixPool(64, UNIT, PAGE, SCRATCH), PrefixPool(64, UNIT, UNIT, SCRATCH)
    old.tails = [[1] * 6]
    for b, prompt in enumerate(([1] * 12, [2] * 9)):
        old.admit(b, prompt, 1)
        old.written(b)
    there, here, going_on = new.take(old, 3, alike=False)
    assert going_on == []
    assert len(there) * PAGE == len(here) * UNIT == 3 * UNIT
    assert [len(new.matched(prompt)) for prompt in ([1] * 12, [2] * 9)] == [1, 2]


def test_pages_are_consecutive_where_they_can_be() -> None:
    pages = FreePages(10)
    first, second = pages.take(3), pages.take(2, last=True)
    assert (first, second) == ([0, 1, 2], [8, 9])
    assert pages.take(2, after=first[-1]) == [3, 4]
    pages.give_back([0, 2])
    assert pages.take(2) == [5, 6]
    assert sorted(pages.take(3)) == [0, 2, 7]
    assert pages.free == 0
    assert pages.take(0) == []

"""Records which KV slots hold which tokens: chunks that prompts share, and each sequence's own slots."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

Chunk = tuple[int, ...]
"""Tokens of a whole chunk."""


class Run(NamedTuple):
    """Describes positions ``start`` to ``stop`` of a sequence, which are in KV slots from ``place`` on."""

    start: int
    stop: int
    place: int


@dataclass(eq=False, repr=False)
class Block:
    """A chunk of tokens after those of its parents, in slots from ``place`` on.

    Its ``repr`` has no tokens: they are a user's text, which does not belong into a message or a log.

    Attributes:
        tokens: of the chunk; empty for the root, which has no slots.
        start: position of the first one.
        users: sequences that begin with it.
        written: whether the slots hold its keys and values.
        used: when a sequence last began with it.
    """

    tokens: Chunk
    start: int
    place: int
    parent: "Block | None"
    children: dict[Chunk, "Block"] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)
    written: bool = False
    used: int = 0

    @property
    def stop(self) -> int:
        """Returns the position after the last token."""
        return self.start + len(self.tokens)

    @property
    def end(self) -> int:
        """Returns the slot after the last token."""
        return self.place + len(self.tokens)

    @property
    def run(self) -> Run:
        """Returns the range of slots that stores the tokens."""
        return Run(self.start, self.stop, self.place)


@dataclass
class Own:
    """Holds the slots that one sequence uses alone, after its shared chunks."""

    place: int
    size: int

    @property
    def end(self) -> int:
        """Returns the slot after the last one."""
        return self.place + self.size


class PoolFullError(ValueError):
    """Says that a prompt does not fit into the slots that sequences leave."""


class PrefixPool:
    """Assigns slots to the chunks that prompts share, and to the tokens of each sequence alone.

    Sequences are numbered by their places in the batch. Chunks that none uses any more stay until their slots
    are needed; those used longest ago are dropped first, a text from its end. Chunks of one text follow each
    other where there are slots. Gaps are closed by moving: in the order of the tree, the child of most
    sequences next to its parent, so that the chunks of a sequence are at most ``1 + log2(sequences)`` runs.

    A chunk is ``unit`` tokens, as a prefill computes them. A prompt that begins with one of ``tails`` has a
    shorter chunk as well, which ends where that does.

    Args:
        slots: of a KV head.
        unit: tokens of a chunk.
        page: own slots are a multiple of it, and so is ``unit``.
        scratch: slots after a sequence's last token.
        depth: most runs of a sequence, at least ``1 + log2(sequences)``.
        move: called with places and sizes of all that is stored, which is to lie one after the other from
            slot 0 on, in this order.

    Attributes:
        tails: tokens that several prompts begin with, multiples of the page, and no whole chunks.
        dropping: called with a written chunk before its slots are given to others; None for nobody.
    """

    def __init__(
        self,
        slots: int,
        unit: int,
        page: int,
        scratch: int,
        depth: int,
        move: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self.slots, self.unit, self._page, self._scratch = slots, unit, page, scratch
        self._depth, self._move, self._clock = depth, move, 0
        self.tails: Sequence[list[int]] = ()
        self.dropping: Callable[[Block], None] | None = None
        self._root = Block((), 0, 0, None, written=True)
        self._own: dict[int, Own] = {}
        self._paths: dict[int, list[Block]] = {}

    def tail(self, prompt: Sequence[int]) -> int:
        """Returns the number of tokens of the longest of ``tails`` that a prompt begins with, or 0."""
        return tail_of(self.tails, prompt)

    def chunks(self, prompt: Sequence[int]) -> Iterator[Chunk]:
        """Yields the chunks that a prompt begins with; its last token is the root of the first pass."""
        start = 0
        for stop in stops(len(prompt), self.unit, self.tail(prompt)):
            yield tuple(prompt[start:stop])
            start = stop

    def own_size(self, prompt: Sequence[int], new_tokens: int) -> int:
        """Returns the own slots of a sequence with such a prompt and so many new tokens."""
        end = max(stops(len(prompt), self.unit, self.tail(prompt)), default=0)
        return own_slots(len(prompt) - end + new_tokens, self._scratch, self._page)

    def blocks(self) -> Iterator[Block]:
        """Returns all chunks, parents before children; the sibling that most sequences use comes first."""
        waiting = [self._root]
        while waiting:
            now = waiting.pop()
            if now is not self._root:
                yield now
            waiting += sorted(now.children.values(), key=lambda child: (len(child.users), child.used))

    def path(self, sequence: int) -> list[Block]:
        """Returns the chunks that a sequence begins with."""
        return self._paths.get(sequence, [])

    def place(self, sequence: int) -> int:
        """Returns the first of a sequence's own slots."""
        return self._own[sequence].place if sequence in self._own else 0

    def size(self, sequence: int) -> int:
        """Returns the number of a sequence's own slots."""
        return self._own[sequence].size if sequence in self._own else 0

    def written(self, sequence: int) -> None:
        """Marks the slots of a sequence's chunks as holding their keys and values."""
        for block in self.path(sequence):
            block.written = True

    def held(self, sequence: int) -> int:
        """Returns how many tokens of a sequence's chunks were written, counted from the first chunk."""
        count = 0
        for block in self.path(sequence):
            if not block.written:
                break
            count = block.stop
        return count

    def forget(self) -> None:
        """Frees all chunks and all slots of sequences."""
        self._root.children.clear()
        self._own.clear()
        self._paths.clear()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Forgets everything where what is done inside is interrupted: nobody knows then what lies where."""
        try:
            yield
        except PoolFullError:
            raise
        except BaseException:
            self.forget()
            raise

    def release(self, sequences: Iterable[int]) -> None:
        """Records that sequences have ended; their chunks stay if they were written."""
        with self._changing():
            for sequence in sequences:
                for block in self._paths.pop(sequence, []):
                    block.users.discard(sequence)
                self._own.pop(sequence, None)
            self._drop_unwritten()

    def _drop_unwritten(self) -> None:
        # Of a text the end first: what comes after an unwritten chunk is unwritten.
        for block in reversed(list(self.blocks())):
            if not block.written and not block.users and not block.children:
                self._drop(block)

    def _drop(self, block: Block) -> None:
        assert block.parent is not None
        del block.parent.children[block.tokens]

    def matched(self, prompt: Sequence[int]) -> list[Block]:
        """Returns the chunks of the pool that a prompt begins with."""
        found, now = [], self._root
        for chunk in self.chunks(prompt):
            after = now.children.get(chunk)
            if after is None:
                break
            found.append(after)
            now = after
        return found

    def needed(
        self, sequences: Collection[int], coming: Sequence[tuple[Sequence[int], int]], empty: int
    ) -> int:
        """Returns the slots that some sequences and new prompts need; chunks that they share count once.

        Args:
            sequences: those that go on.
            coming: prompts, and new tokens of each. What they alone have in common is counted for each.
            empty: places in the batch without a sequence.
        """
        used = sum(len(block.tokens) for block in self.blocks() if not block.users.isdisjoint(sequences))
        used += sum(self.size(sequence) for sequence in sequences) + empty * self.own_size([0], 0)
        for prompt, new_tokens in coming:
            end = max(stops(len(prompt), self.unit, self.tail(prompt)), default=0)
            shared = sum(len(b.tokens) for b in self.matched(prompt) if not b.users.isdisjoint(sequences))
            used += end - shared + self.own_size(prompt, new_tokens)
        return used

    def admit(self, sequence: int, prompt: Sequence[int], new_tokens: int) -> None:
        """Gives slots for a prompt and so many new tokens to a sequence that has no slots.

        Raises:
            PoolFullError: the other sequences leave too few slots; nothing has changed.
        """
        with self._changing():
            self._admit(sequence, prompt, new_tokens)

    def _admit(self, sequence: int, prompt: Sequence[int], new_tokens: int) -> None:
        path, chunks = self.matched(prompt), list(self.chunks(prompt))
        own, more = self.own_size(prompt, new_tokens), sum(map(len, chunks[len(path) :]))
        for block in path:
            block.users.add(sequence)
        try:
            self._free_slots(own + more)
        except PoolFullError:
            for block in path:
                block.users.discard(sequence)
            raise
        self._clock += 1
        last = path[-1] if path else self._root
        places = self._gaps_for(last, more, own)
        if places is None:
            self._close_up()
            top = self.taken
            places = top, top + more
        place, self._own[sequence] = places[0], Own(places[1], own)
        for chunk in chunks[len(path) :]:
            block = Block(chunk, last.stop, place, last, users={sequence})
            last.children[chunk] = block
            path.append(block)
            last, place = block, block.end
        for block in path:
            block.used = self._clock
        self._paths[sequence] = path
        if any(_breaks(path) >= self._depth for path in self._paths.values()):
            self._close_up()

    def take(
        self, other: "PrefixPool", sequences: int, alike: bool
    ) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Begins with the chunks of another pool, as far as this one has free slots.

        Args:
            sequences: of this pool, none of which has begun.
            alike: whether the other pool gives sequences as many slots of their own. They then go on here,
                under the same numbers, if there are as many and they fit.

        Returns:
            what to copy: places there, sizes, and places here; and the sequences that go on.
        """
        self.release(list(self._own))
        empty, going_on = self.own_size([0], 0), list(other._own)
        used = sum(len(block.tokens) for block in other.blocks() if block.users)
        used += sum(own.size for own in other._own.values()) + (sequences - len(going_on)) * empty
        if not alike or self.unit != other.unit or used > self.slots or max(going_on, default=0) >= sequences:
            going_on = []
        left = self.slots - (used if going_on else sequences * empty)
        made, copies, place = {other._root: self._root}, list[tuple[int, int, int]](), 0
        # Chunks in use come first, so that the others are left out if slots are short.
        for in_use in (True, False):
            for block in other.blocks() if self.unit == other.unit else ():
                needs_slots, size = not (in_use and going_on), len(block.tokens)
                if bool(block.users) != in_use or not block.written or block.parent not in made:
                    continue
                if needs_slots and left < size:
                    continue
                left -= size if needs_slots else 0
                parent = made[block.parent]
                own = Block(block.tokens, block.start, place, parent, written=True, used=block.used)
                own.users = set(block.users) if going_on else set()
                parent.children[block.tokens] = made[block] = own
                copies.append((block.place, size, place))
                place += size
        self._clock = other._clock
        for sequence in going_on:
            self._paths[sequence] = [made[block] for block in other.path(sequence)]
            self._own[sequence] = Own(place, other.size(sequence))
            copies.append((other.place(sequence), other.size(sequence), place))
            place += other.size(sequence)
        for sequence in range(sequences):
            if sequence not in self._own:
                self.admit(sequence, [0], 0)
        return copies, going_on

    @property
    def taken(self) -> int:
        """Returns the number of slots of all chunks and sequences."""
        return sum(len(block.tokens) for block in self.blocks()) + sum(o.size for o in self._own.values())

    def _free_slots(self, count: int) -> None:
        while (over := self.taken + count - self.slots) > 0:
            unused = [b for b in self.blocks() if not b.users and not b.children]
            if not unused:
                raise PoolFullError(
                    f"another sequence needs {count} KV slots, {over} more than are left of the "
                    f"{self.slots} of its batch; let it join later"
                )
            oldest = min(unused, key=lambda block: block.used)
            if self.dropping is not None:
                self.dropping(oldest)
            self._drop(oldest)

    def _gaps_for(self, last: Block, more: int, own: int) -> tuple[int, int] | None:
        """Returns places for chunks after ``last`` and for own slots; None without large enough gaps."""
        stored: list[Block | Own] = [*self.blocks(), *self._own.values()]
        taken = [(0, 0), *sorted((e.place, e.end) for e in stored), (self.slots, self.slots)]
        gaps = [(end, start) for (_, end), (start, _) in pairwise(taken) if start > end]
        place = 0
        if more:
            fitting = [gap for gap in gaps if gap[1] - gap[0] >= more]
            if not fitting:
                return None
            chosen = next((gap for gap in fitting if gap[0] == last.end), fitting[0])
            place = chosen[0]
            gaps[gaps.index(chosen)] = place + more, chosen[1]
        # From the end, so that texts can go on where they are.
        fitting = [gap for gap in gaps if gap[1] - gap[0] >= own]
        return (place, fitting[-1][1] - own) if fitting else None

    def _close_up(self) -> None:
        stored: list[Block | Own] = [*self.blocks(), *self._own.values()]
        self._move([(each.place, each.end - each.place) for each in stored])
        place = 0
        for each in stored:
            each.place, place = place, place + each.end - each.place

    def runs(self, sequence: int) -> list[Run]:
        """Returns a sequence's chunks in at most ``depth`` runs, cut where others leave it or at gaps."""
        path, found = self.path(sequence), list[Run]()
        for number, block in enumerate(path):
            if number and path[number - 1].end == block.place and path[number - 1].users == block.users:
                found[-1] = found[-1]._replace(stop=block.stop)
            else:
                found.append(block.run)
        while len(found) > self._depth:
            # Read more than once: by this sequence as one run, by others in parts.
            number = max(n for n in range(1, len(found)) if _adjacent(found[n - 1], found[n]))
            found[number - 1 : number + 1] = [found[number - 1]._replace(stop=found[number].stop)]
        return found


def _adjacent(run: Run, after: Run) -> bool:
    return run.place + run.stop - run.start == after.place


def _breaks(path: Sequence[Block]) -> int:
    """Returns how often consecutive chunks of a path are not adjacent in memory."""
    return sum(block.end != after.place for block, after in pairwise(path))


def stops(tokens: int, unit: int, tail: int) -> Iterator[int]:
    """Returns the positions at which the chunks of a prompt of so many tokens end.

    :class:`PrefixPool` says how they are chosen.
    """
    last = tokens - 1
    yield from range(unit, (tail or last) + 1, unit)
    if tail % unit:
        yield tail
    if tail:
        yield from range(tail + unit, last + 1, unit)


def tail_of(tails: Sequence[list[int]], prompt: Sequence[int]) -> int:
    """Returns the number of tokens of the longest of ``tails`` that is a proper prefix of a prompt."""
    return max((len(t) for t in tails if len(t) < len(prompt) and list(prompt[: len(t)]) == t), default=0)


def own_slots(tokens: int, scratch: int, page: int) -> int:
    """Returns the KV slots, in whole pages, of so many tokens of one sequence and its scratch slots."""
    return -(-(tokens + scratch) // page) * page

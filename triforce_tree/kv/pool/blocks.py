"""Records which pages hold which tokens: those of chunks that prompts share, and each sequence's own."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from triforce_tree.kv.pool.pages import FreePages

Chunk = tuple[int, ...]
"""Tokens of a whole chunk."""

# What is dropped for consecutive pages may cost as much as dropping, for each new chunk, so many chunks more
# than necessary of those used longest ago. In simulated loads nearly all prompts that begin without a kept
# chunk then have consecutive pages, and fewer than 1 in 100 tokens of prompts are computed again for that.
_MORE_CHUNKS = 1.5


@dataclass(eq=False, repr=False)
class Block:
    """A chunk of tokens after those of its parents.

    Its ``repr`` has no tokens: they are a user's text, which does not belong into a message or a log.

    Attributes:
        tokens: the tokens of the chunk; empty for the root.
        start: the position of the first token.
        pages: whole pages, which hold the keys and values of the tokens.
        users: sequences that begin with it.
        written: whether the pages hold its keys and values.
        used: when a sequence last began with it.
    """

    tokens: Chunk
    start: int
    pages: list[int]
    parent: "Block | None"
    children: dict[Chunk, "Block"] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)
    written: bool = False
    used: int = 0

    @property
    def stop(self) -> int:
        """Returns the position after the last token."""
        return self.start + len(self.tokens)


class PoolFullError(ValueError):
    """Says that a prompt does not fit into the slots that sequences leave."""


class PrefixPool:
    """Assigns pages to the chunks that prompts share, and to the tokens of each sequence alone.

    Sequences are numbered by their places in the batch. Chunks that none uses any more stay until their pages
    are needed; those used longest ago are dropped first, a text from its end. Chunks of one text are in
    consecutive pages where these are free, or where dropping other chunks that are nearly as old frees them.

    A chunk is ``unit`` tokens, as a prefill computes them. A prompt that begins with one of ``tails`` has a
    shorter chunk as well, which ends where that does.

    Args:
        slots: the KV slots of each head, a multiple of the page.
        unit: the tokens of a chunk, a multiple of the page.
        page: the KV slots of a page.
        scratch: the KV slots after a sequence's last token that passes write.

    Attributes:
        tails: beginnings that several prompts share. Their lengths are multiples of the page, but not of a
            chunk.
    """

    def __init__(self, slots: int, unit: int, page: int, scratch: int) -> None:
        self.slots, self.unit, self.page, self._scratch = slots, unit, page, scratch
        self._clock = 0
        self.tails: Sequence[list[int]] = ()
        self.forget()

    def chunks(self, prompt: Sequence[int]) -> Iterator[Chunk]:
        """Yields the chunks that a prompt begins with; its last token is the root of the first pass."""
        for start, stop in pairwise([0, *stops(prompt, self.unit, self.tails)]):
            yield tuple(prompt[start:stop])

    def end(self, prompt: Sequence[int]) -> int:
        """Returns the position at which the last of these chunks ends."""
        return max(stops(prompt, self.unit, self.tails), default=0)

    def own_size(self, prompt: Sequence[int], new_tokens: int) -> int:
        """Returns the own slots of a sequence with such a prompt and so many new tokens."""
        return own_slots(len(prompt) - self.end(prompt) + new_tokens, self._scratch, self.page)

    def blocks(self) -> Iterator[Block]:
        """Returns all chunks, parents before children; the sibling that was used last comes first."""
        waiting = [self._root]
        while waiting:
            now = waiting.pop()
            if now is not self._root:
                yield now
            waiting += sorted(now.children.values(), key=lambda child: child.used)

    def path(self, sequence: int) -> list[Block]:
        """Returns the chunks that a sequence begins with."""
        return self._paths.get(sequence, [])

    def shared(self, sequence: int) -> list[int]:
        """Returns the pages of the chunks that a sequence begins with."""
        return [page for block in self.path(sequence) for page in block.pages]

    def own(self, sequence: int) -> list[int]:
        """Returns the pages that a sequence has after its chunks."""
        return self._own.get(sequence, [])

    def size(self, sequence: int) -> int:
        """Returns the number of a sequence's own slots."""
        return len(self.own(sequence)) * self.page

    def written(self, sequence: int, length: int | None = None) -> None:
        """Marks the pages of a sequence's chunks, within its first ``length`` tokens, as holding their keys
        and values.
        """
        for block in self.path(sequence):
            block.written |= length is None or block.stop <= length

    def held(self, sequence: int) -> int:
        """Returns how many tokens of a sequence's chunks were written, counted from the first chunk."""
        count = 0
        for block in self.path(sequence):
            if not block.written:
                break
            count = block.stop
        return count

    def forget(self) -> None:
        """Frees the pages of all chunks and sequences."""
        self._root = Block((), 0, [], None, written=True)
        self._own: dict[int, list[int]] = {}
        self._paths: dict[int, list[Block]] = {}
        self._pages = FreePages(self.slots // self.page)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Forgets everything if what is done inside is interrupted: nobody knows then what pages hold."""
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
                # The end of a text is dropped first, because all chunks after an unwritten one are unwritten.
                for block in reversed(self._paths.pop(sequence, [])):
                    block.users.discard(sequence)
                    if not block.written and not block.users and not block.children:
                        self._drop(block)
                self._pages.give_back(self._own.pop(sequence, []))

    def _drop(self, block: Block) -> None:
        assert block.parent is not None
        del block.parent.children[block.tokens]
        self._pages.give_back(block.pages)

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
        used = sum(len(block.tokens) for block in {b for each in sequences for b in self.path(each)})
        used += sum(self.size(sequence) for sequence in sequences) + empty * self.own_size([0], 0)
        for prompt, new_tokens in coming:
            shared = sum(len(b.tokens) for b in self.matched(prompt) if not b.users.isdisjoint(sequences))
            used += self.end(prompt) - shared + self.own_size(prompt, new_tokens)
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
        new = chunks[len(path) :]
        more, own = sum(map(len, new)) // self.page, self.own_size(prompt, new_tokens) // self.page
        for block in self._to_drop(path, len(new), more, own):
            self._drop(block)
        self._clock += 1
        last = path[-1] if path else self._root
        pages = self._pages.take(more, after=last.pages[-1] if path else -1)
        for chunk in new:
            count = len(chunk) // self.page
            block = Block(chunk, last.stop, pages[:count], last)
            pages = pages[count:]
            last.children[chunk] = block
            path.append(block)
            last = block
        # Own pages are taken from the end, so that a shared text can be extended in the pages that follow it.
        self._own[sequence] = self._pages.take(own, last=True)
        for block in path:
            block.users.add(sequence)
            block.used = self._clock
        self._paths[sequence] = path

    def take(
        self, other: "PrefixPool", sequences: int, alike: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Begins with the chunks of another pool, as far as this one has free pages.

        Args:
            sequences: of this pool, none of which has begun.
            alike: whether the other pool has pages of the same size, and gives sequences as many of their
                own. They then go on here, under the same numbers, if there are as many and they fit.

        Returns:
            the pages there that are copied; as many slots in pages here to which they are copied, in this
            order; and the sequences that go on.
        """
        self.release(list(self._own))
        empty, going_on = self.own_size([0], 0), list(other._own)
        used = sum(len(block.tokens) for block in other.blocks() if block.users)
        used += sum(map(other.size, other._own)) + (sequences - len(going_on)) * empty
        if not alike or self.unit != other.unit or used > self.slots or max(going_on, default=0) >= sequences:
            going_on = []
        left = self.slots - (used if going_on else sequences * empty)
        made, source, target = {other._root: self._root}, list[int](), list[int]()
        # Chunks in use come first, so that the others are left out if pages are short.
        for in_use in (True, False):
            for block in other.blocks() if self.unit == other.unit else ():
                needs_slots, size = not (in_use and going_on), len(block.tokens)
                if bool(block.users) != in_use or not block.written or block.parent not in made:
                    continue
                # The chunk before the end of a tail may not be whole pages of another size.
                if (needs_slots and left < size) or size % self.page:
                    continue
                left -= size if needs_slots else 0
                parent = made[block.parent]
                pages = self._pages.take(size // self.page, after=target[-1] if target else -1)
                own = Block(block.tokens, block.start, pages, parent, written=True, used=block.used)
                own.users = set(block.users) if going_on else set()
                parent.children[block.tokens] = made[block] = own
                source, target = source + block.pages, target + pages
        self._clock = other._clock
        for sequence in going_on:
            self._paths[sequence] = [made[block] for block in other.path(sequence)]
            self._own[sequence] = self._pages.take(len(other.own(sequence)), last=True)
            source, target = source + other.own(sequence), target + self.own(sequence)
        self.place(sequences)
        return source, target, going_on

    def place(self, sequences: int) -> None:
        """Gives slots to the sequences among the first ones that have none."""
        for sequence in range(sequences):
            if sequence not in self._own:
                self.admit(sequence, [0], 0)

    def renumber(self, order: Sequence[int]) -> None:
        """Lets sequence ``order[i]`` be sequence i, and releases those that are not in ``order``."""
        self.release([sequence for sequence in self._own if sequence not in order])
        with self._changing():
            for path in self._paths.values():
                for block in path:
                    block.users.clear()
            numbers = [(number, sequence) for number, sequence in enumerate(order) if sequence in self._own]
            self._own = {number: self._own[sequence] for number, sequence in numbers}
            self._paths = {number: self._paths[sequence] for number, sequence in numbers}
            for number, path in self._paths.items():
                for block in path:
                    block.users.add(number)

    @property
    def taken(self) -> int:
        """Returns the number of slots of all chunks and sequences."""
        return self.slots - self._pages.free * self.page

    def _to_drop(self, path: Sequence[Block], new: int, more: int, own: int) -> list[Block]:
        """Returns the chunks to drop for ``new`` chunks after a path, in ``more`` pages, and ``own`` pages of
        their sequence.

        These are the chunks that were used longest ago, or others that cost little more and without which the
        pages of all chunks of the text are consecutive.
        """
        # Chunks of one text come from its end: each was used whenever those after it were.
        oldest = [block for block in self.blocks() if not block.users and block not in path]
        oldest.sort(key=lambda block: (block.used, -block.start))
        place = {block: n for n, block in enumerate(oldest, 1)}
        short = more + own - self._pages.free

        def dropped(run: Collection[Block] = ()) -> list[Block]:
            """Returns the chunks of a run, and others while pages are short."""
            left, found = short - _pages_of(run), list[Block]()
            for block in oldest:
                if block not in run:
                    if left <= 0:
                        continue
                    left -= len(block.pages)
                found.append(block)
            return found

        def cost(found: Collection[Block]) -> int:
            """Returns a sum that is small for few chunks and for those that were used long ago."""
            return sum(place[block] for block in found)

        least = dropped()
        if (over := short - _pages_of(least)) > 0:
            raise PoolFullError(
                f"another sequence needs {(more + own) * self.page} KV slots, {over * self.page} more than "
                f"are left of the {self.slots} of its batch; let it join later"
            )
        best, most = least, sum(range(len(least) + int(_MORE_CHUNKS * new) + 1)) + 1
        owners = {page: block for block in oldest for page in block.pages}
        for first in self._begins(path, more, owners):
            run = {owners[page] for page in range(first, first + more) if page in owners}
            if cost(run) >= most:
                continue
            for block in reversed(oldest):
                if block.parent in run:
                    run.add(block)
            found = dropped(run)
            if cost(found) < most:
                best, most = found, cost(found)
        return best

    def _begins(self, path: Sequence[Block], count: int, owners: Mapping[int, Block]) -> list[int]:
        """Returns the pages that ``count`` pages after a path may begin with, such that all are consecutive.

        Args:
            owners: chunks that can be dropped, by their pages.
        """
        found = self._pages.begins(count, list(owners)) if count else []
        if path:
            before = [page for block in path for page in block.pages]
            after = before[0] + len(before)
            return [after] if after in found and before == list(range(before[0], after)) else []
        # Pages that begin within those of a chunk need the whole chunk, and more pages at their end.
        begins = set(found)
        return [n for n in found if n - 1 not in begins or owners.get(n - 1) is not owners.get(n)]


def _pages_of(blocks: Iterable[Block]) -> int:
    return sum(len(block.pages) for block in blocks)


def stops(prompt: Sequence[int], unit: int, tails: Sequence[list[int]]) -> Iterator[int]:
    """Returns the positions at which the chunks of a prompt end.

    :class:`PrefixPool` says how they are chosen.
    """
    last, tail = len(prompt) - 1, tail_of(tails, prompt)
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

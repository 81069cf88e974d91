"""Pieces of text that come from another thread into the queues of an event loop."""

import asyncio
import threading

import pytest

from triforce_tree.server.outbox import Outbox, Pieces
from triforce_tree.server.replies import Piece
from triforce_tree.server.text_stream import LevelText

PASSES, PATIENCE = 30, 60


async def received(texts: int, waits: bool) -> list[list[Piece]]:
    """Returns the pieces of each text.

    Args:
        waits: whether the other thread waits for the arrival of each piece before it makes the next one.
    """
    outbox, queues = Outbox(asyncio.get_running_loop()), [Pieces() for _ in range(texts)]
    arrived = threading.Semaphore(0)

    def decode() -> None:
        for number in range(PASSES):
            for text, queue in enumerate(queues):
                outbox.put(queue, 7, Piece(f"{text}.{number} ", (), [LevelText("", "target", number)]), False)
                assert not waits or arrived.acquire(timeout=PATIENCE)
        for queue in queues:
            outbox.put(queue, 7, Piece("", (), [LevelText("end", "target", 0)]), True)

    thread = threading.Thread(target=decode)
    thread.start()
    found: list[list[Piece]] = [[] for _ in queues]

    async def read(queue: Pieces, pieces: list[Piece]) -> None:
        last = False
        while not last:
            index, piece, last = await asyncio.wait_for(queue.get(), PATIENCE)
            arrived.release()
            assert index == 7
            assert not (last and piece.text)
            pieces.append(piece)

    await asyncio.gather(*map(read, queues, found))
    thread.join()
    return found


@pytest.mark.parametrize(("texts", "waits"), [(1, True), (2, True), (40, False)])
def test_each_text_is_complete(texts: int, waits: bool) -> None:
    """Few texts get each piece at once; many ones get longer pieces, with what is known of the tokens."""
    found = asyncio.run(received(texts, waits))
    for text, pieces in enumerate(found):
        assert "".join(piece.text for piece in pieces) == "".join(f"{text}.{n} " for n in range(PASSES))
        levels = [level for piece in pieces for level in piece.levels]
        assert [level.tokens for level in levels] == [*range(PASSES), 0]
        assert levels[-1].text == "end"
        assert len(pieces) == PASSES + 1 if waits else len(pieces) < PASSES / 2

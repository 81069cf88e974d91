"""Streamers that want to know what proposed each token."""

from collections.abc import Collection, Sequence

import pytest

from tests.support.models.tiny_pair import TinyPair
from triforce_tree.requests.streamers import TokenStreamer

PROMPTS = ["The import statement " * 12, "A name is bound to an object, " * 9, "One more text. " * 15]
NEW = 30


class Noting(TokenStreamer):
    """Keeps the tokens and the names of each put."""

    def __init__(self, wants_origins: bool) -> None:
        self.wants_origins = wants_origins
        self.puts: list[tuple[list[int], list[str]]] = []
        self._names: list[str] = []

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        assert not self.puts

    def put_origins(self, names: Sequence[str]) -> None:
        assert self.wants_origins
        self._names = list(names)

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        self.puts.append((list(tokens), self._names))
        self._names = []
        return False

    def end(self) -> None:
        assert self.puts


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_of_a_batch_has_an_origin(pair: TinyPair, levels: int, temperature: float) -> None:
    given = {"rounds": 1} if levels > 1 else {}
    engine = pair.load(levels=levels, budget=64, recent=32, **given)
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": [1, 2, 3]}
    plain = engine.generate(PROMPTS, **options)
    streamers = [Noting(True), Noting(False), Noting(True)]
    out = engine.generate(PROMPTS, streamer=streamers, **options)
    assert out.sequences.equal(plain.sequences), "names change no text"
    assert all(not names for _, names in streamers[1].puts)
    drafted: set[str] = {1: set[str](), 2: {"draft", "lookup"}, 3: {"draft", "lookup", "retrieval"}}[levels]
    for streamer in (streamers[0], streamers[2]):
        assert sum(len(tokens) for tokens, _ in streamer.puts) == NEW
        for tokens, names in streamer.puts:
            assert len(names) == len(tokens)
            # The last token of a pass is the target's own.
            assert set(names[:-1]) <= drafted
        assert all(names[-1] == "target" for _, names in streamer.puts[:-1])
    seen = {name for streamer in streamers for _, names in streamer.puts for name in names}
    assert "target" in seen
    assert levels == 1 or temperature or seen & drafted

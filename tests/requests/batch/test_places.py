"""A batch that prompts join grows and shrinks over the same pages, and texts are as alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import triforce_tree
from tests.requests.batch.test_ended_early import check_held
from tests.support.models.api_cases import CHUNK, CHUNKED, CHUNKED_DRAFTED, SHARING, TARGET
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import reference
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kv.pool.backend import PooledBackend
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.requests.streamers import TokenStreamer

TEXT = prompt_of(400)
# They branch within and between chunks of 16 tokens.
DOCUMENTS = [TEXT[:150], TEXT[:70] + TEXT[200:300], TEXT[::-1][:90], TEXT[:33]]
# Seconds of prefill between two passes: with none, each chunk is followed by a pass. A chunk takes 1/64 s of
# the tests' clock.
PAUSE = "triforce_tree.decoding.chunked_prefill._PAUSE"
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "frequency_penalty": 0.8},
    {"temperature": 1.3, "min_p": 0.1, "bad_words_ids": [[3], [5, 9]]},
    {"temperature": 0, "repetition_penalty": 1.7, "eos_token_id": [7, 9, 11]},
    {"temperature": 0, "logprobs": True},
]


def matching() -> Engine:
    options = load_arguments({**CHUNKED, "levels": 2, "rounds": 1})
    return triforce_tree.load(TARGET, **options)


def drafted(**options: Any) -> Callable[[], Engine]:
    given = load_arguments({**CHUNKED_DRAFTED, **options})
    return lambda: triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **given)


KINDS: dict[str, Callable[[], Engine]] = {
    **{kind: make for kind, make in SHARING.items() if kind != "8 bits"},
    "suffix matching": matching,
    "earlier texts": drafted(levels=2, rounds=1, prefix_cache="1MiB"),
    "exact": drafted(levels=3, rounds=2, exact=True),
}


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_tree.requests.batch._PATIENCE", 3)
    monkeypatch.setattr(PAUSE, 3.5 / 64)


class Client(TokenStreamer):
    """Someone who asks after a number of passes, and may leave.

    Args:
        at: passes of the batch before the prompt comes.
        leaves: after how many tokens, or how many passes without any, the client leaves.
    """

    def __init__(
        self, prompt: list[int], new: int, at: int = 0, options: dict[str, Any] | None = None, seed: int = 0,
        leaves: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.prompt, self.new, self.at, self.seed, self.leaves = prompt, new, at, seed, leaves
        self.options, self.tokens, self.waited = options or {"temperature": 0}, list[int](), 0

    def put_prompt(self, *_: Any) -> None:
        pass

    def put_tokens(self, tokens: Any) -> bool:
        self.tokens += [int(token) for token in tokens]
        return self.leaves is not None and self.leaves[0] == "tokens" and len(self.tokens) >= self.leaves[1]

    def wants_end(self) -> bool:
        self.waited += 1
        return self.leaves is not None and self.leaves[0] == "passes" and self.waited >= self.leaves[1]

    def end(self) -> None:
        pass

    def check(self, output: GenerateOutput, alone: list[int], what: str) -> None:
        count = output.new_tokens
        text = output.sequences[0, len(self.prompt) : len(self.prompt) + count].tolist()
        assert self.tokens == text, what
        assert text == (alone if self.leaves is None else alone[:count]), what
        if self.leaves is not None and self.leaves[0] == "tokens":
            assert count >= min(self.leaves[1], len(alone)), what


class Clients:
    """Clients who join a batch."""

    tokens = None

    def __init__(self, engine: Engine, coming: list[Client]) -> None:
        self._engine, self._coming = engine, list(coming)
        self._passes, self.outputs, self.begun = 0, dict[int, GenerateOutput](), list[Client]()
        self.places: list[int] = []

    def _here(self, fits: Fits) -> list[Client]:
        return [
            each for each in self._coming
            if each.at <= self._passes and fits(each.prompt, each.new, each.options)
        ]  # fmt: skip

    def wanted(self, fits: Fits) -> int:
        self._passes += 1
        program = self._engine.last_program
        assert program is not None
        self.places.append(program.batch)
        check_pool(program.cache.backend)
        return len(self.begun) - len(self.outputs) + len(self._here(fits))

    def next(self, fits: Fits) -> Joined | None:
        if len(self.outputs) == len(self.begun) and self._coming:
            # Nobody else is there.
            self._passes = max(self._passes, min(each.at for each in self._coming))
        for client in self._here(fits):
            self._coming.remove(client)
            self.begun.append(client)
            return Joined(client.prompt, client.new, client, client.seed, options=client.options)
        return None

    def ended(self, number: int, output: GenerateOutput) -> None:
        self.outputs[number] = output

    def decode(self, first: list[Client], most: int, **options: Any) -> None:
        self.begun += first
        names = {name for client in first for name in client.options}
        own = {name: [client.options.get(name) for client in first] for name in names}
        self._engine.generate(
            [client.prompt for client in first], max_new_tokens=[client.new for client in first],
            seed=[client.seed for client in first], streamer=list(first), joining=self, max_batch=most,
            **own, **options,
        )  # fmt: skip


def check_pool(backend: Any) -> None:
    """Checks that no page has two owners, and that sequences use what they are said to use."""
    if not isinstance(backend, PooledBackend):
        return
    pool, blocks = backend.pool, list(backend.pool.blocks())
    pages = [page for block in blocks for page in block.pages]
    pages += [page for b in range(backend.batch) for page in pool.own(b)]
    assert len(pages) == len(set(pages))
    assert len(pages) * pool.page == pool.taken, "all pages belong to a chunk or a place of the batch"
    for block in blocks:
        assert block.users == {b for b in range(backend.batch) if block in pool.path(b)}


def lone_texts(engine: Engine) -> Callable[[Client], list[int]]:
    def text(client: Client) -> list[int]:
        out = engine.generate(
            [client.prompt], max_new_tokens=client.new, seed=[client.seed], **client.options
        )
        tokens: list[int] = out.sequences[0, len(client.prompt) :][: out.new_tokens].tolist()
        return tokens

    return text


def check_end(engine: Engine) -> None:
    check_held(engine, TARGET)
    program = engine.last_program
    assert program is not None
    backend = program.cache.backend
    if isinstance(backend, PooledBackend):
        assert not any(backend.pool.own(b) for b in range(64)), "no sequence has pages of its own"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", KINDS)
def test_texts_go_on_through_changes_of_places(kind: str) -> None:
    """Two waves of clients come and go beside a long text; one leaves during a prefill."""
    engine = KINDS[kind]()
    long = Client(DOCUMENTS[0], 120)
    coming = [
        Client(DOCUMENTS[1], 5, 2), Client(DOCUMENTS[1], 5, 2), Client([*DOCUMENTS[0], 3], 9, 2),
        Client(TEXT[::-1][:200], 4, 3, leaves=("passes", 2)), Client([7], 3, 3),
        Client(DOCUMENTS[2], 6, 18), Client(DOCUMENTS[3], 1, 19), Client([*DOCUMENTS[1], 4], 7, 19),
    ]  # fmt: skip
    clients = Clients(engine, coming)
    clients.decode([long], 8)
    for number, client in enumerate(clients.begun):
        client.check(clients.outputs[number], reference(TARGET, client.prompt, client.new), f"{number}")
    assert len(clients.begun) == 1 + len(coming)
    check_end(engine)
    changes = [(a, b) for a, b in zip(clients.places, clients.places[1:], strict=False) if a != b]
    if kind in ("EAGLE", "block"):  # A drafter of the user's own has buffers for one number of places.
        assert changes == [(2, 4), (4, 8)]
    else:
        assert changes[:3] == [(2, 4), (4, 8), (8, 4)]


@pytest.mark.parametrize("kind", ["plain", "three levels"])
def test_a_client_who_takes_the_place_of_a_prompt_half_read_is_not_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leaves during the prefill; its place is taken in the very pass in which the batch grows."""
    monkeypatch.setattr(PAUSE, 0.0)
    engine = KINDS[kind]()
    leaves = Client(TEXT[::-1][:200], 4, 2, {"temperature": 0, "logprobs": True}, leaves=("passes", 3))
    coming = [leaves, *(Client([*DOCUMENTS[0][:140], number], 9, 5) for number in range(2))]
    clients = Clients(engine, coming)
    clients.decode([Client(DOCUMENTS[0], 40)], 8)
    assert clients.outputs[1].new_tokens == 0, "it has left before its prompt was read"
    assert clients.outputs[1].logprobs.shape == (1, 0)
    for number, client in enumerate(clients.begun):
        client.check(clients.outputs[number], reference(TARGET, client.prompt, client.new), f"{number}")
    check_end(engine)


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_random_clients_get_their_texts(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come and leave at random, with options and seeds of their own, one batch after the other."""
    monkeypatch.setattr(PAUSE, pause)
    seed = random.randrange(2**32)
    draw, alone = random.Random(seed), lone_texts(KINDS["plain"]())
    kind = draw.choice(list(KINDS))
    engine = KINDS[kind]()

    def client(at: int) -> Client:
        document = draw.choice(DOCUMENTS)
        prompt = document[: draw.choice([len(document), draw.randrange(1, len(document))])]
        leaves = draw.choice([None, None, ("tokens", draw.randrange(1, 9)), ("passes", draw.randrange(1, 8))])
        new, options = draw.choice([1, 2, 5, 12, 40]), draw.choice(OPTIONS)
        return Client(prompt, new, at, options, draw.randrange(100), leaves)

    for call in range(3):
        most, at, coming = draw.choice([1, 2, 3, 5, 8, 33]), 0, []
        for _ in range(draw.randrange(8)):
            at += draw.choice([0, 0, 1, 5, 12])
            coming.append(client(at))
        clients = Clients(engine, coming)
        clients.decode([client(0) for _ in range(draw.randrange(1, 3))], most)
        for number, each in enumerate(clients.begun):
            what = f"{seed=} {kind=} {call=} {most=} {number=}"
            each.check(clients.outputs[number], alone(each), what)
        assert max(clients.places, default=1) <= max(most, 2), seed
        check_end(engine)


@pytest.mark.parametrize("kind", ["plain", "three levels"])
def test_a_failure_while_places_change_leaves_nothing_behind(kind: str) -> None:
    """Memory runs out when the larger batch is made; the texts are decoded again with what there is."""
    engine, short = KINDS[kind](), [Client(DOCUMENTS[1], 6, 2), Client(DOCUMENTS[2], 6, 2)]

    class Failing(Clients):
        failed = False

        def wanted(self, fits: Fits) -> int:
            found = super().wanted(fits)
            if self.places[-1] == 4 and not self.failed:
                self.failed = True
                program = engine.last_program
                assert program is not None
                run = program.run

                def out_of_memory(*given: Any) -> None:
                    program.run = run  # type: ignore[method-assign]
                    raise torch.OutOfMemoryError

                program.run = out_of_memory  # type: ignore[method-assign]
            return found

    clients = Failing(engine, short)
    clients.decode([Client(DOCUMENTS[0], 30)], 8)
    assert clients.failed
    for number, client in enumerate(clients.begun):
        client.check(clients.outputs[number], reference(TARGET, client.prompt, client.new), f"{number}")
    check_end(engine)


def grouped(start: int, count: int) -> list[list[int]]:
    """Prompts that share a beginning of 3.5 chunks."""
    common = TEXT[start : start + CHUNK * 7 // 2]
    return [[*common, number, *TEXT[300:309]] for number in range(count)]


def test_calls_with_other_numbers_of_prompts_keep_few_programs() -> None:
    engine, memory = SHARING["plain"](), set()
    for count in range(13, 1, -1):
        prompts = grouped(0, count)
        out = engine.generate(prompts, max_new_tokens=3, do_sample=False)
        assert [row[-3:].tolist() for row in out.sequences] == [reference(TARGET, p, 3) for p in prompts]
        assert engine.last_program is not None
        assert isinstance(engine.last_program.cache.backend, PooledBackend)
        memory.add(engine.last_program.store.memory)
    assert len(memory) == 1, "all have the same pages"
    assert len(engine._hierarchy.places) <= 9


def test_a_beginning_is_computed_once_whatever_the_last_call_had_in_common(fed: list[int]) -> None:
    """The programs of both numbers of prompts exist, and have other beginnings of parts of a chunk."""
    engine = SHARING["plain"]()
    for start, count in ((0, 4), (50, 3), (100, 4)):
        fed.clear()
        engine.generate(grouped(start, count), max_new_tokens=3, do_sample=False)
        # The beginning, and for each prompt the tokens after it but the last.
        assert sum(fed) == CHUNK * 7 // 2 + 9 * count


def test_places_that_another_batch_had_say_nothing_about_a_longer_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory suffices for 32 places of short texts, and for fewer of long ones."""
    engine = SHARING["plain"]()

    def fitting(*how: Any) -> int:
        most, prompt = how[3:5]
        return min(most, 32 if prompt <= 1024 else 8)

    monkeypatch.setattr("triforce_tree.requests.batch_pool.fitting_batch", fitting)
    for length, most in ((60, 32), (1500, 8)):
        prompts = [[*prompt_of(length), number] for number in range(20)]
        clients = Clients(engine, [])
        clients.decode([Client(prompt, 2) for prompt in prompts], 32)
        assert max(clients.places) == most
        for number, client in enumerate(clients.begun):
            client.check(clients.outputs[number], reference(TARGET, client.prompt, 2), f"{number}")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_no_more_than_the_most_are_decoded_together(prefix_cache: bool) -> None:
    """A source may want more, with slots of each sequence's own as well."""
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments({**CHUNKED, "prefix_cache": prefix_cache}))
    clients = Clients(engine, [Client(DOCUMENTS[n % 4], 6, 1) for n in range(7)])
    clients.decode([Client(DOCUMENTS[0], 12)], 3)
    assert max(clients.places) == 3
    for number, client in enumerate(clients.begun):
        client.check(clients.outputs[number], reference(TARGET, client.prompt, client.new), f"{number}")


def test_a_prompt_too_short_for_level_1_is_decoded_beside_a_long_one_in_host_memory() -> None:
    engine = drafted(offload=True)()
    for first in ([Client(DOCUMENTS[0], 5), Client(TEXT[:10], 5)], [Client(TEXT[:10], 5)]):
        clients = Clients(engine, [])
        clients.decode(first, 8)
        for number, client in enumerate(clients.begun):
            client.check(clients.outputs[number], reference(TARGET, client.prompt, client.new), f"{number}")


def test_batches_have_the_rotary_frequencies_of_their_texts() -> None:
    """A batch with free places, one beside the other, before and after a batch of other frequencies."""
    target = tiny("phi3-longrope")  # Texts of more than 64 tokens have other frequencies.
    engine = triforce_tree.load(target, levels=1, **load_arguments(CHUNKED))
    for lengths in ((40,), (70, 69), (70, 90), (40, 30), (90,)):
        first, *others = (Client(TEXT[:length], 9) for length in lengths)
        clients = Clients(engine, others)
        for other in others:
            other.at = 2
        clients.decode([first], 8)
        for client in clients.begun:
            assert client.tokens == greedy(target, client.prompt, 9), len(client.prompt)

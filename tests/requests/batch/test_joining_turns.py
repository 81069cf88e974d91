"""Conversations whose turns join a running batch: each turn computes its new tokens alone."""

from collections.abc import Callable

import pytest

import triforce_tree
from tests.support.models.api_cases import CHUNKED, TARGET
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kv import store
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput

NEW, TURNS = 6, 4
BEGINNINGS = [prompt_of(60), prompt_of(75)[::-1], [*prompt_of(40), *prompt_of(30)[::-1]]]


class Talking:
    """Conversations, each of which has its next turn when the last one has ended; two run together."""

    tokens = None

    def __init__(self, running: int) -> None:
        self.waiting = list(range(running, len(BEGINNINGS)))
        self.texts, self.prompts = [list(text) for text in BEGINNINGS], dict(enumerate(BEGINNINGS[:running]))
        self.speakers = dict(enumerate(range(running)))
        self.outputs: list[tuple[int, list[int], GenerateOutput]] = []
        self.turns = [1] * len(BEGINNINGS)

    def wanted(self, fits: Fits) -> int:
        return 2

    def next(self, fits: Fits) -> Joined | None:
        if not self.waiting or not fits(self.texts[self.waiting[0]], NEW):
            return None
        speaker = self.waiting.pop(0)
        number = len(self.prompts)
        self.prompts[number], self.speakers[number] = list(self.texts[speaker]), speaker
        return Joined(self.prompts[number], NEW)

    def ended(self, number: int, output: GenerateOutput) -> None:
        speaker, prompt = self.speakers[number], self.prompts[number]
        self.outputs.append((speaker, prompt, output))
        new = output.sequences[0, -output.new_tokens :].tolist()
        self.texts[speaker] = [*prompt, *new, *prompt_of(40)[number : number + 5 + number]]
        if self.turns[speaker] < TURNS:
            self.turns[speaker] += 1
            self.waiting.append(speaker)


KINDS: dict[str, Callable[[], Engine]] = {
    "a pool": lambda: triforce_tree.load(
        TARGET, levels=1, **load_arguments({**CHUNKED, "prefix_cache": "1GiB"})
    ),
    "a pool, two levels": lambda: triforce_tree.load(
        TARGET, drafter="lookup", levels=2, **load_arguments({**CHUNKED, "prefix_cache": "1GiB"})
    ),
    "windows": lambda: triforce_tree.load(
        tiny("gemma3"), drafter="lookup", levels=2, **load_arguments({"prefix_cache": "1GiB"})
    ),
    "recurrent layers": lambda: triforce_tree.load(
        recurrent("qwen3.5"), drafter="lookup", levels=2, **load_arguments({"prefix_cache": "1GiB"})
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_turns_find_their_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RING_PAGE", 8)
    engine, talking = KINDS[kind](), Talking(2)
    engine.generate(
        BEGINNINGS[:2], max_new_tokens=NEW, do_sample=False, max_batch=2, joining=talking, pad_token_id=0
    )
    while talking.waiting:
        # Turns that did not fit the buffers begin a batch.
        later = Talking(0)
        later.texts, later.turns, later.outputs = talking.texts, talking.turns, talking.outputs
        first, later.waiting = talking.waiting[0], talking.waiting[1:]
        later.prompts, later.speakers = {0: list(talking.texts[first])}, {0: first}
        engine.generate(
            [talking.texts[first]], max_new_tokens=NEW, do_sample=False, max_batch=2, joining=later
        )
        talking = later
    assert len(talking.outputs) == len(BEGINNINGS) * TURNS
    held = [0] * len(BEGINNINGS)
    for speaker, prompt, output in talking.outputs:
        new = output.sequences[0, -output.new_tokens :].tolist()
        assert new == greedy(engine.target.model, prompt, NEW)
        assert output.reused_tokens == held[speaker], (speaker, len(prompt))
        held[speaker] = len(prompt) + len(new) - 1

"""Texts with different grammars, and without one, in the batches of the server."""

import re
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest

import triforce_tree
from scripts.checks.served import serving
from tests.support.models.api_cases import characters
from tests.support.models.families import tiny
from tests.support.processes.served import KEY, NAME, client_of, close_clients
from triforce_tree import Engine, GenerateOutput
from triforce_tree.grammar import Choice, Grammar, Regex
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits, Scheduler
from triforce_tree.server.text_stream import ServedText

LONG, PATIENCE = 48, 60


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load()


def served(
    engine: Engine, waves: Sequence[Sequence[tuple[Grammar | None, int]]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[int]]:
    """Returns the texts of requests, and the numbers of texts with which batches began.

    Args:
        waves: the grammar and the most tokens of each text. A later wave comes after the first has begun.
    """
    begun, came, sizes = threading.Event(), threading.Event(), list[int]()
    generate, joining = engine.generate, Scheduler.joining

    def counted(prompts: Any, **options: Any) -> GenerateOutput:
        sizes.append(len(prompts))
        return generate(prompts, **options)

    def after_all_have_come(self: Scheduler, *given: Any) -> ServedText | None:
        begun.set()
        came.wait(PATIENCE)
        return joining(self, *given)

    monkeypatch.setattr(engine, "generate", counted)
    monkeypatch.setattr(Scheduler, "joining", after_all_have_come)
    scheduler = Scheduler(engine, Limits(batch=3), lambda text: None)
    texts, pieces, ends = list[ServedText](), list[list[str]](), list[threading.Event]()
    try:
        for wave in waves:
            ended, written = [threading.Event() for _ in wave], [list[str]() for _ in wave]
            coming = [
                ServedText(
                    engine.tokenizer.encode("The name is "),
                    {"max_new_tokens": most, "temperature": 0.0, **({"grammar": grammar} if grammar else {})},
                    (),
                    lambda piece, own=own, end=end: end.set() if piece is None else own.append(piece),
                )
                for (grammar, most), own, end in zip(wave, written, ended, strict=True)
            ]
            scheduler.submit(coming)
            texts, pieces, ends = texts + coming, pieces + written, ends + ended
            assert begun.wait(PATIENCE)
        came.set()
        for end in ends:
            assert end.wait(PATIENCE)
    finally:
        came.set()
        scheduler.close()
    assert [text.error for text in texts] == [None] * len(texts)
    return ["".join(own) for own in pieces], sizes


def test_texts_with_different_grammars_share_a_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waves = [
        [(Choice(["one"]), LONG), (None, LONG)],
        [(Regex("[xy]{4}"), 9), (Choice(["two"]), 9), (None, 5)],
    ]
    [one, free, letters, two, short], sizes = served(engine, waves, monkeypatch)
    assert sizes == [2]
    assert (one, two) == ("one", "two")
    assert re.fullmatch("[xy]{4}", letters)
    assert free.startswith(short)
    assert free == engine.generate("The name is ", max_new_tokens=LONG, temperature=0).text


def test_a_grammar_joins_no_batch_without_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [free, one], sizes = served(engine, [[(None, LONG)], [(Choice(["one"]), 9)]], monkeypatch)
    assert (one, sizes) == ("one", [1, 1])
    assert free == engine.generate("The name is ", max_new_tokens=LONG, temperature=0).text


def test_a_model_without_an_end_token_refuses_a_grammar_in_one_sentence() -> None:
    engine = triforce_tree.load(tiny("llama-gqa"), tokenizer=characters(), levels=1)
    with serving(create_app(engine, Served(NAME, KEY))) as (url, _):
        client = client_of(url)
        given: dict[str, Any] = {"model": NAME, "prompt": "some", "max_tokens": 4}
        with pytest.raises(
            openai.BadRequestError, match=r"needs a token that ends .* generation_config.json"
        ):
            client.completions.create(**given, extra_body={"guided_regex": "[ab]{3}"})
        assert client.completions.create(**given).choices[0].finish_reason == "length"
    close_clients()

"""A server on a GPU: stages are prepared before it answers, and streams say what proposed their tokens."""

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

import triforce_tree
from scripts.checks.served import serving
from tests.support.processes.served import PATIENCE, metric
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

pytestmark = pytest.mark.gpu

WARM, SHORTER = 6000, 3000


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = triforce_tree.load(device="cuda", levels=3, budget=1024, advanced={"chunk": 8})
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    limits = Limits(batch=4, batch_tokens=20_000, new_tokens=512)
    with serving(create_app(engine, Served("pair", limits=limits, warm_up=(WARM,)))) as (address, _):
        yield address


def events(url: str, tokens: int, **fields: object) -> list[dict[str, object]]:
    """Returns the chunks of a stream after a prompt of about so many tokens."""
    asked = {"model": "pair", "prompt": pydoc_text()[: 2 * tokens], "stream": True, **fields}
    with urlopen(Request(f"{url}/v1/completions", json.dumps(asked).encode()), timeout=PATIENCE) as reply:
        lines = [line[5:] for line in reply if line.startswith(b"data:") and b"[DONE]" not in line]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("temperature", [0, 1])
def test_stages_are_those_of_the_warm_up(engine: Engine, url: str, temperature: int) -> None:
    before = engine.last_program
    assert before is not None
    kinds = list(before.prepared)
    assert events(url, SHORTER, max_tokens=40, temperature=temperature)
    assert engine.last_program is before, "the buffers of the warm-up serve shorter prompts"
    assert set(before.prepared) == set(kinds), "so do its stages"


def test_streams_say_what_proposed_their_tokens(url: str) -> None:
    options = {"include_levels": True, "include_usage": True}
    *chunks, last = events(url, SHORTER, max_tokens=200, temperature=0, stream_options=options)
    levels = [each for chunk in chunks for choice in chunk["choices"] for each in choice.get("levels", ())]
    assert "".join(each["text"] for each in levels) == "".join(
        choice["text"] for chunk in chunks for choice in chunk["choices"]
    )
    assert sum(each["tokens"] for each in levels) == last["usage"]["completion_tokens"] == 200
    assert (
        {"draft", "target"}
        <= {each["level"] for each in levels}
        <= {"draft", "lookup", "retrieval", "target"}
    )
    assert metric(url, "sequence_passes_total") < metric(url, "new_tokens_total")

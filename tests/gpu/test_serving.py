"""A server on a GPU: stages are prepared before it answers, and streams say what proposed their tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

import triforce_tree
from scripts.checks.served import serving
from tests.support.processes.served import PATIENCE, metric
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

pytestmark = pytest.mark.gpu

WARM, SHORTER = 6000, 3000
_PREPARING = 300.0  # seconds, where kernels have to be compiled


@contextmanager
def served(warm_up: tuple[int, ...], **options: Any) -> Iterator[str]:
    """Yields the address of a server of the embedded pair."""
    engine = triforce_tree.load(device="cuda", levels=3, budget=1024, advanced={"chunk": 8, **options})
    limits = Limits(batch=4, batch_tokens=20_000, new_tokens=512)
    app = create_app(engine, Served("pair", limits=limits, warm_up=warm_up))
    with serving(app, patience=_PREPARING) as (address, _):
        yield address
    engine.close()


def events(url: str, tokens: int, **fields: object) -> list[dict[str, Any]]:
    """Returns the chunks of a stream after a prompt of about so many tokens."""
    asked = {"model": "pair", "prompt": pydoc_text()[: 2 * tokens], "stream": True, **fields}
    with urlopen(Request(f"{url}/v1/completions", json.dumps(asked).encode()), timeout=PATIENCE) as reply:
        lines = [line[5:] for line in reply if line.startswith(b"data:") and b"[DONE]" not in line]
    return [json.loads(line) for line in lines]


def test_stages_are_those_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, begin = list[int](), torch.cuda.CUDAGraph.capture_begin

    def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        captures.append(1)
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    with served((WARM,)) as url:
        assert captures
        for temperature in (0, 1):
            captures.clear()
            assert events(url, SHORTER, max_tokens=40, temperature=temperature)
            assert not captures, "the stages of the warm-up serve shorter prompts"


def test_streams_say_what_proposed_their_tokens() -> None:
    options = {"include_levels": True, "include_usage": True}
    # Measured times would choose plain decoding for so small a model.
    with served((), rounds=2) as url:
        *chunks, last = events(url, SHORTER, max_tokens=200, temperature=0, stream_options=options)
        assert metric(url, "sequence_passes_total") < metric(url, "new_tokens_total")
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

"""Kept prefixes, sessions and common prefixes beside a cold prefill; the cache on the device and offloaded.

In 16 bits texts may part where scores tie (``triforce_tree.check.ties``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.models.pair_on_gpu import long_text, pair_on
from triforce_tree import Engine
from triforce_tree.check.ties import first_difference
from triforce_tree.config import load_arguments
from triforce_tree.kernels.attention import prefill

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PROMPT, NEW = 20_000, 64
HOW: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "seed": 0}
CACHES: dict[str, dict[str, Any]] = {"device": {}, "8 bits": {"kv_bits": 8}, "offloaded": {"offload": True}}


class Engines(NamedTuple):
    """An engine that keeps prefixes, and one that does not.

    Each has its own copy of the models: host memory holds one offloaded cache of a model at a time.
    """

    warm: Engine
    cold: Engine

    def check(self, prompt: list[int], found: list[int]) -> None:
        """Compares what follows a prompt with the cold engine's text."""
        expected = self.cold.generate(prompt, **HOW).sequences[0].tolist()[len(prompt) :]
        difference = first_difference(self.cold, prompt, found, expected)
        assert difference is None or difference.tie, difference


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def models(request: pytest.FixtureRequest) -> list[Engine]:
    return [pair_on(DEVICE, request.param, levels=3) for _ in range(2)]


@pytest.fixture(params=CACHES)
def engines(request: pytest.FixtureRequest, models: list[Engine]) -> Iterator[Engines]:
    warm, cold = models
    options = CACHES[request.param]
    made = Engines(
        warm.with_options(**load_arguments(options)),
        cold.with_options(**load_arguments({**options, "prefix_cache": False})),
    )
    yield made
    for engine in made:
        engine.close()


def test_kept_chunks_give_the_bits_of_a_cold_prefill(engines: Engines) -> None:
    text = long_text()
    engines.warm.generate(text[:PROMPT], **HOW)
    question = [*text[: PROMPT - 300], *text[PROMPT + 500 : PROMPT + 700]]
    warm, cold = (engine.generate(question, output_logits=True, **HOW) for engine in engines)
    assert warm.reused_tokens
    assert torch.equal(warm.sequences, cold.sequences)
    for ours, theirs in zip(warm.logits, cold.logits, strict=True):
        assert torch.equal(ours, theirs)


def test_sessions_give_the_text_of_a_cold_engine(engines: Engines, tmp_path: Path) -> None:
    """Three calls, a fork, and a session that was saved and loaded."""
    text = long_text()
    session = engines.warm.session(text[:PROMPT])
    session.generate(**HOW)
    session.save(tmp_path)
    for each, at in ((session, 0), (session.fork(), 300), (session, 600)):
        asked = [*each.tokens, *text[PROMPT + at : PROMPT + at + 200]]
        each.generate(asked[len(each.tokens) :], **HOW)
        engines.check(asked, each.tokens[len(asked) :])
    loaded = engines.warm.load_session(tmp_path)
    asked = [*loaded.tokens, *text[PROMPT : PROMPT + 200]]
    out = loaded.generate(text[PROMPT : PROMPT + 200], **HOW)
    engines.check(asked, loaded.tokens[len(asked) :])
    assert out.reused_tokens is not None
    assert out.reused_tokens >= PROMPT


def test_questions_about_one_document_are_answered_as_alone(engines: Engines) -> None:
    """In batches of at most three sequences: about the whole document, then about its first half."""
    text = long_text()
    for common in (PROMPT, PROMPT // 2):
        asked = [[*text[:common], *text[PROMPT + at : PROMPT + 2 * at + 150]] for at in (0, 200, 500, 30)]
        out = engines.warm.generate(asked, max_batch=3, **HOW)
        for sequence, question in zip(out.sequences.tolist(), asked, strict=True):
            engines.check(question, sequence[-NEW:])


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("bits", [8, 16])
def test_prompts_of_other_lengths_need_few_plans_of_cudnn(
    bits: int, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's attention makes a plan for each shape and stride, which takes 0.04 s."""
    engine = pair_on(DEVICE, torch.bfloat16, kv_bits=bits, prefix_cache=False)
    plans, own = set[Any](), prefill._cudnn

    def recorded(q: torch.Tensor, k: torch.Tensor, *how: Any, **named: Any) -> Any:
        plans.add((q.shape, q.stride(), k.shape, k.stride()))
        return own(q, k, *how, **named)

    monkeypatch.setattr(prefill, "_cudnn", recorded)
    text, counts = long_text(), list[int]()
    for length in (12_000, 11_000, 10_007, 9_500):
        given = [text[at : at + length] for at in range(0, 1000 * prompts, 1000)]
        engine.generate(given, **{**HOW, "max_new_tokens": 2})
        counts.append(len(plans))
    assert 0 < counts[-1] <= counts[0] + 2
    engine.close()

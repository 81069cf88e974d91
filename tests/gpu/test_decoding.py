"""Decoding with the embedded pair: greedy text, the distribution of sampled tokens, seeds and memory."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from tests.support.models.pair_on_gpu import FIXED, long_text, pair_on
from triforce_tree import Engine
from triforce_tree.check.goodness_of_fit import chi_square, chi_square_p
from triforce_tree.check.losslessness import uncertain_contexts
from triforce_tree.config import load_arguments
from triforce_tree.requests.streamers import TokenStreamer
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCH, REPEATS = 256, 8
LEAST_P = 1e-4  # about fifty p-values are tested
PASSES = 2000


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = pair_on(DEVICE, request.param, **FIXED)
    yield made
    made.close()


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"tail_tree": True}], ids=str)
def test_levels_decode_the_same_greedy_text(options: dict[str, Any]) -> None:
    """Prompts of three lengths in one batch, in fp32."""
    engine, text = pair_on(DEVICE, torch.float32, **FIXED), long_text()
    prompts = [text[1000 * i : 1000 * i + n] for i, n in enumerate((700, 1500, 3001))]
    plain, *others = (
        engine.with_options(**load_arguments({**options, "levels": levels}))
        .generate(prompts, max_new_tokens=200, do_sample=False)
        .sequences.tolist()
        for levels in (1, 2, 3)
    )
    assert others == [plain, plain]


def test_the_time_of_a_prompt_is_that_until_its_first_token() -> None:
    """The host does not wait for the prompt before it prepares the first pass."""
    engine, text, arrivals = pair_on(DEVICE, torch.bfloat16, **FIXED), long_text(), list[float]()

    class Clock(TokenStreamer):
        def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None: ...

        def put_tokens(self, tokens: Sequence[int]) -> bool:
            torch.cuda.synchronize()
            arrivals.append(time.perf_counter())
            return False

        def end(self) -> None: ...

    for prompt in (text[1:60_001], text[:60_000]):
        arrivals.clear()
        start = time.perf_counter()
        out = engine.generate([prompt], max_new_tokens=64, temperature=0.0, streamer=Clock())
        end = time.perf_counter()
    assert out.prefill_seconds is not None
    assert out.decode_seconds is not None
    assert out.prefill_seconds == pytest.approx(arrivals[0] - start, rel=0.25)
    assert out.decode_seconds < 1.5 * (end - arrivals[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"levels": 2}, {"levels": 1}], ids=str)
def test_stages_that_are_made_beside_a_long_prompt(options: dict[str, Any], temperature: float) -> None:
    """The text is that of an engine whose stages are there already, which has read another text meanwhile."""
    engine, text = pair_on(DEVICE, torch.bfloat16, **options), long_text()
    prompt, other = text[:20_000], text[1:20_001]
    assert prompt[0] != other[0]
    found = [
        engine.generate([ids], max_new_tokens=100, temperature=temperature, seed=5).sequences.tolist()
        for ids in (prompt, other, prompt)
    ]
    assert found[2] == found[0]
    assert found[1] != found[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"levels": 1},
        {"levels": 2},
        {},
        {"tail_tree": True},
        {"runner_ups": False, "retrieval_weight_bits": 8},
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_target(
    engine: Engine, options: dict[str, Any], temperature: float
) -> None:
    """The first new token, and the second after the two likeliest first ones, in batches of equal prompts."""
    target = engine.target
    if options.get("retrieval_weight_bits") and target.dtype == torch.float32:
        pytest.skip("weights of fp32 are not packed")
    [prompt] = uncertain_contexts(engine, long_text()[:900], 1)
    to_probs, made = ProbsFromLogits.at(temperature), engine.with_options(**load_arguments(options))

    def probs_after(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits = target.model(torch.tensor([tokens], device=DEVICE), logits_to_keep=1).logits[0]
        return to_probs(logits, list)[0]

    def p_value(counts: Counter[int], tokens: list[int]) -> float:
        return chi_square_p(*chi_square(counts, probs_after(tokens)))

    drawn = [
        tuple(sequence[-2:])
        for seed in range(REPEATS)
        for sequence in made.generate(
            [prompt] * BATCH, max_new_tokens=2, do_sample=True, temperature=temperature, top_k=0, seed=seed
        ).sequences.tolist()
    ]
    assert p_value(Counter(first for first, _ in drawn), prompt) > LEAST_P
    for token in probs_after(prompt).topk(2).indices.tolist():
        after = Counter(second for first, second in drawn if first == token)
        assert p_value(after, [*prompt, token]) > LEAST_P


class Memory(BaseStreamer):  # type: ignore[misc]
    """Reads the bytes that are allocated on the GPU after every hundredth call."""

    def __init__(self) -> None:
        self.calls, self.readings = 0, list[int]()

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls % 100 == 0:
            self.readings.append(torch.cuda.memory_allocated())

    def end(self) -> None: ...


def test_a_seed_repeats_a_long_text_and_memory_stays(engine: Engine) -> None:
    texts, memory = [], Memory()
    for _ in range(2):
        out = engine.generate(
            long_text()[:4000], max_new_tokens=PASSES, do_sample=True, seed=7, streamer=memory
        )
        texts.append(out.sequences.tolist())
    assert texts[0] == texts[1]
    assert max(memory.readings) - memory.readings[0] < 1 << 20


class Leaving(TokenStreamer):
    """Keeps the tokens that it gets, and ends its text after so many of them."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens, self.ended = most, list[int](), False

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        assert not self.tokens

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        assert len(self.tokens) < self.most
        assert not self.ended
        self.tokens += tokens
        return len(self.tokens) >= self.most

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_streamers_get_the_tokens_of_their_texts(levels: int) -> None:
    """They get those of a pass while the next one runs, and end their texts then."""
    engine, text = pair_on(DEVICE, torch.float32, **FIXED), long_text()
    engine = engine.with_options(**load_arguments({"levels": levels}))
    prompts = [text[1000 * i : 1000 * i + 700] for i in range(4)]
    options = {"max_new_tokens": 60, "do_sample": False}
    plain = engine.generate(prompts, **options)
    streamers = [Leaving(most) for most in (5, 1000, 30, 1000)]
    out = engine.generate(prompts, streamer=streamers, **options)
    assert out.finish_reason == ["stop", "length", "stop", "length"]
    for row, expected, new, streamer in zip(
        out.sequences.tolist(), plain.sequences.tolist(), out.new_tokens, streamers, strict=True
    ):
        assert streamer.ended
        assert new == len(streamer.tokens)
        assert row[700 : 700 + new] == streamer.tokens == expected[700 : 700 + new]

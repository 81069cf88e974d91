"""Engines over the same models, used by several threads and from inside their own callbacks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import triforce_tree
from tests.support.models.api_cases import EXPECTED, PROMPT, SMALL, TARGET, Collect, new
from tests.support.models.families import greedy, perturbed, prompt_of
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.runtime.locks import generation, held

DRAFT = perturbed(TARGET, 0.1)
PROMPTS = [PROMPT, prompt_of(30), prompt_of(52)]
NEW = 8
TEXTS = [EXPECTED[:NEW], *(greedy(TARGET, prompt, NEW) for prompt in PROMPTS[1:])]


def fresh(**options: Any) -> Engine:
    return triforce_tree.load(TARGET, DRAFT, **load_arguments({"levels": 3, **SMALL, **options}))


def is_as_it_was(model: Any = TARGET) -> bool:
    plain = not any("forward" in vars(module) for module in model.modules())
    return model.config._attn_implementation == "sdpa" and not model.training and plain


@pytest.mark.parametrize("case", ["one engine", "siblings", "engines", "draft and target"])
def test_threads_get_their_own_texts(case: str) -> None:
    engines = {
        "one engine": lambda own: [own] * 3,
        "siblings": lambda own: [own, own.with_options(levels=1), own.with_options(levels=2)],
        "engines": lambda own: [own, fresh(levels=2), triforce_tree.load(TARGET)],
        # Two pairs over the same models, each the other's draft: locks are taken in one order.
        "draft and target": lambda own: [
            own,
            triforce_tree.load(DRAFT, TARGET, levels=2, **load_arguments(SMALL)),
            own,
        ],
    }[case](fresh())
    texts = list(TEXTS)
    if case == "draft and target":
        texts[1] = greedy(DRAFT, PROMPTS[1], NEW)
    start = threading.Barrier(3)

    def write(number: int) -> list[list[int]]:
        start.wait()
        return [
            new(
                engines[number].generate(PROMPTS[number], max_new_tokens=NEW, do_sample=False),
                PROMPTS[number],
            )
            for _ in range(2)
        ]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(write, range(3))) == [[text] * 2 for text in texts]
    assert is_as_it_was()
    assert is_as_it_was(DRAFT)


def test_transformers_own_generate_runs_at_the_same_time() -> None:
    """During our generation the user's model has its own attention and decodes as before."""
    engine = fresh()
    theirs: list[list[int]] = []

    class Other(Collect):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            thread = threading.Thread(target=lambda: theirs.append(greedy(TARGET, PROMPTS[1], NEW)))
            thread.start()
            thread.join()
            theirs.append(greedy(TARGET, PROMPTS[1], NEW))
            assert TARGET.training
            assert TARGET.config._attn_implementation == "sdpa"

    TARGET.train()
    try:
        out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False, streamer=Other(), progress=None)
        assert TARGET.training
    finally:
        TARGET.eval()
    assert new(out) == EXPECTED[:NEW]
    assert len(theirs) > 4
    assert all(text == TEXTS[1] for text in theirs)


def test_custom_generate_in_threads() -> None:
    hook = triforce_tree.custom_generate(DRAFT, levels=3, **load_arguments(SMALL))

    def write(number: int) -> list[int]:
        ids = torch.tensor([PROMPTS[number % 3]])
        if number < 3:
            return greedy(TARGET, PROMPTS[number % 3], NEW)
        out = TARGET.generate(ids, custom_generate=hook, max_new_tokens=NEW, do_sample=False)
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(write, range(6))) == TEXTS * 2
    assert is_as_it_was()


class Criterion(StoppingCriteria):
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.call()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processor(LogitsProcessor):
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.call()
        return scores


class Streamer(Collect):
    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def put(self, value: torch.Tensor) -> None:
        self.call()


CALLBACKS: dict[str, Callable[[Callable[[], None]], dict[str, Any]]] = {
    "streamer": lambda call: {"streamer": Streamer(call)},
    "criterion": lambda call: {"stopping_criteria": Criterion(call)},
    "processor": lambda call: {"logits_processor": Processor(call)},
    "progress": lambda call: {"progress": lambda tokens: call()},
}


@pytest.mark.parametrize("what", ["generate", "close", "memory_plan"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_an_engine_called_from_its_own_callback_raises(name: str, what: str) -> None:
    engine = fresh()
    inner = {
        "generate": lambda: engine.with_options(levels=1).generate(PROMPT, max_new_tokens=2),
        "close": engine.close,
        "memory_plan": lambda: engine.memory_plan(40, 5),
    }[what]
    with pytest.raises(RuntimeError, match=r"running, and one of its callbacks .* after the generation"):
        engine.generate(
            PROMPT, max_new_tokens=NEW, do_sample=False, **CALLBACKS[name](lambda: inner() and None)
        )
    assert is_as_it_was()
    assert new(engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)) == EXPECTED[:NEW]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", CALLBACKS)
def test_an_error_inside_leaves_the_models_to_other_threads(name: str, error: type[BaseException]) -> None:
    engine = fresh()

    def fail() -> None:
        raise error("stop")

    with pytest.raises(error, match="stop"):
        engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False, **CALLBACKS[name](fail))
    assert is_as_it_was()
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(engine.generate, PROMPT, max_new_tokens=NEW, do_sample=False).result(timeout=60)
    assert new(out) == EXPECTED[:NEW]


def test_a_generation_waits_for_another_threads() -> None:
    entered = threading.Event()

    def enter() -> None:
        with generation(DRAFT, TARGET):
            entered.set()

    with held(TARGET):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(60)
    assert entered.is_set()

"""torch's default dtype and device are the user's: no text depends on them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.distributions.block_folders import block
from tests.support.distributions.head_folders import eagle, medusa
from tests.support.models.api_cases import EXPECTED, PROMPT, SMALL, SMALL_LOOKUP, TARGET, new
from tests.support.models.families import perturbed
from triforce_tree import Engine
from triforce_tree.config import load_arguments

NEW = 14
DRAFT = perturbed(TARGET, 0.05)
EAGLE, MEDUSA = eagle(TARGET, "chain:3"), medusa(TARGET, "chain:3")
BLOCK = block(TARGET, "chain:3", inputs=(0,))


def drafting(**options: Any) -> Callable[[], Engine]:
    return lambda: triforce_tree.load(TARGET, DRAFT, **load_arguments({**SMALL, **options}))


ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": lambda: triforce_tree.load(TARGET, levels=1, **load_arguments(SMALL_LOOKUP)),
    "lookup": lambda: triforce_tree.load(TARGET, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})),
    "draft": drafting(levels=2, rounds=1),
    "retrieval": drafting(levels=3, rounds=2),
    "8 bits": drafting(levels=3, rounds=2, kv_bits=8, retrieval_weight_bits=8),
    "defaults": drafting(),
    "block": lambda: triforce_tree.load(
        TARGET, drafter=BLOCK, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    ),
    "EAGLE": lambda: triforce_tree.load(
        TARGET, drafter=EAGLE, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    ),
    "Medusa": lambda: triforce_tree.load(
        TARGET, drafter=MEDUSA, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    ),
}
OTHERS = (torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def texts(engine: Engine) -> list[list[int]]:
    found = [new(engine.generate(PROMPT, do_sample=False, max_new_tokens=NEW))]
    for seed in range(2):
        out = engine.generate(
            PROMPT, do_sample=True, temperature=1.5, top_p=0.95, seed=seed, max_new_tokens=NEW
        )
        found.append(new(out))
    # A seed by position draws other random numbers.
    out = engine.generate([PROMPT, PROMPT[5:]], do_sample=True, seed=[7, 8], max_new_tokens=NEW)
    return [*found, out.sequences[1].tolist()]


# Each path with one of them, and two paths with all.
CASES = [(path, OTHERS[n % 3]) for n, path in enumerate(ENGINES)]
CASES += [(path, dtype) for path in ("draft", "retrieval") for dtype in OTHERS if (path, dtype) not in CASES]


@pytest.mark.parametrize("path, dtype", CASES, ids=str)
def test_texts_do_not_depend_on_the_default_dtype(path: str, dtype: torch.dtype) -> None:
    expected = texts(ENGINES[path]())
    assert expected[0] == EXPECTED[:NEW]
    with default(dtype):
        engine = ENGINES[path]()
        assert texts(engine) == expected
    assert texts(engine) == expected, "restored after the first call"
    engine = ENGINES[path]()
    with default(dtype):
        assert texts(engine) == expected, "set after load"
    with default(torch.float64 if dtype != torch.float64 else torch.bfloat16):
        assert texts(engine) == expected, "another one in each call"


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_beams_samples_and_scores(dtype: torch.dtype) -> None:
    engine = drafting(levels=2, rounds=1)()

    def outputs() -> list[Any]:
        beams = engine.generate(PROMPT, num_beams=3, max_new_tokens=6)
        several = engine.generate(PROMPT, do_sample=True, num_return_sequences=2, seed=3, max_new_tokens=6)
        scored = engine.generate(PROMPT, max_new_tokens=4, output_scores=True, logprobs=True)
        assert scored.scores[0].dtype == torch.float32
        return [beams.sequences.tolist(), several.sequences.tolist(), scored.logprobs]

    expected = outputs()
    with default(dtype):
        assert str(outputs()) == str(expected)


@pytest.mark.parametrize("path", ENGINES)
def test_texts_do_not_depend_on_the_default_device(path: str) -> None:
    """A tensor that got the default device by mistake cannot be read there."""
    engine = ENGINES[path]()
    expected = texts(engine)
    with torch.device("meta"):
        assert texts(engine) == expected, "set after load"
        assert texts(ENGINES[path]()) == expected


def test_other_inputs_and_outputs_under_another_default_device(tmp_path: Path) -> None:
    engine = drafting(levels=3, rounds=2)()
    offloading = drafting(levels=3, rounds=2, offload=True)()
    penalties = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [5, 9]]}

    def outputs(folder: str) -> tuple[list[Any], list[float]]:
        several = engine.generate(PROMPT, do_sample=True, num_return_sequences=2, seed=3, max_new_tokens=6)
        scored = engine.generate(PROMPT, max_new_tokens=4, logprobs=True)
        penalised = engine.generate(PROMPT, max_new_tokens=8, eos_token_id=[7, 9], **penalties)
        offloaded = offloading.generate([PROMPT, PROMPT[5:]], max_new_tokens=8, do_sample=False)
        session = engine.session(PROMPT)
        first = session.generate([5, 6], max_new_tokens=5, do_sample=False)
        session.save(tmp_path / folder)
        second = engine.load_session(tmp_path / folder).generate([7], max_new_tokens=5, do_sample=False)
        found = [each.sequences.tolist() for each in (several, penalised, offloaded, first, second)]
        return found, scored.logprobs[0].tolist()

    expected, logprobs = outputs("before")
    with torch.device("meta"):
        found, others = outputs("inside")
    assert found == expected
    assert others == pytest.approx(logprobs, abs=1e-4)

"""Prompts that begin alike are prefilled once, up to where they differ; each text is as alone."""

from typing import Any

import pytest
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.head_folders import eagle
from tests.support.models.api_cases import SMALL, SMALL_LOOKUP, TARGET
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import reference
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding import full_cache
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.verify.draws import sequence_seed

NEW, CHUNK = 10, 16
# A document, two chapters of it, and questions: levels of common beginnings that end within chunks.
DOCUMENT = prompt_of(70)
CHAPTERS = [DOCUMENT + prompt_of(39)[::-1], DOCUMENT + prompt_of(53)[3:]]
PROMPTS = [
    CHAPTERS[0] + prompt_of(9)[4:],
    CHAPTERS[1] + prompt_of(30)[::-1],
    CHAPTERS[0] + prompt_of(21)[9:],
    prompt_of(25)[::-1],
    CHAPTERS[1][:-1],
    [*DOCUMENT, 5, 4, 3],
    CHAPTERS[0],
]
# What the longest common beginning with a prompt before it holds: whole chunks of the retrieval.
SHARED = [0, 68, 108, 0, 116, 68, 108]
OPTIONS = {**SMALL_LOOKUP, "prefill_chunk": CHUNK}


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prefill that were computed."""
    prefill, counts = full_cache.prefill, []

    def counted(model: Any, store: Any, row: int, tokens: list[int], *how: Any) -> None:
        start = how[3]
        counts.append(len(tokens) - start)
        prefill(model, store, row, tokens, *how)

    monkeypatch.setattr(full_cache, "prefill", counted)
    return counts


def new_tokens(out: GenerateOutput) -> list[list[int]]:
    return [row[max(map(len, PROMPTS)) :] for row in out.sequences.tolist()]


def texts(model: PreTrainedModel) -> list[list[int]]:
    return [reference(model, prompt, NEW) for prompt in PROMPTS]


ENGINES = {
    "plain": lambda: triforce_tree.load(TARGET, levels=1, **load_arguments(OPTIONS)),
    "two levels": lambda: triforce_tree.load(
        TARGET, perturbed(TARGET, 0.05), levels=2, **load_arguments({**SMALL, "prefill_chunk": CHUNK})
    ),
    "three levels": lambda: triforce_tree.load(
        TARGET,
        perturbed(TARGET, 0.05),
        levels=3,
        **load_arguments({**SMALL, "prefill_chunk": CHUNK, "rounds": 2}),
    ),
    "8 bits": lambda: triforce_tree.load(TARGET, levels=1, kv_bits=8, **load_arguments(OPTIONS)),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("kind", ENGINES)
def test_what_prompts_begin_with_is_prefilled_once(kind: str, rows: int, fed: list[int]) -> None:
    engine: Engine = ENGINES[kind]()
    out = engine.generate(PROMPTS, max_batch=rows, max_new_tokens=NEW, do_sample=False)
    if rows == len(PROMPTS):
        assert out.reused_tokens == SHARED
        rest = [len(prompt) - 1 - n for prompt, n in zip(PROMPTS, SHARED, strict=True)]
        # Those which are stored as one prefix begin one after the other.
        assert sorted(fed) == sorted(rest)
    else:
        # Of two rows, some sequences that a prompt begins like have left.
        assert sum(fed) < sum(map(len, PROMPTS)) - 64
    if kind != "8 bits":
        assert new_tokens(out) == texts(TARGET)
    cold = engine.with_options(advanced={"prefix_cache": False})
    fed.clear()
    again = cold.generate(PROMPTS, max_batch=rows, max_new_tokens=NEW, do_sample=False)
    assert again.sequences.tolist() == out.sequences.tolist()
    assert again.reused_tokens == [0] * len(PROMPTS)
    assert fed == [len(prompt) - 1 for prompt in PROMPTS]


def test_sampled_texts_are_those_of_each_alone(fed: list[int]) -> None:
    engine = ENGINES["three levels"]()
    options = {"do_sample": True, "temperature": 0.9, "max_new_tokens": NEW}
    together = engine.generate(PROMPTS, seed=11, **options)
    assert together.reused_tokens == SHARED
    alone = [
        engine.generate(prompt, seed=sequence_seed(11, n), **options).sequences[0, len(prompt) :].tolist()
        for n, prompt in enumerate(PROMPTS)
    ]
    assert new_tokens(together) == alone


def test_a_drafter_that_reads_states_gets_those_it_needs(fed: list[int]) -> None:
    """Those of the newest positions are computed, also where keys and values could be copied."""
    drafter = eagle(TARGET, "chain:3")
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=2, **load_arguments({**OPTIONS, "rounds": 1}))
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out) == texts(TARGET)
    assert 0 < sum(out.reused_tokens) <= sum(SHARED)
    cold = triforce_tree.load(
        TARGET, drafter=drafter, levels=2, **load_arguments({**OPTIONS, "rounds": 1, "prefix_cache": False})
    )
    drafted = cold.generate(PROMPTS, max_new_tokens=NEW, do_sample=False).levels[-1]
    assert (out.levels[-1].forwards, out.levels[-1].accepted) == (drafted.forwards, drafted.accepted)


@pytest.mark.parametrize("family", ["mistral-window", "qwen3-next"])
def test_rings_and_recurrent_states_are_not_copied(family: str, fed: list[int]) -> None:
    model = tiny(family) if family == "mistral-window" else recurrent(family)
    engine = triforce_tree.load(model, levels=1, **load_arguments(OPTIONS))
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out) == texts(model)
    assert fed == [len(prompt) - 1 for prompt in PROMPTS]


def test_other_weights_take_nothing_over(fed: list[int]) -> None:
    model = perturbed(TARGET, 0.0)
    engine = triforce_tree.load(model, levels=1, **load_arguments(OPTIONS))
    engine.generate(PROMPTS, max_new_tokens=2, do_sample=False)
    model.load_state_dict(perturbed(TARGET, 0.2).state_dict())
    fed.clear()
    out = engine.generate(PROMPTS[::-1], max_new_tokens=NEW, do_sample=False)
    assert fed[0] == len(PROMPTS[-1]) - 1
    assert new_tokens(out) == texts(model)[::-1]

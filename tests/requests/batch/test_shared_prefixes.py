"""Prompts that begin alike are prefilled once, up to where they differ; each text is as alone."""

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
from triforce_tree.requests.output import GenerateOutput

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
OPTIONS = {**SMALL_LOOKUP, "prefill_chunk": CHUNK}


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
    # Of two sequences at a time, some that a prompt begins like have left.
    assert sum(fed) < sum(map(len, PROMPTS)) - (300 if rows == len(PROMPTS) else 64)
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS) - sum(out.reused_tokens)
    if kind != "8 bits":
        assert new_tokens(out) == texts(TARGET)
    cold = engine.with_options(advanced={"prefix_cache": False})
    fed.clear()
    again = cold.generate(PROMPTS, max_batch=rows, max_new_tokens=NEW, do_sample=False)
    assert again.sequences.tolist() == out.sequences.tolist()
    assert again.reused_tokens == [0] * len(PROMPTS)
    # Prompts that join a running batch are prefilled in chunks, in turns.
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS)


def test_a_drafter_that_reads_states_gets_those_it_needs(fed: list[int]) -> None:
    """States of the newest positions are computed even if keys and values could be copied."""
    drafter = eagle(TARGET, "chain:3")
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=2, **load_arguments({**OPTIONS, "rounds": 1}))
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out) == texts(TARGET)
    assert sum(out.reused_tokens) > 0
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
    # Prompts that join a running batch are prefilled in chunks, in turns.
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS)

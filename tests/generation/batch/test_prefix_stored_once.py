"""What all prompts of a batch begin with is stored once, and each text is as alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import CHUNKED, CHUNKED_DRAFTED, SHARING, TARGET
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import reference
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.generation.batch import prefixes
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.kv.shared import choice
from triforce_tree.kv.shared.given import TreeStore
from triforce_tree.kv.shared.tree import PrefixTree
from triforce_tree.kv.store import KVStore
from triforce_tree.verify.draws import sequence_seed

NEW = 10
DOCUMENT = prompt_of(70)
# Two of them go on alike for a while; lengths differ, and are more than the rows of some batches.
PROMPTS = [
    DOCUMENT + prompt_of(9)[4:],
    DOCUMENT + prompt_of(40)[::-1],
    [*DOCUMENT, 5],
    DOCUMENT + prompt_of(40)[::-1][:30] + [3, 1],
    DOCUMENT + prompt_of(23)[9:],
]
# Whole chunks of the retrieval, not of the prefill.
COMMON = 68
# Where the prefixes of each prompt end: two go on alike for 30 tokens.
LONGER = 100
ENDS = [COMMON, LONGER, COMMON, LONGER, COMMON]
# Tokens of each prompt that were computed for one before it, the first for an earlier batch.
HELD = [COMMON, COMMON, COMMON, LONGER, COMMON]


def program_of(engine: Engine) -> DecodingProgram:
    program = engine.hierarchy.last_program
    assert program is not None
    return program


def store_of(engine: Engine) -> TreeStore:
    store = program_of(engine).store
    assert isinstance(store, TreeStore)
    return store


def ends_of(store: TreeStore) -> list[int]:
    """Tokens of each row's prefixes."""
    return store.prefix.tolist()


def generated(engine: Engine, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    out = engine.generate(prompts, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return new_tokens(out, prompts)


def new_tokens(out: GenerateOutput, prompts: list[list[int]]) -> list[list[int]]:
    return [row[max(map(len, prompts)) :] for row in out.sequences.tolist()]


def texts(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [reference(TARGET, prompt, NEW) for prompt in prompts]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("kind", "rows"), [("plain", 2), ("three levels", 2), *((kind, len(PROMPTS)) for kind in SHARING)]
)
def test_texts_are_those_of_each_alone(kind: str, rows: int) -> None:
    """Also where a sequence that has ended makes room for the next, and again over what is held."""
    engine = SHARING[kind]()
    first = generated(engine, max_batch=rows)
    store = store_of(engine)
    assert (store.capacity, store.batch) == (LONGER, rows)
    assert rows == 2 or ends_of(store) == [COMMON, LONGER, LONGER, COMMON, COMMON]
    if kind == "8 bits":
        other = SHARING[kind]()
        assert first == [generated(other, [prompt])[0] for prompt in PROMPTS]
    else:
        assert first == texts()
    assert generated(engine, max_batch=rows) == first
    assert store_of(engine) is store


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["three levels", "with variances", "8 bits"])
def test_level_1_retrieves_as_over_copies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts would not show it: level 2 verifies them. The budget is a quarter of the text.

    The second batch has a prefix that is shorter than the slots of the first one's.
    """
    shorter = [DOCUMENT[:50] + prompt_of(30)[n :: n + 1] for n in range(len(PROMPTS))]

    def counts() -> list[tuple[int, int]]:
        engine = SHARING[kind]()
        outs = [
            engine.generate(prompts, max_new_tokens=30, do_sample=False, max_batch=3)
            for prompts in (PROMPTS, shorter)
        ]
        return [(level.forwards, level.accepted) for out in outs for level in out.levels]

    once = counts()
    monkeypatch.setattr(prefixes, "prefixes_stored_once", lambda *_: PrefixTree())
    assert once == counts()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("levels", [1, 3])
def test_the_prefix_takes_memory_once(levels: int, bits: int) -> None:
    how = {"levels": levels, "rounds": 1, "kv_bits": bits, **CHUNKED_DRAFTED}
    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **load_arguments(how))
    assert len(generated(engine)) == len(PROMPTS)
    program, store = program_of(engine), store_of(engine)
    heads = program.target.heads
    slot = heads.row * 4 if bits == 16 else heads.row + 2 * 4 * heads.kv
    scratch = store.scratch
    assert scratch is not None
    saved = max(map(len, PROMPTS)) - max(len(p) - end for p, end in zip(PROMPTS, ENDS, strict=True))
    own = program.max_seq_len - saved + scratch
    unit = how["chunk"] if levels == 3 else 1
    slots = LONGER + len(PROMPTS) * -(-own // unit) * unit
    assert store.bytes == slots * slot * program.target.layers
    copied = KVStore(
        program.target.kv_layers,
        len(PROMPTS),
        program.max_seq_len + scratch,
        store.device,
        store.dtype,
        bits=bits,
    )
    saved = copied.memory.nbytes - store.memory.nbytes
    assert saved >= (len(PROMPTS) - 1) * COMMON * heads.row * (4 if bits == 16 else 1) * program.target.layers


@pytest.mark.parametrize("kind", ["two levels", "three levels"])
def test_sampled_texts_are_those_of_each_alone(kind: str) -> None:
    engine = SHARING[kind]()
    options = {"do_sample": True, "temperature": 0.9}
    together = generated(engine, seed=11, max_batch=3, **options)
    assert min(ends_of(store_of(engine))) == COMMON
    alone = [
        generated(engine, [prompt], seed=sequence_seed(11, n), **options)[0]
        for n, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


@pytest.mark.usefixtures("poisoned_empty")
def test_what_is_held_serves_further_batches(fed: list[int]) -> None:
    """Other questions about the document, another document, and one that shares less of the first."""
    engine = SHARING["three levels"]()
    generated(engine, [DOCUMENT + prompt_of(10)[n :: n + 1] for n in range(len(PROMPTS))])
    store = store_of(engine)
    for document, common, kept in [
        (DOCUMENT, COMMON, COMMON),
        (DOCUMENT[:50], 48, 48),
        (prompt_of(62)[::-1], 60, 0),
        (DOCUMENT, COMMON, 0),
    ]:
        prompts = [document + prompt_of(9)[n :: n + 1] for n in range(len(PROMPTS))]
        fed.clear()
        out = engine.generate(prompts, max_new_tokens=NEW, do_sample=False)
        assert new_tokens(out, prompts) == texts(prompts), document
        assert store_of(engine) is store
        assert min(ends_of(store)) == common
        assert out.reused_tokens[0] == kept
        assert sum(fed) == sum(map(len, prompts)) - len(prompts) - sum(out.reused_tokens)


@pytest.mark.parametrize(("before", "kept"), [(1, 64), (3, COMMON)])
def test_a_prefix_that_other_buffers_hold_is_taken_over(before: int, kept: int, fed: list[int]) -> None:
    """Of one text, in whole chunks of its prefill, and of a smaller batch."""
    engine = SHARING["three levels"]()
    generated(engine, PROMPTS[:before])
    fed.clear()
    assert generated(engine) == texts()
    assert min(ends_of(store_of(engine))) == COMMON
    held = [kept, *HELD[1:]]
    assert sum(fed) == sum(len(prompt) - 1 - n for prompt, n in zip(PROMPTS, held, strict=True))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["plain", "three levels", "8 bits", "EAGLE"])
def test_a_header_below_a_chunk_is_computed_and_stored_once(kind: str, fed: list[int]) -> None:
    """By the batch, and by the next ones, in larger slots too; a prompt alone is computed whole."""
    engine = SHARING[kind]().with_options(advanced={"prefill_chunk": 128})
    questions = [DOCUMENT + prompt_of(200)[90 + 20 * n :][: 12 + n] for n in range(4)]
    longer = [question + prompt_of(30) for question in questions]
    for prompts, kept in [(questions, 0), (questions[::-1], COMMON), (longer, COMMON)]:
        fed.clear()
        out = engine.generate(prompts, max_new_tokens=NEW, do_sample=False)
        if kind != "8 bits":
            assert new_tokens(out, prompts) == texts(prompts)
        assert ends_of(store_of(engine)) == [COMMON] * 4
        assert sum(fed) == sum(len(prompt) - 1 - COMMON for prompt in prompts) + COMMON - kept
    fed.clear()
    generated(engine, questions[:1])
    assert fed == [len(questions[0]) - 1]


@pytest.mark.parametrize(("name", "value"), [("LEAST", 72), ("LEAST_SPARED", 3 * COMMON + 1)])
def test_a_short_header_is_not_worth_a_part_of_its_own(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, name, value)
    prompts = [DOCUMENT + prompt_of(200)[90 + 20 * n :][:12] for n in range(4)]
    engine = SHARING["plain"]()
    assert generated(engine, prompts) == texts(prompts)
    assert not isinstance(program_of(engine).store, TreeStore)
    monkeypatch.setattr(choice, name, value - 4)
    engine = SHARING["plain"]()
    assert generated(engine, prompts) == texts(prompts)
    assert ends_of(store_of(engine)) == [COMMON] * 4


def test_weights_that_change_compute_the_prefix_again(fed: list[int]) -> None:
    model = perturbed(TARGET, 0.0)
    engine = triforce_tree.load(model, levels=1, **load_arguments(CHUNKED))
    generated(engine)
    model.load_state_dict(perturbed(TARGET, 0.2).state_dict())
    fed.clear()
    assert generated(engine) == [greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert fed[0] == len(PROMPTS[0]) - 1


class ReadsKeys:
    """A retrieval policy that wants all keys of a layer."""

    needs_context = True

    def __call__(
        self, q: Any, means: Any, limit: Any, table: Any, slots: int, scale: float, **context: Any
    ) -> None:
        table[..., :slots] = torch.arange(slots, dtype=torch.int32)


COPIED: dict[str, Callable[[], Engine]] = {
    "nothing is kept": lambda: triforce_tree.load(
        TARGET, levels=1, **load_arguments({**CHUNKED, "prefix_cache": False})
    ),
    "kept in host memory": lambda: triforce_tree.load(
        TARGET, levels=1, **load_arguments({**CHUNKED, "prefix_cache": "1MiB"})
    ),
    "a window": lambda: triforce_tree.load(tiny("mistral-window"), levels=1, **load_arguments(CHUNKED)),
    "recurrent layers": lambda: triforce_tree.load(
        recurrent("qwen3-next"), levels=1, **load_arguments(CHUNKED)
    ),
    "a policy that reads keys": lambda: triforce_tree.load(
        TARGET,
        perturbed(TARGET, 0.05),
        levels=3,
        **load_arguments({**CHUNKED_DRAFTED, "rounds": 1, "select_chunks": ReadsKeys()}),
    ),
    "offloaded": lambda: triforce_tree.load(
        TARGET,
        perturbed(TARGET, 0.05),
        levels=3,
        offload=True,
        gpu_memory="2GiB",
        **load_arguments({**CHUNKED_DRAFTED, "rounds": 1}),
    ),
}


@pytest.mark.parametrize("kind", COPIED)
def test_where_copies_are_stored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is decided before anything is allocated."""

    def refuse(*args: Any, **how: Any) -> None:
        raise AssertionError("a store of a prefix was made")

    monkeypatch.setattr(TreeStore, "__init__", refuse)
    engine = COPIED[kind]()
    model = engine.hierarchy.target.model
    assert generated(engine) == [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "prompts", [PROMPTS[:1], [PROMPTS[0], prompt_of(100)[::-1]]], ids=["one", "nothing in common"]
)
def test_copies_are_stored_where_prefixes_save_nothing(prompts: list[list[int]]) -> None:
    engine = SHARING["plain"]()
    assert generated(engine, prompts) == texts(prompts)
    assert not isinstance(program_of(engine).store, TreeStore)

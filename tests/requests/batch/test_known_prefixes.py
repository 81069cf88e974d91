"""Prompts that are known before a batch begins share what they begin with, and each text is as alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import CHUNK, CHUNKED, CHUNKED_DRAFTED, SHARING, TARGET
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import reference
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kernels.attention.prefixes import segments_of
from triforce_tree.kv.pool import size
from triforce_tree.kv.pool.backend import PooledBackend
from triforce_tree.kv.pool.size import SharedChunks, common_tails
from triforce_tree.requests import batch_pool
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.verify.draws import sequence_seed

NEW = 10
DOCUMENT = prompt_of(73)
# Two of them go on alike for a while; lengths differ, and are more than the sequences of some batches.
PROMPTS = [
    DOCUMENT + prompt_of(9)[4:],
    DOCUMENT + prompt_of(40)[::-1],
    [*DOCUMENT, 5],
    DOCUMENT + prompt_of(40)[::-1][:30] + [3, 1],
    DOCUMENT + prompt_of(23)[9:],
]
# In whole pages of 8 slots, and in whole chunks of a prefill.
COMMON, WHOLE = 72, 64


class ReadsKeys:
    """A retrieval policy that wants all keys of a layer, and chooses the chunks with the largest ones."""

    needs_context = True

    def __call__(
        self, q: Any, means: Any, limit: Any, table: Any, slots: int, scale: float, **context: Any
    ) -> None:
        keys = context["keys"].unflatten(2, (-1, 4))[:, :, : means.shape[2]].nan_to_num(0.0)
        scores = keys.abs().amax((3, 4))
        hidden = torch.arange(means.shape[2]) >= limit[:, None]
        best = scores.masked_fill(hidden[:, None], -1.0).topk(slots).indices
        table[..., :slots] = best.sort().values.int()


KINDS: dict[str, Callable[[], Engine]] = {
    **SHARING,
    "exact": lambda: triforce_tree.load(TARGET, levels=1, exact=True, **load_arguments(CHUNKED)),
    "reads keys": lambda: triforce_tree.load(
        TARGET,
        perturbed(TARGET, 0.05),
        levels=3,
        **load_arguments({**CHUNKED_DRAFTED, "rounds": 1, "select_chunks": ReadsKeys()}),
    ),
}


def backend_of(engine: Engine) -> PooledBackend:
    program = engine.last_program
    assert program is not None
    assert isinstance(program.cache.backend, PooledBackend)
    return program.cache.backend


def generated(engine: Engine, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    out = engine.generate(prompts, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return new_tokens(out, prompts)


def new_tokens(out: GenerateOutput, prompts: list[list[int]]) -> list[list[int]]:
    return [row[max(map(len, prompts)) :] for row in out.sequences.tolist()]


def texts(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [reference(TARGET, prompt, NEW) for prompt in prompts]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("kind", "together"), [("plain", 2), ("three levels", 2), *((kind, len(PROMPTS)) for kind in KINDS)]
)
def test_texts_are_those_of_each_alone(kind: str, together: int) -> None:
    """A sequence that has ended makes way for the next, and a second batch reads what is held."""
    engine = KINDS[kind]()
    first = generated(engine, max_batch=together)
    backend = backend_of(engine)
    assert backend.batch == together
    if kind == "8 bits":
        other = KINDS[kind]()
        assert first == [generated(other, [prompt])[0] for prompt in PROMPTS]
    else:
        assert first == texts()
    assert generated(engine, max_batch=together) == first
    assert backend_of(engine) is backend


@pytest.mark.parametrize(("kind", "common"), [("plain", COMMON), ("three levels", COMMON), ("exact", WHOLE)])
def test_what_is_common_is_computed_once(kind: str, common: int, fed: list[int]) -> None:
    """It may end within a chunk, except in exact mode, whose bits depend on the chunks of a prefill."""
    engine = KINDS[kind]()
    prompts = [DOCUMENT + prompt_of(7)[n :: n + 1] for n in range(4)]
    assert generated(engine, prompts) == texts(prompts)
    assert sum(fed) == common + sum(len(prompt) - 1 - common for prompt in prompts)
    fed.clear()
    assert generated(engine, prompts) == texts(prompts)
    assert sum(fed) == sum(len(prompt) - 1 - common for prompt in prompts)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["three levels", "EAGLE"])
def test_copies_of_one_prompt_share_all_of_it(kind: str, fed: list[int]) -> None:
    engine, prompt = KINDS[kind](), PROMPTS[0]
    options = {"do_sample": True, "temperature": 0.9, "seed": 3}
    together = generated(engine, [prompt] * 4, **options)
    shared = (len(prompt) - 1) // 8 * 8
    if kind != "EAGLE":  # It needs the states of the newest positions.
        assert sum(fed) == len(prompt) - 1 + 3 * (len(prompt) - 1 - shared)
    alone = [generated(engine, [prompt], **{**options, "seed": sequence_seed(3, n)})[0] for n in range(4)]
    assert together == alone
    assert len(set(map(tuple, alone))) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["three levels", "with variances", "8 bits", "reads keys"])
def test_level_1_retrieves_as_over_copies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts would not show it: level 2 verifies them. The budget is a quarter of the text."""

    def counts() -> list[tuple[int, int]]:
        engine = KINDS[kind]()
        out = engine.generate(PROMPTS, max_new_tokens=30, do_sample=False, max_batch=3)
        return [(level.forwards, level.accepted) for level in out.levels]

    once = counts()
    monkeypatch.setattr(batch_pool, "for_known", lambda *_: None)
    assert once == counts()


@pytest.mark.parametrize("levels", [1, 3])
def test_the_prefix_takes_memory_once(levels: int) -> None:
    how = {"levels": levels, "rounds": 1, **CHUNKED_DRAFTED}
    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **load_arguments(how))
    prompts = [[*prompt_of(2000), n] for n in range(5)]
    assert len(generated(engine, prompts)) == 5
    program, backend = engine.last_program, backend_of(engine)
    spec, slot = backend.spec, program.target.heads.row * 4 * program.target.layers
    assert 0 <= backend.bytes - backend.pool_slots * slot < CHUNK * slot
    assert backend.pool_slots < 2000 + 5 * (spec.scratch + NEW + 2 * CHUNK) + spec.max_seq_len
    # A program alone takes as many slots for each sequence.
    assert 5 * spec.slots > backend.pool_slots + 3 * 2000


def test_two_documents_behind_a_header(fed: list[int]) -> None:
    """Sequences that share a document follow each other, so that it is read once for all of them."""
    system, first, second = prompt_of(35), prompt_of(95)[40:], prompt_of(120)[::-1][:45]
    asked = [prompt_of(200)[60 + 9 * n :][: 9 - n] for n in range(3)]
    prompts = [system + document + question for question in asked for document in (first, second)]
    engine = KINDS["three levels"]()
    assert generated(engine, prompts) == texts(prompts)
    # Whole chunks of the header, both documents' own chunks, and their last pages.
    assert sum(fed) == 32 + (88 - 32) + (80 - 32) + sum(
        len(prompt) - 1 - (88, 80)[n % 2] for n, prompt in enumerate(prompts)
    )
    pool, depth = backend_of(engine).pool, backend_of(engine).store.depth
    pool.release(range(len(prompts)))
    for b, number in enumerate(SharedChunks(prompts, pool.unit, pool.tails).order()):
        pool.admit(b, prompts[number], NEW)
    shared = [pool.shared(b) for b in range(len(prompts))]
    read = sum(segment.length for segment in segments_of(shared, depth, pool.page))
    assert read == len({page for pages in shared for page in pages}) * pool.page


@pytest.mark.usefixtures("poisoned_empty")
def test_documents_change_from_batch_to_batch() -> None:
    """Tokens that the slots held for other groups are not taken for theirs."""
    engine = KINDS["three levels"]()
    first, second, third = prompt_of(90)[40:], prompt_of(120)[::-1][:45], prompt_of(150)[60:]
    for documents in [(first, second), (second, first), (third[:50], second), (first, third[:45])]:
        prompts = [document + prompt_of(30)[n :: n + 1] for document in documents for n in range(2)]
        assert generated(engine, prompts) == texts(prompts)
        assert backend_of(engine)


@pytest.mark.parametrize("kind", ["two levels", "three levels"])
def test_sampled_texts_are_those_of_each_alone(kind: str) -> None:
    engine = KINDS[kind]()
    options = {"do_sample": True, "temperature": 0.9}
    together = generated(engine, seed=11, max_batch=3, **options)
    assert backend_of(engine)
    alone = [
        generated(engine, [prompt], seed=sequence_seed(11, n), **options)[0]
        for n, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


def test_what_slots_of_their_own_hold_is_taken_over(fed: list[int]) -> None:
    """Whole chunks of a text that was decoded alone before."""
    engine = KINDS["three levels"]()
    generated(engine, PROMPTS[:1])
    fed.clear()
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out, PROMPTS) == texts()
    assert min(out.reused_tokens) == WHOLE
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS) - sum(out.reused_tokens)


@pytest.mark.parametrize("size", ["1MiB", "1GiB"])
def test_chunks_that_are_dropped_are_kept_in_host_memory(size: str, fed: list[int]) -> None:
    """A batch finds what a text decoded alone has computed, and the other way round."""
    options = load_arguments({**CHUNKED, "prefix_cache": size})
    engine = triforce_tree.load(TARGET, levels=1, **options)
    other = prompt_of(80)
    batches = [[[*document, n, 1] for n in range(3)] for document in (DOCUMENT, other)]
    for prompts in (batches[0], batches[1], [[*DOCUMENT, 7]], batches[0], batches[1]):
        fed.clear()
        assert generated(engine, prompts) == texts(prompts)
    assert not fed, "all tokens of the prompts are kept"
    engine.close()


def test_weights_that_change_compute_the_prefix_again(fed: list[int]) -> None:
    model = perturbed(TARGET, 0.0)
    engine = triforce_tree.load(model, levels=1, **load_arguments(CHUNKED))
    generated(engine)
    model.load_state_dict(perturbed(TARGET, 0.2).state_dict())
    fed.clear()
    assert generated(engine) == [greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert fed[0] in {len(prompt) - 1 for prompt in PROMPTS}


@pytest.mark.parametrize(("name", "value"), [("LEAST", 80), ("LEAST_SPARED", 3 * COMMON + 1)])
def test_a_short_header_is_not_worth_a_part_of_its_own(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [DOCUMENT + prompt_of(200)[90 + 20 * n :][:12] for n in range(4)]
    for least, pooled in ((value, False), (value - 16, True)):
        monkeypatch.setattr(size, name, least)
        engine = KINDS["plain"]()
        assert generated(engine, prompts) == texts(prompts)
        assert (engine.last_program.cache.backend.pool_slots > 0) == pooled


COPIED: dict[str, Callable[[], Engine]] = {
    "nothing is kept": lambda: triforce_tree.load(
        TARGET, levels=1, **load_arguments({**CHUNKED, "prefix_cache": False})
    ),
    "a window": lambda: triforce_tree.load(tiny("mistral-window"), levels=1, **load_arguments(CHUNKED)),
    "recurrent layers": lambda: triforce_tree.load(
        recurrent("qwen3-next"), levels=1, **load_arguments(CHUNKED)
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
def test_where_each_sequence_has_slots_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV backend is chosen before anything is allocated, so no pool is made and dropped."""

    def refuse(*args: Any, **how: Any) -> None:
        raise AssertionError("a pool was made")

    monkeypatch.setattr(PooledBackend, "__init__", refuse)
    engine = COPIED[kind]()
    model = engine.target.model
    assert generated(engine) == [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "prompts", [PROMPTS[:1], [PROMPTS[0], prompt_of(100)[::-1]]], ids=["one", "nothing in common"]
)
def test_no_pool_where_sharing_saves_nothing(prompts: list[list[int]]) -> None:
    engine = KINDS["plain"]()
    assert generated(engine, prompts) == texts(prompts)
    assert not engine.last_program.cache.backend.pool_slots


def test_tails_are_what_prompts_begin_with() -> None:
    one = prompt_of(60)
    assert common_tails([one[:40], one, prompt_of(50)[::-1]], 16, 4) == (one[:36],)
    assert common_tails([one[:40]] * 3, 16, 4) == (one[:36],)
    assert common_tails([prompt_of(33)] * 2, 16, 4) == (), "whole chunks need no tail"
    torch.manual_seed(0)
    for _ in range(50):
        prompts = [[7] * 16 + torch.randint(2, (n,)).tolist() for n in torch.randint(2, 40, (6,)).tolist()]
        tails = common_tails(prompts, 8, 2)
        for tail in tails:
            assert len(tail) % 2 == 0
            assert len(tail) % 8
            assert sum(len(tail) < len(p) and p[: len(tail)] == tail for p in prompts) > 1


def test_slots_count_what_is_shared_once() -> None:
    prompts = [[1] * 64 + [n] * 10 for n in range(8)]
    slots, copies = SharedChunks(prompts, 16).slots(8, 4, 2, 2)
    assert (slots, copies) == (64 + 8 * 16, 8 * (64 + 16))
    # Of two at a time four documents for two prompts each take more than copies.
    documents = [[n] * 64 + [n, other] for n in range(4) for other in range(2)]
    slots, copies = SharedChunks(documents, 16).slots(2, 4, 2, 2)
    assert slots == copies
    assert SharedChunks(documents[::2] + documents[1::2], 16).order() == [0, 4, 1, 5, 2, 6, 3, 7]

"""Batches are returned as by transformers, and their sequences are independent draws."""

from itertools import pairwise

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

import triforce_tree
from tests.support.models.api_cases import (
    EXPECTED,
    PROMPT,
    SMALL,
    SMALL_LOOKUP,
    TARGET,
    Collect,
    characters,
    small_engine,
    text_of,
)
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.verify.sampling import Stream, derived

WIDTH = len(PROMPT)
OTHER = prompt_of(30)
GAP = [0] * (WIDTH - len(OTHER))
PADDED = {
    "left": (torch.tensor([PROMPT, GAP + OTHER]), torch.tensor([[1] * WIDTH, [0] * len(GAP) + [1] * 30])),
    "right": (torch.tensor([PROMPT, OTHER + GAP]), torch.tensor([[1] * WIDTH, [1] * 30 + [0] * len(GAP)])),
}


def alone(prompt: list[int], new: int, **options) -> list[int]:
    out = TARGET.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module", params=["three levels", "two levels"])
def engine(request) -> Engine:
    if request.param == "three levels":
        return small_engine()
    return triforce_tree.load(
        TARGET, perturbed(TARGET, 0.1), tokenizer=characters(), levels=2, **load_arguments(SMALL)
    )


def test_a_left_padded_batch_is_transformers_own(engine: Engine) -> None:
    ids, mask = PADDED["left"]
    stop = EXPECTED[4]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": stop, "pad_token_id": 7}
    out = engine.generate(ids, attention_mask=mask, **options)
    expected = TARGET.generate(ids, attention_mask=mask, **options)
    assert out.sequences.tolist() == expected.tolist()
    assert 7 in expected[:, WIDTH:], "one sequence ends before the other"
    rows = [row[: row.index(stop) + 1] if stop in row else row for row in expected[:, WIDTH:].tolist()]
    assert out.new_tokens == [len(row) for row in rows]
    assert out.finish_reason == ["eos" if row[-1] == stop else "length" for row in rows]
    shown = [row[:-1] if row[-1] == stop else row for row in rows]
    assert out.text == [text_of(row) for row in shown], "the end token is no part of the text"
    assert out.levels[-1].emitted == sum(map(len, rows))


def test_right_padding_is_left_out_and_stays_where_it_is(engine: Engine, caplog) -> None:
    ids, mask = PADDED["right"]
    out = engine.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert out.sequences[:, :WIDTH].tolist() == ids.tolist()
    assert out.sequences[:, WIDTH:].tolist() == [EXPECTED[:9], alone(OTHER, 9)]
    assert not caplog.records, "transformers' warning of wrong results would be wrong itself"


def test_padding_without_a_mask_is_inferred_as_transformers_does(engine: Engine) -> None:
    ids = PADDED["left"][0]
    for pad, end in ((0, None), (0, 63), (0, 0), (None, None)):
        options = {"pad_token_id": pad, "eos_token_id": end, "max_new_tokens": 6, "do_sample": False}
        expected = TARGET.generate(ids, **options)
        assert engine.generate(ids, **options).sequences.tolist() == expected.tolist()
        assert engine.generate(ids.numpy(), **options).sequences.tolist() == expected.tolist()
    # A list needs no padding, so all of its tokens count.
    rows = ids.tolist()
    out = engine.generate(rows, pad_token_id=0, max_new_tokens=6, do_sample=False)
    assert out.sequences[0, WIDTH:].tolist() == EXPECTED[:6]
    assert out.sequences[1, WIDTH:].tolist() == alone(rows[1], 6)


@pytest.mark.parametrize("side", PADDED)
def test_a_single_padded_sequence_keeps_its_width(engine: Engine, side: str) -> None:
    ids, mask = (whole[1:] for whole in PADDED[side])
    out = engine.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert out.sequences.tolist() == [[*ids[0].tolist(), *alone(OTHER, 9)]]
    assert out.text == text_of(alone(OTHER, 9))
    assert (out.new_tokens, out.finish_reason) == (9, "length")


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 4},
        {"max_length": WIDTH + 3, "max_new_tokens": None},
        {"min_length": WIDTH + 4},
        {"repetition_penalty": 1.7},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(WIDTH + 2)])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_counts_tokens_counts_padding_as_transformers_does(engine: Engine, options: dict) -> None:
    ids, mask = PADDED["left"]
    options = {"max_new_tokens": 8, **options, "eos_token_id": alone(OTHER, 1)[0], "pad_token_id": 0}
    options |= {"attention_mask": mask, "do_sample": False}
    assert engine.generate(ids, **options).sequences.tolist() == TARGET.generate(ids, **options).tolist()


def test_prefix_functions_get_the_index_of_their_sequence() -> None:
    calls: dict[int, list[int]] = {}

    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        calls.setdefault(row, sent.tolist()[:5])
        return [row + 3]

    ids, mask = PADDED["left"]
    out = small_engine().generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, prefix_allowed_tokens_fn=allowed
    )
    assert out.sequences[:, WIDTH:].tolist() == [[3] * 4, [4] * 4]
    assert calls == {0: PROMPT[:5], 1: ids[1, :5].tolist()}


def test_each_sequence_may_have_a_streamer(engine: Engine) -> None:
    rows = torch.tensor([PROMPT, PROMPT[::-1]])
    whole = engine.generate(rows, max_new_tokens=16, do_sample=False).sequences[:, len(PROMPT) :].tolist()
    streamers = [Collect(), Collect()]
    engine.generate(rows, streamer=streamers, max_new_tokens=16, do_sample=False)
    for streamer, row, new in zip(streamers, rows.tolist(), whole, strict=True):
        assert [t for part in streamer.parts for t in part] == [*row, *new]
        assert streamer.ended == 1
    with pytest.raises(ValueError, match=r"the batch has 2, and 1 streamers were given"):
        engine.generate(rows, streamer=Collect(), max_new_tokens=3)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}], ids=["together", "one by one"])
def test_a_streamer_ends_its_sequence(engine: Engine, options: dict[str, float]) -> None:
    class Ends(Collect):
        def put(self, value: torch.Tensor) -> bool:
            super().put(value)
            return len(self.parts) > 1  # after the prompt and the first tokens

    rows = torch.tensor([PROMPT, PROMPT[::-1]])
    whole = engine.generate(rows, max_new_tokens=24, do_sample=False, **options)
    streamers = [Ends(), Collect()]
    out = engine.generate(rows, streamer=streamers, max_new_tokens=24, do_sample=False, **options)
    first = [t for part in streamers[0].parts[1:] for t in part]
    assert len(streamers[0].parts) == 2
    assert 0 < len(first) < 24
    assert out.finish_reason == ["stop", "length"]
    assert out.new_tokens == [len(first), 24]
    new = out.sequences[:, len(PROMPT) :].tolist()
    assert new[0][: len(first)] == first
    assert new[1] == whole.sequences[1, len(PROMPT) :].tolist()


def test_custom_generate_counts_from_the_padded_width() -> None:
    """Processors see the padding, as in transformers."""
    ids, mask = (whole[1:] for whole in PADDED["left"])
    stop = alone(OTHER, 1)[0]
    run = triforce_tree.custom_generate(levels=2, **load_arguments(SMALL_LOOKUP))
    options = {"eos_token_id": stop, "min_new_tokens": 4, "max_new_tokens": 12, "do_sample": False}
    ours = TARGET.generate(ids, attention_mask=mask, custom_generate=run, pad_token_id=0, **options)
    assert ours.tolist() == TARGET.generate(ids, attention_mask=mask, pad_token_id=0, **options).tolist()


SAMPLED = {"max_new_tokens": 6, "do_sample": True, "temperature": 5.0, "top_k": 0}


def rows_of(engine: Engine, seed: int) -> list[list[int]]:
    rows: list[list[int]] = engine.generate([PROMPT] * 3, seed=seed, **SAMPLED).sequences[:, WIDTH:].tolist()
    return rows


def test_sequences_of_a_batch_are_independent_draws_for_every_seed(engine: Engine) -> None:
    batches = [rows_of(engine, seed) for seed in range(-2, 6)]
    for before, after in pairwise(batches):
        assert before[1:] != after[:-1]
        assert not {tuple(row) for row in before} & {tuple(row) for row in after}
    assert all(len({tuple(row) for row in batch}) == 3 for batch in batches)
    assert rows_of(engine, 3) == batches[5]


def test_one_by_one_no_sequence_of_a_seed_is_one_of_the_next_seed() -> None:
    """With seed + number as the seed of a sequence, number 1 of seed 0 would be number 0 of seed 1."""
    engine, found = small_engine(), []
    for seed in (0, 1, 2):
        out = engine.generate([PROMPT] * 3, seed=seed, repetition_penalty=1.2, **SAMPLED)
        found += [tuple(row) for row in out.sequences[:, WIDTH:].tolist()]
    assert len(set(found)) == len(found) == 9


def test_one_by_one_the_first_sequence_draws_as_it_would_alone() -> None:
    """A processor that reads the tokens so far makes them one by one."""
    options = {**SAMPLED, "repetition_penalty": 1.2, "seed": 4}
    single = small_engine().generate(PROMPT, **options)
    rows = small_engine().generate([PROMPT] * 3, **options).sequences[:, WIDTH:].tolist()
    assert rows[0] == single.sequences[0, WIDTH:].tolist()
    assert len({tuple(row) for row in rows}) == 3


def test_derived_seeds_differ_wherever_their_arguments_do() -> None:
    arguments = [(seed, s, n) for seed in (-1, 0, 1, 2, 2**32, 2**63) for s in Stream for n in range(4)]
    seeds = [derived(*each) for each in arguments]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # torch's generator of the CPU looks at 32 bits.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("levels", [1, 2])
def test_a_larger_batch_takes_windows_over(levels: int) -> None:
    """A layer with a window keeps what its newest token sees, and a prompt that ends earlier needs more."""
    target, short, long = tiny("mistral-window"), prompt_of(67), prompt_of(100)
    engine = triforce_tree.load(
        target, perturbed(target, 0.05), levels=levels, **load_arguments({**SMALL, "prefill_chunk": 16})
    )
    for prompts in ([short], [short, long], [prompt_of(70), short, long]):
        out = engine.generate(prompts, max_new_tokens=6, do_sample=False)
        expected = [greedy(target, prompt, 6) for prompt in prompts]
        assert [row[-6:].tolist() for row in out.sequences] == expected

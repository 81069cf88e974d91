"""Beam search is transformers' own, and several texts of a prompt are independent."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import triforce_tree
from tests.support.models.api_cases import SMALL, TARGET, Collect, characters
from tests.support.models.families import perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.branching import slots
from triforce_tree.branching.pages import KVPages
from triforce_tree.check.goodness_of_fit import chi_square, chi_square_p
from triforce_tree.config import load_arguments
from triforce_tree.verify.draws import sequence_seed

PROMPT = prompt_of(40)
# Of different lengths, padded on the left.
BATCH = torch.tensor([PROMPT, [0] * 7 + prompt_of(60)[27:]])
MASK = torch.tensor([[1] * 40, [0] * 7 + [1] * 33])


@pytest.fixture(autouse=True)
def _poisoned(poisoned_empty: None) -> None:
    pass


@cache
def engine(family: str = "llama-gqa", seed: int = 0, **settings: Any) -> Engine:
    return triforce_tree.load(tiny(family, seed, **settings), tokenizer=characters())


def check(made: Engine, ids: torch.Tensor = BATCH, mask: torch.Tensor = MASK, **options: Any) -> Any:
    """Beams, scores and the way to them equal transformers'."""
    how = {
        "max_new_tokens": 16, "do_sample": False, "output_scores": True, "return_dict_in_generate": True,
        "pad_token_id": 0, "attention_mask": mask, **options,
    }  # fmt: skip
    exact = made.target.model.generate(ids, **how)
    found = made.generate(ids, **how)
    assert torch.equal(found.sequences, exact.sequences)
    assert torch.equal(found.beam_indices, exact.beam_indices)
    torch.testing.assert_close(found.sequences_scores, exact.sequences_scores, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(found.scores, exact.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    return found


@pytest.mark.parametrize(
    "family, seed",
    [("llama-gqa", 0), ("llama-gqa", 1), ("llama-gqa", 2), ("llama", 0), ("mistral-window", 0), ("gemma2", 0),
     ("qwen3", 1), ("gpt-neox", 2)],
)  # fmt: skip
def test_beams_are_transformers_own(family: str, seed: int) -> None:
    check(engine(family, seed), num_beams=4)
    found = check(
        engine(family, seed), num_beams=3, num_return_sequences=2, eos_token_id=[5, 9, 17], length_penalty=0.6
    )
    assert len(found.text) == len(found.new_tokens) == 4
    for row, count, reason in zip(found.sequences, found.new_tokens, found.finish_reason, strict=True):
        new = row[40 : 40 + count].tolist()
        assert reason == ("eos" if new[-1] in (5, 9, 17) else "length")


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.3 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[1])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 5, "early_stopping": True, "eos_token_id": [5, 9, 11, 13], "num_return_sequences": 5},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": -0.5, "eos_token_id": 7},
        {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
        {"num_beams": 2, "logits_processor": [Own()], "eos_token_id": 3},
        {"num_beams": 2, "prefix_allowed_tokens_fn": lambda batch, sent: [batch, 5 + len(sent) % 3, 9]},
        {"generation_config": GenerationConfig(num_beams=3, length_penalty=2.0)},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_options_of_beam_search(options: dict[str, Any]) -> None:
    check(engine(), **options)


def test_beam_samples_by_seed() -> None:
    made = engine()
    how: dict[str, Any] = {"num_beams": 3, "do_sample": True, "temperature": 1.5, "max_new_tokens": 12}
    torch.manual_seed(11)
    exact = made.target.model.generate(torch.tensor([PROMPT]), pad_token_id=0, **how)
    state = torch.get_rng_state()
    assert torch.equal(made.generate(torch.tensor([PROMPT]), seed=11, **how).sequences, exact)
    assert torch.equal(torch.get_rng_state(), state)


def test_beams_share_the_slots_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are stored once, and each beam has slots for its new tokens alone."""
    made: list[KVPages] = []

    class Watched(KVPages):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(slots, "KVPages", Watched)
    check(engine(), num_beams=4, max_new_tokens=40)
    [pages] = made
    # 40 and 33 tokens of the prompts, and eight beams of 40, in pages of 16.
    assert pages.count == 3 + 3 + 8 * 3
    assert pages.free == 0


def test_several_samples_of_a_prompt() -> None:
    made = engine(vocab_size=6)
    how: dict[str, Any] = {"temperature": 1.2, "max_new_tokens": 2, "logprobs": True}
    prompt = [1, 2, 3, 4, 5]
    out = made.generate([prompt, prompt[:4]], num_return_sequences=300, seed=5, **how)
    assert out.sequences.shape == (600, 7)
    assert out.logprobs.shape == (600, 2)
    model = made.target.model
    for number, text in enumerate((prompt, prompt[:4])):
        rows = out.sequences[300 * number :][:300]
        counts = Counter((rows[:, 5] * 6 + rows[:, 6]).tolist())
        logits = model(torch.tensor([[*text, token] for token in range(6)])).logits / 1.2
        exact = logits[0, -2].softmax(-1)[:, None] * logits[:, -1].softmax(-1)
        assert chi_square_p(*chi_square(counts, exact.flatten())) > 1e-3
        raw = (1.2 * logits[0, -2]).log_softmax(-1)
        torch.testing.assert_close(out.logprobs[300 * number :][:300, 0], raw[rows[:, 5]], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.sequences_scores, out.logprobs.sum(1))
    again = made.generate([prompt, prompt[:4]], num_return_sequences=300, seed=5, **how)
    assert torch.equal(again.sequences, out.sequences)
    assert len(out.text) == len(out.finish_reason) == len(out.new_tokens) == 600
    first = made.generate(prompt, num_return_sequences=2, seed=5, **how)
    assert torch.equal(first.sequences, out.sequences[:2])


SAMPLED: dict[str, dict[str, Any]] = {
    "drafted": {"levels": 2, "rounds": 1},
    "8 bits": {"levels": 1, "kv_bits": 8},
    "exact": {"levels": 1, "exact": True},
    "offloaded": {"levels": 1, "offload": True, "gpu_memory": "2GiB"},
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_samples_are_those_of_a_batch(kind: str) -> None:
    """Each sample draws by the seed and its number alone, also with drafts and offloaded keys and values."""
    made = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **load_arguments({**SMALL, **SAMPLED[kind]}))
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6}
    out = made.generate([PROMPT, PROMPT[:9]], num_return_sequences=2, seed=7, output_scores=True, **options)
    assert len(out.scores) == 6
    assert out.scores[0].shape[0] == 4
    assert [level.name for level in out.levels] == (["draft", "target"] if kind == "drafted" else ["target"])
    for number, prompt in enumerate([PROMPT, PROMPT, PROMPT[:9], PROMPT[:9]]):
        seed = sequence_seed(sequence_seed(7, number // 2), number % 2)
        alone = made.generate(prompt, seed=[seed], **options)
        assert alone.sequences[0, -6:].tolist() == out.sequences[number, -6:].tolist()


def test_samples_of_prompts_with_options_of_their_own() -> None:
    out = engine().generate(
        [PROMPT, PROMPT[:9]], num_return_sequences=2, do_sample=True, max_new_tokens=[3, 5], seed=7,
        suppress_tokens=list(range(10, 64)), top_k=[1, None], logprobs=[False, True],
    )  # fmt: skip
    assert out.new_tokens == [3, 3, 5, 5]
    assert out.sequences[0].tolist() == out.sequences[1].tolist()
    assert out.sequences[2].tolist() != out.sequences[3].tolist()
    assert (out.logprobs != 0).any(1).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="greedy decoding are 2 equal texts"):
        engine().generate([PROMPT, PROMPT], num_return_sequences=2, temperature=[0.5, 0], max_new_tokens=3)


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_sequences_begin_with_the_prompts_as_they_were_given(name: str) -> None:
    options: dict[str, Any] = {name: 2, "do_sample": name != "num_beams", "max_new_tokens": 3}
    ids = torch.tensor([[7, 0, 8, 9, 0], [1, 2, 3, 4, 5]])
    for mask in (None, torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])):
        out = engine().generate(ids, attention_mask=mask, pad_token_id=0, **options)
        texts = len(out.sequences) // 2
        assert torch.equal(out.sequences[:, :5], ids.repeat_interleave(texts, 0))
        assert out.sequences.shape[1] == 8


def test_samples_obey_constraints() -> None:
    out = engine().generate(
        [PROMPT, PROMPT[:9]], num_return_sequences=3, do_sample=True, max_new_tokens=5,
        prefix_allowed_tokens_fn=lambda batch, sent: [10 + batch, 20 + batch],
    )  # fmt: skip
    new = out.sequences[:, 40:]
    assert set(new[:3].flatten().tolist()) == {10, 20}
    assert set(new[3:].flatten().tolist()) == {11, 21}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 exceeds num_beams=2"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 of greedy decoding are 3 equal texts"),
        ({"num_beams": 0}, "num_beams=0 must be at least 1 and at most 65536"),
        ({"num_beams": 2, "logprobs": True}, "logprobs=True is not supported with num_beams=2"),
        ({"num_beams": 2, "max_batch": 1}, "max_batch is not supported with num_beams=2"),
        ({"num_beams": 2, "max_new_tokens": [3]}, "options of each prompt are not supported"),
        ({"num_beams": 2, "streamer": Collect()}, "a streamer takes one text as it is made"),
        ({"num_beams": 2, "num_beam_groups": 2}, "num_beam_groups=2 is not supported"),
        ({"num_beams": 2, "max_new_tokens": 5000}, "exceed the model's 2048 positions"),
        (
            {"num_return_sequences": 2, "do_sample": True, "streamer": Collect()},
            "a streamer follows one sequence",
        ),
        ({"length_penalty": 2.0}, "length_penalty=2.0 is read with num_beams above 1 alone"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().generate(PROMPT, **{"max_new_tokens": 5, "do_sample": False, **options})


def test_a_session_is_one_text() -> None:
    session = engine().session(PROMPT)
    found = session.generate(num_beams=3, max_new_tokens=6, do_sample=False)
    assert session.tokens == found.sequences[0].tolist()
    several = {"num_return_sequences": 2, "do_sample": True}
    given = (several, {"generation_config": GenerationConfig(**several)}, {"generation_config": several})
    for options in given:
        with pytest.raises(ValueError, match="num_return_sequences=2, but a session goes on with one text"):
            session.generate(max_new_tokens=3, **options)
    assert session.tokens == found.sequences[0].tolist()

"""Calls as transformers users write them work, or fail in one line with the remedy."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BatchEncoding,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TextStreamer,
    TopKLogitsWarper,
)

from tests.support.models.api_cases import EXPECTED, PROMPT, TARGET, characters, new, small_engine, text_of
from tests.support.models.families import greedy, prompt_of
from triforce_tree import Engine
from triforce_tree.requests import chat

OTHER = prompt_of(30)
NEW = 5
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def tokenizer(**options):
    return characters()(text_of(PROMPT), **options)


SINGLE: dict[str, Any] = {
    "tokenizer's tensors": {**tokenizer(return_tensors="pt", return_token_type_ids=False)},
    "encoding": {"inputs": tokenizer(return_tensors="pt", return_token_type_ids=False)},
    "encoding of lists": {"inputs": tokenizer(return_token_type_ids=False)},
    "encoding of arrays": {"inputs": tokenizer(return_tensors="np", return_token_type_ids=False)},
    "input_ids": {"input_ids": PROMPT},
    "dict": {"inputs": {"input_ids": torch.tensor([PROMPT])}},
    "array": {"inputs": np.array(PROMPT)},
    "array of uint8": {"inputs": np.array([PROMPT], dtype=np.uint8)},
    "tensor of int32": {"inputs": torch.tensor([PROMPT], dtype=torch.int32)},
    "numbers of numpy": {"inputs": [np.int64(i) for i in PROMPT]},
    "numbers of torch": {"inputs": list(torch.tensor(PROMPT))},
    "list of one row": {"inputs": [PROMPT]},
    "list of one tensor": {"inputs": [torch.tensor(PROMPT)]},
    "list of one text": {"inputs": [text_of(PROMPT)]},
    "bool mask": {"inputs": PROMPT, "attention_mask": torch.ones(len(PROMPT), dtype=torch.bool)},
    "float mask": {"inputs": [PROMPT], "attention_mask": np.ones((1, len(PROMPT)))},
    "seed of numpy": {"inputs": PROMPT, "seed": np.int64(3)},
    "count of numpy": {"inputs": PROMPT, "max_new_tokens": np.int32(NEW)},
    "config as a dict": {"inputs": PROMPT, "generation_config": {"max_new_tokens": 9, "temperature": 0}},
    "one criterion": {"inputs": PROMPT, "max_new_tokens": 9, "stopping_criteria": MaxLengthCriteria(46)},
    "list of criteria": {"inputs": PROMPT, "max_new_tokens": 9, "stopping_criteria": [MaxLengthCriteria(46)]},
    "nothing asked for": {"inputs": PROMPT, "synced_gpus": False, "assistant_model": None, "streamer": None},
}


@pytest.mark.parametrize("case", SINGLE)
def test_one_sequence(engine: Engine, case: str) -> None:
    out = engine.generate(**{**GREEDY, **SINGLE[case]})
    assert new(out) == EXPECTED[:NEW]
    assert out.text == text_of(EXPECTED[:NEW])


BATCHES: dict[str, Any] = {
    "texts": [text_of(PROMPT), text_of(OTHER)],
    "rows of different lengths": [PROMPT, OTHER],
    "rows as tensors": (torch.tensor(PROMPT), torch.tensor(OTHER)),
    "encoding of texts": BatchEncoding(
        {"input_ids": [PROMPT, OTHER], "attention_mask": [[1] * len(PROMPT), [1] * len(OTHER)]}
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_several_sequences(engine: Engine, case: str) -> None:
    out = engine.generate(BATCHES[case], **GREEDY)
    rows = out.sequences.tolist()
    assert [row[-NEW:] for row in rows] == [EXPECTED[:NEW], greedy(TARGET, OTHER, NEW)]
    assert rows[0][:-NEW] == PROMPT
    assert rows[1][:-NEW] == [0] * (len(PROMPT) - len(OTHER)) + OTHER, "padded on the left"
    assert out.text == [text_of(row[-NEW:]) for row in rows]


def test_prompts_of_different_lengths_are_padded_with_the_pad_token(engine: Engine) -> None:
    out = engine.generate([PROMPT, OTHER], pad_token_id=9, **GREEDY)
    assert out.sequences[1, : len(PROMPT) - len(OTHER)].tolist() == [9] * (len(PROMPT) - len(OTHER))


def test_a_processor_without_a_list(engine: Engine) -> None:
    banned = SuppressTokensLogitsProcessor(EXPECTED[:2], device="cpu")
    expected = greedy(TARGET, PROMPT, NEW, suppress_tokens=EXPECTED[:2])
    for given in (banned, [banned]):
        assert new(engine.generate(PROMPT, logits_processor=given, **GREEDY)) == expected


ROW = {"inputs": [1, 2, 3]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no prompt: give text, a list of texts, a list of messages, token ids"),
    "twice": ({**ROW, "input_ids": [1]}, "given twice, as inputs and as input_ids"),
    "bytes": ({"inputs": b"hello"}, r"bytes; decode it: generate\(data.decode"),
    "number": ({"inputs": 5}, "of type int; give text"),
    "set": ({"inputs": {1, 2}}, "of type set"),
    "message": ({"inputs": {"role": "user", "content": "hi"}}, "put messages into a list"),
    "messages by keyword": (
        {"messages": [{"role": "user", "content": "hi"}]},
        r"messages is no option .*as the prompt: generate\(messages\)",
    ),
    "encoding without ids": ({"inputs": {"text": "hi"}}, "'text' has no input_ids"),
    "token types": ({"inputs": {"input_ids": [1], "token_type_ids": [0]}}, "token_type_ids is not supported"),
    "three dimensions": (
        {"inputs": torch.ones(1, 2, 3, dtype=torch.int64)},
        r"shape \[1, 2, 3\]; give \[L\]",
    ),
    "no dimension": ({"inputs": torch.tensor(3)}, r"shape \[\]"),
    "nested thrice": ({"inputs": [[[1, 2]]]}, "must be integers, not list"),
    "floats": ({"inputs": [1.0, 2.0]}, "must be integers, not float"),
    "float tensor": ({"inputs": torch.ones(1, 3)}, "float32 of shape .*give integers"),
    "bools": ({"inputs": [True, False]}, "must be integers, not bool"),
    "bool tensor": ({"inputs": torch.ones(1, 3, dtype=torch.bool)}, "bool of shape"),
    "float array": ({"inputs": np.ones(3)}, "float64 of shape"),
    "tensor without data": (
        {"inputs": torch.ones(1, 3, dtype=torch.int64, device="meta")},
        "strided on meta",
    ),
    "sparse tensor": (
        {"inputs": torch.ones(1, 3, dtype=torch.int64).to_sparse()},
        "another kind .*sparse_coo",
    ),
    "text and ids": ({"inputs": ["a", 1]}, "mixes text with int"),
    "rows and numbers": ({"inputs": [[1, 2], 3]}, "mixes rows and single numbers"),
    "no rows": ({"inputs": []}, "prompt is empty"),
    "an empty row": ({"inputs": [[1], []]}, "prompt 2 of 2 is empty"),
    "an empty text": ({"inputs": ["a", ""]}, "prompt 2 of 2 is empty"),
    "mask of text": ({"inputs": "abc", "attention_mask": [1, 1, 1]}, "attention_mask belongs to token ids"),
    "short mask": ({**ROW, "attention_mask": [1, 1]}, "1 x 2 entries, the prompt 1 x 3 tokens"),
    "mask of two rows": ({**ROW, "attention_mask": [[1, 1, 1]] * 2}, "2 x 3 entries, the prompt 1 x 3"),
    "mask of four dimensions": (
        {**ROW, "attention_mask": torch.ones(1, 1, 3, 3)},
        r"mask has shape \[1, 1, 3, 3\]",
    ),
    "mask of other numbers": ({**ROW, "attention_mask": [1, 0.5, 1]}, "holds 0.5; give 1 for a token"),
    "two masks": (
        {"inputs": {"input_ids": [1], "attention_mask": [1]}, "attention_mask": [1]},
        "given twice",
    ),
    "fraction": ({**ROW, "max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer, not float"),
    "fraction in a config": (
        {**ROW, "generation_config": GenerationConfig(max_length=20.5), "max_new_tokens": None},
        "max_length=20.5 must be an integer",
    ),
    "word": ({**ROW, "max_new_tokens": "5"}, "max_new_tokens='5' must be an integer, not str"),
    "top_k": ({**ROW, "top_k": True, "do_sample": True}, "top_k=True must be an integer"),
    "temperature": ({**ROW, "temperature": "0.8"}, "temperature='0.8' must be a number, not str"),
    "fraction as a seed": ({**ROW, "seed": 2.5}, "seed=2.5 must be an integer"),
    "number of log-probabilities": ({**ROW, "logprobs": 5}, "logprobs=5 must be True or False"),
    "large seed": ({**ROW, "seed": 2**64}, "at most 64 bits"),
    "config of another kind": ({**ROW, "generation_config": "fast"}, "generation_config is of type str"),
    "unknown key of a dict": ({**ROW, "generation_config": {"temprature": 1}}, "did you mean temperature"),
    "criterion": ({**ROW, "stopping_criteria": ["x"]}, "stopping_criteria holds 'x', which cannot be called"),
    "class of a processor": (
        {**ROW, "logits_processor": [TopKLogitsWarper]},
        r"the class TopKLogitsWarper; give an object, TopKLogitsWarper\(",
    ),
    "class of a criterion": (
        {**ROW, "stopping_criteria": MaxTimeCriteria},
        "holds the class MaxTimeCriteria",
    ),
    "processor": ({**ROW, "logits_processor": 3}, "logits_processor holds 3, which cannot be called"),
    "text for an end": ({**ROW, "eos_token_id": "</s>"}, "eos_token_id='</s>' must be a token id or a list"),
    "texts for ends": ({**ROW, "eos_token_id": [2, "</s>"]}, r"convert_tokens_to_ids\('</s>'\) tells it"),
    "streamer": ({**ROW, "streamer": "x"}, "streamer='x' is no object with methods put and end; give one"),
    "class of a streamer": ({**ROW, "streamer": TextStreamer}, "TextStreamer'> is no object with methods"),
    "empty stop string": ({**ROW, "stop_strings": [""]}, "stop_strings holds ''; give strings"),
    "stop string of another kind": ({**ROW, "stop_strings": [b"x"]}, "stop_strings holds b'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_fails_in_one_line(engine: Engine, case: str) -> None:
    given, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        engine.generate(**{"max_new_tokens": 3, **given})
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_too_long_by_itself(engine: Engine) -> None:
    limit = TARGET.config.max_position_embeddings
    with pytest.raises(ValueError, match=rf"exceed the model's {limit} positions; shorten the prompt$"):
        engine.generate([1] * limit, max_new_tokens=3)


def test_only_the_beginning_of_a_very_long_text_is_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    own = type(engine.tokenizer).__call__

    def counted(self: Any, text: str, **options: Any) -> Any:
        read.append(len(text))
        return own(self, text, **options)

    monkeypatch.setattr(type(engine.tokenizer), "__call__", counted)
    limit = TARGET.config.max_position_embeddings
    with pytest.raises(
        ValueError, match=rf"2,000,000 characters has more than .* {limit:,} positions; shorten it"
    ):
        engine.generate("ab" * 1_000_000, max_new_tokens=3)
    assert sum(read) <= chat._MANY_CHARACTERS * limit


def test_a_long_text_of_few_tokens_is_tokenized_to_its_end() -> None:
    def runs(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}

    assert chat.encoded(runs, "x" * 10_000, 100) == [10_000]  # type: ignore[arg-type]


def test_the_users_own_lists_and_configs_are_left_alone(engine: Engine) -> None:
    criteria, config = StoppingCriteriaList(), GenerationConfig(stop_strings=[text_of(EXPECTED[2:3])])
    before = config.to_dict()
    engine.generate(PROMPT, stopping_criteria=criteria, generation_config=config, max_new_tokens=NEW)
    assert not criteria
    assert config.to_dict() == before

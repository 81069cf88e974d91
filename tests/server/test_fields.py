"""The sampling fields of requests, by the real client: texts beside those of ``Engine.generate``."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from tests.support.processes.served import NAME, PATIENCE, PROMPT
from triforce_tree.engine import Engine


def complete(client: openai.OpenAI, tokens: int = 12, **fields: Any) -> Any:
    own = ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words", "stop_token_ids", "speculation")
    fields = {"prompt": PROMPT, "temperature": 0, **fields}
    extra = {name: fields.pop(name) for name in own if name in fields}
    return client.completions.create(model=NAME, max_tokens=tokens, extra_body=extra, **fields)


def text(client: openai.OpenAI, tokens: int = 12, **fields: Any) -> str:
    made: str = complete(client, tokens, **fields).choices[0].text
    return made


def expected(engine: Engine, tokens: int = 12, **options: Any) -> str:
    return str(engine.generate([PROMPT], max_new_tokens=tokens, **{"do_sample": False, **options}).text)


def first_token(engine: Engine) -> int:
    """Returns the token that greedy decoding writes first."""
    assert engine.tokenizer is not None
    out = engine.generate([PROMPT], max_new_tokens=1, do_sample=False)
    return int(out.sequences[0, -1])


def test_logit_bias(client: openai.OpenAI, engine: Engine) -> None:
    first, plain = first_token(engine), text(client)
    assert text(client, logit_bias={str(first): -100}) == expected(engine, sequence_bias={(first,): -100.0})
    assert text(client, logit_bias={str(first): -100}) != plain
    forced = text(client, 5, logit_bias={"70": 100})
    assert forced == engine.tokenizer.decode([70] * 5)


def test_penalties(client: openai.OpenAI, engine: Engine) -> None:
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        made = text(client, 40, **{name: 1.9})
        assert made == expected(engine, 40, **{name: 1.9}), name
        assert made != text(client, 40), name


def test_sampled_fields(client: openai.OpenAI, engine: Engine) -> None:
    for fields in ({"min_p": 0.2}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}):
        options = {"do_sample": True, "temperature": 1.2, "top_k": 0, "top_p": 1.0, **fields}
        made = text(client, temperature=1.2, seed=5, **fields)
        assert made == expected(engine, seed=[5], **options), fields


def test_bad_words(client: openai.OpenAI) -> None:
    plain = text(client, 20)
    word = next(each for each in plain.split() if each.isalpha())
    made = text(client, 20, bad_words=[word])
    assert word in plain
    assert word not in made.split()


def test_min_tokens_and_stop_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    first = first_token(engine)
    ended = complete(client, stop_token_ids=[first])
    assert ended.choices[0].text == ""
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens == 1
    longer = complete(client, stop_token_ids=[first], min_tokens=4)
    assert longer.usage.completion_tokens >= 4
    assert longer.choices[0].text == expected(
        engine, eos_token_id=sorted({*engine_ends(engine), first}), min_new_tokens=4
    )
    plain = text(client)
    stop = plain[:2]
    assert text(client, stop=stop) == ""
    assert text(client, stop=stop, min_tokens=6).startswith(plain[:2])


def engine_ends(engine: Engine) -> list[int]:
    return torch.as_tensor(engine.target.model.generation_config.eos_token_id).flatten().tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    """lm-evaluation-harness asks for token ids, one new token and log-probabilities of the prompt."""
    assert engine.tokenizer is not None
    ids = engine.tokenizer(PROMPT).input_ids
    if stream:
        pieces = list(complete(client, 1, prompt=ids, echo=True, logprobs=2, stream=True))
        choices = [piece.choices[0] for piece in pieces]
        made = "".join(choice.text for choice in choices)
        parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
        logprobs, tokens, top, offsets = (
            [value for part in parts for value in getattr(part, name)]
            for name in ("token_logprobs", "tokens", "top_logprobs", "text_offset")
        )
    else:
        choice = complete(client, 1, prompt=ids, echo=True, logprobs=2).choices[0]
        made, found = choice.text, choice.logprobs
        logprobs, tokens, top, offsets = (
            found.token_logprobs, found.tokens, found.top_logprobs, found.text_offset
        )  # fmt: skip
    assert made == PROMPT + expected(engine, 1)
    assert len(tokens) == len(ids) + 1
    assert logprobs[0] is None
    assert top[0] is None
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    own = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(logprobs[1:-1], own, strict=True))
    assert all(abs(max(best.values()) - row.max()) < 1e-3 for best, row in zip(top[1:], logits, strict=True))
    assert [made[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


def test_echo_without_log_probabilities(client: openai.OpenAI, engine: Engine) -> None:
    assert text(client, 4, echo=True) == PROMPT + expected(engine, 4)


def test_speculation_is_reported(client: openai.OpenAI, engine: Engine) -> None:
    off = complete(client, 20, speculation="off")
    assert off.choices[0].text == expected(engine, 20)
    assert off.usage.speculation == {"levels": 1, "passes": 20}
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0
    short = complete(client, 20, speculation={"levels": 2, "length": 8})
    assert short.choices[0].text == expected(engine, 20)
    assert short.usage.speculation["length"] == 8
    assert getattr(complete(client, 3).usage, "speculation", None) is None
    made = client.responses.create(
        model=NAME, input="a", max_output_tokens=5, temperature=0, extra_body={"speculation": "off"}
    )
    assert made.usage.speculation == {"levels": 1, "passes": 5}


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 1.3, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "top_k": 30, "bad_words": ["the"], "min_tokens": 4},
]


def test_requests_with_different_fields_share_batches(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is the one that its request gets alone."""
    alone = [text(client, 24, **fields) for fields in FIELDS]
    batches, generate = [], engine.generate
    begun, others_wait = threading.Event(), threading.Event()

    def counted(prompts: list[list[int]], **how: Any) -> Any:
        batches.append(len(prompts))
        begun.set()
        others_wait.wait(PATIENCE)
        return generate(prompts, **how)

    monkeypatch.setattr(engine, "generate", counted)
    fields = [*FIELDS[:3], *FIELDS[1:]]
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(text, client, 24, **fields[0])]
        assert begun.wait(PATIENCE)
        made += [pool.submit(text, client, 24, **each) for each in fields[1:4]]
        time.sleep(1)  # They are read, and wait for the batch that is about to run.
        others_wait.set()
        texts = [each.result(PATIENCE) for each in made]
    assert texts == [alone[FIELDS.index(each)] for each in fields[:4]]
    assert sum(batches) < 4, "others joined"


REFUSED = {
    "logit_bias": [{"a": 1}, {"5": 101}, {"5": True}, {"99999999": 1}, [1]],
    "frequency_penalty": [2.1, "1"],
    "min_p": [1.5, -0.1],
    "min_tokens": [13, -1],
    "bad_words": [[""], [3]],
    "stop_token_ids": [["a"], [10**9], 5],
    "best_of": [2],
    "speculation": ["on", {"levels": 4}, {"depth": 1}, {"length": 0}],
    "echo": ["yes"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_by_name(client: openai.OpenAI, name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, extra_body={name: value})
        said = str(refused.value)
        assert name in said or "vocabulary" in said or "levels" in said or "length" in said or "depth" in said


def test_fields_of_chats(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    made = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, temperature=0, logit_bias={"70": 100},
        frequency_penalty=0.5, presence_penalty=0.5, extra_body={"min_tokens": 2, "speculation": "off"},
    )  # fmt: skip
    assert made.choices[0].message.content
    assert made.usage.speculation["levels"] == 1
    with pytest.raises(openai.BadRequestError, match="echo is not supported for chats"):
        client.chat.completions.create(model=NAME, messages=messages, extra_body={"echo": True})

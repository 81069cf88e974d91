"""Refusals of the server and their messages; API keys."""

import json
from http.client import HTTPConnection
from urllib.parse import urlparse

import openai
import pytest

from tests.support.processes.served import KEY, NAME, PATIENCE, PROMPT

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def refusal(call: object, **given: object) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as raised:
        call(model=given.pop("model", NAME), **given)
    assert isinstance(raised.value.body, dict)
    assert "\n" not in raised.value.body["message"]
    return raised.value.status_code, raised.value.body["message"]


@pytest.mark.parametrize(
    "change, status, said",
    [
        ({"model": "other"}, 404, "'other' is not served here; use 'pair'"),
        ({"max_tokens": 501}, 400, "501 new tokens are more than the 500"),
        ({"extra_body": {"logit_bias": {"5": 101}}}, 400, "logit_bias has 5: 101; give token ids"),
        ({"extra_body": {"frequency_penalty": 2.5}}, 400, "frequency_penalty=2.5 must be a number from -2"),
        ({"extra_body": {"echo": 1}}, 400, "echo=1 must be true or false"),
        ({"extra_body": {"max_completion_tokens": 0}}, 400, "max_completion_tokens is not supported"),
        ({"suffix": "end"}, 400, "suffix is not supported"),
        ({"best_of": 3}, 400, "best_of=3 is not supported, because the server returns"),
        ({"extra_body": {"min_tokens": 3.0}}, 400, "min_tokens=3.0 must be a whole number"),
        ({"stop": ["a"] * 5}, 400, "stop is a list, and must be a text, or a list of at most 4"),
        (
            {"extra_body": {"prompt": {"a": 1}}},
            400,
            "prompt is an object, and must be a text, a list of texts, token ids",
        ),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options is given without a stream"),
        ({"prompt": ["a"] * 5}, 400, "5 texts are more than the 4 that may wait"),
        ({"n": 3, "prompt": ["a"] * 2}, 400, "6 texts are more than the 4 that may wait"),
    ],
    ids=lambda value: None if isinstance(value, (dict, int)) else str(value)[:20],
)
def test_completions(client: openai.OpenAI, change: dict[str, object], status: int, said: str) -> None:
    given = {"prompt": PROMPT, "max_tokens": 4, **change}
    found = refusal(client.completions.create, **given)
    assert found[0] == status
    assert said in found[1]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tools": [TOOL]}, "this model's chat template does not read tools; leave them out"),
        ({"extra_body": {"functions": [TOOL["function"]]}}, "functions is not supported"),
        (
            {"response_format": {"type": "grammar"}},
            "response_format is an object, and must be an object whose",
        ),
        ({"modalities": ["audio"]}, "modalities is not supported"),
        ({"top_logprobs": 3}, "top_logprobs is given without logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": None, "extra_body": {"min_tokens": 501}}, "exceeds the limit of 500 new tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "continues text alone",
        ),
    ],
)
def test_chats(client: openai.OpenAI, change: dict[str, object], said: str) -> None:
    given = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, **change}
    status, message = refusal(client.chat.completions.create, **given)
    assert status == 400
    assert said in message


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_are_bounded(url: str, chunked: bool) -> None:
    body = json.dumps({"model": NAME, "prompt": "a" * 2**20}).encode()
    connection = HTTPConnection(urlparse(url).netloc, timeout=PATIENCE)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    if chunked:
        sent = iter([body[: 2**19], body[2**19 :]])
        connection.request("POST", "/v1/completions", sent, headers, encode_chunked=True)
    else:
        # The size of the file is sufficient for the test.
        connection.putrequest("POST", "/v1/completions")
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    said = json.loads(answer.read())["error"]["message"]
    assert said == "the body has more than 1,048,576 bytes; send less, or raise --max-body"
    connection.close()


def test_models(client: openai.OpenAI, url: str) -> None:
    [listed] = client.models.list()
    assert listed.id == NAME
    assert listed.created > 1_700_000_000
    assert client.models.retrieve(NAME) == listed
    with pytest.raises(openai.NotFoundError, match="'org/other' is not served here; use 'pair'"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="there is no GET /v1/embeddings here") as raised:
        client.with_options(base_url=url).get("/v1/embeddings", cast_to=object)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "not_found_error"

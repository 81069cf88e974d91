"""Texts of replies up to stop strings and end tokens, and log-probabilities as JSON."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
import torch

import triforce_tree
from scripts.checks.served import serving
from tests.support.models.scripted import scripted
from tests.support.models.tokenizer_kinds import tokenizer_of
from tests.support.processes.served import KEY, LIMITS, NAME, PATIENCE, client_of
from triforce_tree.server.app import Served, create_app

PROMPT = "Once upon a"
WORDS = " time there\n    x 🎉"
NAMES = ("<|tool|>", "<|user|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}Once upon a"


def ids_of(kind: str, text: str) -> list[int]:
    return list(tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"])


class Script:
    """A server whose model generates words, then the tokens of ``NAMES``; the last one ends the text."""

    def __init__(self, kind: str) -> None:
        self.kind, self.tokenizer = kind, tokenizer_of(kind)
        prompt = ids_of(kind, PROMPT)
        names = self.tokenizer.convert_tokens_to_ids(list(NAMES))
        words = [token for token in dict.fromkeys(ids_of(kind, PROMPT + WORDS)) if token not in prompt]
        self.new = [*words, *names]
        model = scripted(self.tokenizer, [prompt[-1], *self.new], names[-1])
        # Tokens with probability 0, like the padding of a vocabulary.
        bias = torch.zeros(len(self.tokenizer))
        bias[0:5] = -torch.inf
        model.lm_head.register_forward_hook(lambda m, a, out: out + bias)
        self.engine = triforce_tree.load(
            model, model, tokenizer=self.tokenizer, tree="chain:3", levels=2, advanced={"rounds": 1}
        )
        before, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (prompt, [*prompt, *self.new[:-1]])
        )
        self.text = whole[len(before) :]

    def client(self) -> openai.OpenAI:
        return client_of(self.url)

    url = ""


@pytest.fixture(scope="module", params=["byte-level", "Llama 2", "WordPiece, cleaned up"])
def script(request: pytest.FixtureRequest) -> Iterator[Script]:
    made = Script(request.param)
    made.tokenizer.chat_template = TEMPLATE
    with serving(create_app(made.engine, Served(NAME, KEY, LIMITS))) as (made.url, _):
        yield made
    made.tokenizer.chat_template = None


def choices(script: Script, stream: bool, chat: bool, **more: Any) -> list[Any]:
    given: dict[str, Any] = {"model": NAME, "max_tokens": 40, "temperature": 0, "stream": stream, **more}
    if chat:
        found = script.client().chat.completions.create(messages=[{"role": "user", "content": "x"}], **given)
    else:
        found = script.client().completions.create(prompt=PROMPT, **given)
    return [choice for chunk in (found if stream else [found]) for choice in chunk.choices]


def text_of(found: list[Any], stream: bool, chat: bool) -> str:
    if not chat:
        return "".join(choice.text for choice in found)
    return "".join((c.delta if stream else c.message).content or "" for c in found)


ways = pytest.mark.parametrize(
    ("stream", "chat"), [(False, False), (True, False), (False, True), (True, True)]
)


@ways
def test_texts_go_on_from_the_prompts(script: Script, stream: bool, chat: bool) -> None:
    found = choices(script, stream, chat)
    assert text_of(found, stream, chat) == script.text
    assert script.text.endswith("<|tool|>")
    assert found[-1].finish_reason == "stop"
    out = script.engine.generate(PROMPT, max_new_tokens=40, do_sample=False)
    assert (out.text, out.sequences[0].tolist()[-len(script.new) :]) == (script.text, script.new)


@ways
@pytest.mark.parametrize("stop", ["<|user|>", "<|tool|>", "<|tool|><|us", "re\n", "e"])
def test_texts_end_where_those_of_generate_do(script: Script, stop: str, stream: bool, chat: bool) -> None:
    shown = script.text
    if script.kind.startswith("WordPiece"):
        stop = stop.replace("><", "> <").replace("\n", " x")
    named = f"{shown} <|user|>" if script.kind.startswith("WordPiece") else f"{shown}<|user|>"
    found = choices(script, stream, chat, stop=["\0never", stop])
    if stop not in named:
        assert text_of(found, stream, chat) == shown
        return
    assert (
        text_of(found, stream, chat).rstrip() == named[: named.index(stop)].replace("<|user|>", "").rstrip()
    )
    assert found[-1].finish_reason == "stop"
    if not stream:
        out = script.engine.generate(
            PROMPT, max_new_tokens=40, do_sample=False, stop_strings=["\0never", stop]
        )
        reply = script.client().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]
        )
        assert reply.usage.completion_tokens == out.new_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(script: Script, stream: bool) -> None:
    found = choices(script, stream, True, logprobs=True, top_logprobs=20)
    entries = [entry for choice in found if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == len(script.new)
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode() == script.text
    for entry in entries:
        assert len(entry.top_logprobs) == 20
        for each in (entry, *entry.top_logprobs):
            assert -9999.0 <= each.logprob <= 0
            if each.bytes is not None and not each.token.startswith("bytes:"):
                assert bytes(each.bytes).decode() == each.token
        [own] = [each for each in entry.top_logprobs if each.logprob == entry.logprob]
        assert (own.token, own.bytes) == (entry.token, entry.bytes)
        # In greedy decoding the chosen token is the most probable one.
        assert own is entry.top_logprobs[0]
    assert [entry.token for entry in entries[-2:]] == ["<|user|>", "<|im_end|>"]
    assert [entry.bytes for entry in entries[-2:]] == [None, None], "they are no part of the text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_logprobs_of_completions(script: Script, stream: bool, count: int) -> None:
    found = [c.logprobs for c in choices(script, stream, False, logprobs=count) if c.logprobs is not None]
    tokens, values, best, offsets = (
        [each for logprobs in found for each in getattr(logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(tokens) == len(values) == len(best) == len(offsets) == len(script.new)
    for token, value, alternatives, offset in zip(tokens, values, best, offsets, strict=True):
        assert alternatives[token] == value
        assert len(alternatives) in (max(1, count), count + 1)
        whole = not token.startswith("bytes:") and token not in NAMES[1:]
        assert not whole or script.text[offset : offset + len(token)] == token
    assert offsets == sorted(offsets)
    assert "".join(t for t in tokens[:-2] if not t.startswith("bytes:")) == script.text.replace(
        "🎉", "🎉" if "🎉" in tokens or " 🎉" in tokens else ""
    )


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_sampled_alternatives_are_json_without_collisions(script: Script, path: str, stream: bool) -> None:
    """The temperature is so high that the drawn token may not be among the most probable ones."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": 30, "temperature": 100, "seed": 1, "stream": stream}
    own = {"prompt": PROMPT, "logprobs": 20}
    if path.startswith("chat"):
        own = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    request = Request(
        f"{script.url}/v1/{path}", json.dumps(body | own).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )  # fmt: skip
    with urlopen(request, timeout=PATIENCE) as reply:
        text = reply.read().decode()
    parts = [line.removeprefix("data: ") for line in text.split("\n") if line] if stream else [text]

    def refused(name: str) -> None:
        raise AssertionError(name)

    bodies = [json.loads(part, parse_constant=refused) for part in parts if part != "[DONE]"]
    found = [c["logprobs"] for each in bodies for c in each["choices"] if c["logprobs"]]
    assert found
    if not path.startswith("chat"):
        best = [own for logprobs in found for own in logprobs["top_logprobs"]]
        assert {len(own) for own in best} <= {20, 21}
        assert 21 in {len(own) for own in best}


def test_impossible_tokens_have_a_least_logprob() -> None:
    """The request asks for more alternatives than there are tokens with a probability above 0."""
    script = Script("byte-level")
    bias = torch.full((len(script.tokenizer),), -torch.inf)
    bias[script.new] = 0
    script.engine.target.model.lm_head.register_forward_hook(lambda m, a, out: out + bias)
    engine = triforce_tree.load(script.engine.target.model, tokenizer=script.tokenizer, levels=1)
    with serving(create_app(engine, Served(NAME, KEY, LIMITS))) as (script.url, _):
        found = choices(script, False, False, logprobs=20)[0].logprobs
        assert min(value for own in found.top_logprobs for value in own.values()) == -9999.0
        assert all(len(own) == 20 for own in found.top_logprobs)

"""The server, tested with OpenAI's client over HTTP."""

import threading

import openai
import pytest
import torch

from tests.support.processes.served import NAME, PATIENCE, PROMPT, expected, metric, until
from triforce_tree.engine import Engine
from triforce_tree.server.text_stream import TextStream


def test_completions_are_the_targets_text(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0)
    [choice] = answer.choices
    assert choice.text == expected(engine, PROMPT, 24)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(engine.tokenizer(PROMPT)["input_ids"])
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens < 24


def test_usage_counts_the_tokens_that_were_kept(client: openai.OpenAI, engine: Engine) -> None:
    """A prompt that is asked again needs no prefill of its whole chunks."""
    prompt = "Counted: " + PROMPT * (3000 // len(PROMPT) * 3)
    tokens = len(engine.tokenizer(prompt)["input_ids"])
    counted = []
    for chat in (False, True):
        asked = client.chat.completions if chat else client.completions
        text = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        for _ in range(2):
            answer = asked.create(model=NAME, max_tokens=4, temperature=0, **text)
            counted.append(answer.usage.prompt_tokens_details.cached_tokens)
    chunk = 1024
    assert tokens > 2 * chunk
    assert counted[1::2] == [tokens // chunk * chunk] * 2
    assert max(counted[::2]) < chunk


def test_chats_take_the_template(client: openai.OpenAI, engine: Engine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    prompt = f"user: {PROMPT}\nassistant:"
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=16, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected(engine, prompt, 16)
    chunks = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=16, temperature=0, stream=True
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_part_of_the_text(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    whole = expected(engine, PROMPT, 60)
    stop = whole[20:26]  # in the middle of words
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": [stop, "\0never"]}
    answer = client.completions.create(**given, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    if stream:
        return
    tokens = engine.generate(PROMPT, max_new_tokens=60, do_sample=False).sequences[0]
    assert engine.tokenizer is not None
    start = len(tokens) - 60
    needed = next(n for n in range(1, 61) if stop in engine.tokenizer.decode(tokens[start : start + n]))
    assert answer.usage.completion_tokens == needed, (
        "tokens of the same pass after the stop string do not count"
    )
    scored = client.completions.create(**given, logprobs=1)
    assert len(scored.choices[0].logprobs.tokens) == needed


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(**more: object) -> list[str]:
        answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, **more)
        return [choice.text for choice in answer.choices]

    once = texts(seed=5, n=3)
    assert once == texts(seed=5, n=3)
    assert len(set(once)) == 3
    assert len(set(texts(n=3))) == 3


@pytest.mark.parametrize("stop", [None, ["the"]])
def test_streams_have_the_logprobs_of_whole_replies(
    client: openai.OpenAI, engine: Engine, stop: list[str] | None
) -> None:
    """For both texts of a request each token has its log-probability in exactly one chunk."""
    given = {"model": NAME, "max_tokens": 40, "seed": 3, "n": 2, "temperature": 1.1, "stop": stop}
    chat = {**given, "messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**chat)
    chunks = list(client.chat.completions.create(**chat, stream=True))
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        with_some = [c for c in own if c.logprobs is not None]
        assert len(with_some) > (1 if stop else 2)
        entries = [entry for c in with_some for entry in c.logprobs.content]
        assert choice.logprobs is not None
        # Passes are chosen by measured times, and the last bits depend on the number of tokens of a pass.
        for entry, other in zip(entries, choice.logprobs.content, strict=True):
            pairs = list(zip([entry, *entry.top_logprobs], [other, *other.top_logprobs], strict=True))
            assert len(pairs) == 4
            assert all((a.token, a.bytes) == (b.token, b.bytes) for a, b in pairs)
            assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-4)
        # A chunk never has text before the log-probabilities of its tokens.
        tokens = text = ""
        for c in own:
            tokens += "".join(entry.token for entry in (c.logprobs.content if c.logprobs else []))
            text += c.delta.content or ""
            assert tokens.startswith(text)


def test_logprobs_in_streams_are_those_of_generate(client: openai.OpenAI, engine: Engine) -> None:
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 0}
    chunks = list(client.completions.create(**given, stream=True))
    found = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    expected = engine.generate(PROMPT, max_new_tokens=20, do_sample=False, logprobs=True)
    values = [value for logprobs in found for value in logprobs.token_logprobs]
    assert values == pytest.approx(expected.logprobs[0].tolist(), abs=1e-5)
    texts = [token for logprobs in found for token in logprobs.tokens]
    offsets = [offset for logprobs in found for offset in logprobs.text_offset]
    assert "".join(texts) == expected.text
    assert offsets == [len("".join(texts[:at])) for at in range(len(texts))]


def test_prompts_of_a_list_come_back_in_order(client: openai.OpenAI, engine: Engine) -> None:
    prompts = [PROMPT, "A list comprehension", "Class definitions, like"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=10, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [expected(engine, p, 10) for p in prompts]


def test_a_client_that_leaves_ends_its_text(
    client: openai.OpenAI, engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, left = TextStream.put_tokens, threading.Event()

    def after_it_has_left(stream: TextStream, value: torch.Tensor) -> bool:
        """Delays the second pass until the server has noticed that the client has disconnected."""
        if stream.count and left.wait(PATIENCE):
            until(stream.wants_end)
        return put(stream, value)

    monkeypatch.setattr(TextStream, "put_tokens", after_it_has_left)
    before, cancelled = metric(url, "new_tokens_total"), metric(url, 'sequences_total{outcome="cancelled"}')
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=500, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    left.set()
    until(lambda: metric(url, 'sequences_total{outcome="cancelled"}') > cancelled)
    until(lambda: not metric(url, "running_sequences"))
    assert metric(url, "new_tokens_total") - before < 100


def test_choices_of_a_stream_are_those_of_a_whole_reply(client: openai.OpenAI) -> None:
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "n": 3, "seed": 4, "temperature": 1.2}
    whole = client.completions.create(**given)
    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == 48
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert sum(bool(c.text) for c in own) > 2
        assert [c.finish_reason for c in own if c.finish_reason] == ["length"]


@pytest.mark.parametrize("stop", [None, ["the"]])
@pytest.mark.parametrize("chat", [False, True])
def test_streams_say_what_proposed_their_tokens(
    client: openai.OpenAI, chat: bool, stop: list[str] | None
) -> None:
    given = {"model": NAME, "max_tokens": 60, "temperature": 0, "stop": stop, "stream": True}
    options = {"include_usage": True, "include_levels": True}
    if chat:
        messages = [{"role": "user", "content": PROMPT}]
        stream = client.chat.completions.create(messages=messages, stream_options=options, **given)
    else:
        stream = client.completions.create(prompt=PROMPT, stream_options=options, **given)
    text, levels, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = (choice.delta.content if chat else choice.text) or ""
            own = getattr(choice, "levels", [])
            # Text that is no stop string after all comes with the tokens that show this.
            text += piece
            levels += own
            assert "".join(each["text"] for each in levels) == text
    assert {each["level"] for each in levels} <= {"draft", "lookup", "target"}
    # A text that ends after a few tokens may be one of plain passes alone.
    assert stop or len({each["level"] for each in levels}) > 1
    assert usage is not None
    assert sum(each["tokens"] for each in levels) == usage.completion_tokens
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    drafted = sum(each["tokens"] for each in levels if each["level"] != "target")
    # The last pass may have accepted tokens after the end.
    assert 0 <= accepted - drafted < 10


def test_streams_without_the_option_say_nothing_of_levels(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, stream=True)
    assert not any(hasattr(choice, "levels") for chunk in stream for choice in chunk.choices)

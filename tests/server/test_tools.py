"""Tools, constraints and reasoning over HTTP, with OpenAI's client and agents."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest

import triforce_tree
from scripts.checks.served import serving
from tests.support.processes.served import KEY, NAME, PATIENCE, client_of, metric
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

pytest.importorskip("xgrammar")

# Like the templates of Qwen: tools in JSON, calls and results between tags.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "Answer <tool_call>{name, arguments}</tool_call>{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}"
    "{% endfor %}assistant:{% if enable_thinking is defined %}"
    "{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bonn", "Ulm"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "time",
        "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
USER = [{"role": "user", "content": "What is the weather in Bonn?"}]
SCHEMA = {
    "type": "object",
    "properties": {"title": {"enum": ["a", "b"]}, "pages": {"type": "boolean"}},
    "required": ["title", "pages"],
}


@pytest.fixture(scope="module")
def own_engine() -> Engine:
    made = triforce_tree.load(device="cpu", levels=2)
    assert made.tokenizer is not None
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def address(own_engine: Engine) -> Iterator[str]:
    limits = Limits(waiting=16, batch=4, new_tokens=500)
    with serving(create_app(own_engine, Served(NAME, KEY, limits, body=2**20))) as (address, _):
        yield address


@pytest.fixture
def own(address: str) -> openai.OpenAI:
    return client_of(address)


def chat(own: openai.OpenAI, **more: Any) -> Any:
    given = {"messages": USER, "max_tokens": 400, "temperature": 0, **more}
    given["extra_body"] = {**UNTHINKING, **more.get("extra_body", {})}
    return own.chat.completions.create(model=NAME, **given)


def weather(call: Any) -> dict[str, Any]:
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Bonn", "Ulm")
    assert 0 <= arguments["days"] <= 9
    assert arguments.keys() == {"city", "days"}
    return dict(arguments)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_calls(own: openai.OpenAI, choice: Any) -> None:
    [choice_] = chat(own, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).choices
    assert choice_.finish_reason == "tool_calls"
    assert choice_.message.content is None
    [call] = choice_.message.tool_calls
    weather(call)
    assert call.id.startswith("call_")


def test_a_forced_call_of_a_tool_without_parameters_has_none(own: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    for seed in range(3):
        [made] = chat(
            own, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
        ).choices
        [call] = made.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_streamed_calls_are_those_of_whole_replies(own: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "tools": [WEATHER, TIME],
        "tool_choice": NAMED,
        "seed": 3,
        "temperature": 1,
        "n": 2,
    }
    whole = chat(own, **given)
    chunks = list(chat(own, **given, stream=True))
    for choice in whole.choices:
        own_chunks = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        calls = [call for each in own_chunks for call in each.delta.tool_calls or []]
        begun = [call for call in calls if call.id]
        assert [call.index for call in begun] == list(range(len(begun)))
        assert len(calls) > len(begun), "the arguments come in pieces"
        assert ["".join(c.function.arguments for c in calls if c.index == each.index) for each in begun] == [
            call.function.arguments for call in choice.message.tool_calls
        ]
        assert own_chunks[-1].finish_reason == choice.finish_reason
        assert not any(each.delta.content for each in own_chunks)


def test_calls_of_strict_tools_obey_their_schemas(own: openai.OpenAI, own_engine: Engine) -> None:
    """The model repeats a call whose city is not allowed; without a call its text is what it was."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    other = {"city": "Rome", "days": 3}
    call = json.dumps({"name": "weather", "arguments": other})
    turn = f"What is it?\nassistant:<think></think><tool_call>\n{call}\n</tool_call>\nuser: "
    messages = [{"role": "user", "content": 12 * turn + "What is it?"}]
    for choice in ({}, {"tool_choice": "auto"}):
        given: dict[str, Any] = {"messages": messages, "max_tokens": 100, **choice}
        [free, *_] = chat(own, tools=[WEATHER, TIME], **given).choices[0].message.tool_calls
        assert json.loads(free.function.arguments) == other
        [first, *_] = chat(own, tools=[strict, TIME], **given).choices[0].message.tool_calls
        weather(first)
    assert own_engine.tokenizer is not None
    prompt = own_engine.tokenizer.apply_chat_template(
        USER, tools=[strict], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    expected = own_engine.generate(prompt, max_new_tokens=24, do_sample=False).text
    assert "<tool_call>" not in expected
    assert chat(own, tools=[strict], max_tokens=24).choices[0].message.content == expected


def test_openais_client_joins_the_pieces_of_a_call(own: openai.OpenAI) -> None:
    given: dict[str, Any] = {"messages": USER, "tools": [WEATHER, TIME], "tool_choice": NAMED}
    given |= {"model": NAME, "max_tokens": 400, "seed": 3, "extra_body": UNTHINKING}
    whole = own.chat.completions.create(**given).choices[0].message.tool_calls
    with own.chat.completions.stream(**given) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        joined = stream.get_final_completion().choices[0].message.tool_calls
    assert len(pieces) > len(joined)
    assert [(call.function.name, call.function.arguments) for call in joined] == [
        (call.function.name, call.function.arguments) for call in whole
    ]


def test_calls_that_the_limit_cuts_are_cut(own: openai.OpenAI) -> None:
    """The limit lies within the arguments; those of a whole call begin with them."""
    given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED, "temperature": 0}
    [whole] = chat(own, **given).choices[0].message.tool_calls
    for limit in range(8, 60):
        choice = chat(own, **given, max_tokens=limit).choices[0]
        if choice.message.tool_calls:
            break
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert whole.function.arguments.startswith(call.function.arguments)
    assert len(call.function.arguments) < len(whole.function.arguments)


def test_calls_that_the_limit_cuts_before_their_arguments_are_text(own: openai.OpenAI) -> None:
    [choice] = chat(own, tools=[WEATHER], tool_choice="required", max_tokens=8).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")


def test_results_of_tools_are_read_by_the_template(own: openai.OpenAI, own_engine: Engine) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    prompt = (
        "user: What is the weather in Bonn?\nassistant: "
        '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>\n'
        "tool: Rain\nassistant:<think></think>"
    )
    expected = own_engine.generate(prompt, max_new_tokens=12, do_sample=False).text
    answer = chat(own, messages=messages, max_tokens=12)
    assert answer.choices[0].message.content == expected


def test_auto_and_none_leave_the_text_as_it_is(own: openai.OpenAI) -> None:
    texts = {
        str(choice): chat(own, tools=[WEATHER], max_tokens=24, **({"tool_choice": choice} if choice else {}))
        .choices[0]
        .message
        for choice in (None, "auto", "none")
    }
    assert len({message.content for message in texts.values()}) == 1
    assert not any(message.tool_calls for message in texts.values())


def test_schemas_are_obeyed_in_chats_completions_and_responses(own: openai.OpenAI) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    form = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}}
    texts = [chat(own, response_format=form).choices[0].message.content]
    texts += [chat(own, extra_body={"guided_json": SCHEMA}).choices[0].message.content]
    texts += [
        chat(own, extra_body={"structured_outputs": {"json": json.dumps(SCHEMA)}}).choices[0].message.content
    ]
    answer = own.completions.create(
        model=NAME, prompt="Book:", max_tokens=400, extra_body={"guided_json": SCHEMA}
    )
    texts += [answer.choices[0].text]
    made = own.responses.create(
        model=NAME,
        input="A book.",
        max_output_tokens=400,
        text={"format": {"type": "json_schema", "name": "book", "schema": SCHEMA}},
        extra_body=UNTHINKING,
    )
    texts += [made.output_text]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_choices_expressions_and_grammars(own: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        return str(chat(own, extra_body=more, max_tokens=40).choices[0].message.content)

    assert text(guided_choice=["yes", 'n"o\n']) in ("yes", 'n"o\n')
    assert text(guided_regex="[ab]{3}c") in {f"{a}{b}{c}c" for a in "ab" for b in "ab" for c in "ab"}
    assert text(guided_grammar='root ::= "1" ("+1"){2}') == "1+1+1"
    assert json.loads(text(structured_outputs={"choice": ["12"]})) == 12
    nothing = {"json": None, "grammar": None, "json_object": False, "disable_any_whitespace": False}
    assert text(structured_outputs={**nothing, "regex": "[0]{2}", "choice": None}) == "00"
    with pytest.raises(openai.BadRequestError, match="structured_outputs is an object, and must be"):
        text(structured_outputs={"regex": "a", "disable_any_whitespace": True})


def test_a_demanded_content_or_a_call(own: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}
    message = chat(own, tools=[WEATHER], response_format=form).choices[0].message
    if message.tool_calls:
        weather(message.tool_calls[0])
    else:
        assert json.loads(message.content).keys() == {"title", "pages"}


def test_reasoning_is_separated(own: openai.OpenAI, own_engine: Engine) -> None:
    """The prompt opens the reasoning, which the text does not end; then a grammar makes it end."""
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    expected = own_engine.generate(
        "user: What is the weather in Bonn?\nassistant:<think>", max_new_tokens=12, do_sample=False
    ).text
    answer = chat(own, max_tokens=12, extra_body=extra)
    message = answer.choices[0].message
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    assert (message.content, message.reasoning_content) == ("", expected)
    stream = chat(own, max_tokens=12, extra_body=extra, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == expected


def test_tokens_of_reasoning_are_counted(own: openai.OpenAI) -> None:
    """The text names each of its tokens; those up to the closing marker are reasoning."""
    turn = "What is it?\nassistant:<think>We look at it.</think>yes\nuser: "
    given: dict[str, Any] = {
        "messages": [{"role": "user", "content": 12 * turn + "What is it?"}],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        "logprobs": True,
        "max_tokens": 20,
    }
    answer = chat(own, **given)
    assert answer.choices[0].message.reasoning_content == "We look at it."
    texts = [each.token for each in answer.choices[0].logprobs.content]
    count = next(n for n in range(len(texts)) if "</think>" in "".join(texts[:n]))
    assert 0 < count < answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == count
    *_, last = chat(own, **given, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == count


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0] has no name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] is no function"),
    ({"tools": [WEATHER, WEATHER]}, "two tools have the same name"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "names a tool that is not among",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
            ]
        },
        "the parameters of the strict tool f are refused",
    ),
    ({"tools": [WEATHER], "tool_choice": "always"}, 'tool_choice="always" must be "auto"'),
    ({"tool_choice": "required"}, "tool_choice is given without tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format has no schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format is refused",
    ),
    ({"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}}, "are given together"),
    ({"extra_body": {"guided_regex": "(a"}}, "parenthesis"),
    ({"extra_body": {"guided_grammar": "root := x"}}, "the constraint of the text is refused"),
    ({"extra_body": {"guided_choice": []}}, "guided_choice"),
    ({"extra_body": {"guided_json": "{"}}, "guided_json is no JSON"),
    ({"extra_body": {"guided_whitespace_pattern": " "}}, "guided_whitespace_pattern is not supported"),
    (
        {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
        "chat_template is no variable of this model's",
    ),
    ({"extra_body": {"chat_template_kwargs": {"unknown": 1}}}, "unknown is no variable"),
    ({"extra_body": {"reasoning_effort": "low"}}, "reasoning_effort is no variable"),
]


@pytest.mark.parametrize("given, said", REFUSED, ids=lambda value: str(value)[:40])
def test_refusals(own: openai.OpenAI, given: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(own, **given)
    assert said in raised.value.body["message"]  # type: ignore[index, call-overload]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": deep(400)},
        {
            "guided_json": {
                "type": "object",
                "properties": {f"a{n}": {"type": "string"} for n in range(20_000)},
            }
        },
        {
            "guided_json": {
                "oneOf": [{"type": "object", "properties": {"a": {"const": n}}} for n in range(3000)]
            }
        },
        {"guided_regex": "(" * 5000 + ")" * 5000},
        {"guided_regex": "((((a{1,900}){1,900}){1,900}){1,900}){1,900}"},
        {"guided_grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"guided_choice": ["a" * 100_000, "b" * 200_000]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(100)}}]},
    ],
    ids=lambda body: str(body)[:40],
)
def test_attacks_end_in_one_sentence_while_others_are_decoded(
    own: openai.OpenAI, address: str, body: dict[str, Any]
) -> None:
    pieces, done = [], threading.Event()

    def stream() -> None:
        for _ in chat(own, max_tokens=500, stream=True):
            pieces.append(1)
        done.set()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        answer = chat(own, extra_body=body, max_tokens=4)
        assert answer.choices[0].finish_reason in ("length", "stop")
    except openai.BadRequestError as problem:
        said = str(problem.body)
    else:
        said = ""
    assert "\\n" not in said
    thread.join(PATIENCE)
    assert done.is_set()


def test_ten_calls_of_a_loop(own: openai.OpenAI) -> None:
    """A conversation of ten calls and results; each prompt reads all calls before it."""
    messages: list[Any] = list(USER)
    for turn in range(10):
        answer = chat(
            own,
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            seed=turn,
            temperature=1,
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        assert message.tool_calls
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            weather(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{turn} degrees"})
    assert answer.usage.prompt_tokens > 10 * 20


def test_responses(own: openai.OpenAI, own_engine: Engine) -> None:
    expected = own_engine.generate(
        "system: Be short.\nuser: Hello\nassistant:", max_new_tokens=10, do_sample=False
    ).text
    made = own.responses.create(
        model=NAME, instructions="Be short.", input="Hello", max_output_tokens=10, temperature=0
    )
    assert made.output_text == expected
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 10
    events = list(
        own.responses.create(
            model=NAME,
            instructions="Be short.",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            max_output_tokens=10,
            temperature=0,
            stream=True,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected


def test_items_of_streamed_and_whole_responses_are_alike(own: openai.OpenAI, own_engine: Engine) -> None:
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    forced = {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}}
    end = {"logit_bias": {str(own_engine.tokenizer.eos_token_id): 100}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    cases: list[tuple[int, dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = [
        (8, {}, {}, [("message", "incomplete")]),
        (8, {}, end, [("message", "completed")]),
        (8, {}, thinking, [("reasoning", "incomplete")]),
        (30, forced, {}, [("function_call", "incomplete")]),
        (200, forced, {}, [("function_call", "completed")]),
    ]
    for limit, fields, more, expected in cases:
        given: dict[str, Any] = {
            "model": NAME, "input": "Hello", "max_output_tokens": limit, "temperature": 0, **fields,
            "extra_body": {**UNTHINKING, **more},
        }  # fmt: skip
        whole, events = own.responses.create(**given), list(own.responses.create(**given, stream=True))
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [(item.type, item.status) for item in whole.output] == expected
        shown = [
            [item.model_dump(exclude={"id", "call_id"}) for item in items]
            for items in (whole.output, events[-1].response.output, done)
        ]
        assert shown[0] == shown[1] == shown[2]


def test_fields_of_chats_are_refused_in_responses(own: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "n": 2, "logprobs": True, "top_logprobs": 2, "messages": USER, "max_tokens": 3,
        "max_completion_tokens": 3, "response_format": {"type": "json_object"}, "verbosity": "medium",
        "stream_options": {"include_levels": True},
    }  # fmt: skip
    for name, value in fields.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported for responses"):
            own.responses.create(model=NAME, input="a", extra_body={name: value})
    nothing = {"n": 1, "top_logprobs": 0, "logprobs": False, "stop": ["\n"]}
    made = own.responses.create(model=NAME, input="a", max_output_tokens=4, temperature=0, extra_body=nothing)
    assert "\n" not in made.output_text


def test_tools_in_responses(own: openai.OpenAI) -> None:
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    items: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
    for turn in range(3):
        with own.responses.stream(
            model=NAME,
            input=items,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=400,
        ) as stream:
            made = stream.get_final_response()
        assert made.output
        for item in made.output:
            assert item.type == "function_call"
            assert json.loads(item.arguments)["city"] in ("Bonn", "Ulm")
            items += [
                {
                    "type": "function_call",
                    "call_id": item.call_id,
                    "name": item.name,
                    "arguments": item.arguments,
                },
                {"type": "function_call_output", "call_id": item.call_id, "output": f"{turn} degrees"},
            ]
    named = own.responses.create(
        model=NAME,
        input=items,
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=400,
    )
    assert named.output[0].type == "function_call"
    with pytest.raises(
        openai.BadRequestError, match="previous_response_id is not supported, as no response is kept"
    ):
        own.responses.create(model=NAME, input="a", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match=r"input\[0\] is no message"):
        own.responses.create(model=NAME, input=[{"type": "computer_call_output"}])


def posted(address: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        with urlopen(Request(address + path, json.dumps(body).encode(), headers), timeout=PATIENCE) as answer:
            return json.loads(answer.read())
    except HTTPError as problem:
        with problem:
            return json.loads(problem.read())["error"]["message"]


def test_tokenize_and_detokenize(address: str, own_engine: Engine) -> None:
    tokenizer = own_engine.tokenizer
    assert tokenizer is not None
    text = "The import statement"
    ids = tokenizer(text)["input_ids"]
    found = posted(address, "/tokenize", {"model": NAME, "prompt": text, "return_token_strs": True})
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] == own_engine.target.max_positions
    assert posted(address, "/detokenize", {"tokens": ids}) == {"prompt": text}
    chat_ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert posted(address, "/tokenize", {"messages": USER})["tokens"] == chat_ids
    assert "outside the vocabulary" in posted(address, "/detokenize", {"tokens": [10**6]})
    assert "must be a list of token ids" in posted(address, "/detokenize", {"tokens": "a"})
    assert "other is not supported" in posted(address, "/tokenize", {"prompt": "a", "other": 1})


def test_formats_that_are_unknown_are_refused(own_engine: Engine) -> None:
    with pytest.raises(ValueError, match="tool_parser='hermess' must be one of harmony, mistral"):
        create_app(own_engine, Served(NAME, tool_parser="hermess"))


def test_models_have_their_length(own: openai.OpenAI, own_engine: Engine) -> None:
    assert own.models.retrieve(NAME).max_model_len == own_engine.target.max_positions  # type: ignore[attr-defined]


def test_metrics_have_the_names_of_vllm(own: openai.OpenAI, address: str) -> None:
    chat(own, max_tokens=4)
    with urlopen(f"{address}/metrics", timeout=PATIENCE) as reply:
        text = reply.read().decode()
    label = f'{{model_name="{NAME}"}}'
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:"))
    assert float(values[f"vllm:generation_tokens_total{label}"]) == metric(address, "new_tokens_total")
    assert float(values[f"vllm:prefix_cache_queries_total{label}"]) == metric(address, "prompt_tokens_total")
    assert float(values[f"vllm:spec_decode_num_drafts_total{label}"]) > 0
    assert float(values[f"vllm:request_time_per_output_token_seconds_count{label}"]) > 0
    assert float(values[f"vllm:num_requests_running{label}"]) >= 0
    assert float(values[f"vllm:time_to_first_token_seconds_count{label}"]) > 0
    assert f'vllm:e2e_request_latency_seconds_bucket{{le="+Inf",model_name="{NAME}"}}' in values


@pytest.fixture
def event_loop_of_this_thread() -> Iterator[None]:
    """Closes the event loop of a library that would leave one open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("event_loop_of_this_thread")
def test_litellm(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it the library asks another server for prices.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    given = {
        "model": f"openai/{NAME}",
        "api_base": f"{address}/v1",
        "api_key": KEY,
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "extra_body": UNTHINKING,
    }
    weather(litellm.completion(**given).choices[0].message.tool_calls[0])
    chunks = list(litellm.completion(**given, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    weather(built.choices[0].message.tool_calls[0])
    assert built.choices[0].finish_reason == "tool_calls"


@pytest.mark.filterwarnings("ignore")
def test_ten_calls_of_an_agent(address: str) -> None:
    """An agent of smolagents, whose model is made to call the same tool in every step."""
    smolagents = pytest.importorskip("smolagents")
    asked = []

    class Weather(smolagents.Tool):
        name, description, output_type = "weather", "The weather of a city.", "string"
        inputs = {  # noqa: RUF012 - the library reads an attribute of the class
            "city": {"type": "string", "enum": ["Bonn", "Ulm"], "description": "city"},
            "days": {"type": "integer", "description": "days"},
        }

        def forward(self, city: str, days: int) -> str:
            asked.append((city, days))
            return f"{len(asked)} degrees"

    model = smolagents.OpenAIModel(
        NAME, f"{address}/v1", KEY, tool_choice=NAMED, max_tokens=120, temperature=0, extra_body=UNTHINKING
    )
    agent = smolagents.ToolCallingAgent([Weather()], model, max_steps=10, verbosity_level=0)
    steps = list(agent.run("What is the weather in Bonn?", stream=True))
    calls = [call for step in steps for call in getattr(step, "tool_calls", None) or []]
    assert len(asked) == 10, [getattr(step, "error", None) for step in steps]
    assert {call.name for call in calls} == {"weather"}

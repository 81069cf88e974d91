"""Formats of tool calls and reasoning: what is read, from any pieces, and what grammars of calls allow."""

import copy
import itertools
import json
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from triforce_tree.engine import Engine
from triforce_tree.grammar import EBNF
from triforce_tree.grammar.matching import Grammars, Matcher, words_of
from triforce_tree.server.grammars import GrammarTexts
from triforce_tree.server.tools.calls import Shape
from triforce_tree.server.tools.formats import FORMATS, NO_CALLS, Parsing, format_name
from triforce_tree.server.tools.message import Message
from triforce_tree.server.tools.spans import Reasoning, Spans

THINK = Reasoning("<think>", "</think>")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {
    "weather": WEATHER,
    "time.now": {"type": "object", "properties": {"utc": {"type": "boolean"}}},
}
W, SEP, END = "weather", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"

# For each format: a text, its content, its reasoning, and its calls.
READ: list[tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        "",
        "",
        [(W, {"city": "Bonn"})],
    ),
    (
        "hermes",
        '<think>\nWhere? </think>\n\nI look.\n<tool_call>{"name": "weather", "arguments": "{\\"days\\": 2}"}'
        '</tool_call>\n<tool_call>\n{"name": "other"}\n</tool_call>\n',
        "I look.",
        "\nWhere? ",
        [(W, {"days": 2}), ("other", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        "",
        "",
        [(W, {"city": "</tool_call>"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}',
        "",
        "",
        [(W, {"city": "a\nb"})],
    ),
    (
        "qwen3_coder",
        "So:\n<tool_call>\n<function=weather>\n<parameter=city>\nBad\nEms <b>\n</parameter>\n"
        "<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "So:",
        "",
        [(W, {"city": "Bad\nEms <b>", "days": 3})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=time.now><parameter=utc>True</parameter></function></tool_call>",
        "",
        "",
        [("time.now", {"utc": True})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</function>\n</tool_call>",
        "",
        "",
        [(W, {"city": "12"})],
    ),
    (
        "glm",
        "<think>x</think><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "",
        "x",
        [(W, {"city": "Bonn", "days": 2})],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}',
        "",
        "",
        [(W, {"city": "Bonn"})],
    ),
    (
        "llama3_json",
        ' {"name": "weather", "parameters": {}}; {"name": "time.now", "arguments": {}}',
        "",
        "",
        [(W, {}), ("time.now", {})],
    ),
    ("llama3_json", '{"name": "Bonn", "parameters": {}}', '{"name": "Bonn", "parameters": {}}', "", []),
    (
        "pythonic",
        "[weather(city='Bonn', days=-2), time.now(utc=true)]",
        "",
        "",
        [(W, {"city": "Bonn", "days": -2}), ("time.now", {"utc": True})],
    ),
    ("pythonic", "[weather(city=[1, {'a': None}])]", "", "", [(W, {"city": [1, {"a": None}]})]),
    ("pythonic", "[1, 2]", "[1, 2]", "", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", "", []),
    (
        "mistral",
        'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]time.now[CALL_ID]abcdefghi[ARGS]{}',
        "Yes.",
        "",
        [(W, {"city": "Bonn"}), ("time.now", {})],
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "Bonn"}', "", "", [(W, {"city": "Bonn"})]),
    (
        "mistral_json",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}, "id": "abcdefghi"}]',
        "",
        "",
        [(W, {"city": "Bonn"})],
    ),
    (
        "deepseek_v3",
        f'Hm{BEGIN}function{SEP}weather\n```json\n{{"city": "Bonn"}}\n```{END}\n'
        f"<｜tool▁call▁begin｜>function{SEP}time.now\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>",
        "Hm",
        "",
        [(W, {"city": "Bonn"}), ("time.now", {})],
    ),
    (
        "deepseek_v31",
        f'{BEGIN}weather{SEP}{{"city": "Bonn"}}{END}<｜tool▁call▁begin｜>time.now{SEP}'
        f"{{}}{END}<｜tool▁calls▁end｜>",
        "",
        "",
        [(W, {"city": "Bonn"}), ("time.now", {})],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}',
        "I look. ",
        "Where?",
        [(W, {"city": "Bonn"})],
    ),
    (
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>',
        "",
        "",
        [(W, {"city": "Bonn"})],
    ),
    ("harmony", "<|channel|>final<|message|>Rain < sun.<|return|>", "Rain < sun.", "", []),
    ("harmony", "no <headers|>", "no <headers|>", "", []),
    ("none", "<think> a</think>b", "b", " a", []),
]
# Texts that begin like calls and are none.
MALFORMED = [
    ("hermes", " x \n<tool_call>\n{'name': 1}\n</tool_call> y "),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>" * 3),
    ("hermes", '<tool_call>{"a": "' + "</tool_call>" * 30 + "<tool_"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=f>text<parameter=a>1</parameter></function></tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
    ("pythonic", "[" * 500 + "]" * 500),
    ("pythonic", "[weather(city='Bo"),
    ("mistral", "a [TOOL_CALLS] b"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>a<｜tool▁calls▁end｜>"),
    ("harmony", "<|channel|>commentary to=functions.weather<|message|>[1]<|call|>"),
    ("harmony", "<|channel|>" + "x" * 2000),
    ("harmony", "<|channel|>" * 100),
]


def parsed(name: str, text: str, cuts: list[int], reasoning: Reasoning | None = THINK) -> Message:
    message = Message(Parsing(name, TOOLS, reasoning))
    ends = [0, *sorted(cuts), len(text)]
    content = thoughts = ""
    calls: list[tuple[str, str]] = []
    for deltas in (*(message.put(text[a:b]) for a, b in itertools.pairwise(ends)), message.end()):
        for delta in deltas:
            content, thoughts = content + delta.content, thoughts + delta.reasoning
            if delta.call is not None:
                before = ("", "") if delta.begins else calls.pop()
                calls.append((delta.call.name, before[1] + delta.arguments))
    assert (content, thoughts, calls) == all_of(message)
    return message


def all_of(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(each.name, each.arguments) for each in message.calls]


@pytest.mark.parametrize("name, text, content, reasoning, calls", READ)
def test_texts_are_read(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    message = parsed(name, text, [])
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [(each.name, json.loads(each.arguments)) for each in message.calls] == calls
    assert [each.number for each in message.calls] == list(range(len(calls)))


# Calls whose arguments have begun and do not end, or are followed by text: the content, and the arguments.
BROKEN = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bo', "", '{"city": "Bo'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>b', "b", '{"a": NaN}'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": [1}</tool_call> b', " b", '{"a": [1}'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}} b', " b", "{}"),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nBo</par", "", '{"city": "Bo</par'),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>3", "", '{"days": '),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bo</arg_value",
        "",
        '{"city": "Bo</arg_value',
    ),
    ("llama3_json", '{"name": "weather", "parameters": {}} and more', " and more", "{}"),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"a": 1} b', " b", '{"a": 1}'),
    ("deepseek_v31", f'{BEGIN}weather{SEP}{{"city": "Bo', "", '{"city": "Bo'),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "B', "", '{"city": "B'),
]


@pytest.mark.parametrize("name, text, content, arguments", BROKEN)
def test_calls_that_have_begun_stay_calls(name: str, text: str, content: str, arguments: str) -> None:
    for cuts in ([], range(len(text))):
        message = parsed(name, text, list(cuts), None)
        assert all_of(message) == (content, "", [(W, arguments)])


# The beginning of a call, its arguments as the model writes them, and its end.
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name": "weather", "parameters": ', "}"),
    "mistral": ("[TOOL_CALLS]weather[ARGS]", ""),
    "mistral_json": ('[TOOL_CALLS][{"name": "weather", "arguments": ', "}]"),
    "deepseek_v3": (f"{BEGIN}function{SEP}weather\n```json\n", f"\n```{END}<｜tool▁calls▁end｜>"),
    "deepseek_v31": (f"{BEGIN}weather{SEP}", f"{END}<｜tool▁calls▁end｜>"),
    "harmony": ("<|channel|>commentary to=functions.weather<|message|>", "<|call|>"),
    "qwen3_coder": ("<tool_call>\n<function=weather>\n", "</function>\n</tool_call>"),
    "glm": ("<tool_call>weather\n", "</tool_call>"),
}


def written(name: str, arguments: dict[str, Any]) -> str:
    """Returns arguments as the model writes them."""
    if name not in ("qwen3_coder", "glm"):
        return json.dumps(arguments, ensure_ascii=False)
    form = "<parameter={}>\n{}\n</parameter>\n"
    if name == "glm":
        form = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    return "".join(form.format(key, text) for key, text in texts.items())


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_read_while_they_are_written(name: str) -> None:
    """Texts are read but for what may be a marker, whatever they contain."""
    generator, (begin, end) = random.Random(name), WRITTEN[name]
    bits = [
        "Bonn", '"', "\\", "\n", "é😀", "{", "}}", "]", "<", "</par", "</parameter>", "<b>", "`",
        "</arg_value>", "x" * 50,
    ]  # fmt: skip
    for _ in range(60):
        city = "".join(generator.choices(bits, k=generator.randrange(9)))
        city = "Bonn" if city.startswith("<") and name == "qwen3_coder" else city
        arguments = {"city": city, "days": generator.randrange(-9, 99)}
        text = begin + written(name, arguments) + end
        for cuts in ([], range(len(text)), sorted(generator.choices(range(len(text)), k=5))):
            [(tool, found)] = all_of(parsed(name, text, list(cuts)))[2]
            assert (tool, json.loads(found)) == (W, arguments), text
    message = Message(Parsing(name, TOOLS, None))
    text = begin + written(name, {"city": "B" * 40, "days": 3}) + end
    for place in range(len(text)):
        message.put(text[place])
        if message.calls:
            seen = text[: place + 1].count("B")
            assert seen - message.calls[0].arguments.count("B") <= 1


@pytest.mark.parametrize("name, text", MALFORMED, ids=lambda value: value[:30])
def test_malformed_calls_are_text(name: str, text: str) -> None:
    whole = Message(Parsing(name, TOOLS, None))
    whole.put_whole(text)
    assert not whole.calls
    # The header of a message and markers at its end are not part of a text that is no call.
    assert whole.content == text or (name == "harmony" and "[1]" in whole.content)


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_do_not_change_the_message(name: str) -> None:
    """Fragments of calls in any order, cut at any places, give what the whole text gives."""
    generator = random.Random(name)
    form = FORMATS[name]
    own = [text for other, text, *_ in READ if other == name] + [
        text for other, text in MALFORMED if other == name
    ]
    bits = [
        *form.markers,
        "<think>",
        "</think>",
        " ",
        "\n",
        "a",
        '{"name": "weather", "arguments": {}}',
        "{",
        '"',
        "}",
    ]
    for _ in range(400):
        parts = []
        for _ in range(generator.randrange(1, 8)):
            text = generator.choice(own or bits)[:400]
            start, end = sorted(generator.randrange(len(text) + 1) for _ in range(2))
            parts.append(generator.choice([text, text[start:end], generator.choice(bits)]))
        text = "".join(parts)
        reasoning = generator.choice([None, THINK, Reasoning("<think>", "</think>", inside=True)])
        whole = all_of(parsed(name, text, [], reasoning))
        cuts = [generator.randrange(len(text) + 1) for _ in range(generator.randrange(20))]
        assert all_of(parsed(name, text, cuts, reasoning)) == whole, (text, cuts)
        assert all_of(parsed(name, text, list(range(len(text))), reasoning)) == whole, text
        if not whole[2]:
            kept = "".join(whole[:2]).replace("<think>", "").replace("</think>", "").split()
            given = text.replace("<think>", "").replace("</think>", "").split()
            assert name == "harmony" or sorted("".join(kept)) == sorted("".join(given))


@pytest.mark.parametrize(
    "name, text, first, last",
    [
        ("hermes", "<think>Where? I look.</think>Rain < sun. <think>no</think>", "<think>", "</think>"),
        ("none", "<think>" + "It rains. " * 9, "<think>", "rains. "),
        ("none", "It rains. <think>", "", ""),
        ("glm", "<think>a</think><tool_call>weather</tool_call>", "<think>", "</think>"),
        (
            "harmony",
            "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>final<|message|>Rain.",
            "<|channel|>analysis",
            "<|end|>",
        ),
        ("harmony", "a<|channel|>analysis<|message|>Where? <|e", "<|channel|>", "<|e"),
    ],
)
def test_tokens_of_reasoning_are_counted(name: str, text: str, first: str, last: str) -> None:
    """A token counts where it begins, between the first marker and the end of the first last one."""
    generator = random.Random(text)
    start, stop = text.index(first), text.index(last, text.index(first)) + len(last)
    stop = len(text) if last in ("rains. ", "<|e") else stop
    for _ in range(20):
        starts = sorted(generator.choices(range(len(text)), k=12))
        message = parsed(name, text, starts[::3])
        assert message.reasoning_tokens(starts) == sum(start <= place < stop for place in starts)


def test_one_call_where_no_parallel_ones_are_wanted() -> None:
    call = '<tool_call>{"name": "weather"}</tool_call>'
    message = Message(Parsing("hermes", TOOLS, None), parallel=False)
    message.put_whole(call + call)
    assert len(message.calls) == 1


def test_identifiers_of_mistral_have_nine_characters() -> None:
    message = parsed("mistral", "[TOOL_CALLS]a[ARGS]{}", [])
    [call] = message.calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.fixture(params=[False, True], ids=["ordinary", "special"])
def tokenizer(request: pytest.FixtureRequest, engine: Engine, name: str) -> PreTrainedTokenizerBase:
    """A tokenizer, in which the markers of the format may be special tokens."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    assert tokenizer is not None
    # The grammars of GLM have markers of arguments that are ordinary tokens, as in its tokenizers.
    if request.param:
        markers = [each for each in FORMATS[name].markers if "arg" not in each]
        tokenizer.add_special_tokens({"extra_special_tokens": markers})
    return tokenizer


def generated(
    name: str, shape: Shape, before: str, tokenizer: PreTrainedTokenizerBase, tries: int = 10
) -> list[str]:
    """Returns random texts with a structure that begin with ``before`` and end within 300 tokens."""
    size = len(tokenizer)
    text = GrammarTexts(tokenizer, size).text(shape)
    grammars, generator, found = Grammars(tokenizer, size), random.Random(name), list[str]()
    bits = torch.empty(1, words_of(size), dtype=torch.int32)
    # Tokens with closing characters are preferred, so that strings and lists end.
    closing = torch.tensor([bool({*tokenizer.decode([id])} & {*'"}])>'}) for id in range(size)])
    for _ in range(tries):
        matcher, ids = grammars.matcher(EBNF(text), [0]), tokenizer(before)["input_ids"]
        matcher.accept(ids)
        while not matcher.ended and len(ids) < 300:
            Matcher.fill([matcher], bits, [0])
            mask = (bits[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
            allowed = mask.view(-1)[:size].bool()
            preferred = allowed & closing
            choices = preferred if preferred.any() and generator.random() < 0.7 else allowed
            chosen = generator.choice(choices.nonzero().view(-1).tolist())
            ids.append(0 if allowed[0] and generator.random() < 0.5 else chosen)
            matcher.accept(ids[-1:])
        if matcher.ended:
            found.append(tokenizer.decode(ids[:-1]))
    return found


@pytest.mark.parametrize("reasoning", [None, THINK, Reasoning("<think>", "</think>", inside=True)])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != NO_CALLS])
def test_grammars_of_calls_allow_what_is_read(
    name: str, reasoning: Reasoning | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Random texts of a grammar are calls with arguments that their schemas allow."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("xgrammar")
    before = "" if reasoning is None else "a</think>" if reasoning.inside else "<think>a</think>"
    if before and name == "harmony":
        before = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    texts = generated(name, FORMATS[name].calls_shape(TOOLS, reasoning, True), before, tokenizer)
    assert texts
    for text in texts:
        message = Message(Parsing(name, TOOLS, reasoning))
        message.put_whole(text)
        assert message.calls, text
        assert not message.content
        assert not before or message.reasoning == "a"
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


FREE = "Rain < sun, {a} [b] `c`. "


@pytest.mark.parametrize("name", [name for name in FORMATS if name != NO_CALLS])
def test_texts_are_free_up_to_a_call(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A call that the model begins is one of an offered tool, with arguments that its schema allows."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("xgrammar")
    form = FORMATS[name]
    shape = form.text_shape(TOOLS, THINK, True)
    if name == "harmony":
        thoughts = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
        free, opening = f"{thoughts}<|channel|>final<|message|>{FREE}", f"{thoughts}<|channel|>commentary to="
    else:
        assert isinstance(form, Spans)
        thoughts, opening = "<think>a</think>", form.opening[-1]
        free = thoughts + FREE
        opening = thoughts + opening if form.at_start else free + opening
    assert generated(name, shape, free, tokenizer)
    texts = generated(name, shape, opening, tokenizer, 20)
    assert texts
    for text in texts:
        message = Message(Parsing(name, TOOLS, THINK))
        message.put_whole(text)
        assert message.reasoning == "a"
        assert message.content.startswith(FREE.strip() if FREE in text else "")
        assert message.calls, text
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


@pytest.mark.parametrize(
    "template, name",
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]", "mistral"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [", "mistral_json"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ('<tool_call>\n{"name": ', "hermes"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        (
            '{"name": function name, "parameters": dictionary}<|python_tag|>'.replace(
                "parameters", "parameters"
            ),
            "llama3_json",
        ),
        ("{{ message.content }}", "none"),
    ],
)
def test_formats_are_chosen_by_the_template(template: str, name: str) -> None:
    assert format_name(template) == name

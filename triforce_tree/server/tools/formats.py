"""The registry of formats, and the choice of one for a tokenizer."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from triforce_tree.server.tools.calls import Call, MalformedCallError, Shape, Tools
from triforce_tree.server.tools.deepseek import DeepSeek
from triforce_tree.server.tools.harmony import Harmony
from triforce_tree.server.tools.hermes import Hermes
from triforce_tree.server.tools.llama import LlamaJson, Pythonic
from triforce_tree.server.tools.mistral import Mistral
from triforce_tree.server.tools.pieces import Pieces
from triforce_tree.server.tools.spans import Format, Parser, Reasoning, Spans
from triforce_tree.server.tools.xml import Glm, QwenXml


class _NoCalls:
    """The format of models whose calls are not known."""

    opening: tuple[str, ...] = ()
    closing, at_start = "", False
    markers: tuple[str, ...] = ()
    id_length: int | None = None
    pieces: Pieces | None = None

    def fits(self, template: str) -> bool:
        return True

    def calls(self, text: str, tools: Tools) -> list[Call]:
        raise MalformedCallError("no calls are known")

    def shape(self, tools: Tools, several: bool) -> Shape:
        raise MalformedCallError("no calls are known")


NO_CALLS = "none"
# The first one that fits a chat template is taken.
FORMATS: dict[str, Format] = {
    "harmony": Harmony(),
    "mistral": Spans(Mistral()),
    "mistral_json": Spans(Mistral(listed=True)),
    "deepseek_v3": Spans(DeepSeek()),
    "deepseek_v31": Spans(DeepSeek(fenced=False)),
    "qwen3_coder": Spans(QwenXml()),
    "glm": Spans(Glm()),
    "hermes": Spans(Hermes()),
    "pythonic": Spans(Pythonic()),
    "llama3_json": Spans(LlamaJson()),
    NO_CALLS: Spans(_NoCalls()),
}
# Markers of reasoning, in the chat template or the vocabulary.
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Parsing:
    """How the texts of one request are parsed. It can be sent to another process.

    Attributes:
        name: the name of the format.
        tools: the tools that the model may call.
        reasoning: the markers of reasoning; None if it is not separated.
    """

    name: str = NO_CALLS
    tools: Tools = field(default_factory=dict)
    reasoning: Reasoning | None = None

    @property
    def format(self) -> Format:
        return FORMATS[self.name]

    @property
    def markers(self) -> tuple[str, ...]:
        """The names of special tokens that the text must show."""
        own = self.format.markers if self.tools or self.name == "harmony" else ()
        return own if self.reasoning is None else (*own, self.reasoning.opening, self.reasoning.closing)

    def parser(self) -> Parser:
        return self.format.parser(self.tools, self.reasoning)


def format_name(template: str) -> str:
    """Returns the name of the first format that fits a chat template."""
    return next(name for name, each in FORMATS.items() if each.fits(template))


def reasoning_markers(template: str, vocabulary: Collection[Any]) -> Reasoning | None:
    """Returns the markers of reasoning that a model writes, or None."""
    for opening, closing in _REASONING:
        if closing in template or (opening in vocabulary and closing in vocabulary):
            return Reasoning(opening, closing)
    return None

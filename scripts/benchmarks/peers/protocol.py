"""What an engine is to the benchmark ``peers``: requests, answers and the modes that are compared.

This module and those in ``engines`` use the standard library and the engine's own package alone, so that they
run in a Python that has nothing else of this project's.
"""

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """What an engine loads.

    Attributes:
        target: a folder in safetensors, or a GGUF file.
        dtype: of the weights of a folder, such as "bfloat16"; None for a GGUF file.
        mode: one of the engine's ``modes``.
        draft, head: folder of a draft model, and of an EAGLE-3 head; None without.
        max_length: tokens of the longest prompt with its new tokens.
        batch: prompts of a request.
        threads: on a CPU.
    """

    target: str
    dtype: str | None
    mode: str
    draft: str | None
    head: str | None
    max_length: int
    batch: int
    threads: int


@dataclass(frozen=True)
class Request:
    """One request for the same number of new tokens after each prompt. Texts do not end before.

    Attributes:
        prompts: token ids; all prompts have the same length.
        temperature: 0 is greedy. No token is left out otherwise.
        seed: of the draws.
    """

    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    seed: int


@dataclass
class Answer:
    """The new tokens of a request, and when they came.

    Attributes:
        tokens: of each sequence.
        stamps: (seconds since the request, CPU seconds of the process by then, sequence, number of tokens
            that came).
        passes: forwards of the target after the first token; None: as many as there are later stamps.
        prepared: whether the engine made or captured stages within the answer, so that the same request is
            faster when it comes again.
    """

    tokens: list[list[int]]
    stamps: list[tuple[float, float, int, int]] = field(default_factory=list)
    passes: int | None = None
    prepared: bool = False


class Clock:
    """Makes an answer while tokens come."""

    def __init__(self, batch: int) -> None:
        self.answer = Answer([[] for _ in range(batch)])
        self._start = time.perf_counter()

    def came(self, sequence: int, tokens: list[int]) -> None:
        """Notes the new tokens of a sequence."""
        if tokens:
            now = time.perf_counter() - self._start
            self.answer.stamps.append((now, time.process_time(), sequence, len(tokens)))
            self.answer.tokens[sequence] += tokens


class Engine(Protocol):
    """An engine in one mode, in a process of its own. It computes every prompt anew."""

    packages: tuple[str, ...]
    """The names of the distributions whose versions a row gives; the first one is needed."""

    def modes(self, draft: bool, head: bool) -> list[str]:
        """Returns the modes to compare; NAME:K is a mode with K proposed tokens."""

    def takes(self, target: str) -> bool:
        """Returns whether the engine reads this kind of checkpoint."""

    def load(self, load: Load) -> None:
        """Loads the models. Any exception is a reason for which the mode is not measured."""

    def generate(self, request: Request) -> Answer: ...


# Name -> module in ``engines`` with a class ``Engine``.
ENGINES = {
    "ours": "ours",
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama_cpp",
}


def engine(name: str) -> Engine:
    """Returns an engine that has loaded nothing; its package is imported by ``load``."""
    made: Engine = import_module(f"scripts.benchmarks.peers.engines.{ENGINES[name]}").Engine()
    return made


def is_gguf(target: str) -> bool:
    return target.endswith(".gguf")


def split_mode(mode: str) -> tuple[str, int]:
    """Returns the name of a mode and its number of proposed tokens, 0 without."""
    name, _, size = mode.partition(":")
    return name, int(size or 0)

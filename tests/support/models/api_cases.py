"""A small target with its greedy output, and helpers to call ``generate`` on it."""

import string
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import triforce_tree
from tests.support.distributions.block_folders import block
from tests.support.distributions.head_folders import eagle
from tests.support.models.families import greedy, perturbed, prompt_of, tiny, without_tree
from triforce_tree import Engine
from triforce_tree.config import load_arguments

SMALL = {"gamma": 3, "tree": "best-first:3,2", "budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6}
SMALL_LOOKUP = without_tree(SMALL)
PROMPT = prompt_of(41)
TARGET = tiny("llama-gqa")
EXPECTED = greedy(TARGET, PROMPT, 40)
# Engines of short prefills, whose prompts share whole chunks of them.
CHUNK = 16
CHUNKED = {**SMALL_LOOKUP, "prefill_chunk": CHUNK}
CHUNKED_DRAFTED = {**SMALL, "prefill_chunk": CHUNK}
CHARACTERS = string.ascii_letters + string.digits + " ."


def _drafting(**options: Any) -> Callable[[], Engine]:
    return lambda: triforce_tree.load(
        TARGET, perturbed(TARGET, 0.05), **load_arguments({**options, **CHUNKED_DRAFTED})
    )


SHARING: dict[str, Callable[[], Engine]] = {
    "plain": lambda: triforce_tree.load(TARGET, levels=1, **load_arguments(CHUNKED)),
    "two levels": _drafting(levels=2, rounds=1),
    "three levels": _drafting(levels=3, rounds=2),
    "passes chosen": _drafting(),
    "8 bits": _drafting(levels=3, rounds=2, kv_bits=8),
    "with variances": _drafting(levels=3, rounds=2, key_variance=True),
    "EAGLE": lambda: triforce_tree.load(
        TARGET, drafter=eagle(TARGET, "chain:3"), levels=2, **load_arguments({**CHUNKED, "rounds": 1})
    ),
    "block": lambda: triforce_tree.load(
        TARGET,
        drafter=block(TARGET, "chain:3", inputs=(0,)),
        levels=2,
        **load_arguments({**CHUNKED, "rounds": 1}),
    ),
}


@cache
def small_engine() -> Engine:
    """Three levels with a draft that is often accepted; tests must not change it."""
    return triforce_tree.load(
        TARGET, perturbed(TARGET, 0.1), tokenizer=characters(), levels=3, **load_arguments(SMALL)
    )


def characters() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 64 characters."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def new(out: GenerateDecoderOnlyOutput, prompt: list[int] = PROMPT) -> list[int]:
    assert out.sequences[0, : len(prompt)].tolist() == prompt
    return out.sequences[0, len(prompt) :].tolist()


def ours(engine: Engine, **kwargs) -> list[int]:
    return new(engine.generate(PROMPT, **kwargs))


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1

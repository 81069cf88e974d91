"""Engines for tests of sessions, and what they generate without one."""

from functools import cache
from typing import Any

import triforce_tree
from tests.support.models.api_cases import characters
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments

PROMPT = prompt_of(150)
NINE: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}. {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def made(family: str, **options: Any) -> Engine:
    if family == "lfm2":
        return triforce_tree.load(recurrent(family), levels=1, advanced={"prefill_chunk": 16})
    target = tiny(family)
    tokenizer = characters()
    tokenizer.chat_template = TEMPLATE
    own = {**SMALL, "window": 40, **options}
    return triforce_tree.load(target, perturbed(target, 0.05), tokenizer=tokenizer, **load_arguments(own))


def engine(**options: Any) -> Engine:
    return made("llama-gqa").with_options(**load_arguments(options))


def cold(prompt: list[int], family: str = "llama-gqa") -> list[int]:
    return (
        made(family)
        .with_options(advanced={"prefix_cache": False})
        .generate(prompt, **NINE)
        .sequences[0]
        .tolist()
    )

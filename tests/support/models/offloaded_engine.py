"""An engine whose cache is offloaded, and the greedy tokens that it should emit."""

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree import load
from triforce_tree.config import load_arguments
from triforce_tree.engine import Engine

PROMPT, NEW = prompt_of(150), 40


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama-gqa")
    return target, perturbed(target, 0.05)


@cache
def expected() -> list[int]:
    return greedy(models()[0], PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


def engine(**options: Any) -> Engine:
    target, draft = models()
    return load(target, draft, **load_arguments({**SMALL, "offload": True, **options}))

"""Needles in one text, which is prefilled once: questions about it share its keys and values."""

import random
from collections.abc import Sequence

from triforce_tree import Engine
from triforce_tree.eval.needle import ANSWER_TOKENS
from triforce_tree.eval.text import token_ids
from triforce_tree.pair import needle as planted


def planted_in(engine: Engine, ids: Sequence[int], count: int, seed: int) -> tuple[list[int], dict[str, str]]:
    """As many tokens with ``count`` facts at even depths, and the numbers by name."""
    draw, tokenizer = random.Random(seed), engine.tokenizer
    assert tokenizer is not None
    numbers = {
        name: "".join(draw.choices("0123456789", k=planted.DIGITS))
        for name in draw.sample(planted.names(), count)
    }
    facts = [token_ids(tokenizer, planted.fact(name, number)) for name, number in numbers.items()]
    hay = list(ids[: len(ids) - sum(map(len, facts))])
    text: list[int] = []
    for number, fact in enumerate(facts):
        text += [*hay[number * len(hay) // count : (number + 1) * len(hay) // count]]
        # In the middle of its part.
        middle = len(text) - len(hay) // count // 2
        text[middle:middle] = fact
    return text, numbers


def found_share(engine: Engine, ids: Sequence[int], count: int, seed: int) -> float:
    """Share of the needles in a text that greedy decoding answers with exactly the number."""
    text, numbers = planted_in(engine, ids, count, seed)
    assert engine.tokenizer is not None
    hits = 0
    for name, number in numbers.items():
        question = token_ids(engine.tokenizer, planted.question(name))
        # Whole chunks of the text are kept from the question before.
        out = engine.generate([*text, *question], max_new_tokens=ANSWER_TOKENS, do_sample=False)
        hits += str(out.text).strip().startswith(number)
    return hits / count

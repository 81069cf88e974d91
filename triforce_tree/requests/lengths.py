"""Checks the length of prompts against a model's positions before the model's weights are read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from triforce_tree.loading.gguf import gguf_configuration
from triforce_tree.loading.gguf_header import is_gguf
from triforce_tree.loading.model_files import configuration
from triforce_tree.models.supported import max_positions
from triforce_tree.option_checks import check_positions
from triforce_tree.requests.chat import Chat, chats_of, encoded
from triforce_tree.requests.tokenized_texts import Tokenizer

# More tokens than a tokenizer adds to a text.
_SPECIAL = 16


def texts_of(inputs: Any) -> list[str | Chat]:
    """Returns the texts and chats among the prompts of a call; the list is empty if they are token ids.

    Raises:
        ValueError: the messages cannot be used.
    """
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(each, str) for each in inputs):
        return list(inputs)
    return list(chats_of(inputs) or ())


def check_prompts(
    source: PreTrainedModel | str | Path,
    tokenizer: Tokenizer | None,
    prompts: Iterable[str | Chat],
    new_tokens: int,
) -> None:
    """Raise an error for prompts that are too long for a model, before its weights are read.

    Args:
        source: the model, its folder or its hub id.
        tokenizer: the tokenizer; with None nothing is checked.
        prompts: the texts and chats.
        new_tokens: number of tokens to generate after each prompt.

    Raises:
        ValueError: a prompt has too many tokens, or the tokenizer refuses it.
        OSError: raised by :func:`configuration`.
    """
    if tokenizer is None:
        return
    config: Any
    if isinstance(source, PreTrainedModel):
        config = source.config
    else:
        config = gguf_configuration(source) if is_gguf(source) else configuration(source)[1]
    positions = max_positions(config.get_text_config(decoder=True))
    if positions is None:
        return
    for prompt in prompts:
        # A token has at least a byte; a chat's template may add any number.
        most = len(prompt.encode("utf-8", "replace")) + _SPECIAL if isinstance(prompt, str) else positions
        if most + new_tokens > positions:
            check_positions(len(encoded(tokenizer, prompt, positions)), new_tokens, positions)

"""What a generation returns: transformers' own output, and what it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from triforce_tree.runtime.stats import LevelStats, added


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output (``.sequences`` int64 ``[B, W + N]``) and what it took.

    ``sequences`` is the prompt as it was given, ``[B, W]`` with its padding, and N columns of new tokens:
    those of a row, then the pad token where others have more.

    ``finish_reason``: "eos", "stop" or "length". ``new_tokens``: how many. ``text``: the new text, where a
    tokenizer is at hand. Of these three a batch of several rows has lists, with one entry a row.

    ``levels``: statistics of each level over all rows, level 0 first. ``prefill_seconds`` and
    ``decode_seconds``: host time. ``capture_seconds``: what compiling and capturing CUDA graphs took, once
    for all texts that fit them. ``profile``: the file whose settings were used; None for the engine's own.
    ``memory``: the map of the memory, where rows may be offloaded.
    """

    levels: list[LevelStats] | None = None
    finish_reason: str | list[str] | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    new_tokens: int | list[int] | None = None
    text: str | list[str] | None = None
    capture_seconds: float | None = None
    profile: str | None = None
    memory: dict[str, Any] | None = None


def by_row(values: Sequence[Any]) -> Any:
    """The value of a single row, or a list of those of several."""
    return values[0] if len(values) == 1 else list(values)


def appended(ids: Tensor, new: Sequence[Sequence[int]], padding: int) -> torch.LongTensor:
    """int64 ``[B, W + N]``: ids ``[B, W]``, then each row's new tokens, padded to N."""
    rows = [ids.new_tensor(list(tokens)) for tokens in new]
    columns = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    # transformers annotates its outputs with the legacy class.
    return cast(torch.LongTensor, torch.cat([ids, columns], 1))


def joined(outputs: Sequence[GenerateOutput], ids: Tensor, padding: int) -> GenerateOutput:
    """One output for the rows of ids ``[B, W]``, which were decoded one after the other."""
    last = outputs[-1]
    new = [o.sequences[0, o.sequences.shape[1] - cast(int, o.new_tokens) :].tolist() for o in outputs]
    last.sequences = appended(ids, new, padding)
    last.prefill_seconds = sum(o.prefill_seconds or 0.0 for o in outputs)
    last.decode_seconds = sum(o.decode_seconds or 0.0 for o in outputs)
    levels: list[LevelStats] = []
    for output in outputs:
        levels = added(levels, output.levels or [])
    last.levels = levels
    for name in ("finish_reason", "new_tokens", "text"):
        values = [getattr(o, name) for o in outputs]
        setattr(last, name, None if None in values else by_row(values))
    return last

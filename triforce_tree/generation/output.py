"""The output of a generation: transformers' own, with statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from triforce_tree.runtime.stats import LevelStats, added


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output (``.sequences`` int64 ``[B, W + N]``) with statistics.

    ``sequences`` is the prompt as it was given, ``[B, W]`` with its padding, and N columns of new tokens; a
    sequence with fewer than N is filled with the pad token.

    ``finish_reason``: "eos", "stop" or "length". ``new_tokens``: their number. ``text``: the new text, if the
    engine has a tokenizer. For a batch of several sequences these three are lists with one entry each.

    ``levels``: statistics of each level over all sequences, level 0 first. ``prefill_seconds`` and
    ``decode_seconds``: host time. ``capture_seconds``: compiling and capturing CUDA graphs, once for all
    prompts that fit them. ``profile``: the file whose settings were used; None for the engine's own.
    ``memory``: the memory map, where KV slots may be offloaded.
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
    """The value of a single sequence, or a list of those of several."""
    return values[0] if len(values) == 1 else list(values)


def appended(ids: Tensor, new: Sequence[Sequence[int]], padding: int) -> torch.LongTensor:
    """int64 ``[B, W + N]``: ids ``[B, W]``, then each sequence's new tokens, padded to N."""
    rows = [ids.new_tensor(list(tokens)) for tokens in new]
    columns = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    # transformers annotates its outputs with the legacy class.
    return cast(torch.LongTensor, torch.cat([ids, columns], 1))


def joined(outputs: Sequence[GenerateOutput], ids: Tensor, padding: int) -> GenerateOutput:
    """One output for the sequences of ids ``[B, W]``, which were decoded one by one."""
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

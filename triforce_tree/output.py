"""What a generation returns: transformers' own output, and what it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from triforce_tree.stats import LevelStats


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output (``.sequences`` int64 ``[B, L]``, prompt included) and what it took.

    ``levels``: statistics of each level, level 0 first (of the last row, where there are several).
    ``finish_reason``: "eos", "stop" or "length". ``prefill_seconds`` and ``decode_seconds``: host time.
    ``text``: the new text, where a tokenizer is at hand. ``captured``: whether the cycle ran in CUDA graphs,
    and ``capture_seconds`` what compiling and capturing them took, once for all texts that fit them.
    ``profile``: the file whose settings were used; None for the engine's own. ``memory``: the map of the
    memory, where rows may be offloaded.
    """

    levels: list[LevelStats] | None = None
    finish_reason: str | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    new_tokens: int | None = None
    text: str | None = None
    captured: bool | None = None
    capture_seconds: float | None = None
    profile: str | None = None
    memory: dict[str, Any] | None = None


def joined(outputs: Sequence[GenerateOutput], model: PreTrainedModel) -> GenerateOutput:
    """One output for rows that were decoded one by one."""
    last = outputs[-1]
    last.sequences = padded([o.sequences[0] for o in outputs], model)
    last.prefill_seconds = sum(o.prefill_seconds or 0.0 for o in outputs)
    last.decode_seconds = sum(o.decode_seconds or 0.0 for o in outputs)
    last.new_tokens = sum(o.new_tokens or 0 for o in outputs)
    return last


def padded(rows: list[Tensor], model: PreTrainedModel) -> torch.LongTensor:
    """int64 ``[B, L]``; shorter rows are padded at the end."""
    config = model.generation_config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    pad = next((i for i in (config.pad_token_id, eos) if i is not None), 0)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    return cast(torch.LongTensor, tokens)  # transformers annotates its outputs with the legacy class

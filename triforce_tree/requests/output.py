"""The output of a generation: the output class of transformers with statistics."""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.requests.scores import by_position
from triforce_tree.runtime.stats import LevelStats, added
from triforce_tree.text.new_text import new_text
from triforce_tree.text.vocabulary import Vocabulary


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output class of transformers (``.sequences`` int64 ``[B, W + N]``) with statistics.

    ``sequences`` is the prompt as it was given, ``[B, W]`` with its padding, followed by N columns of new
    tokens. A sequence with fewer than N new tokens is filled with the pad token.

    ``finish_reason`` is "eos", "stop" or "length". ``new_tokens`` is the number of new tokens. ``text`` is
    the new text if the engine has a tokenizer, without special tokens and the end token; a leading space is
    kept, so that it can be appended to the prompt. For a batch of several sequences each of the three is a
    list.

    ``logits`` and ``scores`` (with ``output_logits=True``, ``output_scores=True``) are as in transformers:
    for each of the N columns fp32 ``[B, V]``, the target's raw and processed logits that the token was chosen
    by. ``logprobs`` (with ``logprobs=True``) is fp32 ``[B, N]``, the log-probability of each new token by its
    raw logits, whatever the sampling options. All three are 0 after the end of a sequence. They are on the
    device of ``sequences``, or in host memory if KV slots are offloaded.

    ``sequences_scores`` (with ``output_scores=True``) and ``beam_indices`` are set by beam search, as in
    transformers. With several samples per prompt (``num_return_sequences``) and ``logprobs=True``,
    ``sequences_scores`` is the sum of each sample's ``logprobs``, fp32 ``[B]``.

    ``reused_tokens`` is the number of prompt tokens whose keys and values were kept from an earlier call; for
    a batch it is a list.

    ``levels`` has the statistics of each level over all sequences, level 0 first. ``prefill_seconds`` and
    ``decode_seconds`` are host time. ``capture_seconds``, which is part of neither, is the time to make the
    stages. On a GPU this compiles and captures CUDA graphs and makes level 1's copy of the weights, if it has
    one. It happens before prefill, once for all prompts that fit the stages, and between passes when a new
    tree shape is first used. ``memory`` is the memory map if KV slots may be offloaded. ``ranks`` is set
    under torchrun: over how many processes ``heads`` and ``positions`` are split.
    """

    logprobs: Tensor | None = None
    levels: list[LevelStats] | None = None
    finish_reason: str | list[str] | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    new_tokens: int | list[int] | None = None
    text: str | list[str] | None = None
    capture_seconds: float | None = None
    memory: dict[str, Any] | None = None
    ranks: dict[str, int] | None = None
    reused_tokens: int | list[int] | None = None
    sequences_scores: Tensor | None = None
    beam_indices: Tensor | None = None


def output_of(
    input_ids: Tensor,
    sequences: Sequences[Sequence],
    padding: int,
    vocabulary: Vocabulary | None,
    capture_seconds: float,
    scores: Mapping[str, Any],
) -> GenerateOutput:
    """Returns the output of finished sequences, with the target's statistics alone.

    Args:
        input_ids: the prompts as the output begins with them, int64 ``[B, W]``.
        padding: the token that fills shorter sequences.
        vocabulary: decodes the texts; None for no texts.
        scores: the values of ``logits``, ``scores`` and ``logprobs``, as far as they were requested.
    """
    new = [sequence.new for sequence in sequences]
    levels: list[LevelStats] = []
    for sequence in sequences:
        levels = added(levels, [sequence.target])
    texts = vocabulary and [
        new_text(vocabulary, sequence.prompt, tokens, sequence.ending.stop_tokens)
        for sequence, tokens in zip(sequences, new, strict=True)
    ]
    return GenerateOutput(
        sequences=appended(input_ids, new, padding),
        levels=levels,
        finish_reason=by_row([sequence.finish_reason for sequence in sequences]),
        prefill_seconds=max(sequence.prefill_seconds for sequence in sequences),
        decode_seconds=max(sequence.decode_seconds for sequence in sequences),
        new_tokens=by_row([len(tokens) for tokens in new]),
        text=by_row(texts) if texts else None,
        capture_seconds=capture_seconds,
        reused_tokens=by_row([sequence.reused for sequence in sequences]),
        **scores,
    )


def by_row(values: Sequences[Any]) -> Any:
    """Returns the value itself if there is one sequence, and a list of values if there are several."""
    return values[0] if len(values) == 1 else list(values)


def appended(ids: Tensor, new: Sequences[Sequences[int]], padding: int) -> torch.LongTensor:
    """Returns int64 ``[B, W + N]``: the ids ``[B, W]`` followed by each sequence's new tokens, padded to
    N.
    """
    rows = [ids.new_tensor(list(tokens)) for tokens in new]
    columns = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    # transformers annotates its outputs with the legacy class.
    return cast(torch.LongTensor, torch.cat([ids, columns], 1))


def joined(outputs: Sequences[GenerateOutput], ids: Tensor, padding: int) -> GenerateOutput:
    """Returns one output for the sequences of ``ids`` ``[B, W]``, which were decoded one by one. ``outputs``
    are not changed.
    """
    last = copy.copy(outputs[-1])
    new = [o.sequences[0, o.sequences.shape[1] - cast(int, o.new_tokens) :].tolist() for o in outputs]
    last.sequences = appended(ids, new, padding)
    last.prefill_seconds = sum(o.prefill_seconds or 0.0 for o in outputs)
    last.decode_seconds = sum(o.decode_seconds or 0.0 for o in outputs)
    levels: list[LevelStats] = []
    for output in outputs:
        levels = added(levels, output.levels or [])
    last.levels = levels
    for name in ("logits", "scores"):
        # Each prompt may have options of its own.
        if any(getattr(o, name) is not None for o in outputs):
            columns = by_position([[row[0] for row in getattr(o, name) or ()] for o in outputs])
            setattr(last, name, columns)
    found = [o.logprobs for o in outputs if o.logprobs is not None]
    if found:
        rows = [found[0].new_zeros(0) if o.logprobs is None else o.logprobs[0] for o in outputs]
        last.logprobs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    for name in ("finish_reason", "new_tokens", "text", "reused_tokens"):
        values = [getattr(o, name) for o in outputs]
        setattr(last, name, None if None in values else by_row(values))
    return last

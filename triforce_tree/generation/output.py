"""The output of a generation: transformers' own, with statistics."""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.generation.batch.scores import by_position
from triforce_tree.runtime.stats import LevelStats, added
from triforce_tree.text.new_text import new_text
from triforce_tree.text.vocabulary import Vocabulary


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output (``.sequences`` int64 ``[B, W + N]``) with statistics.

    ``sequences`` is the prompt as it was given, ``[B, W]`` with its padding, and N columns of new tokens; a
    sequence with fewer than N is filled with the pad token.

    ``finish_reason``: "eos", "stop" or "length". ``new_tokens``: their number. ``text``: the new text, if the
    engine has a tokenizer, without special tokens and the end token; it goes on from the prompt's, a first
    space included. For a batch of several sequences these three are lists with one entry each.

    ``logits`` and ``scores`` (with ``output_logits=True``, ``output_scores=True``): as in transformers, for
    each of the N columns fp32 ``[B, V]``, the target's raw and processed logits that the token was chosen by.
    ``logprobs`` (with ``logprobs=True``): fp32 ``[B, N]``, the log-probability of each new token by its raw
    logits, whatever the sampling options. All three are 0 after the end of a sequence. They are on the device
    of ``sequences``, or in host memory where KV slots are offloaded.

    ``sequences_scores`` (with ``output_scores=True``), ``beam_indices``: of beam search, as in transformers.
    Of several samples (``num_return_sequences``, with ``logprobs=True``) ``sequences_scores`` is the sum of
    each one's ``logprobs``, fp32 ``[B]``.

    ``reused_tokens``: of the prompt, those whose keys and values were kept from an earlier call; a list for a
    batch.

    ``levels``: statistics of each level over all sequences, level 0 first. ``prefill_seconds`` and
    ``decode_seconds``: host time. ``capture_seconds``, in neither of them: making stages, which on a GPU
    compiles and captures CUDA graphs, and level 1's copy of the weights, if it has one, once for all prompts
    that fit them; before prefill, or for further shapes of tree between two passes. ``memory``: the memory
    map, where KV slots may be offloaded. ``ranks``: under torchrun, over how many processes ``heads`` and
    ``positions`` are split.
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
    tokenizer: PreTrainedTokenizerBase | None,
    capture_seconds: float,
    scores: Mapping[str, Any],
) -> GenerateOutput:
    """The output of sequences that have ended, whose prompts are ``input_ids`` ``[B, W]``.

    Its statistics are the target's alone, over these sequences.

    Args:
        scores: what was asked for of ``logits``, ``scores`` and ``logprobs``.
    """
    new = [sequence.new for sequence in sequences]
    levels: list[LevelStats] = []
    for sequence in sequences:
        levels = added(levels, [sequence.target])
    vocabulary = tokenizer and Vocabulary(tokenizer)
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


def placed(out: GenerateOutput, prompt: Tensor, moves_scores: bool) -> GenerateOutput:
    """The output with the prompt ``[B, W]`` as it was given, on its device.

    Args:
        moves_scores: whether logits, scores and log-probabilities are moved there too.
    """
    new = out.sequences[:, prompt.shape[1] :].to(prompt.device)
    # transformers annotates its outputs with the legacy class.
    out.sequences = cast(torch.LongTensor, torch.cat([prompt, new], 1))
    if moves_scores:
        for name in ("logits", "scores"):
            if (rows := getattr(out, name)) is not None:
                setattr(out, name, tuple(row.to(prompt.device) for row in rows))
        if out.logprobs is not None:
            out.logprobs = out.logprobs.to(prompt.device)
    return out


def by_row(values: Sequences[Any]) -> Any:
    """The value of a single sequence, or a list of those of several."""
    return values[0] if len(values) == 1 else list(values)


def appended(ids: Tensor, new: Sequences[Sequences[int]], padding: int) -> torch.LongTensor:
    """int64 ``[B, W + N]``: ids ``[B, W]``, then each sequence's new tokens, padded to N."""
    rows = [ids.new_tensor(list(tokens)) for tokens in new]
    columns = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    # transformers annotates its outputs with the legacy class.
    return cast(torch.LongTensor, torch.cat([ids, columns], 1))


def joined(outputs: Sequences[GenerateOutput], ids: Tensor, padding: int) -> GenerateOutput:
    """One output for the sequences of ids ``[B, W]``, which were decoded one by one; theirs stay."""
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
        if getattr(last, name) is not None:
            columns = by_position([[row[0] for row in getattr(o, name)] for o in outputs])
            setattr(last, name, columns)
    if last.logprobs is not None:
        rows = [cast(Tensor, o.logprobs)[0] for o in outputs]
        last.logprobs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    for name in ("finish_reason", "new_tokens", "text", "reused_tokens"):
        values = [getattr(o, name) for o in outputs]
        setattr(last, name, None if None in values else by_row(values))
    return last

"""What a user gives to be continued, as rows of token ids."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

Inputs = str | Sequence[int] | Tensor


def token_rows(
    inputs: Inputs,
    attention_mask: Tensor | None,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
) -> list[list[int]]:
    """Token ids of each text.

    Args:
        inputs: text, token ids, or int64 ``[L]`` / ``[B, L]``.
        attention_mask: of the same shape; tokens under 0 are left out.
        tokenizer: for text.
        vocabulary: how many ids there are.

    Raises:
        ValueError: text without a tokenizer, an empty row, an id outside the vocabulary.
    """
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: load(..., tokenizer=...)")
        rows = [tokenizer(inputs)["input_ids"]]
    elif isinstance(inputs, Tensor):
        rows = (inputs if inputs.dim() == 2 else inputs[None]).tolist()
    else:
        rows = [list(inputs)]
    if attention_mask is not None:
        seen = (attention_mask if attention_mask.dim() == 2 else attention_mask[None]).tolist()
        rows = [[t for t, m in zip(r, s, strict=True) if m] for r, s in zip(rows, seen, strict=True)]
    for row in rows:
        if not row:
            raise ValueError("the prompt is empty; give at least one token")
        if not 0 <= min(row) <= max(row) < vocabulary:
            worst = max(row) if max(row) >= vocabulary else min(row)
            raise ValueError(f"token id {worst} lies outside the vocabulary of {vocabulary}")
    return rows

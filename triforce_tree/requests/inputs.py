"""Reads prompts in every accepted form, and returns padded token ids.

Multimodal models continue text alone: their inputs for images, video and sound must be empty.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.loading.gguf import gguf_configuration
from triforce_tree.loading.gguf_header import is_gguf
from triforce_tree.loading.model_files import configuration
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.supported import max_positions
from triforce_tree.option_checks import check_positions
from triforce_tree.requests.chat import Chat, chats_of, encoded
from triforce_tree.requests.tokenized_texts import Tokenizer
from triforce_tree.runtime.token_ids import left_padded

Ids = Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any] | Tensor
Inputs = str | Sequence[str] | Chat | Sequence[Chat] | Ids | Mapping[str, Any]

_FORMS = "give text, a list of texts, a list of messages, token ids [L] or [B, L], or a tokenizer's output"
IdArray = np.ndarray[Any, np.dtype[np.int64]]
# A tokenizer adds fewer tokens than this to a text.
_SPECIAL = 16
_OTHER = re.compile(
    "pixel|image|video|audio|patch|grid|second_per|input_features|input_values|feature_att|^mm_"
)
# 0 for text, others for the tokens that stand for an image. Models of text alone may have other types.
_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts.

    Attributes:
        ids: int64 ``[B, W]`` as they were given, padding included; the output begins with them.
        input_ids, attention_mask: int64 ``[B, W]``, the prompts with all padding on the left; the mask is 0
            where a token is padding.
        tokens: the token ids of each prompt without padding.
    """

    ids: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    tokens: list[list[int]]


def prompts_of(
    target: HFModel,
    tokenizer: Tokenizer | None,
    inputs: Inputs | None,
    input_ids: Ids | None = None,
    attention_mask: Ids | None = None,
    padding: int = 0,
    inferred: int | None = None,
) -> Prompts:
    """Reads one prompt or several.

    Args:
        target: gives the vocabulary, the most tokens of a prompt, and the device of the ids unless they are
            given as a tensor.
        tokenizer: needed for text. For chats it needs a chat template.
        inputs: text or texts; a chat (a list of messages) or chats; token ids ``[L]``, ``[B, L]`` or lists of
            different lengths; or the output of a tokenizer for any of these.
        input_ids: token ids under transformers' keyword, instead of ``inputs``.
        attention_mask: has the shape of the ids; tokens with mask 0 are padding.
        padding: the token that fills shorter sequences on the left.
        inferred: the token that transformers treats as padding in tensors ``[B, L]`` without a mask.

    Raises:
        ValueError: the form is another one; a prompt is empty; an id is outside the vocabulary; a text is too
            long.
    """
    if inputs is not None and input_ids is not None:
        raise ValueError("the prompt was given twice, as inputs and as input_ids; leave one of them out")
    given: Any = inputs if input_ids is None else input_ids
    if given is None:
        raise ValueError(f"there is no prompt: {_FORMS}")
    # A tensor of the caller's own stays on its device.
    device = given.device if isinstance(given, Tensor) else target.device
    if isinstance(given, Mapping):
        given, attention_mask = _opened(given, attention_mask)
    texts = texts_of(given)
    if texts is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask belongs to token ids, and the prompt is text; leave it out")
        if tokenizer is None:
            what = "a text prompt needs" if isinstance(texts[0], str) else "messages need"
            raise ValueError(f"{what} a tokenizer: load(..., tokenizer=...)")
        sequences = [np.array(encoded(tokenizer, each, target.max_positions), np.int64) for each in texts]
    else:
        sequences = [_whole(sequence, "token id") for sequence in _sequences(given, "the prompt")]
    if attention_mask is not None:
        mask = [np.array(sequence, dtype=np.int64) for sequence in _mask(sequences, attention_mask)]
    elif getattr(given, "ndim", 0) == 2 and inferred is not None:
        mask = [(sequence != inferred).astype(np.int64) for sequence in sequences]
    else:
        mask = [np.ones_like(sequence) for sequence in sequences]
    real = [sequence[seen != 0] for sequence, seen in zip(sequences, mask, strict=True)]
    check_tokens(real, target.vocab_size)
    ids = left_padded(sequences, padding, device)
    if any((seen == 0).any() for seen in mask):
        triples = zip(sequences, mask, real, strict=True)
        sequences = [np.concatenate([sequence[seen == 0], own]) for sequence, seen, own in triples]
        mask = [np.sort(seen) for seen in mask]
    moved, shown = left_padded(sequences, padding, device), left_padded(mask, 0, device)
    return Prompts(ids, moved, shown, [sequence.tolist() for sequence in real])


def prompt_of(target: HFModel, tokenizer: Tokenizer | None, inputs: Inputs) -> list[int]:
    """Returns the token ids of a single prompt; arguments and errors are those of :func:`prompts_of`."""
    prompts = prompts_of(target, tokenizer, inputs).tokens
    if len(prompts) > 1:
        raise ValueError(f"one prompt is needed, and {len(prompts)} were given; leave the others out")
    return prompts[0]


def real_tokens(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Returns the token ids of each prompt in ``ids`` int64 ``[B, W]`` whose mask is not 0."""
    sequences: list[list[int]] = ids.tolist()
    if mask is None or bool((mask != 0).all()):
        return sequences
    seen = (mask != 0).tolist()
    return [list(compress(*each)) for each in zip(sequences, seen, strict=True)]


def check_tokens(sequences: Sequence[Sequence[int] | IdArray | Tensor], vocabulary: int) -> None:
    """Raises ValueError if a sequence is empty or an id is outside the vocabulary."""
    if not len(sequences):
        raise ValueError("the list of prompts is empty; give at least one")
    for number, sequence in enumerate(sequences, 1):
        if len(sequence) == 0:
            which = "the prompt" if len(sequences) == 1 else f"prompt {number} of {len(sequences)}"
            raise ValueError(f"{which} is empty; give at least one token")
        # Python's own take 30 times as long for 100,000 tokens.
        if isinstance(sequence, (np.ndarray, Tensor)):
            least, most = int(sequence.min()), int(sequence.max())
        else:
            least, most = min(sequence), max(sequence)
        if least < 0 or most >= vocabulary:
            worst = most if most >= vocabulary else least
            raise ValueError(
                f"token id {worst} lies outside the vocabulary of {vocabulary}; give ids from 0 to "
                f"{vocabulary - 1}, or the tokenizer of this model if the prompt is a text"
            )


def _opened(batch: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Returns the ids and the mask of a tokenizer's output."""
    if "input_ids" not in batch:
        names = ", ".join(map(repr, batch)) or "nothing"
        hint = "; put messages into a list" if "role" in batch else ""
        raise ValueError(f"a prompt of {names} has no input_ids; {_FORMS}{hint}")
    extra = sorted(set(batch) - {"input_ids", "attention_mask"})
    if extra:
        raise ValueError(
            f"{extra[0]} is not supported by triforce_tree, which continues token ids alone; leave it out of "
            "the tokenizer's output"
        )
    if attention_mask is not None and batch.get("attention_mask") is not None:
        raise ValueError("attention_mask was given twice, beside and in the prompt; leave one of them out")
    return batch["input_ids"], batch.get("attention_mask", attention_mask)


def texts_of(given: Any) -> list[Any] | None:
    """Returns the prompts of a call if they are texts or chats, and None if they are token ids.

    Raises:
        ValueError: the prompts are bytes, texts among others, or messages that cannot be used.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, (bytes, bytearray)):
        raise ValueError("the prompt is bytes; decode it: generate(data.decode('utf-8'))")
    if (chats := chats_of(given)) is not None:
        return chats
    kinds = set(map(type, given)) if isinstance(given, (list, tuple)) else set()
    if not any(issubclass(kind, str) for kind in kinds):
        return None
    if len(kinds) > 1:
        raise ValueError(f"the prompt mixes text with {_named(kinds - {str})}; {_FORMS}")
    return list(given)


def _sequences(given: Any, what: str) -> list[Any]:
    """Returns the given ids as a list of sequences, each a list or a tensor of one dimension."""
    if isinstance(given, (Tensor, np.ndarray)):
        if given.ndim not in (1, 2):
            raise ValueError(f"{what} has shape {list(given.shape)}; give [L], or [B, L] for a batch")
        if isinstance(given, Tensor) and (given.is_meta or given.layout != torch.strided):
            kind = f"{given.layout} on {given.device}"
            raise ValueError(f"{what} is a tensor of another kind ({kind}); give a dense one with data")
        return list(given) if given.ndim == 2 else [given]
    if not isinstance(given, (list, tuple, range)):
        raise ValueError(f"{what} is of type {type(given).__name__}; {_FORMS}")
    if set(map(type, given)) == {int}:
        return [given]
    nested = [isinstance(item, (list, tuple, range)) or getattr(item, "ndim", 0) > 0 for item in given]
    if any(nested) and not all(nested):
        raise ValueError(f"{what} mixes rows and single numbers; give [L], or [B, L] for a batch")
    return list(given) if any(nested) else [given]


def _whole(sequence: Any, what: str) -> IdArray:
    """Returns a copy of one sequence as integers."""
    if isinstance(sequence, (Tensor, np.ndarray)):
        kind = str(sequence.dtype).removeprefix("torch.")
        if sequence.ndim != 1 or not kind.startswith(("int", "uint")):
            raise ValueError(
                f"{what}s are {kind} of shape {list(sequence.shape)}; give integers, such as int64"
            )
        # Numbers that int64 does not hold would change their signs.
        sequence = sequence.numpy(force=True) if isinstance(sequence, Tensor) else sequence
        numbers: Any = sequence.tolist() if kind == "uint64" else sequence
    else:
        numbers = sequence if set(map(type, sequence)) == {int} else _integers(sequence, what)
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{what} {max(numbers, key=abs)} lies outside every vocabulary") from None


def _integers(sequence: Any, what: str) -> list[int]:
    try:
        if any(isinstance(item, (bool, np.bool_)) for item in sequence):
            raise TypeError
        return [index(item) for item in sequence]
    except TypeError:
        kinds = {type(item) for item in sequence if isinstance(item, bool) or not hasattr(item, "__index__")}
        raise ValueError(f"{what}s must be integers, not {_named(kinds)}; {_FORMS}") from None


def _mask(sequences: list[IdArray], attention_mask: Any) -> list[list[int]]:
    """Returns the mask (1 for a token, 0 for padding) as lists of the same lengths as ``sequences``."""
    mask = [
        sequence.tolist() if hasattr(sequence, "tolist") else list(sequence)
        for sequence in _sequences(attention_mask, "the mask")
    ]
    shape, wanted = [len(sequence) for sequence in mask], [len(sequence) for sequence in sequences]
    if shape != wanted:
        raise ValueError(
            f"attention_mask has {_shape(shape)} entries, the prompt {_shape(wanted)} tokens; give it the "
            "shape of the ids"
        )
    odd = [m for sequence in mask for m in sequence if m not in (0, 1)]
    if odd:
        raise ValueError(f"attention_mask holds {odd[0]!r}; give 1 for a token and 0 for padding")
    return [[int(m) for m in sequence] for sequence in mask]


def _shape(lengths: list[int]) -> str:
    return " x ".join(map(str, (len(lengths), *sorted(set(lengths))[-1:])))


def _named(kinds: set[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds))


def check_lengths(
    source: PreTrainedModel | str | Path,
    tokenizer: Tokenizer | None,
    prompts: Iterable[str | Chat],
    new_tokens: int,
) -> None:
    """Raises an error for prompts that are too long for a model, before its weights are read.

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


def text_alone(given: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Returns a model's inputs without the empty inputs of other modalities that processors add for text.

    For text-only models all inputs are returned.

    Raises:
        ValueError: an input of another modality is not empty; the message names it.
    """
    config: Any = model.config
    if config.get_text_config(decoder=True) is config:
        return dict(given)
    kept = {}
    # Images come before the types of their tokens, so that the error names the images.
    for name, value in sorted(given.items(), key=lambda item: item[0] in _TYPES):
        if name not in _TYPES and not _OTHER.search(name):
            kept[name] = value
        elif not _empty(name, value):
            what = f"{name} ({', '.join(value)})" if isinstance(value, Mapping) else name
            raise ValueError(
                f"{what} is not supported by triforce_tree, which continues text alone; leave it out, or use "
                "the model's own generate()"
            )
    return kept


def _empty(name: str, value: Any) -> bool:
    if name in _TYPES and value is not None:
        return not bool(torch.as_tensor(value, device="cpu").any())
    if isinstance(value, Mapping):
        return all(_empty("", part) for part in value.values())
    if isinstance(value, Tensor):
        return value.numel() == 0
    return value is None or (hasattr(value, "__len__") and len(value) == 0)

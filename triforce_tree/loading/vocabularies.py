"""Whether target and draft share a tokenizer, and which tokens of different ones are the same."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from triforce_tree.drafters.token_map import TokenMap

LEAST_SHARED = 0.05
"""Least share of the target's vocabulary, and of its own, that a draft of another tokenizer must share."""
# Sizes that differ are taken for paddings of one vocabulary where both are multiples of _PADDED_TO, and the
# difference is at most this share of the larger (Pythia: 50,304 to 50,688; Qwen2.5: 151,936 and 152,064).
_PADDED_TO, _MOST_PADDING = 64, 0.01
# From here on a pair of tokenizers is as good as one, such as those of a model and its chat version.
_NEARLY_ALL = 0.9
_SPACE_OF_BYTES, _SPACE_OF_PIECES = "Ġ", "▁"
_OTHER = "choose another draft, or none (suffix matching)"
_LOG = logging.getLogger(__name__)


def token_map(
    target: int,
    draft: int,
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> TokenMap | None:
    """The draft's token ids for the target's; None where these are the same.

    Two tokenizers are compared by their vocabularies. Where one is not at hand, the sizes decide: equal ones,
    or paddings of one vocabulary, are taken for one tokenizer.

    Args:
        target, draft: sizes of the models' vocabularies, padding included.

    Raises:
        ValueError: the two share too little of either vocabulary; without both tokenizers, sizes
            that padding does not explain.
    """
    own, others = _vocabulary(target_tokenizer), _vocabulary(draft_tokenizer)
    if not own or not others:
        if target != draft and not _paddings(target, draft, own or others):
            raise ValueError(
                f"the draft's vocabulary has {draft} tokens, the target's {target}, and these are not "
                "paddings of one vocabulary; if they have different tokenizers, give both (tokenizer=, "
                f"draft_tokenizer=), or {_OTHER}"
            )
    elif own != others:
        return _shared(target, draft, target_tokenizer, draft_tokenizer)
    return TokenMap.padded(target, draft) if target != draft else None


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """The ids of all tokens; empty where no tokenizer is at hand, or it has no such list."""
    listed = getattr(tokenizer, "get_vocab", None)
    return dict(listed()) if listed is not None else {}


def _paddings(target: int, draft: int, vocabulary: Mapping[str, int]) -> bool:
    """Whether both may be padded sizes of one vocabulary, which is empty where it is not at hand."""
    most = max(vocabulary.values(), default=-1)
    return (
        target % _PADDED_TO == draft % _PADDED_TO == 0
        and abs(target - draft) <= _MOST_PADDING * max(target, draft)
        and most < min(target, draft)
    )


def _shared(target: int, draft: int, target_tokenizer: Any, draft_tokenizer: Any) -> TokenMap:
    """The map of tokens that stand for the same text in both vocabularies.

    A token of the target that the draft lacks is read by the draft as the longest end of its text that is a
    token of the draft: the draft's next token follows that end.
    """
    own = _texts(_vocabulary(target_tokenizer), target)
    others = _texts(_vocabulary(draft_tokenizer), draft)
    ids: dict[bytes, int] = {}
    for token, text in others.items():
        ids.setdefault(text, token)
    shared = {token: ids[text] for token, text in own.items() if text in ids}
    for role in ("bos_token_id", "eos_token_id"):
        # The same function under different names, such as </s> and <|endoftext|>.
        token, counterpart = _role(target_tokenizer, role), _role(draft_tokenizer, role)
        if token in own and counterpart in others and token not in shared:
            shared[token] = counterpart
    _check_share(len(shared), len(own), len(others))
    unknown = _role(draft_tokenizer, "unk_token_id")
    unknown = unknown if unknown in others else 0
    inputs, proposals, taken = [0] * target, [-1] * target, set[int]()
    for token, text in own.items():
        inputs[token] = shared[token] if token in shared else _last_part(text, ids, unknown)
    for token, counterpart in shared.items():
        # Of several tokens of one text the first is proposed.
        if counterpart not in taken:
            proposals[token] = counterpart
            taken.add(counterpart)
    return TokenMap(torch.tensor(inputs), torch.tensor(proposals))


def _check_share(shared: int, own: int, others: int) -> None:
    """Refuse a draft whose tokens are few of the target's, or mostly others; say so of one that lacks some.

    Args:
        shared, own, others: numbers of tokens of both, of the target and of the draft.
    """
    share, used = shared / max(1, own), shared / max(1, others)
    if share < LEAST_SHARED:
        raise ValueError(
            f"the draft's tokenizer has {shared} of the target's {own} tokens ({share:.1%}), but a "
            f"draft of another tokenizer needs at least {LEAST_SHARED:.0%} of them; {_OTHER}"
        )
    if used < LEAST_SHARED:
        raise ValueError(
            f"the target has {shared} of the {others} tokens of the draft's tokenizer ({used:.1%}), but of a "
            f"draft of another tokenizer at least {LEAST_SHARED:.0%} must be the target's; {_OTHER}"
        )
    if min(share, used) < _NEARLY_ALL:
        _LOG.warning(
            "the draft has another tokenizer, with %.0f %% of the target's tokens, which are %.0f %% of its "
            "own; it proposes these alone, and reads others by their ends, so fewer tokens are accepted",
            100 * share, 100 * used,
        )  # fmt: skip


def _role(tokenizer: Any, name: str) -> int:
    """A special token's id, -1 where there is none."""
    token = getattr(tokenizer, name, None)
    return -1 if token is None else int(token)


def _last_part(text: bytes, ids: Mapping[bytes, int], unknown: int) -> int:
    """The id of the longest end of a text that is a token, or ``unknown``."""
    return next((ids[text[at:]] for at in range(1, len(text)) if text[at:] in ids), unknown)


def _texts(vocabulary: Mapping[str, int], size: int) -> dict[int, bytes]:
    """The text of each token with an id below ``size``, as bytes; the lower ids of equal texts first.

    Byte-level vocabularies write a character for each byte; SentencePiece ones write spaces as ``▁`` and
    bytes as ``<0x0A>``.
    """
    tokens = sorted((token, text) for text, token in vocabulary.items() if 0 <= token < size)
    of_bytes, of_pieces = (
        sum(text.startswith(space) for text in vocabulary) for space in (_SPACE_OF_BYTES, _SPACE_OF_PIECES)
    )
    if of_bytes > of_pieces:
        table = _characters_of_bytes()
        return {token: _from_characters(text, table) for token, text in tokens}
    texts = {token: _from_piece(text) if of_pieces else text.encode() for token, text in tokens}
    # A character before the byte of the same text.
    return dict(
        sorted(texts.items(), key=lambda item: vocabulary.get(f"<0x{item[1].hex().upper()}>") == item[0])
    )


def _characters_of_bytes() -> dict[str, int]:
    """The byte of each character by which byte-level vocabularies write it (Radford et al., 2019).

    Printable characters of Latin-1 are their own; the other bytes, in order, are the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _from_characters(text: str, table: Mapping[str, int]) -> bytes:
    try:
        return bytes([table[character] for character in text])
    except KeyError:
        # Special tokens may have other characters.
        return text.encode()


def _is_byte(text: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) is not None


def _from_piece(text: str) -> bytes:
    if _is_byte(text):
        return bytes.fromhex(text[3:5])
    return text.replace(_SPACE_OF_PIECES, " ").encode()

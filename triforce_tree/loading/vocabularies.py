"""Decides whether target and draft share a tokenizer, and maps equal tokens of different tokenizers."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.text.vocabulary import BYTE, bytes_of_characters

LEAST_SHARED = 0.05
"""A draft with another tokenizer must share this fraction of the target's vocabulary and of its own."""
# Two sizes count as paddings of one vocabulary if both are multiples of _PADDED_TO and differ by at most the
# fraction _MOST_PADDING of the larger (Pythia has 50,304 to 50,688; Qwen2.5 has 151,936 and 152,064).
_PADDED_TO, _MOST_PADDING = 64, 0.01
# Two tokenizers that share this fraction, such as those of a model and its chat version, cause no warning.
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
    """Returns the map from the target's token ids to the draft's; None if the ids are equal.

    Two tokenizers are compared by their vocabularies. If one is missing, the sizes decide: models whose sizes
    are equal, or differ only by padding, count as models with one tokenizer.

    Args:
        target, draft: sizes of the models' vocabularies, padding included.

    Raises:
        ValueError: the vocabularies share too few tokens; or a tokenizer is missing, and padding does not
            explain the difference of the sizes.
    """
    targets, drafts = _vocabulary(target_tokenizer), _vocabulary(draft_tokenizer)
    if not targets or not drafts:
        if target != draft and not _paddings(target, draft, targets or drafts):
            raise ValueError(
                f"the draft's vocabulary has {draft} tokens, the target's {target}, and these are not "
                "paddings of one vocabulary; if they have different tokenizers, give both (tokenizer=, "
                f"draft_tokenizer=), or {_OTHER}"
            )
    elif targets != drafts:
        return _shared(target, draft, target_tokenizer, draft_tokenizer)
    return TokenMap.padded(target, draft) if target != draft else None


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of all tokens; empty without a tokenizer, or if it cannot list them."""
    listed = getattr(tokenizer, "get_vocab", None)
    return dict(listed()) if listed is not None else {}


def _paddings(target: int, draft: int, vocabulary: Mapping[str, int]) -> bool:
    """Returns whether two sizes may be paddings of one vocabulary, which is empty if it is unknown."""
    most = max(vocabulary.values(), default=-1)
    return (
        target % _PADDED_TO == draft % _PADDED_TO == 0
        and abs(target - draft) <= _MOST_PADDING * max(target, draft)
        and most < min(target, draft)
    )


def _shared(target: int, draft: int, target_tokenizer: Any, draft_tokenizer: Any) -> TokenMap:
    """Returns the map of tokens that stand for the same text in both vocabularies.

    If the draft lacks a token of the target, it reads instead the longest suffix of the token's text that is
    a token of the draft, since the next token continues this suffix.
    """
    targets = _texts(_vocabulary(target_tokenizer), target)
    drafts = _texts(_vocabulary(draft_tokenizer), draft)
    ids: dict[bytes, int] = {}
    for token, text in drafts.items():
        ids.setdefault(text, token)
    shared = {token: ids[text] for token, text in targets.items() if text in ids}
    for role in ("bos_token_id", "eos_token_id"):
        # Special tokens with the same function may have different names, such as </s> and <|endoftext|>.
        token, counterpart = _role(target_tokenizer, role), _role(draft_tokenizer, role)
        if token in targets and counterpart in drafts and token not in shared:
            shared[token] = counterpart
    _check_share(len(shared), len(targets), len(drafts))
    unknown = _role(draft_tokenizer, "unk_token_id")
    unknown = unknown if unknown in drafts else 0
    inputs, proposals, taken = [0] * target, [-1] * target, set[int]()
    for token, text in targets.items():
        inputs[token] = shared[token] if token in shared else _last_part(text, ids, unknown)
    for token, counterpart in shared.items():
        # If several tokens of the target have one text, only the first is proposed.
        if counterpart not in taken:
            proposals[token] = counterpart
            taken.add(counterpart)
    return TokenMap(torch.tensor(inputs, device="cpu"), torch.tensor(proposals, device="cpu"))


def _check_share(shared: int, targets: int, drafts: int) -> None:
    """Raises ValueError if target and draft share too few tokens, and warns if they share not nearly all.

    Args:
        shared: number of tokens that both have.
        targets, drafts: number of tokens of the target and of the draft.
    """
    share, used = shared / max(1, targets), shared / max(1, drafts)
    if share < LEAST_SHARED:
        raise ValueError(
            f"the draft's tokenizer has {shared} of the target's {targets} tokens ({share:.1%}), but a "
            f"draft of another tokenizer needs at least {LEAST_SHARED:.0%} of them; {_OTHER}"
        )
    if used < LEAST_SHARED:
        raise ValueError(
            f"the target has {shared} of the {drafts} tokens of the draft's tokenizer ({used:.1%}), but of a "
            f"draft of another tokenizer at least {LEAST_SHARED:.0%} must be the target's; {_OTHER}"
        )
    if min(share, used) < _NEARLY_ALL:
        _LOG.warning(
            "the draft has another tokenizer, with %.0f %% of the target's tokens, which are %.0f %% of its "
            "own; it proposes only these, and reads only a suffix of others, so fewer tokens are accepted",
            100 * share, 100 * used,
        )  # fmt: skip


def _role(tokenizer: Any, name: str) -> int:
    """Returns the id of a special token, or -1 if the tokenizer has none."""
    token = getattr(tokenizer, name, None)
    return -1 if token is None else int(token)


def _last_part(text: bytes, ids: Mapping[bytes, int], unknown: int) -> int:
    """Returns the id of the longest proper suffix of a text that is a token, or ``unknown``."""
    return next((ids[text[at:]] for at in range(1, len(text)) if text[at:] in ids), unknown)


def _texts(vocabulary: Mapping[str, int], size: int) -> dict[int, bytes]:
    """Returns the text of each token with an id below ``size``, as bytes; of equal texts the lowest id first.

    Byte-level vocabularies represent each byte by a character; SentencePiece vocabularies write spaces as
    ``▁`` and bytes as ``<0x0A>``.
    """
    tokens = sorted((token, text) for text, token in vocabulary.items() if 0 <= token < size)
    of_bytes, of_pieces = (
        sum(text.startswith(space) for text in vocabulary) for space in (_SPACE_OF_BYTES, _SPACE_OF_PIECES)
    )
    if of_bytes > of_pieces:
        return {token: bytes_of_characters(text) for token, text in tokens}
    texts = {token: _from_piece(text) if of_pieces else text.encode() for token, text in tokens}
    # Byte tokens come last, so that a token for a character precedes the byte token with the same text.
    return dict(
        sorted(texts.items(), key=lambda item: vocabulary.get(f"<0x{item[1].hex().upper()}>") == item[0])
    )


def _from_piece(text: str) -> bytes:
    if byte := BYTE.fullmatch(text):
        return bytes.fromhex(byte[1])
    return text.replace(_SPACE_OF_PIECES, " ").encode()

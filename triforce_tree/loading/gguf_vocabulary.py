"""Bounds the number of tokens of a text by the vocabulary in a GGUF file. Nothing here imports torch."""

from collections.abc import Callable
from pathlib import Path
from unicodedata import normalize

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from triforce_tree.loading.byte_level import characters_of_bytes
from triforce_tree.loading.gguf_header import vocabulary_of

# A vocabulary with this token spells unknown letters by their bytes.
_TOKEN_OF_BYTE = "<0xFF>"
_IN_NO_TEXT = "\U0010ffff" * 2


def least_tokens(path: Path) -> Callable[[str], int] | None:
    """Returns a function that gives a lower bound of a text's tokens under the vocabulary of a GGUF file.

    The bound is the least number of the vocabulary's tokens whose concatenation is the text. The merges and
    the rules that split words can only raise it: by about 1 % for an English text. The tokenizer itself is
    not used because transformers takes seconds to make it.

    Returns:
        None if the file has no vocabulary of a known kind.
    """
    kind, words = vocabulary_of(path) or ("", [])
    if not words or kind not in _SPELLINGS:
        return None
    spelled = _SPELLINGS[kind]
    letters = set(characters_of_bytes().values()) if kind == "gpt2" else set()
    # Some files have tokens such as <think> or two spaces in plain text.
    vocabulary = {*words, *(spelled(word) for word in words if not letters.issuperset(word))}

    def count(text: str) -> int:
        text = spelled(text)
        unknown = set(text) - vocabulary
        if _TOKEN_OF_BYTE not in vocabulary:  # then tokenizers may drop these letters
            text, unknown = text.translate(dict.fromkeys(map(ord, unknown))), set()
        if not text:
            return 0
        parts = {text[at : at + length] for length in (1, 2, 3) for at in range(len(text))}
        useful = unknown.union(word for word in vocabulary if word[:3] in parts and word[-3:] in parts)
        # The best segmentation under equal scores is the shortest. Adjacent tokens with the first id count as
        # one unknown token, so the first id belongs to a word that no text has.
        shortest = Tokenizer(Unigram([(_IN_NO_TEXT, -1.0), *((word, -1.0) for word in useful)], 0, False))
        return len(shortest.encode(text).ids)

    # Some tokenizers compose characters first.
    return lambda text: min(map(count, {text, normalize("NFC", text)}))


def _in_characters_of_bytes(text: str) -> str:
    """Returns a text with a character for each of its bytes, as byte-level vocabularies spell tokens."""
    return text.encode("utf-8", "replace").decode("latin-1").translate(characters_of_bytes())


def _with_marked_spaces(text: str) -> str:
    return text.replace(" ", "▁")


_SPELLINGS: dict[str, Callable[[str], str]] = {
    "gpt2": _in_characters_of_bytes,
    "llama": _with_marked_spaces,
    "gemma4": _with_marked_spaces,
}

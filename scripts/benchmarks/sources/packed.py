"""Packs all texts into one compressed file, for machines where their packages are not installed."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from triforce_tree.runtime.files.writing import replace_file

_FORMAT = "triforce-tree texts 1"
# Tokens of the embedded tokenizer that are kept of each text: the longest prompt, and some for another place.
PROMPT_TOKENS = 122_880
KEPT_TOKENS = PROMPT_TOKENS + 1024


def write(
    path: str | Path,
    texts: Mapping[str, str],
    licences: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase",
    tokens: int = KEPT_TOKENS,
) -> int:
    """Writes beginnings of the texts; returns the file's bytes.

    Args:
        texts: by name.
        licences: by name, kept beside the texts.
        tokens: most of ``tokenizer``'s tokens that are kept of a text.
    """
    content = {
        name: {"licence": licences[name], "text": beginning(text, tokenizer, tokens)}
        for name, text in texts.items()
    }
    data = lzma.compress(json.dumps({"format": _FORMAT, "texts": content}).encode(), preset=9)
    replace_file(path, data)
    return len(data)


def beginning(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int) -> str:
    """Returns the characters of a text's first tokens."""
    # No token has more characters than this on average; encoding more would only take time.
    head = text[: 16 * tokens]
    offsets = tokenizer(head, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    return head[: offsets[tokens][0]] if len(offsets) > tokens else head


def read(path: str | Path) -> dict[str, str]:
    """Returns the texts by name.

    Raises:
        ValueError: :func:`write` did not make this file.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        content = json.loads(lzma.decompress(data))
        if content["format"] != _FORMAT:
            raise KeyError(content["format"])
        return {name: held["text"] for name, held in content["texts"].items()}
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is no file of texts; make one with python -m scripts.benchmarks texts"
        ) from error

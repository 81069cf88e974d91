"""Text of the user's files and of stdin: UTF-8, or what a byte order mark at the beginning announces."""

import codecs
import sys
from pathlib import Path

# The marks of UTF-32 begin with those of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# UTF-16 without a mark is valid UTF-8 where it holds Latin letters, each with a zero byte.
_MOST_ZEROS = 0.2


def read_text(path: str | Path) -> str:
    """A text file, by the rules of :func:`decoded`.

    Raises:
        ValueError: it is empty, or not in one of these encodings.
        OSError: it cannot be read.
    """
    text = decoded(Path(path).read_bytes(), repr(str(path)))
    if not text.strip():
        raise ValueError(f"{str(path)!r} holds no text; give a file with a prompt in it")
    return text


def read_stdin() -> str:
    """All of stdin, by the rules of :func:`decoded`; empty where there is nothing.

    Raises:
        ValueError: it is not in one of these encodings.
    """
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else decoded(binary.read(), "the text on stdin")


def decoded(content: bytes, name: str) -> str:
    """Text of bytes: UTF-8 or, after a byte order mark, UTF-16 or UTF-32; line ends become newlines.

    The mark is no part of the text.

    Args:
        name: what the bytes are, for errors.

    Raises:
        ValueError: they are in none of these encodings.
    """
    mark, encoding = next((entry for entry in _MARKS if content.startswith(entry[0])), (b"", "utf-8"))
    announced = "" if encoding == "utf-8" else f", nor the {encoding.upper()} that its first bytes announce"
    try:
        text = content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text{announced} ({error.reason} at byte {error.start + len(mark)}); "
            "convert it first"
        ) from error
    if text and text.count("\0") > _MOST_ZEROS * len(text):
        raise ValueError(f"{name} is not UTF-8 text (many of its bytes are zero); convert it first")
    return text.replace("\r\n", "\n").replace("\r", "\n")

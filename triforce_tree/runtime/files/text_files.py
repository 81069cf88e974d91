"""Reads text from files and stdin: in UTF-8, or in the encoding of a byte order mark at the beginning."""

import codecs
import sys
from pathlib import Path

# UTF-32 comes before UTF-16, since its marks begin with those of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# UTF-16 without a mark may be valid UTF-8: Latin letters are then followed by a zero byte each. A text with a
# larger fraction of zeros is refused.
_MOST_ZEROS = 0.2


def read_text(path: str | Path) -> str:
    """Reads a text file with :func:`decoded`.

    Raises:
        ValueError: the file is empty or in another encoding.
        OSError: the file cannot be read.
    """
    text = decoded(Path(path).read_bytes(), repr(str(path)))
    if not text.strip():
        raise ValueError(f"{str(path)!r} holds no text; give a file with a prompt in it")
    return text


def read_stdin() -> str:
    """Reads all of stdin with :func:`decoded`.

    Raises:
        ValueError: the text is in another encoding.
    """
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else decoded(binary.read(), "the text on stdin")


def decoded(content: bytes, name: str) -> str:
    """Decodes bytes in UTF-8 or, after a byte order mark, UTF-16 or UTF-32.

    The mark is removed, and all line ends become newlines.

    Args:
        name: the name of the source for errors.

    Raises:
        ValueError: the bytes are in another encoding.
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

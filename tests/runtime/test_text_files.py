"""Text files in the encodings that editors write, and refused ones."""

import codecs
import re
from pathlib import Path

import pytest

from triforce_tree.runtime.files.text_files import decoded, read_text

TEXT = "Ein Satz mit ü, ß und 漢字.\nUnd noch einer.\n"


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_mark_of_the_encoding_is_no_part_of_the_text(
    tmp_path: Path, mark: bytes, encoding: str, line_end: str
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(mark + TEXT.replace("\n", line_end).encode(encoding))
    assert read_text(path) == TEXT


def test_a_mark_within_the_text_stays() -> None:
    assert decoded("a\ufeffb".encode(), "it") == "a\ufeffb"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9", "is not UTF-8 text (unexpected end of data at byte 3)"),
        (b"caf\xe9 au lait", "at byte 3"),
        (codecs.BOM_UTF16_LE + b"a", "nor the UTF-16-LE that its first bytes announce"),
        ("words without a mark".encode("utf-16-le"), "many of its bytes are zero"),
        ("words without a mark".encode("utf-16-be"), "many of its bytes are zero"),
        (codecs.BOM_UTF8 + b"\n \n", "holds no text"),
        (b"", "holds no text"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_text(path)

"""The characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""

from functools import cache


@cache
def characters_of_bytes() -> dict[int, str]:
    """Returns the character of each byte.

    Printable characters of Latin-1 represent themselves; the characters from 256 on represent the other bytes
    in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}

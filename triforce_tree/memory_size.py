"""Parses sizes of memory as people write them."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{name}i": 1 << (10 * power) for power, name in enumerate("KMGT", 1)}
# A smaller number is refused, because its unit was probably forgotten.
_LEAST_SIZE = 1 << 20


def bytes_of(size: int | str, option: str) -> int:
    """Returns the bytes of a size such as ``24GiB``, ``24 GB``, ``24G`` or a plain number.

    Args:
        option: the name of the option for errors.

    Raises:
        ValueError: the text is not a size, or the size is less than 1 MiB.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", str(size), re.IGNORECASE)
    number = 0 if isinstance(size, bool) or found is None else float(found[1])
    if found is None or not 0 < number < 1e18:
        raise ValueError(f"{option}={str(size)[:40]!r} is no size of memory; write it like 24GiB")
    unit = (found[2] or "").upper().replace("I", "i")
    if number * _UNITS[unit] < _LEAST_SIZE:
        like = f"{number:g}GiB" if number <= 1024 else "24GiB"
        raise ValueError(f"{option}={size!r} is less than 1 MiB; write {like}")
    return int(number * _UNITS[unit])

"""Sizes of memory as people write them."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{name}i": 1 << (10 * power) for power, name in enumerate("KMGT", 1)}
# A smaller number lacks its unit.
_LEAST_SIZE = 1 << 20


def bytes_of(size: int | str, option: str) -> int:
    """``24GiB``, ``24 GB``, ``24G`` or a plain number, in bytes; ``option`` is named in errors.

    Raises:
        ValueError: no size, or less than 1 MiB (a number without its unit).
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

"""Checks of single options, whose errors name the value, its limits and what to do."""

from collections.abc import Mapping

# Most tokens of a cache or a window.
MOST_TOKENS = 2**20


def within(name: str, value: object, least: int, most: int = MOST_TOKENS) -> None:
    """Raise ValueError unless the value of an option is an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} and at most {most}")


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raise ValueError unless an option has one of two values or more; True is not 1."""
    if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed):
        *first, last = map(repr, allowed)
        raise ValueError(f"{name}={value!r} must be {', '.join(first)} or {last}")


def alone(option: str, refused: Mapping[str, object]) -> None:
    """Raise ValueError where any of these is given beside an option.

    Args:
        refused: whether each is given, by its name.
    """
    if named := [name for name, given in refused.items() if given]:
        raise ValueError(f"{option} does not work with {named[0]}; leave one of them out")

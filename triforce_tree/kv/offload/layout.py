"""Divides an offloaded cache into parts, for the cache itself and for plans of its memory."""

EVICTED_TOGETHER = 128
"""Tokens that leave the device window at once, rounded up to whole units."""


def round_up(count: int, unit: int) -> int:
    """Returns the next multiple of ``unit``."""
    return -(-count // unit) * unit


def piece_slots(piece_bytes: int, slot_bytes: int, slots: int, unit: int) -> int:
    """Returns the KV slots of a piece of a layer: whole units, about ``piece_bytes``, at least one unit."""
    return max(1, min(piece_bytes // slot_bytes, slots) // unit) * unit


def eviction_block(unit: int) -> int:
    """Returns how many tokens leave the device window at once."""
    return round_up(EVICTED_TOGETHER, unit)


def window_slots(recent: int, unit: int, scratch_slots: int) -> int:
    """Returns the KV slots of the device window: recent tokens, those soon to be evicted, scratch slots."""
    return recent + eviction_block(unit) + scratch_slots

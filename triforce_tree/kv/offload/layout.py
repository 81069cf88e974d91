"""The units and pieces in which an offloaded cache is laid out, by the cache itself and by memory plans."""

from dataclasses import dataclass

from triforce_tree.trees.device_shapes import unit_rows


@dataclass(frozen=True)
class Layout:
    """Sizes of one layer of one sequence in an offloaded cache, in KV slots.

    Attributes:
        unit: whole chunks, and whole tiles of the attention; pieces begin at multiples of it.
        slots: all slots, a multiple of ``unit``.
        piece: slots of one copy to the device, a multiple of ``unit``.
    """

    unit: int
    slots: int
    piece: int

    @classmethod
    def of(cls, max_seq_len: int, chunk: int, slot_bytes: int, piece_bytes: int) -> "Layout":
        """The layout for sequences of up to ``max_seq_len`` tokens.

        Args:
            chunk: of the retrieval cache; 1 without one.
            slot_bytes: of one token's keys and values.
            piece_bytes: most bytes of a piece, unless one unit has more.
        """
        unit = unit_rows(chunk)
        slots = _rounded_up(max_seq_len, unit)
        return cls(unit, slots, max(1, min(piece_bytes // slot_bytes, slots) // unit) * unit)

    def rounded_up(self, slots: int) -> int:
        """The least multiple of ``unit`` that is no smaller than ``slots``."""
        return _rounded_up(slots, self.unit)


def _rounded_up(slots: int, unit: int) -> int:
    return -(-slots // unit) * unit

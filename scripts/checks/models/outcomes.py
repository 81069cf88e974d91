"""Defines a row of the table: how a path of the engine ended for a feature set of a class."""

from dataclasses import asdict, dataclass
from typing import Any

EQUAL = "equal"  # to the text of ``model.generate``
REFUSED = "refused"  # with the reason, as ValueError of our own code
DIFFERS = "differs"
CRASHES = "crashes"  # anything else that is raised, a hang, or the end of the process
NOT_BUILT = "not built"  # no tiny model, or none that transformers itself decodes
SKIPPED = "skipped"  # not on this device
BAD = (DIFFERS, CRASHES)


@dataclass(frozen=True)
class Row:
    """One path of one feature set of a class; ``features`` are what is special about the tiny model.

    ``commit`` is that of older code which the row was kept from; empty for the file's own.
    """

    model_type: str
    model_class: str
    feature_set: str
    path: str
    outcome: str
    reason: str = ""
    features: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model_class, self.feature_set, self.path

    def as_dict(self) -> dict[str, Any]:
        """Returns the record of the results file, where the class is named ``class``."""
        found = {name: value for name, value in asdict(self).items() if value or name != "commit"}
        return {"class" if name == "model_class" else name: value for name, value in found.items()}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Row":
        return cls(**{"model_class" if name == "class" else name: value for name, value in found.items()})

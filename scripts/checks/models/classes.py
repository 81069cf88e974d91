"""The classes of transformers in the table: causal LMs, and multimodal classes used for text."""

from dataclasses import dataclass
from typing import Any

import transformers as hf
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Family:
    """A class, and the first configuration that transformers' mappings name it with.

    Attributes:
        name: of the class.
        model_type: of its configuration.
    """

    name: str
    model_type: str

    @property
    def config_class(self) -> type[Any]:
        """Returns the class's configuration; of several in the mappings the one that it declares."""
        declared: Any = getattr(getattr(hf, self.name), "config_class", None)
        return declared or CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> Any:
        return getattr(hf, self.name)


def families() -> dict[str, Family]:
    """Returns all classes by name, causal LMs first, each with the first model type whose configuration it
    takes.
    """
    found: dict[str, Family] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, name in mapping.items():
            found.setdefault(name, Family(name, model_type))
    return {name: _own_type(family) for name, family in found.items()}


def _own_type(family: Family) -> Family:
    """Returns the family with the model type of its own configuration."""
    declared = getattr(family.config_class, "model_type", "") or family.model_type
    return Family(family.name, declared)

"""Settings of the hierarchy that a target may not admit."""

from triforce_tree.config import HierarchyConfig
from triforce_tree.models.exact.check import check_exact
from triforce_tree.models.few_row import check_low_bits
from triforce_tree.models.hf_model import HFModel


def check_settings(target: HFModel, config: HierarchyConfig) -> None:
    """Raise ValueError where a target cannot be run so; see ``check_low_bits`` and ``check_exact``."""
    if config.levels in ("auto", 3):
        check_low_bits(target.model, config.weight_bits)
    if config.exact:
        check_exact(target)

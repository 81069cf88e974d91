"""Checks that a target can run with the settings of the hierarchy."""

from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention.backend import refuse
from triforce_tree.models.exact.check import check_exact
from triforce_tree.models.few_row import check_low_bits
from triforce_tree.models.hf_model import HFModel


def check_settings(target: HFModel, config: HierarchyConfig) -> None:
    """Raise ValueError if a target cannot run with these settings.

    See ``check_low_bits``, ``check_exact`` and ``kernels.attention.backend.refuse``.
    """
    if config.levels in ("auto", 3):
        check_low_bits(target.model, config.weight_bits)
    if config.exact:
        check_exact(target)
    heads = {shape.heads for shape in target.kv_shapes}
    options = {"kv_bits": config.kv_bits, "exact": config.exact, "offload": config.offloads is not False}
    refuse(config.attention_backend, target.device, target.dtype, heads, options)

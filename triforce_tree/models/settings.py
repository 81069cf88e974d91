"""What the settings of the hierarchy may be for a target."""

from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention.backend import refuse
from triforce_tree.models.exact.host import why_not_exact_on_host
from triforce_tree.models.experts.modules import experts_per_token
from triforce_tree.models.few_row import check_low_bits, foreign_quantisation, why_not_replaceable
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.runtime import distributed

_LEAVE_OUT = "leave out exact"
_DTYPES = (torch.bfloat16, torch.float16)
_CHAIN = "chain:5"


def check_settings(target: HFModel, config: HierarchyConfig) -> None:
    """Raises ValueError if a target cannot run with these settings.

    See also ``check_low_bits`` and ``kernels.attention.backend.refuse``.
    """
    if config.levels in ("auto", 3):
        check_low_bits(target.model, config.weight_bits)
    if config.exact:
        check_exact(target)
    if target.indexed:
        _check_indexed(target.name, config)
    heads = {shape.heads for shape in target.kv_shapes}
    options = {"kv_bits": config.kv_bits, "exact": config.exact, "offload": config.offloads is not False}
    refuse(config.attention_backend, target.device, target.dtype, heads, options)


def _check_indexed(name: str, config: HierarchyConfig) -> None:
    """Raises ValueError if a target whose layers have indexers cannot run with these settings."""
    if config.levels == 3:
        raise ValueError(
            f"levels=3 is not possible with {name}: an indexer already chooses the tokens that its layers "
            "attend to, so a retrieval level would read as much as the target; use levels=2 or levels='auto'"
        )
    for option, given in (("kv_bits=8", config.kv_bits == 8), ("offload=True", config.offload is True)):
        if given:
            raise ValueError(
                f"{option} is not possible with {name}: the slots that its indexers choose are read one "
                "by one, on the device and in its own dtype; leave it out"
            )


def check_exact(target: HFModel) -> None:
    """Raises an error if the bits of a target's row would depend on the other rows of a pass.

    Raises:
        UnsupportedModelError: the model, or its device, has operations without an exact implementation.
        ValueError: the model runs on several ranks.
    """
    if distributed.current() is not None:
        raise ValueError(
            f"exact=True runs on one rank, as sums over ranks depend on their size; {_LEAVE_OUT}"
        )
    if reason := _why_not(target):
        raise UnsupportedModelError(f"exact=True does not serve {target.name}: {reason}; {_LEAVE_OUT}")


def _why_not(target: HFModel) -> str | None:
    model = target.model
    if (method := foreign_quantisation(model)) is not None:
        return f"it is quantised ({method}), and its library chooses products by the number of rows"
    if target.indexed:
        return "it has indexers, whose sums depend on how many tokens a pass has"
    if target.states is not None:
        return "it has recurrent layers, whose sums depend on how many tokens a pass has"
    if experts_per_token(model.config.get_text_config(decoder=True)):
        return "it has experts, whose products depend on how many tokens are routed to each"
    if model.device.type == "cpu":
        return why_not_exact_on_host(model)
    if model.device.type != "cuda":
        return f"there are no such kernels for {model.device.type}"
    if model.dtype not in _DTYPES:
        return f"on a GPU it needs bfloat16 or float16, not {model.dtype}"
    return why_not_replaceable(model)


def within_limits(target: HFModel, draft: HFModel | None, config: HierarchyConfig) -> HierarchyConfig:
    """Returns settings that models with recurrent layers can decode with.

    Args:
        draft: the draft model; None for another drafter. Where it or the target has recurrent layers, the
            default tree becomes a chain: trees of such models were not measured yet.
        config: the settings.

    Raises:
        ValueError: three levels with a target that has recurrent layers.
    """
    if target.states is not None and config.levels == 3:
        raise ValueError(
            f"levels=3 is not possible with {target.name}: level 1 would need recurrent states of its own, "
            "after tokens that level 2 has not verified, and save only what the few layers with attention "
            "read of keys and values; use levels=2 or levels='auto'"
        )
    if draft is None or (target.states is None and draft.states is None):
        return config
    return replace(config, tree=_CHAIN) if config.tree == HierarchyConfig().tree else config

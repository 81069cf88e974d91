"""Checks whether ``exact=True`` supports a model."""

import torch

from triforce_tree.models.exact.host import why_not_exact_on_host
from triforce_tree.models.experts.modules import experts_per_token
from triforce_tree.models.few_row import quantisation, why_not_replaceable
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.runtime import distributed

_LEAVE_OUT = "leave out exact"
_DTYPES = (torch.bfloat16, torch.float16)


def check_exact(target: HFModel) -> None:
    """Raise an error if the bits of a target's row would depend on the other rows of a pass.

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
    if (method := quantisation(model)) is not None:
        return f"it is quantised ({method}), and its library chooses products by the number of rows"
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

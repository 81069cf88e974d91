"""Tensor parallelism: a model cut in place, so that each process holds a share of heads and neurons.

What is cut comes from transformers' own plan for the family. A "colwise" layer keeps this rank's outputs,
a "rowwise" one this rank's inputs, and its outputs are summed over all ranks (Megatron-LM, arXiv
1909.08053): two sums a decoder layer. Embeddings, norms and the head stay whole on every rank. The plan's
own hooks are not used: linear layers are exchanged, compiled and captured here, and a sum must stay an
operator of its own.
"""

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.runtime.distributed import Group, all_reduce

_COLUMNS, _ROWS = "colwise", "rowwise"
# Modules that compute the same on every rank, such as the norm of one head.
_WHOLE = "replicated_with_grad_allreduce"
_ALONE = "run it on one card, without torchrun"


class RowParallel(nn.Module):
    """An ``nn.Linear`` of which this rank has some of the inputs: a product, a sum over all ranks, the bias.

    Args:
        linear: this rank's columns, without the bias.
        bias: of the whole layer; None for none.
        shards: ranks that share it.
    """

    def __init__(self, linear: nn.Linear, bias: Tensor | None, shards: int) -> None:
        super().__init__()
        self.linear, self.bias, self.shards = linear, bias, shards

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features / shards]`` to ``[..., out_features]``, the same on all ranks."""
        out: Tensor = all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias


def shards_of(model: nn.Module) -> int:
    """How many ranks a model is cut for; 1 for a whole one."""
    return next((m.shards for m in model.modules() if isinstance(m, RowParallel)), 1)


@torch.no_grad()
def shard(model: PreTrainedModel, group: Group) -> None:
    """Cut a model in place for this rank; one that is cut already stays as it is.

    Args:
        model: whole, on any device. Its configuration still tells the whole model's counts.

    Raises:
        ValueError: the family has no plan that can be carried out here, or the ranks are too many or too
            few for its heads and neurons; the model is then as it was.
    """
    if shards_of(model) > 1:
        return
    _check_heads(model, group.size)
    for path, style in _planned(model, group.size):
        parent, _, name = path.rpartition(".")
        owner, linear = model.get_submodule(parent), model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if style == _COLUMNS:
            linear.weight = _part(linear.weight, 0, group)
            if linear.bias is not None:
                linear.bias = _part(linear.bias, 0, group)
            linear.out_features //= group.size
        else:
            bias = linear.bias
            linear.register_parameter("bias", None)
            linear.weight = _part(linear.weight, 1, group)
            linear.in_features //= group.size
            setattr(owner, name, RowParallel(linear, bias, group.size))


def _check_heads(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    for name, count in (
        ("key/value heads", getattr(config, "num_key_value_heads", None) or heads),
        ("query heads", heads),
    ):
        if count % size:
            raise ValueError(
                f"{count} {name} of {type(model).__name__} cannot be shared evenly by {size} cards; start as "
                f"many processes as divide {count} (torchrun --nproc-per-node)"
            )


def _planned(model: PreTrainedModel, size: int) -> list[tuple[str, str]]:
    """(path, style) of all linear layers to cut, all of them checked."""
    name = type(model).__name__
    # Entries outside the list of layers are embeddings and the head.
    plan = {key: style for key, style in (model.tp_plan or {}).items() if "*" in key}
    if not plan:
        raise ValueError(f"{name} has no tensor-parallel plan in transformers; {_ALONE}")
    found = []
    for path, module in model.named_modules():
        style = plan.get(_generic(path))
        # A norm over several heads at once would need those of other ranks, and is refused.
        if style is None or (style == _WHOLE and all(p.dim() == 1 for p in module.parameters())):
            continue
        if style not in (_COLUMNS, _ROWS) or type(module) is not nn.Linear:
            raise ValueError(
                f"{name} cannot be cut: its plan asks for {style!r} of {path}, a {type(module).__name__}; "
                f"only linear layers in the styles {_COLUMNS!r} and {_ROWS!r} are served; {_ALONE}"
            )
        width = module.out_features if style == _COLUMNS else module.in_features
        if width % size:
            raise ValueError(
                f"{width} features of {path} cannot be shared evenly by {size} cards; start as many "
                f"processes as divide {width} (torchrun --nproc-per-node)"
            )
        found.append((path, style))
    for path, _ in model.named_parameters():
        if (style := plan.get(_generic(path))) is not None:
            raise ValueError(
                f"{name} cannot be cut: its plan asks for {style!r} of the parameter {path}, and only linear "
                f"layers are served; {_ALONE}"
            )
    if not any(style == _ROWS for _, style in found):
        raise ValueError(f"{name} has no layer that its tensor-parallel plan names; {_ALONE}")
    return found


def _generic(path: str) -> str:
    """A path with a star in place of each number, as plans are written."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _part(whole: Tensor, dim: int, group: Group) -> nn.Parameter:
    """This rank's rows or columns, in memory of their own, so that the whole can go."""
    mine = whole.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(mine, requires_grad=whole.requires_grad)

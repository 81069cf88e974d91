"""Tensor parallelism: a model sharded in place, so that each process holds a share of heads and neurons.

Which layers are sharded is given by transformers' plan for the family. A "colwise" layer keeps this rank's
outputs, a "rowwise" one this rank's inputs, and its outputs are summed over all ranks (Megatron-LM, arXiv
1909.08053): two all-reduces per decoder layer. Embeddings, norms and the head are replicated. The plan's own
hooks are not used: linear layers are replaced, compiled and captured here, and the all-reduce must remain a
separate operator.
"""

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.models.few_row import quantisation
from triforce_tree.runtime.distributed import Group, all_reduce

_COLUMNS, _ROWS = "colwise", "rowwise"
# Modules that compute the same on every rank, such as a norm over one head.
_REPLICATED = "replicated_with_grad_allreduce"
_REMEDY = "run it on one card, without torchrun"


class RowParallel(nn.Module):
    """An ``nn.Linear`` sharded by inputs: the product of this rank's share, an all-reduce, then the bias.

    Args:
        linear: this rank's columns, without the bias.
        bias: of the full layer, or None.
        shards: number of ranks that share the layer.
    """

    def __init__(self, linear: nn.Linear, bias: Tensor | None, shards: int) -> None:
        super().__init__()
        self.linear, self.bias, self.shards = linear, bias, shards

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features / shards]`` to ``[..., out_features]``, the same on all ranks."""
        out: Tensor = all_reduce(self.linear(x), self.shards)
        return out if self.bias is None else out + self.bias


def shards_of(model: nn.Module) -> int:
    """How many ranks a model is sharded over; 1 if it is not sharded."""
    return next((m.shards for m in model.modules() if isinstance(m, RowParallel)), 1)


@torch.no_grad()
def shard(model: PreTrainedModel, group: Group) -> None:
    """Shard a model in place for this rank; a model that is sharded already is left as it is.

    Args:
        model: the full model, on any device. Its configuration keeps the full model's counts.

    Raises:
        ValueError: the family has no plan that is supported here, or its heads or features are not divisible
            by the number of ranks; the model is then unchanged.
    """
    if shards_of(model) > 1:
        return
    if (method := quantisation(model)) is not None:
        raise ValueError(f"{type(model).__name__} is quantised ({method}) and cannot be sharded; {_REMEDY}")
    _check_heads(model, group.size)
    for path, style in _planned(model, group.size):
        parent, _, name = path.rpartition(".")
        owner, linear = model.get_submodule(parent), model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if style == _COLUMNS:
            linear.weight = _shard(linear.weight, 0, group)
            if linear.bias is not None:
                linear.bias = _shard(linear.bias, 0, group)
            linear.out_features //= group.size
        else:
            bias = linear.bias
            linear.register_parameter("bias", None)
            linear.weight = _shard(linear.weight, 1, group)
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
    """(path, style) of all linear layers to shard, after checking every one."""
    name = type(model).__name__
    # Entries outside the decoder layers are the embeddings and the head.
    plan = {key: style for key, style in (model.tp_plan or {}).items() if "*" in key}
    if not plan:
        raise ValueError(f"{name} has no tensor-parallel plan in transformers; {_REMEDY}")
    found = []
    for path, module in model.named_modules():
        style = plan.get(_generic(path))
        # A norm over several heads at once would need the heads of other ranks, and is refused.
        if style is None or (style == _REPLICATED and all(p.dim() == 1 for p in module.parameters())):
            continue
        if style not in (_COLUMNS, _ROWS) or type(module) is not nn.Linear:
            raise ValueError(
                f"{name} cannot be sharded: its plan asks for {style!r} of {path}, a "
                f"{type(module).__name__}; only linear layers in the styles {_COLUMNS!r} and {_ROWS!r} are "
                f"supported; {_REMEDY}"
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
                f"{name} cannot be sharded: its plan asks for {style!r} of the parameter {path}, and only "
                f"linear layers are supported; {_REMEDY}"
            )
    if not any(style == _ROWS for _, style in found):
        raise ValueError(f"{name} has no layer that its tensor-parallel plan names; {_REMEDY}")
    return found


def _generic(path: str) -> str:
    """A path with a star in place of each layer number, as in transformers' plans."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _shard(full: Tensor, dim: int, group: Group) -> nn.Parameter:
    """This rank's rows or columns, copied, so that the full tensor can be freed."""
    part = full.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=full.requires_grad)

"""Tensor parallelism: a model sharded in place, so that each process holds a share of heads and neurons.

Which layers are sharded is given by transformers' plan for the family. A "colwise" layer keeps this rank's
outputs, a "rowwise" one this rank's inputs, and its outputs are summed over all ranks (Megatron-LM, arXiv
1909.08053): two all-reduces per decoder layer. Embeddings and norms are replicated, and all ranks share the
vocabulary's rows of the head. The plan's own hooks are not used: linear layers are replaced, compiled and
captured here, and the all-reduce must remain a separate operator.

Where a text is split by position too, all of its ranks have the same hidden states: they share the neurons of
the MLPs, while those with other positions keep all heads of attention (Helix, arXiv 2507.07120).
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.ranks import all_reduce
from triforce_tree.models.few_row import quantisation
from triforce_tree.models.host.linears import is_plain_linear
from triforce_tree.models.indexers import indexers
from triforce_tree.runtime.distributed import Group, all_gather_tensor, broadcast_tensor, current

_COLUMNS, _ROWS = "colwise", "rowwise"
# Modules that compute the same on every rank, such as a norm over one head.
_REPLICATED = "replicated_with_grad_allreduce"
_REMEDY = "run it on one card, without torchrun"


class RowParallel(nn.Module):
    """An ``nn.Linear`` sharded by inputs: the product of this rank's share, an all-reduce, then the bias.

    Args:
        linear: this rank's columns, without the bias.
        bias: the bias of the full layer, or None.
        shards: number of ranks that share the layer.
    """

    def __init__(self, linear: nn.Linear, bias: Tensor | None, shards: int) -> None:
        super().__init__()
        self.linear, self.bias, self.shards = linear, bias, shards

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., out_features]``, equal on all ranks, for this rank's ``[..., in_features /
        shards]``.
        """
        out: Tensor = all_reduce(self.linear(x), self.shards)
        return out if self.bias is None else out + self.bias


class VocabularyParallel(nn.Module):
    """A language model head of which each rank has some rows. Each rank computes its logits, and one
    all-gather joins them.

    Every rank gets the same bytes. All ranks have the same number of rows. If the vocabulary is not a
    multiple of the number of ranks, the last ranks begin earlier, and logits that another rank has computed
    too are dropped.

    Args:
        head: the full head, which becomes this rank's.
        group: all ranks.
        copied: whether the rows are copied, so that the full weight can be freed. Otherwise they are a view,
            as needed for a weight that is also the embedding.
    """

    def __init__(self, head: nn.Linear, group: Group, copied: bool) -> None:
        super().__init__()
        size = -(-head.out_features // group.size)
        self._starts = [min(rank * size, head.out_features - size) for rank in range(group.size)]
        rows = slice(self._starts[group.rank], self._starts[group.rank] + size)
        for name, full in list(head.named_parameters(recurse=False)):
            part = full.detach()[rows]
            own = nn.Parameter(part.clone() if copied else part, requires_grad=full.requires_grad)
            head.register_parameter(name, own)
        self.out_features, head.out_features = head.out_features, size
        self.linear = head

    @property
    def weight(self) -> Tensor:
        """Returns this rank's rows of the weight; some families read its dtype."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., out_features]``, equal on all ranks, for ``[..., in_features]``."""
        own: Tensor = self.linear(x)
        group, size = current(), own.shape[-1]
        assert group is not None, "ranks share a head only after they have joined"
        # Bytes: gloo does not gather all dtypes.
        parts = all_gather_tensor(own.contiguous().view(torch.uint8), group).view(own.dtype)
        ends = enumerate(zip(parts, self._starts, strict=True))
        return torch.cat([part[..., min(size, rank * size - start) :] for rank, (part, start) in ends], -1)


def agreed_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Returns the same logits on all ranks, so that their decisions agree: gathered by the head, or else
    those of rank 0.
    """
    if current() is None or isinstance(model.get_output_embeddings(), VocabularyParallel):
        return logits
    return broadcast_tensor(logits)


def shards_of(model: nn.Module) -> int:
    """Returns how many ranks the heads of a model are sharded over; 1 if they are not."""
    return next((n for name, n in _shards(model) if of_attention(model, name)), 1)


def mlp_shards_of(model: nn.Module) -> int:
    """Returns how many ranks the neurons of a model's MLPs are sharded over; 1 if they are not."""
    return next((n for name, n in _shards(model) if not of_attention(model, name)), 1)


def _shards(model: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, m.shards) for name, m in model.named_modules() if isinstance(m, RowParallel))


def of_attention(model: nn.Module, path: str) -> bool:
    """Returns whether a linear layer belongs to attention, judged by its parent module."""
    parent = path.rpartition(".")[0]
    return hasattr(model.get_submodule(parent), "is_causal") or "att" in parent.rpartition(".")[2]


@torch.no_grad()
def shard(model: PreTrainedModel, heads: Group, neurons: Group | None = None) -> None:
    """Shards a model in place for this rank; a model that is sharded so already is left as it is.

    Args:
        model: the full model, on any device. Its configuration keeps the full model's counts.
        heads: ranks that share the heads, one or more.
        neurons: ranks that share the neurons of the MLPs, by default ``heads``. Where the neurons are no
            multiple of their number, only ``heads`` share them. All of them share the rows of the head,
            unless it is quantised.

    Raises:
        ValueError: the model is sharded over other ranks; or several ranks are to share the heads, and the
            family has no plan that is supported here, or its heads or features are not divisible by their
            number. The model is then unchanged.
    """
    every = neurons = neurons or heads
    if any(_shards(model)):
        if shards_of(model) != heads.size or mlp_shards_of(model) not in (heads.size, neurons.size):
            raise ValueError(
                f"this {type(model).__name__} is sharded over other ranks already (heads over "
                f"{shards_of(model)}, neurons over {mlp_shards_of(model)}); load the model again"
            )
        return
    planned = layers_to_shard(model, heads.size, quantisation(model))
    if not neurons_divide(model, planned, neurons.size):
        neurons = heads
    attention = {path for path, _ in planned if of_attention(model, path)}
    for path, style in planned:
        if (group := heads if path in attention else neurons).size == 1:
            continue
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
    _share_head(model, every)


def _share_head(model: PreTrainedModel, group: Group) -> None:
    """Shares a head's rows where it is torch's own linear layer over floating-point weights."""
    head: Any = model.get_output_embeddings()
    if group.size == 1 or head is None or not is_plain_linear(head) or quantisation(model) is not None:
        return
    [path] = [path for path, module in model.named_modules() if module is head]
    parent, _, name = path.rpartition(".")
    tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
    setattr(model.get_submodule(parent), name, VocabularyParallel(head, group, copied=not tied))


def layers_to_shard(model: PreTrainedModel, heads: int, method: str | None) -> list[tuple[str, str]]:
    """Returns (path, style) of the linear layers to shard. The result for a model that is already sharded is
    meaningless.

    Args:
        model: its weights are not read.
        heads: ranks that share the heads; one shares none, and needs no plan of the family.
        method: how the weights are quantised; None if they are not.

    Raises:
        ValueError: as :func:`shard`.
    """
    if heads == 1:
        try:
            return _planned(model, 1) if method is None else []
        except ValueError:  # the family has no plan for linear layers: every rank keeps them whole
            return []
    if method is not None:
        raise ValueError(f"{type(model).__name__} is quantised ({method}) and cannot be sharded; {_REMEDY}")
    if indexers(model):
        raise ValueError(
            f"{type(model).__name__} has indexers, which cannot be sharded; run without torchrun"
        )
    _check_heads(model, heads)
    return _planned(model, heads)


def neurons_divide(model: nn.Module, planned: Iterable[tuple[str, str]], size: int) -> bool:
    """Returns whether ``size`` ranks can share the neurons of all MLPs among these layers."""
    return not any(
        _split_width(model, path, style) % size for path, style in planned if not of_attention(model, path)
    )


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
    """Returns (path, style) of all linear layers to shard, after checking every one."""
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
        if (width := _split_width(model, path, style)) % size:
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


def _split_width(model: nn.Module, path: str, style: str) -> int:
    """Returns the number of features of a linear layer that are divided among ranks."""
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    return linear.out_features if style == _COLUMNS else linear.in_features


def _generic(path: str) -> str:
    """Returns a path with a star in place of each layer number, as in transformers' plans."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _shard(full: Tensor, dim: int, group: Group) -> nn.Parameter:
    """Returns a copy of this rank's rows or columns, so that the full tensor can be freed."""
    part = full.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=full.requires_grad)

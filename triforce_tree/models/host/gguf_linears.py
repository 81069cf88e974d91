"""Linear layers and embeddings whose weights stay in the blocks of a GGUF file, for fp32 inputs on the CPU.

The C kernels unpack blocks in registers to the values that the package gguf gives, and add products in the
order in which they add those of fp32 weights. So a result has the bits that it would have with unpacked
weights. For many rows, where oneDNN is faster, all blocks are unpacked first.
"""

from torch import Tensor, nn

from triforce_tree.kernels.cpu import onednn
from triforce_tree.kernels.cpu.fp32 import linear as fp32
from triforce_tree.kernels.cpu.fp32.linear import Blocks
from triforce_tree.models.host.matrices import matrix_of

UNPACKED_ROWS = 256
"""Fewest rows for which it pays to make an fp32 copy of packed weights."""


class GgufLinear(nn.Linear):
    """An ``nn.Linear`` over blocks.

    Args:
        weight: packed rows, uint8 ``[out_features, bytes]``, dense.
        blocks: their kind.
        bias: fp32 ``[out_features]``, or None.
    """

    def __init__(self, weight: nn.Parameter, blocks: Blocks, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = blocks.ins(weight), weight.shape[0]
        self.blocks, self.weight = blocks, weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() >= UNPACKED_ROWS * x.shape[-1] and onednn.multiplies_many_rows():
            return onednn.linear(x, fp32.widened(matrix_of(self)), self.bias)
        return fp32.linear(x, matrix_of(self))


class GgufEmbedding(nn.Embedding):
    """An ``nn.Embedding`` over blocks; arguments as of :class:`GgufLinear`."""

    def __init__(self, weight: nn.Parameter, blocks: Blocks, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape[0], blocks.ins(weight)
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.blocks, self.weight = blocks, weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.detach().index_select(0, ids.flatten())
        return fp32.unpacked(rows, self.blocks).view(*ids.shape, -1)


def in_gguf_blocks(model: nn.Module) -> bool:
    """Returns whether linear layers of a model are over blocks."""
    return any(isinstance(module, GgufLinear) for module in model.modules())

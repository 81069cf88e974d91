"""Random numbers on the CPU.

Torch's Exp(1) takes 20 ns a number, and sampling needs a number for every token of the vocabulary at every
node.
"""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable

_NOISE = struct.Struct("4q")


def fill_exponential(out: Tensor, generator: torch.Generator) -> None:
    """Fills an fp32 tensor with positive draws from Exp(1), like ``out.exponential_(generator=generator)``.

    On the CPU they depend only on one draw of the generator, not on the number of threads.
    """
    library = usable(out) if out.is_contiguous() else None
    if library is None:
        out.exponential_(generator=generator)
        return
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device="cpu"))
    library.exponential(_NOISE.pack(out.data_ptr(), seed, out.numel(), torch.get_num_threads()))

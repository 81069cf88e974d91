"""Copies the experts of a layer to which tokens are routed from host memory to the device.

Expert e of a layer is copied into slot e of device memory that several layers share. The router of the layer
decides on the device which experts a pass needs. The kernels read the routing on the device and the weights
in page-locked host memory. So no operator synchronises with the host, and a captured graph serves any
routing.
"""

from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("choose_experts", writes=("held", "moves", "count", "fetched"), triton=".experts_kernels")
def choose_experts(
    ids: Tensor, held: Tensor, moves: Tensor, count: Tensor, fetched: Tensor, layer: int
) -> None:
    """Lists the experts of a layer to which tokens are routed and which are not in their slots.

    Args:
        ids: integers of any shape, the experts of each token; those outside 0 to E - 1 are ignored.
        held: int32 ``[E]``, the layer whose expert is in each slot, -1 for none. It is written for the listed
            experts, so the caller must copy them.
        moves: int32 ``[E]``; the first elements receive the experts to copy, ascending.
        count: int32 ``[1]``, receives the number of experts to copy.
        fetched: int64 ``[1]``, increased by this number.
        layer: number of the layer.
    """
    wanted = set(ids.flatten().tolist())
    missing = [e for e, holder in enumerate(held.tolist()) if e in wanted and holder != layer]
    for at, expert in enumerate(missing):
        moves[at], held[expert] = expert, layer
    count.fill_(len(missing))
    fetched += len(missing)


@operator("fetch_experts", writes=("slots",), triton=".experts_kernels")
def fetch_experts(slots: Tensor, on_host: Tensor, moves: Tensor, count: Tensor) -> None:
    """Copies experts into their slots from host memory that the device can read.

    Args:
        slots: ``[E, n]``, of any dtype; written.
        on_host: ``[E, n]``, the experts of one layer.
        moves, count: results of ``choose_experts``.
    """
    for expert in moves[: int(count)].tolist():
        slots[expert].copy_(on_host[expert])

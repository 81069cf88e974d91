"""Experts of one layer on the device, of which only those that tokens are routed to are copied from the host.

Expert e of a layer is copied into slot e of memory that several layers share. Which experts a pass needs is
known only inside the layer, after its router: the kernels read the routing where it is, on the device, and
the weights in page-locked host memory. Nothing synchronises with the host, and a captured graph serves any
routing.
"""

from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("choose_experts", writes=("held", "moves", "count", "fetched"), triton=".experts_kernels")
def choose_experts(
    ids: Tensor, held: Tensor, moves: Tensor, count: Tensor, fetched: Tensor, layer: int
) -> None:
    """List the experts of a layer that tokens are routed to and that are not in their slots.

    Args:
        ids: integers of any shape, the experts of each token; those outside 0 to E - 1 are ignored.
        held: int32 ``[E]``, the layer whose expert is in each slot, -1 for none; listed experts are entered
            here, so the caller must copy them.
        moves: int32 ``[E]``, receives the experts to copy, ascending, in its first entries.
        count: int32 ``[1]``, receives their number.
        fetched: int64 ``[1]``, increased by it.
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
    """Copy experts from host memory that the device can read into their slots.

    Args:
        slots: ``[E, n]``, words of any dtype; changed in place.
        on_host: ``[E, n]``, the same experts of one layer.
        moves, count: from ``choose_experts``.
    """
    for expert in moves[: int(count)].tolist():
        slots[expert].copy_(on_host[expert])

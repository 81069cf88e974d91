"""The choice of a KV backend, and the only place where one is made."""

from collections.abc import Callable

from triforce_tree.kv.backend import CacheSpec, KVBackend
from triforce_tree.kv.device import DeviceBackend
from triforce_tree.kv.offload.backend import OffloadedBackend
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.parallel.backend import SplitBackend
from triforce_tree.kv.parallel.store import split_of
from triforce_tree.kv.pool.backend import PooledBackend
from triforce_tree.kv.pool.size import PoolSize


def make_backend(
    spec: CacheSpec,
    offload: Offload | None = None,
    pinned: Callable[[int], None] | None = None,
    pool: PoolSize | None = None,
    kept: KVBackend | None = None,
) -> KVBackend:
    """Returns a backend; its memory is that of an earlier one, ``kept``, if that fits.

    Args:
        spec: what the slots are needed for.
        offload: how to split the slots between device and host; None keeps them on the device.
        pinned: called with bytes of host memory as they are taken.
        pool: the pool that the sequences share; None gives each slots of its own.
        kept: an earlier backend of the same target and bits, which is not used at the same time.

    Raises:
        ValueError: settings that the backend does not serve.
        HostMemoryError: host memory is short.
    """
    if offload is not None:
        return OffloadedBackend(spec, offload, pinned)
    split = split_of(spec.target, spec.config)
    if split is not None:
        return SplitBackend(spec, split)
    if pool is not None:
        return PooledBackend(spec, pool, kept)
    return DeviceBackend(spec, kept.store if kept is not None else None)

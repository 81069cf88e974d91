"""flash-attn 4 for prefill: where it is installed, suits a call, and is measured to be faster.

Its one call takes the positions before a chunk and the chunk itself. Which way is faster depends on the card,
the heads and the lengths, so the first call of each kind computes both: they must give the same result, and
the faster one serves all calls of that kind in this process. Chunks of a prompt that is read again have then
the same bits. Where flash-attn 4 fails or gives another result, a warning says why, once, and it is not used
any more.
"""

import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.device import describe
from triforce_tree.runtime.distributed import world_size
from triforce_tree.runtime.stage_clock import StageClock

VARIABLE = "TRIFORCE_TREE_FLASH_ATTN"
"""Environment variable: "0" never uses flash-attn 4; "1" does for every call that suits it, unmeasured."""
Kind = tuple[Any, ...]
choices: dict[Kind, bool] = {}
"""By kind of call: whether flash-attn 4 is used."""
# Fewest queries and positions of a call: it compiles for seconds, which shorter prompts do not win back.
_QUERIES, _POSITIONS = 128, 16_384
# What it may take of the other way's time: two timings of the same work differ by less than the rest.
_SHARE, _ROUNDS = 0.97, 3
# Largest relative difference of two ways in 16 bits, which is 0.003 on random values, over so many queries.
_SAME, _COMPARED = 1e-2, 64
_lock = threading.Lock()
_failures: list[str] = []


def unavailable() -> str | None:
    """Why flash-attn 4 is not used for any call; None where it can be."""
    missing = _function() is None
    if _failures:
        return _failures[0]
    return "it is not installed" if missing else None


def offered(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether flash-attn 4 may serve ``causal_attention`` of these tensors, without a window."""
    if _setting() == "0" or _failures or _function() is None:
        return False
    return q.shape[2] >= _QUERIES and k.shape[2] >= _POSITIONS and _suits(q, k, v)


def faster(
    own: Callable[[], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the result of ``own`` or of flash-attn 4, whichever is faster for calls of this kind."""

    def other() -> Tensor:
        return causal(q, k, v, scale=scale, softcap=softcap, sinks=sinks)

    if _setting() == "1":
        return other()
    kind = _kind(q, k, v, softcap, sinks)
    if kind not in choices:
        with _lock:
            if kind not in choices:
                choices[kind] = _wins(own, other, q)
    return other() if choices[kind] else own()


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``causal_attention`` by flash-attn 4, whose mask is aligned to the last position as well.

    It reads keys and values by their strides, so that nothing of a cache is copied.
    """
    function = _function()
    assert function is not None
    # It launches on the current device.
    with torch.cuda.device_of(q):
        out = function(
            *(t.transpose(1, 2) for t in (q, k, v)),
            softmax_scale=scale,
            causal=True,
            softcap=softcap or 0.0,
            learnable_sink=None if sinks is None else sinks.detach(),
        )
    made: Tensor = out[0] if isinstance(out, tuple) else out
    return made.transpose(1, 2)


@cache
def _function() -> Callable[..., Any] | None:
    """``flash_attn_func`` of flash-attn 4, if it is installed and can be imported."""
    try:
        from flash_attn.cute import flash_attn_func
    except ModuleNotFoundError as error:
        # flash-attn 2 has the package too, without this part of it.
        if error.name not in ("flash_attn", "flash_attn.cute"):
            _give_up(error)
        return None
    except Exception as error:  # whatever an extension raises that was built for other libraries
        _give_up(error)
        return None
    return flash_attn_func


def _give_up(error: Exception) -> None:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    _failures.append(f"{type(error).__name__}: {first[:200]}")
    warnings.warn(
        f"flash-attn 4 cannot be used, so prefill goes on without it: {_failures[-1]}",
        RuntimeWarning,
        stacklevel=2,
    )


def _setting() -> str | None:
    setting = os.environ.get(VARIABLE) or None
    if setting not in (None, "0", "1"):
        raise ValueError(f"{VARIABLE}={setting!r} is neither 0 (never) nor 1 (for every call that suits it)")
    return setting


def _suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether device, dtype, widths of heads and layout suit flash-attn 4.

    Several ranks may find another way faster each; those that compute the same must have the same bits.
    """
    if not q.is_cuda or torch.version.hip is not None or world_size() > 1:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return False
    widths, major = (k.shape[3], v.shape[3]), describe(q.device).capability[0]
    # On Blackwell of data centres it has these alone.
    fit = major == 10 and (max(widths) <= 128 or widths in ((192, 128), (256, 256)))
    if not fit and not (major == 9 and max(widths) <= 256):
        return False
    return all(width % 8 == 0 for width in widths) and all(_aligned(t) for t in (q, k, v))


def _aligned(t: Tensor) -> bool:
    """Returns whether rows begin at multiples of 16 bytes; flash-attn 4 would copy other tensors."""
    return t.stride(3) == 1 and t.data_ptr() % 16 == 0 and all(size % 8 == 0 for size in t.stride()[:3])


def _kind(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> Kind:
    """Returns a key that calls share if they differ in lengths alone, by less than a factor of two."""
    lengths = q.shape[2].bit_length(), k.shape[2].bit_length()
    heads = *q.shape[:2], k.shape[1], k.shape[3], v.shape[3]
    # Whether a head's positions lie together.
    layout = k.stride(1) > k.stride(2)
    return (*lengths, *heads, q.device, q.dtype, layout, softcap is not None, sinks is not None)


def _wins(own: Callable[[], Tensor], other: Callable[[], Tensor], q: Tensor) -> bool:
    """Returns whether ``other`` gives the same result as ``own`` in less time."""
    # Before anything is timed: cuDNN makes its plans, flash-attn 4 compiles.
    expected = own()
    try:
        with warnings.catch_warnings():
            # Of arguments that its compiler leaves out, at every compilation.
            warnings.filterwarnings("ignore", module="cutlass")
            _check(other(), expected)
        del expected
        clock = StageClock(q.device)
        with torch.cuda.device_of(q):
            clock.start()
            for _ in range(_ROUNDS):
                own()
                clock.mark("own")
                other()
                clock.mark("other")
            clock.synchronize()
    except Exception as error:  # its compiler is Python, and may raise anything
        _give_up(error)
        return False
    spent = clock.seconds()
    return spent["other"] <= _SHARE * spent["own"]


def _check(found: Tensor, expected: Tensor) -> None:
    """Raises ArithmeticError if the two results differ, compared at queries from the whole chunk."""
    some = slice(None, None, max(1, expected.shape[2] // _COMPARED))
    found, expected = found[:, :, some].float(), expected[:, :, some].float()
    difference, size = (found - expected).norm().item(), expected.norm().item()
    # A NaN is no smaller than anything.
    if not difference <= _SAME * size:
        raise ArithmeticError(
            f"another result: a difference of {difference:.3g} where the norm is {size:.3g}"
        )

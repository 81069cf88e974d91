"""Uses flash-attn 4 for prefill if it is installed, supports a call, and is measured to be faster.

One call attends to the positions before a chunk and to the chunk itself. Which implementation is faster
depends on the GPU, the heads and the lengths. So the first call of each kind runs both, which must give the
same result, and the faster one serves all calls of that kind in this process. A chunk that is computed again
then has the same bits. If flash-attn 4 fails or gives another result, a warning says why, and it is not used
again.
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
"""Environment variable: "0" never uses flash-attn 4; "1" uses it for all supported calls, unmeasured."""
Kind = tuple[Any, ...]
choices: dict[Kind, bool] = {}
"""Whether flash-attn 4 is used, for each kind of call."""
# Fewest queries and positions of a call. It compiles for seconds, which shorter prompts do not save.
_QUERIES, _POSITIONS = 128, 16_384
# It must take less than this share of the other time; timings of the same work differ by less than 3 percent.
_SHARE, _ROUNDS = 0.97, 3
# Largest relative difference of both results in 16 bits (it is 0.003 on random values), and queries compared.
_SAME, _COMPARED = 1e-2, 64
_lock = threading.Lock()
_failures: list[str] = []


def unavailable() -> str | None:
    """Returns why flash-attn 4 is not used for any call, or None if it can be used."""
    missing = _function() is None
    if _failures:
        return _failures[0]
    return "it is not installed" if missing else None


def offered(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether flash-attn 4 may compute ``causal_attention`` of these tensors without a window."""
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
    """Computes ``causal_attention`` by flash-attn 4, whose mask is also aligned to the last position.

    It reads keys and values by their strides, so a cache is not copied.
    """
    function = _function()
    assert function is not None
    # flash-attn 4 launches on the current device.
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
    """Returns ``flash_attn_func`` of flash-attn 4 if it can be imported."""
    try:
        from flash_attn.cute import flash_attn_func
    except ModuleNotFoundError as error:
        # flash-attn 2 has a package of the same name without this module.
        if error.name not in ("flash_attn", "flash_attn.cute"):
            _give_up(error)
        return None
    except Exception as error:  # an extension built for other libraries may raise any error
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
        raise ValueError(f"{VARIABLE}={setting!r} is neither 0 (never) nor 1 (for every supported call)")
    return setting


def _suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether flash-attn 4 supports the device, dtype, head dimensions and layout.

    It is not used with several ranks: they must compute the same bits, but could measure different choices.
    """
    if not q.is_cuda or torch.version.hip is not None or world_size() > 1:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return False
    widths, major = (k.shape[3], v.shape[3]), describe(q.device).capability[0]
    # On data-centre Blackwell it supports only these head dimensions.
    fit = major == 10 and (max(widths) <= 128 or widths in ((192, 128), (256, 256)))
    if not fit and not (major == 9 and max(widths) <= 256):
        return False
    return all(width % 8 == 0 for width in widths) and all(_aligned(t) for t in (q, k, v))


def _aligned(t: Tensor) -> bool:
    """Returns whether all rows begin at multiples of 16 bytes; flash-attn 4 would copy other tensors."""
    return t.stride(3) == 1 and t.data_ptr() % 16 == 0 and all(size % 8 == 0 for size in t.stride()[:3])


def _kind(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> Kind:
    """Returns a key that calls share if they differ only in lengths, by less than a factor of two."""
    lengths = q.shape[2].bit_length(), k.shape[2].bit_length()
    heads = *q.shape[:2], k.shape[1], k.shape[3], v.shape[3]
    # Whether the positions of a head are contiguous.
    layout = k.stride(1) > k.stride(2)
    return (*lengths, *heads, q.device, q.dtype, layout, softcap is not None, sinks is not None)


def _wins(own: Callable[[], Tensor], other: Callable[[], Tensor], q: Tensor) -> bool:
    """Returns whether ``other`` gives the same result as ``own`` in less time."""
    # The first calls are not timed, because cuDNN makes its plans and flash-attn 4 compiles.
    expected = own()
    try:
        with warnings.catch_warnings():
            # At every compilation its compiler warns of arguments that it leaves out.
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
    except Exception as error:  # its compiler is written in Python and may raise any error
        _give_up(error)
        return False
    spent = clock.seconds()
    return spent["other"] <= _SHARE * spent["own"]


def _check(found: Tensor, expected: Tensor) -> None:
    """Raises ArithmeticError if the two results differ at a sample of queries from the whole chunk."""
    some = slice(None, None, max(1, expected.shape[2] // _COMPARED))
    found, expected = found[:, :, some].float(), expected[:, :, some].float()
    difference, size = (found - expected).norm().item(), expected.norm().item()
    # The comparison is false for NaN, so that NaN raises.
    if not difference <= _SAME * size:
        raise ArithmeticError(
            f"another result: a difference of {difference:.3g} where the norm is {size:.3g}"
        )

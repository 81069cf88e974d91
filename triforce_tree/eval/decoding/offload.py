"""Speed of an offloaded cache: all levels beside plain decoding of the same engine under the same limit."""

from collections.abc import Sequence

import torch

from triforce_tree.engine import Engine
from triforce_tree.eval.decoding.batch import counted, generate
from triforce_tree.eval.results import Record, Series
from triforce_tree.kv.offload.host_attention import check_host_attention

KIND = "offload"
OURS, STREAMED, ATTENDED = "all levels", "plain, streamed", "plain, with attention on the CPU"
METHODS = (OURS, STREAMED, ATTENDED)
PLAIN = (STREAMED, ATTENDED)
WARM_UP_TOKENS = 2


def check(engine: Engine) -> None:
    """Raise ValueError where nothing can be offloaded."""
    if not engine.hierarchy.config.offloads:
        raise ValueError("nothing is offloaded; give --offload, or a limit such as --gpu-memory 24GiB")


def methods(engine: Engine) -> list[str]:
    """Those that this model and this processor can run."""
    try:
        check_host_attention(engine.hierarchy.target)
    except ValueError:
        return [OURS, STREAMED]
    return list(METHODS)


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    new_tokens: int,
    plain_tokens: int,
    series: Series,
) -> None:
    """Measure what the series lacks; arguments as of ``eval.speed.measure``.

    Args:
        plain_tokens: of each plain decoding, whose time a token does not change.

    Raises:
        ValueError: nothing is offloaded under the limit.
    """
    check(engine)
    found = methods(engine)
    engines = {OURS: engine.with_options(prefix_cache=False)}
    for name, attends in ((STREAMED, False), (ATTENDED, True)):
        if name in found:
            engines[name] = engine.with_options(levels=1, host_attention=attends, prefix_cache=False)
    device = engine.hierarchy.target.device
    last: list[str] = []

    def one(key: Record) -> Record:
        own, prompt = engines[key["method"]], prompts[key["prompt"]]
        if last != [key["method"]]:
            # Only one engine's offloaded cache fits; the first pass of each measures and captures.
            engine.hierarchy.release()
            generate(own, [prompt], key["temperature"], WARM_UP_TOKENS, series.seed)
            last[:] = [key["method"]]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        new = new_tokens if key["method"] == OURS else plain_tokens
        out = generate(own, [prompt], key["temperature"], new, series.seed + key["prompt"], series.stop)
        if out.memory is None:
            raise ValueError(
                "the whole cache fits under the limit, and nothing is offloaded; give a smaller "
                "--gpu-memory, a longer --context, or --offload"
            )
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {
            "seconds": out.decode_seconds,
            "prefill_seconds": out.prefill_seconds,
            "new_tokens": counted(out),
            "peak_bytes": peak,
            "memory": out.memory,
        }

    keys = [
        {"kind": KIND, "method": method, "temperature": temperature, "prompt": number}
        for method in found
        for temperature in temperatures
        for number in range(len(prompts))
    ]
    series.fill(keys, one)

"""Writes the keys and values of prompts into an offloaded cache, layer by layer."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from triforce_tree.kv.backend import PromptRun
from triforce_tree.kv.offload.layerwise_prefill import (
    DeviceStates,
    HostStates,
    OffloadedPrefill,
    ReservedStates,
    prefill_by_layers,
)
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache


def prefill_offloaded(
    cache: OffloadedCache,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    starts: Sequence[int],
    run: PromptRun,
) -> None:
    """Stores keys and values of all but the last token of each prompt, and their hidden states.

    Args:
        cache: its sequences get the prompts.
        chunk: tokens that are computed at once.
        starts: tokens of each prompt that are in the cache already, and stay.
        run: the states of recurrent layers, if there are any, hold the first ``starts`` tokens.
    """
    host = cache.host
    # The chunk means before the smaller of the two positions are known and stay valid.
    with_means = [min(pair) for pair in zip(host.base, starts, strict=True)]
    host.ring.invalidate()
    for b, start in enumerate(starts):
        # The windows' memory is needed for the prefill.
        for layer in range(host.layers if start > host.base[b] else 0):
            cache.write_window(layer, b, start - host.base[b])
    sinks = []
    for b, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        tokens = list(prompt[:-1])
        cache.rings.fed(b, len(tokens), start)
        cache.lengths[b] = len(tokens)
        host.base[b] = cache.base_after(len(tokens))
        sinks.append(OffloadedPrefill(cache, b, start, with_means[b], run.states))
        _prefill_one(sinks[-1], tokens, chunk, run)
        if run.states is not None:
            run.states.lengths[b] = len(tokens)
        # The last layer's keys and values are copied out of memory that the next prefill overwrites.
        host.to_host.join()
    for sink in sinks:
        sink.commit()
    cache.publish()


def _prefill_one(sink: OffloadedPrefill, tokens: list[int], chunk: int, run: PromptRun) -> None:
    cache, model = sink.cache, sink.cache.model
    if run.features is not None:
        run.features.begin(sink.b, sink.start)
    compute = partial(prefill_by_layers, model, tokens, chunk, sink, run.progress, run.features)
    count = len(tokens) - sink.start
    hidden = count * model.model.config.get_text_config(decoder=True).hidden_size
    if cache.host.last_resident and hidden <= cache.store.memory.numel():
        compute(ReservedStates(cache.store.memory, chunk))
    elif cache.settings.states_on_host:
        with closing(HostStates(count, chunk, cache.host.device)) as states:
            compute(states)
    else:
        compute(DeviceStates())

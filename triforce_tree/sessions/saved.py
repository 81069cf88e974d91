"""Sessions in files: tokens, and keys and values layer by layer, in safetensors.

    session.json            the format, the model, the tokenizer, the conversation
    tokens.safetensors      int64 [L]
    layer-00000.safetensors k, v [H_kv, n, D] of the last n of L - 1 tokens; k_scale, v_scale in 8 bits
    states.safetensors      of recurrent layers, if there are any

Keys and values are stored as they are in the cache. They do not say where it was: what was saved from the
device may be loaded into host memory, and the other way round.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.fingerprint import shape_of, tokenizer_digest, weights_digest
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.sessions.checks import check_fields, check_tensors, check_tokens, damaged, kinds_of, opened
from triforce_tree.sessions.folders import FILE, STATES, TOKENS, check_free, layer_file, replaced

if TYPE_CHECKING:
    from triforce_tree.engine import Engine
    from triforce_tree.sessions.session import Session

FORMAT = 1
# KV slots of one copy from or to host memory, a multiple of any unit of an offloaded cache.
_BLOCK_UNITS = 256
_PARTS = ("k", "v", "k_scale", "v_scale")


def save(session: "Session", folder: Path) -> None:
    """See :meth:`Session.save`."""
    if distributed.current() is not None:
        raise ValueError("several processes share the target's keys and values; save sessions of one process")
    check_free(folder)
    with session.program() as (program, _), replaced(folder) as new:
        cache, count = program.cache, len(session.tokens) - 1
        _write_layers(program, count, new)
        if cache.states is not None:
            states = {str(number): state[0].cpu() for number, state in enumerate(cache.states.buffers)}
            save_file(states, new / STATES)
        save_file({"tokens": id_tensor(session.tokens)}, new / TOKENS)
        kept = {"chunk": cache.cached.chunk, "whole": cache.cached.whole[0], "messages": session.messages}
        told = {"begun": session.begun, "turns": session.turns}
        text = json.dumps({**_identity(session.engine), **kept, **told}, ensure_ascii=False)
        (new / FILE).write_text(text, encoding="utf-8")


def _write_layers(program: DecodingProgram, count: int, folder: Path) -> None:
    """Write the first ``count`` tokens of each layer; one is written while the next one is copied."""
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for layer, shape in enumerate(program.target.kv_layers):
            if shape is None:
                continue
            parts = _layer(program.cache, layer, count)
            if written is not None:
                written.result()
            written = writer.submit(save_file, parts, layer_file(folder, layer))
        if written is not None:
            written.result()


def read(engine: "Engine", folder: Path) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a session that :func:`save` wrote, and all else that is not keys and values.

    Raises:
        ValueError: it was saved with another model, tokenizer or ``kv_bits``, or by another version;
            a file is damaged.
        OSError: a file is missing.
    """
    if distributed.current() is not None:
        raise ValueError("several processes share the target's keys and values; load sessions in one process")
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no session, as {FILE} is missing; name a saved one")
    try:
        found = read_json(folder / FILE)
    except ValueError as error:
        raise damaged(folder / FILE, error) from error
    _check(found, _identity(engine), folder)
    tokens = check_tokens(folder / TOKENS, engine.hierarchy.target.vocab_size)
    check_fields(folder / FILE, found, len(tokens))
    return tokens, found


@torch.no_grad()
def fill(program: DecodingProgram, tokens: list[int], found: dict[str, Any], folder: Path) -> None:
    """Write the keys, values and states of a session into a cache made for it.

    Raises:
        ValueError: a file is damaged; the cache is then as before.
        OSError: a file is missing, also then.
    """
    cache, target = program.cache, program.target
    layers = [layer for layer, shape in enumerate(target.kv_layers) if shape is not None]
    for layer in layers:
        _check_layer(cache, layer, len(tokens) - 1, layer_file(folder, layer))
    if cache.states is not None:
        states = {str(n): (state.shape[1:], state.dtype) for n, state in enumerate(cache.states.buffers)}
        check_tensors(folder / STATES, states)
    cache.forget()
    # Copies of rings and states are of the sequence that the cache held.
    cache.marks.prune(0, 0)
    for layer in layers:
        _fill(cache, layer, len(tokens) - 1, layer_file(folder, layer))
    if cache.states is not None:
        count = len(cache.states.buffers)
        with opened(folder / STATES) as file:
            cache.states.restore([file.get_tensor(str(number))[None] for number in range(count)])
    if target.length_rope is not None:
        target.length_rope.choose_for_texts([len(tokens)])
    cache.restored(tokens, found["whole"] if found["chunk"] == cache.cached.chunk else 0)


def _identity(engine: "Engine") -> dict[str, Any]:
    """What a session's keys and values belong to."""
    target = engine.hierarchy.target
    return {
        "format": FORMAT,
        "model": f"{target.name} {shape_of(target.model)}",
        "weights": weights_digest(target.model),
        "kv_bits": engine.hierarchy.config.kv_bits,
        "tokenizer": None if engine.tokenizer is None else tokenizer_digest(engine.tokenizer),
    }


def _check(found: Any, own: dict[str, Any], folder: Path) -> None:
    """Raise ValueError where a session was not saved with what the engine has."""
    remedies = {
        "format": "prefill its text anew",
        "model": "load that model",
        "weights": "load the weights that it was saved with",
        "kv_bits": "give the engine this kv_bits",
        "tokenizer": "load the tokenizer that it was saved with",
    }
    for name, remedy in remedies.items():
        theirs = found.get(name) if isinstance(found, dict) else None
        # Without a tokenizer only token ids go in and out.
        if theirs != own[name] and not (name == "tokenizer" and None in (theirs, own[name])):
            raise ValueError(
                f"the session in {folder} was saved with {name}={theirs!r}, this engine has {own[name]!r}; "
                f"{remedy}, or begin a new session"
            )


def _layer(cache: FullCache, layer: int, count: int) -> dict[str, Tensor]:
    """What the cache holds of the first ``count`` tokens in one layer, in host memory."""
    offloaded = cache.offloaded
    if offloaded is not None and (index := offloaded.host_layers[layer]) is not None:
        return _offloaded_layer(offloaded, index, count)
    store = _store(cache)
    number, place = store.place(layer)
    group = store.groups[number]
    positions = range(max(0, count - (group.shape.window or count)) if group.ring else 0, count)
    parts = [part[place, 0][:, group.slots_of(positions)].cpu().contiguous() for part in group.parts]
    return dict(zip(_PARTS, parts, strict=False))


def _store(cache: FullCache) -> KVStore:
    """KV slots on the device."""
    store = cache.offloaded.rings if cache.offloaded is not None else cache.store
    assert store is not None
    return store


def _offloaded_layer(cache: OffloadedCache, index: int, count: int) -> dict[str, Tensor]:
    host, base = cache.host, min(cache.host.base[0], count)
    parts = [
        torch.empty(host.heads.kv, count, dim, dtype=cache.window.dtype)
        for dim in (host.heads.dim, host.heads.value_dim)
    ]
    block = _BLOCK_UNITS * host.unit
    for start in range(0, base, block):
        stop = min(start + block, base)
        for part, rows in zip(parts, host.heads.split(host.read(index, 0, start, stop)), strict=True):
            part[:, start:stop] = rows.transpose(0, 1)
    for part, slots in zip(parts, cache.window.kv, strict=True):
        part[:, base:] = slots[index, 0, :, : count - base]
    return dict(zip(_PARTS, parts, strict=False))


def _check_layer(cache: FullCache, layer: int, count: int, path: Path) -> None:
    """Raise ValueError where a file does not hold a layer of ``count`` tokens as the cache keeps it."""
    offloaded = cache.offloaded
    slots: tuple[Tensor, ...]
    if offloaded is not None and offloaded.host_layers[layer] is not None:
        slots, least = offloaded.window.kv, count
    else:
        store = _store(cache)
        group = store.groups[store.place(layer)[0]]
        slots, least = group.parts, min(count, group.shape.window or count)
    shape, _ = kinds_of(path).get("k", ([], None))
    # A layer with a window may have been saved from a cache that keeps all of its positions.
    kept = shape[1] if len(shape) == 3 and least <= shape[1] <= count else count
    wanted = {name: ((p.shape[2], kept, p.shape[4]), p.dtype) for name, p in zip(_PARTS, slots, strict=False)}
    check_tensors(path, wanted)


def _fill(cache: FullCache, layer: int, count: int, path: Path) -> None:
    """Write one layer of a file into the cache."""
    with opened(path) as file:
        parts = [file.get_tensor(name) for name in _PARTS if name in file.keys()]  # noqa: SIM118
    offloaded = cache.offloaded
    if offloaded is not None and (index := offloaded.host_layers[layer]) is not None:
        _fill_offloaded(offloaded, index, count, parts)
        return
    store = _store(cache)
    number, place = store.place(layer)
    group = store.groups[number]
    # Of a layer with a window, the last positions; both ends know at least a window of them.
    kept = min(parts[0].shape[1], group.slots)
    positions = range(count - kept, count)
    for slots, part in zip(group.parts, parts, strict=True):
        slots[place, 0][:, group.slots_of(positions)] = part[:, part.shape[1] - kept :].to(slots.device)


def _fill_offloaded(cache: OffloadedCache, index: int, count: int, parts: list[Tensor]) -> None:
    host = cache.host
    base = count // host.unit * host.unit
    block = _BLOCK_UNITS * host.unit
    for start in range(0, base, block):
        stop = min(start + block, base)
        rows = torch.empty(stop - start, host.heads.row, device=host.device, dtype=cache.window.dtype)
        for target, part in zip(host.heads.split(rows), parts, strict=True):
            target.copy_(part[:, start:stop].transpose(0, 1))
        host.write(index, 0, start, rows)
        cache.store_means(index, 0, start, rows)
    for slots, part in zip(cache.window.kv, parts, strict=True):
        slots[index, 0, :, : count - base] = part[:, base:].to(slots.device)

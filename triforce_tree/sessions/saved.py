"""Saves sessions from the engine's buffers to a folder, and loads them.

Keys and values are stored as they are in the cache, layer by layer. The files do not depend on where the
cache was: a session that was saved from the device may be loaded into host memory, and the other way round.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.json_files import parse_json
from triforce_tree.runtime.fingerprint import shape_of, tokenizer_digest, weights_digest
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.sessions.folders import (
    FILE,
    STATES,
    TOKENS,
    NewFiles,
    SavedFiles,
    check_fields,
    damaged,
    layer_name,
    opened,
    saving,
)
from triforce_tree.sessions.tensor_files import Kind

if TYPE_CHECKING:
    from triforce_tree.sessions.session import Session


def save(session: "Session", folder: Path) -> None:
    """Writes a session into a folder; see :meth:`Session.save`."""
    if distributed.current() is not None:
        raise ValueError("several processes share the target's keys and values; save sessions of one process")
    fields = {"messages": session.messages, "begun": session.begun, "turns": session.turns}
    _check_json(fields)
    # The folder is tried before keys and values are computed that are not in the buffers any more.
    with saving(folder) as new:
        new.write(TOKENS, {"tokens": id_tensor(session.tokens)})
        with session.program() as (program, _):
            cache = program.cache
            _write_layers(program, len(session.tokens) - 1, new)
            if cache.states is not None:
                states = {str(number): state[0].cpu() for number, state in enumerate(cache.states.buffers)}
                new.write(STATES, states)
            kept = {"chunk": cache.cached.chunk, "whole": cache.cached.whole[0]}
        new.finish({**_identity(session.engine), **kept, **fields})


def _check_json(fields: dict[str, Any]) -> None:
    """Raises ValueError if the values of a conversation do not survive being written to JSON and read
    again.
    """
    try:
        parse_json(json.dumps(fields).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the messages cannot be saved ({error}); use text and numbers in them") from error


def _write_layers(program: DecodingProgram, count: int, new: NewFiles) -> None:
    """Writes the first ``count`` tokens of each layer. One layer is written while the next one is copied."""
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for layer in _layers(program):
            parts = program.cache.backend.layer(layer, count)
            if written is not None:
                written.result()
            written = writer.submit(new.write, layer_name(layer), parts)
        if written is not None:
            written.result()


def _layers(program: DecodingProgram) -> list[int]:
    """Returns the layers that have keys and values."""
    return [layer for layer, shape in enumerate(program.target.kv_layers) if shape is not None]


@contextmanager
def opened_for(engine: LoadedEngine, folder: Path) -> Iterator[tuple[list[int], SavedFiles]]:
    """Returns a context with the tokens of a session that :func:`save` wrote, and its files.

    Raises:
        ValueError: the session was saved with another model, tokenizer or ``kv_bits``, or by another version;
            or a file is damaged.
        OSError: a file is missing.
    """
    if distributed.current() is not None:
        raise ValueError("several processes share the target's keys and values; load sessions in one process")
    with opened(folder) as files:
        _check(files.fields, _identity(engine), folder)
        tokens = _tokens(files, engine.target.vocab_size)
        check_fields(folder / FILE, files.fields, len(tokens))
        yield tokens, files


def _tokens(files: SavedFiles, vocabulary: int) -> list[int]:
    if TOKENS not in files.names:
        raise damaged(files.folder / FILE, "it names no file of tokens")
    shape, _ = files.kinds(TOKENS).get("tokens", ((), None))
    _check_kinds(files, TOKENS, {"tokens": ((max([1, *shape]),), torch.int64)})
    tokens: list[int] = files.read(TOKENS)["tokens"].tolist()
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise damaged(files.path(TOKENS), f"a token id lies outside the vocabulary of {vocabulary}")
    return tokens


@torch.no_grad()
def fill(program: DecodingProgram, tokens: list[int], files: SavedFiles) -> None:
    """Writes the keys, values and states of a session into a cache made for it.

    Raises:
        ValueError: a file is damaged. If its size or shapes are wrong the cache is unchanged. If its contents
            are damaged the cache is empty.
        OSError: a file cannot be read. The cache is then empty.
    """
    cache, target, count = program.cache, program.target, len(tokens) - 1
    layers = _layers(program)
    names = {TOKENS, *map(layer_name, layers), *([STATES] if cache.states is not None else [])}
    if files.names != names:
        differing = ", ".join(sorted(files.names ^ names))
        raise damaged(files.folder / FILE, f"it names files of another model: {differing}")
    for layer in layers:
        _check_layer(cache, layer, count, files)
    if cache.states is not None:
        states = {
            str(n): (tuple(state.shape[1:]), state.dtype) for n, state in enumerate(cache.states.buffers)
        }
        _check_kinds(files, STATES, states)
    cache.forget()
    # Copies of rings and states are of the sequence that the cache held.
    if cache.marks is not None:
        cache.marks.prune(0, 0)
    # One file is read, and its checksum computed, while the one before it is copied out of the other buffer.
    largest = max((files.size(layer_name(layer)) for layer in layers), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, device="cpu") for _ in range(2)]
    with ThreadPoolExecutor(1) as reader:
        coming = [reader.submit(files.read, layer_name(layer), buffers[0]) for layer in layers[:1]]
        for number, layer in enumerate(layers):
            parts = coming.pop().result()
            if number + 1 < len(layers):
                name, buffer = layer_name(layers[number + 1]), buffers[(number + 1) % 2]
                coming.append(reader.submit(files.read, name, buffer))
            cache.backend.set_layer(layer, count, list(parts.values()))
    if cache.states is not None:
        cache.states.restore([part[None] for part in files.read(STATES).values()])
    if target.length_rope is not None:
        target.length_rope.choose_for_texts([len(tokens)])
    found = files.fields
    cache.restored(tokens, found["whole"] if found["chunk"] == cache.cached.chunk else 0)


def _identity(engine: LoadedEngine) -> dict[str, Any]:
    """Returns the properties of an engine that a session's keys and values depend on."""
    target = engine.target
    return {
        "model": f"{target.name} {shape_of(target.model)}",
        "weights": weights_digest(target.model),
        "kv_bits": engine.config.kv_bits,
        "tokenizer": None if engine.tokenizer is None else tokenizer_digest(engine.tokenizer),
    }


def _check(found: dict[str, Any], own: dict[str, Any], folder: Path) -> None:
    """Raises ValueError if a session was saved with other properties than the engine has."""
    remedies = {
        "model": "load that model",
        "weights": "load the weights that it was saved with",
        "kv_bits": "give the engine this kv_bits",
        "tokenizer": "load the tokenizer that it was saved with",
    }
    for name, remedy in remedies.items():
        theirs = found.get(name)
        # A session without a tokenizer has only token ids, so the tokenizer may differ.
        if theirs != own[name] and not (name == "tokenizer" and None in (theirs, own[name])):
            raise ValueError(
                f"the session in {folder} was saved with {name}={theirs!r}, this engine has {own[name]!r}; "
                f"{remedy}, or begin a new session"
            )


def _check_kinds(files: SavedFiles, name: str, wanted: Mapping[str, Kind]) -> None:
    """Raises ValueError unless a file has exactly these tensors."""
    found = files.kinds(name)
    if list(found) != list(wanted):
        raise damaged(files.path(name), f"it holds the tensors {sorted(found)}, not {sorted(wanted)}")
    for part, (shape, dtype) in wanted.items():
        if found[part] != (shape, dtype):
            theirs, theirs_dtype = found[part]
            raise damaged(
                files.path(name), f"{part} is {theirs_dtype} {list(theirs)}, not {dtype} {list(shape)}"
            )


def _check_layer(cache: FullCache, layer: int, count: int, files: SavedFiles) -> None:
    """Raises ValueError unless a file has a layer of ``count`` tokens in the format of the cache."""
    slots, least = cache.backend.layer_slots(layer, count)
    shape, _ = files.kinds(layer_name(layer)).get("k", ((), None))
    # A layer with a window may have been saved from a cache that keeps all of its positions.
    kept = shape[1] if len(shape) == 3 and least <= shape[1] <= count else count
    wanted = {name: ((p.shape[-3], kept, p.shape[-1]), p.dtype) for name, p in slots.items()}
    _check_kinds(files, layer_name(layer), wanted)

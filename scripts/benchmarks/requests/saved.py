"""Saving and loading a session beside writing and reading the same bytes: docs/results/saved_sessions.jsonl.

    python -m scripts.benchmarks saved_sessions --folder /path/on/the/disk

Keys and values have the shape of Llama-3.1-8B's and are random numbers in a small model's cache on the CPU:
what is in them takes no other time. Each file is flushed to the disk within the seconds, and dropped from the
page cache before it is read (``posix_fadvise``). Both ways take turns.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.requests.tables import SAVED
from triforce_tree.sessions.session import Session

_LAYERS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_WAYS = ("save", "write", "load", "read")


def session_of(tokens: int, layers: int) -> Session:
    """Returns a session of so many tokens with random keys and values, which no model has computed."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=_KV_HEADS, num_key_value_heads=_KV_HEADS, head_dim=_HEAD_DIM,
        max_position_embeddings=2 * tokens + 8192, pad_token_id=0,
    )  # fmt: skip
    target = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    engine = triforce_tree.load(target, levels=1)
    session = engine.session([1 + n % 500 for n in range(tokens)], reserve=64)
    with session.buffers() as program:
        program.cache.forget()
        for group in program.store.groups:
            for part in group.parts:
                part.normal_()
        program.cache.restored(session.tokens, 0)
    return session


def flush(folder: Path) -> None:
    """Waits until a folder's files are on the disk, and drops them from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def written(contents: Sequence[bytes], folder: Path) -> None:
    """Writes files of these contents."""
    for number, content in enumerate(contents):
        with (folder / str(number)).open("wb", buffering=0) as file:
            file.write(content)


def read(folder: Path, most: int) -> None:
    """Reads all files into one buffer."""
    content = bytearray(most)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            file.readinto(content)


def measure(session: Session, folder: Path, runs: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes, and seconds of each way in turns."""
    own, raw, engine = folder / "session", folder / "raw", session.engine
    session.save(own)
    # The same bytes, as a disk may take less time for zeros.
    contents = [path.read_bytes() for path in own.iterdir()]
    sizes = [len(content) for content in contents]
    raw.mkdir()
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}

    def timed(way: str, work: Callable[[], object], flushed: Path | None = None) -> None:
        start = time.perf_counter()
        work()
        if flushed is not None:
            flush(flushed)
        seconds[way].append(time.perf_counter() - start)

    for _ in range(runs):
        timed("save", lambda: session.save(own), own)
        timed("write", lambda: written(contents, raw), raw)
        timed("load", lambda: Session.load(engine, own, reserve=64))
        timed("read", lambda: read(raw, max(sizes)))
        flush(own)
    return sum(sizes), seconds


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks saved_sessions", __doc__)
    made.add_argument("--tokens", type=int, default=10_240, help="of the session; 128 KiB each")
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--folder", type=Path, help="on the disk to measure; by default where results go")
    args = made.parse_args(words)
    tokens, layers = (300, 2) if args.tiny else (args.tokens, _LAYERS)
    out = args.out or (Path(tempfile.mkdtemp()) if args.tiny else RESULTS)
    session = session_of(tokens, layers)
    folder = Path(tempfile.mkdtemp(dir=args.folder or out))
    try:
        size, seconds = measure(session, folder, args.runs)
    finally:
        shutil.rmtree(folder)
    rows: list[Record] = []
    for ours, raw in (("save", "write"), ("load", "read")):
        own, other = (statistics.median(seconds[way]) for way in (ours, raw))
        rows.append({
            "what": ours, "raw": raw, "bytes": size, "seconds": own, "raw_seconds": other,
            "ratio": own / other, "all_seconds": {way: seconds[way] for way in (ours, raw)},
        })  # fmt: skip
        print(rows[-1], flush=True)
    head = header(args.seed)
    write(out / SAVED, head | {"tokens": tokens, "runs": args.runs, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

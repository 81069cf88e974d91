"""Few-row linear layers on one GPU: check them, try configurations, say which are best.

    python -m scripts.benchmarks linear --out linear.json --seconds 150
    python -m scripts.benchmarks linear --out linear.json --quick      # the check and the table's own choices

Linears of one input are one launch. Variants are compiled by parallel processes first. The timing process
writes a line per measurement; should a configuration break its CUDA context, another process goes on.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton

from scripts.benchmarks.attention.problems import measure_ceilings
from scripts.benchmarks.common.results import header, write
from scripts.benchmarks.linear.layers import Cell, layer_times, peer_times
from scripts.benchmarks.linear.problems import (
    BITS,
    LAYERS,
    ROTATION,
    Shape,
    Weights,
    candidates,
    chosen,
    gate,
    least_bytes,
    time_us,
    variant,
    weight_bytes,
    wrong,
)  # fmt: skip
from triforce_tree.eval.results import commit
from triforce_tree.kernels.linear.configs import LinearConfig

# By rows that are tuned: more rows of the same tile, which take what was found there.
ALSO = {16: (1, 8), 32: (24,), 64: (48,), 96: ()}
DRAFT_ALSO = (1, 5, 6, 8)
SUMMED = [1, 8, 16, 24, 32, 48, 64, 96]
NEW = [*LAYERS["7B"], LAYERS["8B"][0], LAYERS["8B"][2]]


def cells() -> list[Cell]:
    """(bits, shape, rows) to tune, the most wanted first."""
    draft = [(16, shape, 16) for shape in LAYERS["68M"]]
    first = [(b, shape, m) for b in (16, 8) for m in (16, 32) for shape in NEW]
    rest = [(b, shape, m) for b, m in ((4, 16), (16, 64), (8, 64), (4, 32), (16, 96)) for shape in NEW]
    return draft + first + rest + [(4, shape, 64) for shape in NEW[:4]]


def also(cell: Cell) -> list[Cell]:
    bits, shape, rows = cell
    more = DRAFT_ALSO if shape in LAYERS["68M"] else ALSO[rows]
    return [(bits, shape, count) for count in more]


def compile_shard(index: int, workers: int) -> None:
    """Launch this process's share of the variants once, on small weights."""
    wanted = {variant(b, m, shape, c): None for b, shape, m in cells() for c in candidates(b, m, shape)}
    for name in ("7B", "8B"):
        for bits in BITS:
            for outs, ins in {(o, shape.ins) for shape in LAYERS[name] for o in shape.outs}:
                for rows in (16, 32, 64, 128):
                    wanted[variant(bits, rows, Shape((outs,), ins), chosen(bits, rows, outs, ins))] = None
    weights = {}
    for bits, rows, fused, config in list(wanted)[index::workers]:
        if (bits, fused) not in weights:
            weights[bits, fused] = Weights(bits, Shape((256, 256) if fused else (512,), 4096))
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
        try:
            weights[bits, fused].call(x, 0, None, config)
        except Exception as error:
            print(f"{bits} bits M={rows} {config}: {error!r}"[:200], flush=True)


class Log:
    """Lines of JSON, one per measurement, that survive a broken process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]
        self.keys = {json.dumps(row["key"]) for row in self.rows}

    def __contains__(self, key: list) -> bool:
        return json.dumps(key) in self.keys

    def add(self, key: list, **what: object) -> None:
        self.rows.append({"key": key, **what})
        self.keys.add(json.dumps(key))
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def key_of(cell: Cell) -> list:
    bits, shape, rows = cell
    return [bits, str(shape), rows]


def sweep(log: Log, until: float, quick: bool) -> None:
    """Time cell after cell until the time is up."""
    if ["ceilings"] not in log:
        log.add(["ceilings"], read=measure_ceilings().read_bandwidth)
    for cell in cells():
        if time.time() > until:
            return
        bits, shape, rows = cell
        own = chosen(bits, rows, shape.out, shape.ins)
        todo = [own] if quick else candidates(bits, rows, shape)
        if any([*key_of(cell), asdict(c)] not in log for c in todo):
            time_cell(log, cell, todo, quick)


def time_cell(log: Log, cell: Cell, todo: list[LinearConfig], quick: bool) -> None:
    bits, shape, rows = cell
    copies = max(2, -(-ROTATION // weight_bytes(bits, shape)))
    weights = Weights(bits, shape, copies)

    def attempt(config: LinearConfig, rows: int, check: bool = True) -> float | None:
        key = [*key_of((bits, shape, rows)), asdict(config)]
        if key in log:
            return None
        try:
            said = wrong(weights.call(x[rows], 0, None, config), *exact) if check else None
            calls = [lambda c=c: weights.call(x[rows], c, None, config) for c in range(copies)]
            took = time_us(calls) if said is None else None
            log.add(key, us=took, error=said)
            return took
        except Exception as error:
            log.add(key, us=None, error=repr(error)[:300])
            if "CUDA" in repr(error) or "Accelerator" in repr(error):
                sys.exit(3)
            return None

    counts = [rows, *(count for _, _, count in also(cell))]
    x = {m: torch.randn(m, shape.ins, dtype=torch.bfloat16, device="cuda") for m in counts}
    exact = weights.exact(x[rows])
    made = [(us, at) for at, c in enumerate(todo) if (us := attempt(c, rows)) is not None]
    if made and not quick:
        ranked = [todo[at] for _, at in sorted(made)]
        for steps in (0, 2, 4):
            attempt(replace(ranked[0], prefetch=steps), rows, False)
        for count in counts[1:]:
            for config in ranked[:2]:
                attempt(config, count, False)
    for count in counts if bits == 16 else []:
        if [*key_of((bits, shape, count)), "torch"] not in log:
            calls = [
                lambda c=c, m=count: [torch.nn.functional.linear(x[m], w) for w in weights.words[c]]
                for c in range(copies)
            ]
            log.add([*key_of((bits, shape, count)), "torch"], us=time_us(calls))


def best_configs(log: Log) -> dict[str, tuple[float, dict]]:
    found: dict[str, tuple[float, dict]] = {}
    for row in log.rows:
        if len(row["key"]) == 4 and isinstance(row["key"][3], dict) and row.get("us"):
            cell = json.dumps(row["key"][:3])
            if cell not in found or row["us"] < found[cell][0]:
                found[cell] = row["us"], row["key"][3]
    return found


def layers(log: Log, until: float) -> None:
    found, best = best_configs(log), {}
    for name in ("7B", "8B"):
        for cell in [(b, shape, m) for b in BITS for shape in LAYERS[name] for m in SUMMED]:
            # What was not tuned takes what was found for the nearest larger count of rows.
            near = [json.dumps([cell[0], str(cell[1]), m]) for m in SUMMED if m >= cell[2]]
            config = next((found[key][1] for key in near if key in found), None)
            if config:
                best[cell] = LinearConfig(**config)
    for key, us in layer_times(best, SUMMED):
        log.add(["layer", *key], us=us)
        if time.time() > until:
            return


def peer(log: Log, until: float) -> None:
    shapes = [Shape((shape.out,), shape.ins) for shape in LAYERS["7B"]]
    for key, us, error in peer_times([(b, shape, m) for m in (16, 32) for b in (8, 4) for shape in shapes]):
        log.add(key, us=us, error=error)
        if time.time() > until:
            return


def report(log: Log) -> dict:
    """What the results file keeps: the best of each problem, whole layers, the peer."""
    read = next((row["read"] for row in log.rows if row["key"] == ["ceilings"]), 4.42e12)
    measured = {json.dumps(row["key"]): row.get("us") for row in log.rows}
    best, table = best_configs(log), []
    print(f"read bandwidth {read / 1e12:.2f} TB/s")
    for cell in [one for tuned in cells() for one in (tuned, *also(tuned))]:
        bits, shape, rows = cell
        if (key := json.dumps(key_of(cell))) not in best:
            continue
        us, config = best[key]
        roof = least_bytes(bits, rows, shape) / read * 1e6
        torch_us = measured.get(json.dumps([16, *key_of(cell)[1:], "torch"]))
        own_config = asdict(chosen(bits, rows, shape.out, shape.ins))
        own = measured.get(json.dumps([*key_of(cell), own_config]))
        table.append({
            "bits": bits, "outs": shape.outs, "ins": shape.ins, "rows": rows, "us": us, "roof_us": roof,
            "of_roof": roof / us, "torch_bf16_us": torch_us, "choose_us": own, "config": config,
        })  # fmt: skip
        print(
            f"{bits:2} bits {shape!s:25} M={rows:3}: {us:7.2f} us, {roof / us:4.0%} of the roof; "
            f"choose {own or 0:7.2f}, torch bf16 {torch_us or 0:7.2f}; "
            + " ".join(str(int(v)) for v in config.values())
        )
    layers: dict[tuple, dict] = {}
    gemlite, small = [], {}
    for row in log.rows:
        kind, *key = row["key"]
        if kind == "layer" and key[0] == "small":
            small["early" if key[1] else "ordinary"] = row["us"]
        elif kind == "layer":
            layers.setdefault(tuple(key[:3]), {})[key[3]] = row["us"]
        elif row["key"][-1] == "gemlite":
            gemlite.append({"bits": kind, "shape": key[0], "rows": key[1], "us": row["us"]})
        if kind in ("layer", "peer") or row["key"][-1] == "gemlite":
            print(json.dumps(row["key"]), f"{row['us']:.1f}" if row["us"] else row.get("error"))
    errors = [row for row in log.rows if row.get("error")]
    for row in errors[:20]:
        print("failed:", json.dumps(row)[:300])
    print(f"{len(log.rows)} measurements, {len(errors)} failed")
    names = ("layer", "bits", "rows")
    return {
        "read_bandwidth": read,
        "gpu": torch.cuda.get_device_name(),
        "measured": len(log.rows),
        "small_us": small,
        "layers": [dict(zip(names, key, strict=True)) | {"us": us} for key, us in layers.items()],
        "gemlite": gemlite,
        "cells": table,
    }


def check(log: Log, part: int, parts: int) -> None:
    for name, said in gate(part, parts):
        log.add(["gate", name], error=said)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks linear", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("linear.json"))
    parser.add_argument("--seconds", type=float, default=150.0, help="stop in time for so long in all")
    parser.add_argument("--quick", action="store_true", help="the check and the table's own choices")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--layer-seconds", type=float, default=25.0, help="part of the time for whole layers")
    parser.add_argument("--peer-seconds", type=float, default=15.0, help="part of the time for gemlite")
    parser.add_argument("--commit", default=commit(), help="what is measured, where no .git says it")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; the tests run these kernels in Triton's interpreter")
    end = time.time() + args.seconds
    lines = args.out.with_suffix(".lines")

    def child(part: str, seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-m", "scripts.benchmarks", "linear"]
        command += ["--out", str(args.out), "--part", part]
        command += ["--seconds", str(max(5.0, seconds)), "--workers", str(args.workers)]
        return subprocess.Popen(command + ["--quick"] * args.quick)

    def finish(part: str, seconds: float) -> int:
        running = child(part, seconds)
        try:
            return running.wait(timeout=max(5.0, seconds) + 20)
        except subprocess.TimeoutExpired:
            running.kill()
            print(f"{part} ran past its time", flush=True)
            return 1

    if args.part:
        kind, _, index = args.part.partition(":")
        if kind == "prepare":
            check(Log(Path(f"{lines}{index}")), int(index), args.workers)
            if not args.quick:
                compile_shard(int(index), args.workers)
        elif kind == "sweep":
            sweep(Log(lines), end, args.quick)
        elif kind == "layers":
            layers(Log(lines), end)
        else:
            peer(Log(lines), end)
        return 0

    lines.unlink(missing_ok=True)
    began = time.time()
    shards = [child(f"prepare:{i}", args.seconds) for i in range(args.workers)]
    for shard in shards:
        try:
            shard.wait(timeout=max(5.0, 0.45 * args.seconds - (time.time() - began)))
        except subprocess.TimeoutExpired:
            shard.kill()
            print("a preparing process ran past its time", flush=True)
    checked = [row for i in range(args.workers) for row in Log(Path(f"{lines}{i}")).rows]
    failed = [row for row in checked if row["error"]]
    for row in failed[:40]:
        print("FAILED", row["key"][1], row["error"][:200])
    for i in range(args.workers):
        Path(f"{lines}{i}").unlink(missing_ok=True)
    print(f"gate: {len(checked) - len(failed)} of {len(checked)} right", flush=True)
    print(f"checked and compiled for {time.time() - began:.0f} s", flush=True)
    after = args.layer_seconds + args.peer_seconds
    while finish("sweep", end - time.time() - after) == 3 and time.time() < end - after:
        print("a configuration broke the CUDA context; going on behind it", flush=True)
    finish("layers", end - time.time() - args.peer_seconds)
    if args.peer_seconds:
        finish("peer", end - time.time())
    log = Log(lines)
    made = header(0, "linear") | {"commit": args.commit}
    made |= {"torch": torch.__version__, "triton": triton.__version__, **report(log)}
    write(args.out, made | {"checked": len(checked), "failed": failed})
    return 1 if failed else 0

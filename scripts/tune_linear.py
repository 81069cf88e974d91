"""Few-row linear layers on one GPU: check them, try configurations, say which are best.

    python scripts/tune_linear.py --out linear.json --seconds 240
    python scripts/tune_linear.py --out linear.json --quick      # the check and the table's own choices

Variants are compiled by parallel processes first. The timing process writes a line per measurement; should a
configuration break its CUDA context, another process goes on behind it.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from linear_problems import (
    BITS,
    LARGE,
    LAYER_7B,
    ROTATION,
    SMALL,
    Weights,
    candidates,
    gate,
    least_bytes,
    tiles,
    time_us,
    weight_bytes,
    wrong,
)  # fmt: skip
from tree_attention_timing import measure_ceilings

from triforce_tree.kernels.linear_configs import LinearConfig, choose

SUMMED = (1, 16, 32, 64)
FIRST = LARGE[:3]


def cells() -> list[tuple[int, int, int, int]]:
    """(bits, outs, ins, rows), the most wanted first."""
    some = [(b, n, k, m) for m in (16, 32, 64, 1) for n, k in FIRST for b in BITS]
    more = [(b, n, k, m) for m in (16, 64, 32) for n, k in LARGE[3:] for b in BITS]
    rest = [(b, n, k, 128) for n, k in FIRST for b in BITS]
    return some + more + rest + [(b, n, k, 16) for n, k in SMALL for b in BITS]


def compile_shard(index: int, workers: int) -> None:
    """Launch this process's share of the variants once, on a small weight."""
    variants = {
        (b, m, tile, splits): None for b, _, _, m in cells() for tile in tiles(b, m) for splits in (1, 2)
    }
    variants |= {
        (b, m, replace(c, splits=1, prefetch=2), min(c.splits, 2)): None
        for b, n, k, m in cells()
        for c in [choose(b, m, n, k)]
    }
    mine = [v for at, v in enumerate(variants) if at % workers == index]
    weights = {bits: Weights(bits, 512, 4096, 1) for bits in BITS}
    for bits, rows, tile, splits in mine:
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
        try:
            weights[bits].call(x, 0, None, replace(tile, splits=splits))
        except Exception as error:
            print(f"{bits} bits M={rows} {tile}: {error!r}"[:200], flush=True)


class Log:
    """Lines of JSON, one per measurement, that survive a broken process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def __contains__(self, key: list) -> bool:
        return any(row["key"] == key for row in self.rows)

    def add(self, key: list, **what: object) -> None:
        self.rows.append({"key": key, **what})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def sweep(log: Log, until: float, quick: bool) -> None:
    """Time cell after cell until the time is up."""
    if ["ceilings"] not in log:
        log.add(["ceilings"], read=measure_ceilings().read_bandwidth)
    for bits, outs, ins, rows in cells():
        if time.time() > until:
            return
        key = [bits, outs, ins, rows]
        own = choose(bits, rows, outs, ins)
        todo = [own] if quick else list(dict.fromkeys([own, *candidates(bits, rows, outs, ins)]))
        todo = [c for c in todo if [*key, asdict(c)] not in log]
        if todo or (bits == 16 and [*key, "torch"] not in log):
            time_cell(log, key, todo, quick)


def time_cell(log: Log, key: list, todo: list[LinearConfig], quick: bool) -> None:
    bits, outs, ins, rows = key
    copies = max(2, -(-ROTATION // weight_bytes(bits, outs, ins)))
    weights = Weights(bits, outs, ins, copies)
    x = torch.randn(rows, ins, dtype=torch.bfloat16, device="cuda")
    gold, allowed = weights.exact(x)

    def attempt(config: LinearConfig) -> float | None:
        try:
            said = wrong(weights.call(x, 0, None, config), gold, allowed)
            calls = [lambda c=c: weights.call(x, c, None, config) for c in range(copies)]
            took = time_us(calls) if said is None else None
            log.add([*key, asdict(config)], us=took, error=said)
            return took
        except Exception as error:
            log.add([*key, asdict(config)], us=None, error=repr(error)[:300])
            if "CUDA" in repr(error) or "Accelerator" in repr(error):
                sys.exit(3)
            return None

    if bits == 16 and [*key, "torch"] not in log:
        calls = [lambda c=c: torch.nn.functional.linear(x, weights.words[c]) for c in range(copies)]
        log.add([*key, "torch"], us=time_us(calls))
    made = [(us, at) for at, c in enumerate(todo) if (us := attempt(c)) is not None]
    if made and not quick:
        best = todo[min(made)[1]]
        for steps in (0, 1, 4):
            attempt(replace(best, prefetch=steps))


def best_configs(log: Log) -> dict[tuple[int, int, int, int], dict]:
    found: dict[tuple[int, int, int, int], dict] = {}
    for row in log.rows:
        if len(row["key"]) == 5 and isinstance(row["key"][4], dict) and row.get("us"):
            cell = tuple(row["key"][:4])
            if cell not in found or row["us"] < found[cell]["us"]:
                found[cell] = {"us": row["us"], "config": row["key"][4]}
    return found


def layers(log: Log) -> None:
    """One 7B layer's seven products in their order, each waiting for what it needs, several layers round."""
    best = best_configs(log)
    for bits in BITS:
        made = [[Weights(bits, n, k, 1) for n, k in LAYER_7B] for _ in range(3 if bits == 16 else 6)]
        for rows in SUMMED:
            ways = ["ours", "ours spaced", *(["torch", "torch spaced"] if bits == 16 else [])]
            for way in [w for w in ways if [bits, rows, f"layer {w}"] not in log]:
                x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
                wide = torch.randn(rows, 11008, dtype=torch.bfloat16, device="cuda")

                def run(at: int, w: Weights, x=x, wide=wide, way=way, rows=rows, bits=bits) -> None:
                    inputs = wide if w.ins == 11008 else x
                    if "spaced" in way and at in (0, 3, 4, 6):
                        # Something small of torch's own, where a layer has norms, attention, activation.
                        inputs = inputs.neg()
                    if "torch" in way:
                        torch.nn.functional.linear(inputs, w.words[0])
                        return
                    known = best.get((bits, w.outs, w.ins, rows))
                    w.call(inputs, 0, None, LinearConfig(**known["config"]) if known else None)

                try:
                    took = time_us(
                        [lambda ws=ws, run=run: [run(at, w) for at, w in enumerate(ws)] for ws in made]
                    )
                    log.add([bits, rows, f"layer {way}"], us=took)
                except Exception as error:
                    log.add([bits, rows, f"layer {way}"], us=None, error=repr(error)[:300])


def peer(log: Log) -> None:
    """gemlite on the same shapes, where it can be imported; its own tuning runs at its first call."""
    try:
        import gemlite
        from gemlite.helper import A16W4_HQQ_INT, A16W8_INT8

        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    except Exception as error:
        log.add(["peer"], error=repr(error)[:300])
        return
    kind = torch.bfloat16
    for rows in (16, 32):
        for outs, ins in FIRST:
            for bits in (4, 8):
                key = [bits, outs, ins, rows, "gemlite"]
                if key in log:
                    continue
                try:
                    x = torch.randn(rows, ins, dtype=kind, device="cuda")
                    made = []
                    for _ in range(max(2, -(-ROTATION // weight_bytes(bits, outs, ins)))):
                        if bits == 8:
                            weight = torch.randn(outs, ins, dtype=kind, device="cuda")
                            made.append(A16W8_INT8(dtype=kind).from_weights(weight))
                        else:
                            codes = torch.randint(0, 16, (outs, ins), dtype=torch.uint8, device="cuda")
                            scales = torch.rand(outs * ins // 128, 1, dtype=kind, device="cuda")
                            zeros = torch.full_like(scales, 8)
                            made.append(A16W4_HQQ_INT(dtype=kind).from_weights(codes, scales, zeros))
                    made[0](x)
                    log.add(key, us=time_us([lambda m=m, x=x: m(x) for m in made]))
                except Exception as error:
                    log.add(key, us=None, error=repr(error)[:300])


def report(log: Log) -> dict:
    read = next((row["read"] for row in log.rows if row["key"] == ["ceilings"]), 4.42e12)
    measured = {json.dumps(row["key"]): row.get("us") for row in log.rows}
    best, table = best_configs(log), []
    print(f"read bandwidth {read / 1e12:.2f} TB/s")
    for bits, outs, ins, rows in cells():
        if (cell := (bits, outs, ins, rows)) not in best:
            continue
        us, config = best[cell]["us"], best[cell]["config"]
        roof = least_bytes(bits, rows, outs, ins) / read * 1e6
        torch_us = measured.get(json.dumps([16, outs, ins, rows, "torch"]))
        own = measured.get(json.dumps([*cell, asdict(choose(bits, rows, outs, ins))]))
        other = measured.get(json.dumps([*cell, "gemlite"]))
        table.append({
            "bits": bits, "outs": outs, "ins": ins, "rows": rows, "us": us, "roof_us": roof,
            "of_roof": roof / us, "torch_bf16_us": torch_us, "choose_us": own, "gemlite_us": other,
            "config": config,
        })  # fmt: skip
        print(
            f"{bits:2} bits [{outs:5}, {ins:5}] M={rows:3}: {us:7.2f} us, {roof / us:4.0%} of the roof; "
            f"choose {own or 0:7.2f}, torch bf16 {torch_us or 0:7.2f}, gemlite {other or 0:7.2f}; "
            + " ".join(str(int(v)) for v in config.values())
        )
    sums = []
    for bits in BITS:
        for rows in SUMMED:
            parts = [best.get((bits, n, k, rows), {}).get("us") for n, k in LAYER_7B]
            cublas = [measured.get(json.dumps([16, n, k, rows, "torch"])) for n, k in LAYER_7B]
            roof = sum(least_bytes(bits, rows, n, k) for n, k in LAYER_7B) / read * 1e6
            sums.append({
                "bits": bits, "rows": rows, "roof_us": roof,
                "sum_us": None if None in parts else sum(parts),
                "torch_bf16_sum_us": None if None in cublas else sum(cublas),
                "chained_us": measured.get(json.dumps([bits, rows, "layer ours"])),
                "torch_bf16_chained_us": measured.get(json.dumps([16, rows, "layer torch"])),
                "spaced_us": measured.get(json.dumps([bits, rows, "layer ours spaced"])),
                "torch_bf16_spaced_us": measured.get(json.dumps([16, rows, "layer torch spaced"])),
            })  # fmt: skip
            print("7B layer", json.dumps({k: round(v, 1) if v else v for k, v in sums[-1].items()}))
    errors = [row for row in log.rows if row.get("error")]
    for row in errors[:20]:
        print("failed:", json.dumps(row)[:300])
    print(f"{len(log.rows)} measurements, {len(errors)} failed")
    return {"read_bandwidth": read, "gpu": torch.cuda.get_device_name(), "cells": table, "layers": sums}


def check(log: Log, part: int, parts: int) -> None:
    for name, said in gate(part, parts):
        log.add(["gate", name], error=said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("linear.json"))
    parser.add_argument("--seconds", type=float, default=240.0, help="stop in time for so long in all")
    parser.add_argument("--quick", action="store_true", help="the check and the table's own choices")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--peer-seconds", type=float, default=40.0, help="part of the time kept for gemlite")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    end = time.time() + args.seconds
    lines = args.out.with_suffix(".lines")

    def child(part: str, seconds: float, **how: object) -> subprocess.Popen:
        command = [sys.executable, __file__, "--out", str(args.out), "--part", part]
        command += ["--seconds", str(max(5.0, seconds)), "--workers", str(args.workers)]
        return subprocess.Popen(command + ["--quick"] * args.quick, **how)

    def finish(part: str, seconds: float) -> int:
        running = child(part, seconds)
        try:
            return running.wait(timeout=max(5.0, seconds) + 25)
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
            layers(Log(lines))
        else:
            peer(Log(lines))
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
    print(f"gate: {len(checked) - len(failed)} of {len(checked)} right (of 528)", flush=True)
    print(f"checked and compiled for {time.time() - began:.0f} s", flush=True)
    keep = 12 + args.peer_seconds * (not args.quick)
    while finish("sweep", end - time.time() - keep) == 3 and time.time() < end - keep:
        print("a configuration broke the CUDA context; going on behind it", flush=True)
    finish("layers", 10)
    if not args.quick and args.peer_seconds:
        finish("peer", end - time.time())
    log = Log(lines)
    checks = {"checked": len(checked), "failed": failed}
    args.out.write_text(json.dumps(report(log) | checks | {"measurements": log.rows}, indent=0))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

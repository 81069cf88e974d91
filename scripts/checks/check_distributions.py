"""The exact distribution of whole generations, with every draw enumerated, against the target's, on a device.

    python -m scripts.checks.check_distributions [--device cuda|cpu] [--batch 128] [names ...]

The cases are those of ``tests/support/distributions/generation_cases.py``. The operators that draw and accept
(on a GPU the Triton kernels) run too, with random numbers crafted for each outcome, and must decide as their
definitions do. Prints a line for each case: runs, seconds, and the total variation between the distribution
of the generated tokens and the target's own, computed in float64. Exits with status 1 if one is larger than
``--limit``.
"""

import argparse
import time

import torch
from generation_cases import CASES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all of them by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128, help="runs in parallel")
    parser.add_argument("--limit", type=float, default=1e-5, help="largest total variation")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; cases: {'; '.join(CASES)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    runs, failed, start = 0, [], time.perf_counter()
    for name in options.names or CASES:
        case, began = CASES[name], time.perf_counter()
        generations = case.generations(options.device, batch=options.batch, operators=True)
        distance = case.distance(generations)
        runs += generations.runs
        if not distance <= options.limit:
            failed.append(name)
        seconds = time.perf_counter() - began
        mark = "" if distance <= options.limit else "  DIFFERS"
        print(f"{name:36} {generations.runs:6} runs {seconds:7.1f} s   {distance:.1e}{mark}", flush=True)
    names = options.names or list(CASES)
    print(
        f"{len(names) - len(failed)} of {len(names)} cases within {options.limit:.0e} on {options.device}: "
        f"{runs} runs, {time.perf_counter() - start:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

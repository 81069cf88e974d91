"""The exact distribution of whole generations, with every draw enumerated, against the target's, on a device.

    python -m scripts.checks.check_distributions [--device cuda|cpu] [--batch 128] [names ...]

The cases are those of ``tests/support/distributions/generation_cases.py``. The operators that draw and accept
(on a GPU the Triton kernels) run too, with random numbers crafted for each outcome, and must decide as their
definitions do. Prints a line for each case: runs, seconds, and the total variation between the distribution
of the generated tokens and the target's own, computed in float64. Exits with status 1 if one is larger than
``--limit``; the last line is JSON.
"""

import sys
import time

import torch

from scripts.checks.report import Report, parser
from tests.support.distributions.generation_cases import CASES


def main() -> int:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="cases; all of them by default")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    made.add_argument("--batch", type=int, default=128, help="runs in parallel")
    made.add_argument("--limit", type=float, default=1e-5, help="largest total variation")
    options = made.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        made.error(f"no case {unknown[0]!r}; cases: {'; '.join(CASES)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    report, start = Report(), time.perf_counter()
    for name in options.names or CASES:
        case, began = CASES[name], time.perf_counter()
        generations = case.generations(options.device, batch=options.batch, operators=True)
        distance = float(case.distance(generations))
        figures = {"runs": generations.runs, "seconds": round(time.perf_counter() - began, 1)}
        report.add(name, distance <= options.limit, **figures, distance=distance)
    runs, seconds = sum(row["runs"] for row in report.rows), round(time.perf_counter() - start)
    return report.finish(device=options.device, limit=options.limit, runs=runs, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())

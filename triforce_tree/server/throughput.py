"""A line of throughput in the log for each interval in which the server worked."""

import asyncio
import logging

from triforce_tree.server.metrics import Metrics, Totals
from triforce_tree.server.scheduler import Scheduler

_LOG = logging.getLogger("triforce_tree.server")
# Seconds between two lines.
_EVERY = 10.0


async def log_throughput(metrics: Metrics, scheduler: Scheduler, every: float = _EVERY) -> None:
    """Logs a line every ``every`` seconds until it is cancelled; nothing while the server is idle."""
    before, clock = metrics.totals(), asyncio.get_running_loop()
    start = clock.time()
    while True:
        await asyncio.sleep(every)
        now, seconds = metrics.totals(), clock.time() - start
        if now != before or scheduler.running or scheduler.waiting:
            _LOG.info(throughput(before, now, seconds, scheduler.running, scheduler.waiting))
        before, start = now, start + seconds


def throughput(before: Totals, now: Totals, seconds: float, running: int, waiting: int) -> str:
    """Returns the line for the ``seconds`` between two totals.

    The share of prompt tokens that were still cached is that of the sequences that ended in this time. The
    accepted tokens are those of a pass of one sequence, without the token that the target adds itself.
    """
    prompt, new, passes, reused, ended = (b - a for a, b in zip(before, now, strict=True))
    parts = [
        f"prompts {prompt / seconds:,.1f} tokens/s", f"new {new / seconds:,.1f} tokens/s",
        f"running {running}", f"waiting {waiting}",
    ]  # fmt: skip
    if ended:
        parts.append(f"kept prefixes {100 * reused / ended:.0f} % of prompt tokens")
    if passes:
        parts.append(f"accepted {(new - passes) / passes:.2f} tokens a pass")
    return ", ".join(parts)

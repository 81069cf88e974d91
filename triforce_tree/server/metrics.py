"""Metrics of a server for Prometheus, and a line of throughput in its log."""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from triforce_tree.server.scheduler import Scheduler
from triforce_tree.server.text_stream import ServedText

_LOG = logging.getLogger("triforce_tree.server")
# Seconds between two lines of throughput.
_EVERY = 10.0
_NAMESPACE = "triforce_tree"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


# The names that metrics have at vLLM.
_VLLM = {
    "running_sequences": ["num_requests_running"],
    "waiting_sequences": ["num_requests_waiting"],
    "prompt_tokens": ["prompt_tokens", "prefix_cache_queries"],
    "new_tokens": ["generation_tokens"],
    "reused_tokens": ["prefix_cache_hits"],
    "proposed_tokens": ["spec_decode_num_draft_tokens"],
    "accepted_tokens": ["spec_decode_num_accepted_tokens"],
    "sequence_passes": ["spec_decode_num_drafts"],
    "first_token_seconds": ["time_to_first_token_seconds"],
    "inter_token_seconds": ["inter_token_latency_seconds"],
    "token_seconds": ["request_time_per_output_token_seconds"],
    "sequence_seconds": ["e2e_request_latency_seconds"],
    "queue_seconds": ["request_queue_time_seconds"],
    "prefill_seconds": ["request_prefill_time_seconds"],
}


class _AsVLLM(Collector):
    """Repeats metrics of a registry under vLLM's names, with its label ``model_name``."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            own = metric.name.removeprefix(f"{_NAMESPACE}_")
            for name in (f"vllm:{theirs}" for theirs in _VLLM.get(own, ())):
                named = Metric(name, metric.documentation, metric.type)
                for sample in metric.samples:
                    end = sample.name.removeprefix(metric.name)
                    labels = {**sample.labels, "model_name": self._model}
                    named.add_sample(f"{name}{end}", labels, sample.value)
                yield named


class Totals(NamedTuple):
    """Numbers that grow: tokens of prompts whose first new token is there, new tokens, passes of sequences,
    and of the sequences that have ended the reused tokens and all tokens of their prompts.
    """

    prompt: int
    new: int
    passes: int
    reused: int
    ended_prompts: int


class Metrics:
    """Counts sequences and tokens. Names begin with ``triforce_tree_``; process metrics with ``process_``.

    Args:
        model: the name of the model.
    """

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._as_vllm = CollectorRegistry()
        self._as_vllm.register(_AsVLLM(registry, model))
        self._ended_prompts = 0
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        own: dict[str, Any] = {"namespace": _NAMESPACE, "registry": registry}
        timed = own | {"buckets": _SECONDS}
        self._requests = Counter("sequences", "Sequences by outcome.", ["outcome"], **own)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts.", **own)
        self._new = Counter("new_tokens", "Tokens generated.", **own)
        self._proposed = Counter("proposed_tokens", "Draft tokens that the target verified.", **own)
        self._accepted = Counter("accepted_tokens", "Draft tokens that the target accepted.", **own)
        self._passes = Counter(
            "sequence_passes",
            "Passes of the target, counted for each sequence of the batch; each adds one token and the draft "
            "tokens that it accepted.",
            **own,
        )
        self._reused = Counter(
            "reused_tokens", "Tokens of prompts whose keys and values were still cached.", **own
        )
        self._waited = Histogram("queue_seconds", "Seconds of a sequence in the queue.", **timed)
        self._first = Histogram(
            "first_token_seconds", "Seconds from a request to the first token of a sequence.", **timed
        )
        self._whole = Histogram(
            "sequence_seconds", "Seconds from a request to the end of a sequence.", **timed
        )
        self._prefill = Histogram(
            "prefill_seconds", "Seconds of the prefill of prompts that began together.", **timed
        )
        self._token = Histogram(
            "token_seconds", "Seconds of decoding per new token of a sequence.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), **own,
        )  # fmt: skip
        self._between = Histogram(
            "inter_token_seconds",
            "Seconds between two passes of a sequence, divided among the tokens of the later one.",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3, 10), **own,
        )  # fmt: skip
        self._stored = Gauge(
            "kv_stored_tokens",
            "KV slots in use by running sequences; a slot shared by several counts once.",
            **own,
        )
        self._shared = Gauge(
            "kv_shared_tokens", "KV slots saved in running sequences by sharing common prefixes.", **own
        )
        self._waiting = Gauge("waiting_sequences", "Sequences in the queue.", **own)
        self._running = Gauge("running_sequences", "Sequences that are being decoded.", **own)

    def watch(self, scheduler: Scheduler) -> None:
        """Reports the queue and the KV slots of this scheduler."""
        self._waiting.set_function(lambda: scheduler.waiting)
        self._running.set_function(lambda: scheduler.running)
        self._stored.set_function(lambda: scheduler.kv_tokens()[0])
        self._shared.set_function(lambda: scheduler.kv_tokens()[1])

    def refused(self) -> None:
        """Counts a request that was refused because the queue was full."""
        self._requests.labels("refused").inc()

    def passed(self, sequence: ServedText, tokens: int, seconds: float | None) -> None:
        """Counts the new tokens of a pass.

        Args:
            seconds: the time since the sequence's pass before it; None for the first one.
        """
        self._passes.inc()
        self._new.inc(tokens)
        if seconds is None:
            assert sequence.stream is not None
            assert sequence.stream.first is not None
            self._first.observe(sequence.stream.first - sequence.began)
            self._prompt.inc(len(sequence.prompt))
        else:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)

    def ended(self, sequence: ServedText) -> None:
        """Counts a sequence that has ended, was cancelled or has failed."""
        self._waited.observe(sequence.waited)
        output = sequence.output
        if output is None:
            self._requests.labels("cancelled" if sequence.error is None else "failed").inc()
            return
        self._requests.labels("cancelled" if sequence.cut else "ended").inc()
        self._whole.observe(time.monotonic() - sequence.began)
        self._reused.inc(int(sequence.result("reused_tokens")))
        self._ended_prompts += len(sequence.prompt)
        new = int(sequence.result("new_tokens"))
        if new and output.decode_seconds is not None:
            self._token.observe(output.decode_seconds / new)
        if output.prefill_seconds is not None:
            self._prefill.observe(output.prefill_seconds)
        if output.levels:
            self._proposed.inc(output.levels[-1].proposed)
            self._accepted.inc(output.levels[-1].accepted)

    def totals(self) -> "Totals":
        """Returns what was counted since the start."""

        def total(name: str) -> int:
            return int(self._registry.get_sample_value(f"{_NAMESPACE}_{name}_total") or 0)

        return Totals(
            total("prompt_tokens"), total("new_tokens"), total("sequence_passes"), total("reused_tokens"),
            self._ended_prompts,
        )  # fmt: skip

    def exposed(self) -> bytes:
        """Returns all metrics in Prometheus' text format, some also under vLLM's names."""
        return generate_latest(self._registry) + generate_latest(self._as_vllm)


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

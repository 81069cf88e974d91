"""Metrics of a server for Prometheus."""

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from triforce_tree.server.scheduler import Scheduler, ServedText

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counts sequences and tokens. Names begin with ``triforce_tree_``; process metrics with ``process_``."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def named(name: str) -> str:
            return f"triforce_tree_{name}"

        self._requests = Counter(named("sequences"), "Sequences by outcome.", ["outcome"], registry=registry)
        self._prompt = Counter(named("prompt_tokens"), "Tokens of prompts.", registry=registry)
        self._new = Counter(named("new_tokens"), "Tokens generated.", registry=registry)
        self._proposed = Counter(
            named("proposed_tokens"), "Draft tokens that the target verified.", registry=registry
        )
        self._accepted = Counter(
            named("accepted_tokens"), "Draft tokens that the target accepted.", registry=registry
        )
        self._reused = Counter(
            named("reused_tokens"),
            "Tokens of prompts whose keys and values were still cached.",
            registry=registry,
        )
        self._waited = Histogram(
            named("queue_seconds"), "Seconds of a sequence in the queue.", buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            named("first_token_seconds"), "Seconds from a request to the first token of a sequence.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            named("sequence_seconds"), "Seconds from a request to the end of a sequence.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._prefill = Histogram(
            named("prefill_seconds"),
            "Seconds of the prefill of prompts that began together.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._token = Histogram(
            named("token_seconds"), "Seconds of decoding per new token of a sequence.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), registry=registry,
        )  # fmt: skip
        self._stored = Gauge(
            named("kv_stored_tokens"),
            "KV slots in use by running sequences; a slot shared by several counts once.",
            registry=registry,
        )
        self._shared = Gauge(
            named("kv_shared_tokens"),
            "KV slots saved in running sequences by sharing common prefixes.",
            registry=registry,
        )
        self._waiting = Gauge(named("waiting_sequences"), "Sequences in the queue.", registry=registry)
        self._running = Gauge(
            named("running_sequences"), "Sequences that are being decoded.", registry=registry
        )

    def watch(self, scheduler: Scheduler) -> None:
        """Reports the queue and the KV slots of this scheduler."""
        self._waiting.set_function(lambda: scheduler.waiting)
        self._running.set_function(lambda: scheduler.running)
        self._stored.set_function(lambda: scheduler.kv_tokens()[0])
        self._shared.set_function(lambda: scheduler.kv_tokens()[1])

    def refused(self) -> None:
        """Counts a request that was refused because the queue was full."""
        self._requests.labels("refused").inc()

    def ended(self, sequence: ServedText) -> None:
        """Counts a sequence that has ended, was cancelled or has failed."""
        self._waited.observe(sequence.waited)
        if sequence.stream is not None and sequence.stream.first is not None:
            self._first.observe(sequence.stream.first - sequence.began)
        output = sequence.output
        if output is None:
            self._requests.labels("cancelled" if sequence.error is None else "failed").inc()
            return
        self._requests.labels("cancelled" if sequence.cut else "ended").inc()
        self._whole.observe(time.monotonic() - sequence.began)
        self._reused.inc(int(sequence.result("reused_tokens")))
        new = int(sequence.result("new_tokens"))
        self._prompt.inc(len(sequence.prompt))
        self._new.inc(new)
        if new and output.decode_seconds is not None:
            self._token.observe(output.decode_seconds / new)
        if output.prefill_seconds is not None:
            self._prefill.observe(output.prefill_seconds)
        if output.levels:
            self._proposed.inc(output.levels[-1].proposed)
            self._accepted.inc(output.levels[-1].accepted)

    def exposed(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

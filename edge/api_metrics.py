"""What was asked and answered so far, for people (tokens of the last second) and for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from starsd.edge.api_answers import Tally
from starsd.edge.api_line import Line

if TYPE_CHECKING:
    from starsd.edge.runtime import Runtime
    from starsd.edge.telemetry import Telemetry

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
WINDOW = 1.0  # seconds that the speed is of
GAUGES = {  # of a reading: names here, and what they are
    "power_w": ("power_watts", "Power of the board, or of its GPU alone."),
    "temperature_c": ("temperature_celsius", "Of the hottest sensor."),
    "throttled": ("throttled", "1 while clocks are held down by heat or current."),
    "memory_used": ("memory_used_bytes", "Memory that programs could not have."),
    "memory_total": ("memory_bytes", "Memory that there is."),
    "gpu_load": ("gpu_load_ratio", "Load of the GPU."),
    "cpu_load": ("cpu_load_ratio", "Load of all cores."),
    "age_s": ("reading_age_seconds", "Since the sensors were read."),
}


class Metrics:
    """Belongs to one event loop, and to one runtime."""

    def __init__(self, runtime: Runtime, line: Line, now: Callable[[], float] = time.monotonic) -> None:
        registry = self._registry = CollectorRegistry()
        self._runtime, self._now = runtime, now
        self._counted = {"up": 0, "down": 0}  # bytes
        self._recent: deque[tuple[float, int]] = deque()
        self._requests = Counter("starsd_edge_requests", "Answered requests.", ["path", "status"], registry=registry)
        self._seconds = Histogram(
            "starsd_edge_request_seconds",
            "From a request to its last byte.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            "starsd_edge_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=registry
        )
        self._prompt = Counter("starsd_edge_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._tokens = Counter("starsd_edge_tokens", "Tokens of answers.", registry=registry)
        self._passes = Counter("starsd_edge_passes", "Passes of the target behind prefills.", registry=registry)
        self._accepted = Counter(
            "starsd_edge_accepted_drafts", "Drafts that were right.", ["source"], registry=registry
        )
        self._bytes = Counter(
            "starsd_edge_link_bytes", "Between this device and its server.", ["way"], registry=registry
        )
        for name, what, read in (
            ("running", "Requests that are being answered.", lambda: line.running),
            ("waiting", "Requests in the line.", lambda: line.waiting),
            ("link_up", "1 while the server is connected.", lambda: runtime.status().link == "up"),
        ):
            Gauge(f"starsd_edge_{name}", what, registry=registry).set_function(read)
        registry.register(_Device(runtime.telemetry))

    def request(self, path: str, status: int, seconds: float) -> None:
        """One request is over; `path` is one of ours, lest strangers fill the memory."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens(self, count: int) -> None:
        """So many tokens just came."""
        self._tokens.inc(count)
        self._recent.append((self._now(), count))
        self._forget()

    def answered(self, tally: Tally, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)
        self._passes.inc(tally.passes)
        self._accepted.labels("remote").inc(tally.accepted_remote)
        self._accepted.labels("ngram").inc(tally.accepted_ngram)

    def tokens_per_second(self) -> float:
        """Of the last second, all answers together."""
        self._forget()
        return sum(count for _, count in self._recent) / WINDOW

    def text(self) -> bytes:
        """In Prometheus' text format."""
        if (link := self._runtime.link) is not None:
            for way, now in (("up", link.channel.bytes_up), ("down", link.channel.bytes_down)):
                self._bytes.labels(way).inc(now - self._counted[way])
                self._counted[way] = now
        return generate_latest(self._registry)

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < self._now() - WINDOW:
            self._recent.popleft()


class _Device(Collector):
    """What its sensors say when it is asked for: only what is known."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        reading = self._telemetry.reading()
        for field, (name, what) in GAUGES.items():
            if (value := getattr(reading, field)) is None:
                continue
            gauge = GaugeMetricFamily(f"starsd_edge_device_{name}", what, labels=["of"] if field == "power_w" else [])
            gauge.add_metric([reading.power_of or ""] if field == "power_w" else [], float(value))
            yield gauge
        telemetry = self._telemetry
        for name, what, joules in (
            ("energy", "Used while the power was known.", telemetry.joules),
            ("answer_energy", "Of it, used while answers were made.", telemetry.answer_joules),
        ):
            yield CounterMetricFamily(f"starsd_edge_{name}_joules", what, value=joules)

"""What was asked and answered so far, for people (tokens of the last second) and for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from starsd.edge.api_answers import Tally
from starsd.edge.api_line import Line

if TYPE_CHECKING:
    from starsd.edge.runtime import Runtime

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
WINDOW = 1.0  # seconds that the speed is of


class Metrics:
    """Belongs to one event loop, and to one runtime."""

    def __init__(self, runtime: Runtime, line: Line, now: Callable[[], float] = time.monotonic) -> None:
        registry = self._registry = CollectorRegistry()
        self._now = now
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
        self._bytes.labels("up").inc(tally.bytes_up)
        self._bytes.labels("down").inc(tally.bytes_down)

    def tokens_per_second(self) -> float:
        """Of the last second, all answers together."""
        self._forget()
        return sum(count for _, count in self._recent) / WINDOW

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < self._now() - WINDOW:
            self._recent.popleft()

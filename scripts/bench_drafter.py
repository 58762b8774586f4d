"""`starsd bench drafter`: how fast one drafter serves several sessions.

Both schedules draw official trees (`DynamicTree`) for the same sessions, each from a context of `context` rows. A round
gives every session a verdict of three tokens with their features and ends when every session has its new tree:

- fifo, the paper's: one session after the other, each tree alone in its passes;
- batched: all sessions in the same passes.

Rounds of the two take turns, so that both meet the same machine. `tree_ms_p50` is the median time from the start of a
tree's service to its end; for fifo that leaves out the wait for the sessions before it.

On a CPU that others use too, one thread can beat two many times over, since all threads wait for the last one in every
product; hence both are tried first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from starsd.server.drafter import DynamicTree, SlotLimits
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_MODEL

RANDOM = "random"
VERDICT = 3
WARM_UP = 2
TRIES = 7  # trees for each number of threads


@dataclass(frozen=True)
class DrafterBench:
    """What is measured, and for how long."""

    sessions: tuple[int, ...] = (1, 4, 16)
    total: int = 60
    depth: int = 5
    top_k: int = 10
    context: int = 256
    seconds: float = 4.0  # for each number of sessions, both schedules together
    dtype: str = "int8"
    device: str = "cpu"
    threads: int = 0  # 0: one or all, whichever is faster at the start
    seed: int = 0

    @property
    def shape(self) -> DynamicTree:
        return DynamicTree(self.total, self.depth, self.top_k)


def open_layer(bench: DrafterBench, head: str | None, target: str | None) -> Any:
    """The head that is measured: a folder's, the packaged one, or RANDOM weights of its size.

    The packaged one's target is pulled where it is missing.
    """
    import torch

    from starsd.server.eagle_heads import load_head
    from starsd.server.eagle_layer import EagleLayer
    from starsd.server.heads import ensure_model
    from starsd.server.random_head import random_head

    if bench.threads:
        torch.set_num_threads(bench.threads)
    if head == RANDOM:
        return EagleLayer(random_head(dtype=bench.dtype, device=bench.device, seed=bench.seed))
    if head is None or target is None:
        head, target = str(packaged_head(DEFAULT_MODEL)), DEFAULT_MODEL
        ensure_model(target)
    return EagleLayer(load_head(head, target, dtype=bench.dtype, device=bench.device))


def run(bench: DrafterBench, layer: Any) -> Iterator[dict[str, Any]]:
    """Two rows for each number of sessions, fifo first."""
    from starsd.server.batch import BatchDrafter

    shape, draw = bench.shape, np.random.default_rng(bench.seed)
    most = max(bench.sessions)
    drafter = BatchDrafter(layer, SlotLimits(slots=most, entries=bench.depth * bench.top_k), shape)
    sessions = [drafter.open() for _ in range(most)]
    width, vocab = layer.spec.features.width, layer.spec.vocab

    def verdict(session: Any, count: int) -> None:
        start = session.rows.count
        session.commit(draw.integers(0, vocab, count).tolist())
        session.feed(start, draw.standard_normal((session.rows.count - start, width), np.float32))

    def fifo(chosen: Sequence[Any]) -> list[float]:
        return [_seconds(drafter.trees, [session], shape) for session in chosen]

    def batched(chosen: Sequence[Any]) -> list[float]:
        return [_seconds(drafter.trees, chosen, shape)] * len(chosen)

    for session in sessions:
        verdict(session, 1 + bench.context)
        drafter.trees([session], shape)
    if not bench.threads and bench.device == "cpu":
        _set_threads(lambda: fifo(sessions[:1])[0])
    for count in bench.sessions:
        chosen, latencies, spent = sessions[:count], _per_schedule(), _per_schedule()
        for number in range(10_000):
            for schedule, serve in (("fifo", fifo), ("batched", batched)):
                for session in chosen:
                    if session.rows.count > 2 * bench.context:
                        session.truncate(1)
                        verdict(session, bench.context)
                        drafter.trees([session], shape)
                    verdict(session, VERDICT)
                times = serve(chosen)
                if number >= WARM_UP:
                    latencies[schedule] += times
                    spent[schedule].append(sum(times) if schedule == "fifo" else times[0])
            if sum(map(sum, spent.values())) >= bench.seconds and number > WARM_UP:
                break
        for schedule, times in latencies.items():
            yield {
                "sessions": count,
                "schedule": schedule,
                "trees_per_s": round(count / statistics.median(spent[schedule]), 1),
                "tree_ms_p50": round(1000 * statistics.median(times), 2),
                "dtype": layer.precision,
            }


def _set_threads(seconds: Callable[[], float]) -> None:
    """Let torch have one thread or as many as it has now, whichever makes this faster."""
    import torch

    found = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        found.append((statistics.median(seconds() for _ in range(TRIES)), threads))
    torch.set_num_threads(min(found)[1])


def _per_schedule() -> dict[str, list[float]]:
    return {"fifo": [], "batched": []}


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start

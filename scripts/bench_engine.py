"""`starsd bench engine`: what a pass of so many rows costs, and plain decoding beside other engines."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from starsd.edge.bundle import ensure_bundle
from starsd.edge.target import Target, open_target
from starsd.export.hf_folder import SOURCE_GGUF
from starsd.scripts.bench_peers import Make, Peer, llama_cpp, ours, transformers_fp32
from starsd.shared import manifest, tree
from starsd.shared.config import Engine
from starsd.shared.errors import UsageError
from starsd.shared.home import parse_ref

PAST = 256  # tokens of context behind every pass
ROUNDS = 5
STEPS = 16  # decoded a round and engine
REST = 0.5  # seconds before a peer's turn, in which the threads of the one before stop spinning
MIN_REPEATS, ROW_SECONDS = 7, 1.0  # a row count is timed at least so often, and for about so long
LABELS = ("plain_tok_s", "transformers_tok_s", "llama_cpp_tok_s")


def run(
    model: str, precision: str | None, rows: Sequence[int], threads: int, *, peers: bool
) -> Iterator[dict[str, float | None]]:
    """The contract's rows: one for each row count, then one with tokens per second of each engine."""
    from starsd.edge.target_onnx import physical_cores

    threads = threads or physical_cores()
    bundle = ensure_bundle(model, precision)
    target = open_target("onnx", bundle, Engine(threads=threads))
    if wrong := [count for count in rows if not 1 <= count <= target.context - PAST]:
        raise UsageError(f"rows are {wrong}, expected 1 to {target.context - PAST}")
    prompt = [(37 * i + 11) % target.shape.vocab for i in range(PAST)]
    target.prefill(prompt)
    for count in rows:
        yield {"rows": count, "ms_p50": round(pass_milliseconds(target, count), 2)}
    del target  # its threads would compete with the peers'
    yield plain_speeds(bundle, prompt, threads, peers=peers)


def pass_milliseconds(target: Target, rows: int) -> float:
    """Median time of a pass over a chain of `rows`; nothing is committed."""
    tokens = [(53 * i + 5) % target.shape.vocab for i in range(rows)]
    parents = tree.chain(rows)
    times: list[float] = []
    target.score(tokens, parents)
    deadline = time.perf_counter() + ROW_SECONDS
    while len(times) < MIN_REPEATS or time.perf_counter() < deadline:
        started = time.perf_counter()
        target.score(tokens, parents)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def plain_speeds(bundle: Path, prompt: list[int], threads: int, *, peers: bool) -> dict[str, float | None]:
    """Tokens per second of ours and of each peer, medians of interleaved rounds; None where a peer is not there."""
    makers: dict[str, tuple[Make, Path]] = {"plain_tok_s": (ours, bundle)}
    if peers:
        source = parse_ref(manifest.read(bundle).source).folder
        makers["transformers_tok_s"] = (transformers_fp32, source)
        gguf = source / SOURCE_GGUF
        if gguf.is_file():
            makers["llama_cpp_tok_s"] = (llama_cpp, gguf)
    with contextlib.ExitStack() as stack:
        running = {}
        for label, (make, path) in makers.items():
            peer = stack.enter_context(Peer(make, path, prompt, threads))
            if peer.missing:
                print(f"{label.removesuffix('_tok_s')}: {peer.missing} is not installed", file=sys.stderr)
            else:
                running[label] = peer
        times: dict[str, list[float]] = {label: [] for label in running}
        for _ in range(ROUNDS):
            for label, peer in running.items():
                time.sleep(REST)
                times[label].append(peer.milliseconds(STEPS))
    return {label: round(1e3 / statistics.median(times[label]), 1) if label in times else None for label in LABELS}

"""A target bundle on ONNX Runtime: static K/V buffers, grown by doubling, which most graphs write in place.

They lie in the host's memory, or on a GPU where the provider is one that has them. What a graph is fed and how it hands
out K/V depends on its flavour: `shared/graph_contract.py`.

On the processor passes are padded as little as the flavour allows: a dummy for attention alone, or an even number of
rows throughout. On a GPU a pass over a tree has 1, 2, 4 … 64 rows, so that each of these shapes can be captured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starsd.edge import probe
from starsd.edge.cuda import Cuda, open_cuda
from starsd.edge.onnx_gpu import GpuCache, OnnxGpu
from starsd.edge.onnx_graph import VERSION, OnnxGraph, available
from starsd.edge.onnx_host import HostCache
from starsd.edge.padded_target import PaddedTarget, context_of
from starsd.edge.providers import choose_provider, session_options
from starsd.edge.target import Floats
from starsd.shared.config import Engine
from starsd.shared.errors import CapacityError, DeviceError, UsageError
from starsd.shared.graph_contract import Pass, contract_of, require_runtime
from starsd.shared.manifest import Manifest, read
from starsd.shared.tensorrt_key import MAX_ROWS


class Device(NamedTuple):
    """A GPU to compute on: onnxruntime's provider, and whether passes become CUDA graphs."""

    cuda: Cuda
    provider: str
    captures: bool


def open_bundle(folder: Path, config: Engine) -> OnnxTarget:
    """Open the bundle in `folder` on the provider that `config` names. `auto` is the processor where a GPU cannot be
    used, and says on stderr why where one could be expected.

    Raises BundleError when its files and manifest disagree, or the graph won't load, UsageError for a configuration
    out of range, and DeviceError for a GPU that was asked for and fails.
    """
    about = read(folder)
    require_runtime(about.flavour, VERSION)
    choice = choose_provider(config.provider, about, VERSION, available())
    why_not = choice.why_not
    if choice.name != "cpu":
        try:
            return _open_on_gpu(folder, about, config, choice.name)
        except (DeviceError, CapacityError) as error:
            if config.provider != "auto":
                raise
            why_not = str(error)
    if why_not:
        print(f"without a GPU, on the processor: {why_not}", file=sys.stderr, flush=True)
    return OnnxTarget(folder, about, config)


def _open_on_gpu(folder: Path, about: Manifest, config: Engine, provider: str) -> OnnxTarget:
    """Without CUDA graphs where they cannot be had. TensorRT's provider captures no more than one shape."""
    cuda = open_cuda()
    if provider == "cuda" and not contract_of(about.flavour).on_host:
        try:
            return OnnxTarget(folder, about, config, Device(cuda, provider, captures=True))
        except DeviceError:
            pass
    return OnnxTarget(folder, about, config, Device(cuda, provider, captures=False))


class OnnxTarget(PaddedTarget):
    """One model and one conversation's cache; see `Target` for the life of it. Without a `device` on the processor."""

    def __init__(self, folder: Path, manifest: Manifest, config: Engine, device: Device | None = None) -> None:
        self.manifest = manifest
        context = context_of(config, probe.PROMPT, manifest.shape.context)
        cores = physical_cores()
        if not 0 <= config.threads <= 2 * cores:
            raise UsageError(f"threads are {config.threads}, expected 0 to {2 * cores} with {cores} usable cores")
        super().__init__(manifest.shape, manifest.features, context, config.prefill_chunk)
        self._first_room = min(config.initial_context, context)
        self._gpu: OnnxGpu | None = None
        threads = config.threads or cores
        if device is None:
            self._graph = OnnxGraph(folder, manifest, threads)
            self._start_cache()
            self._choose_padding(self._graph.contract.paddings)
        else:
            self._start_on(device, folder, threads)
            self._choose_bucket()

    @property
    def provider(self) -> str:
        """Where it computes: cpu, cuda or tensorrt."""
        return self._graph.provider

    @property
    def captures(self) -> bool:
        """Whether passes over trees become CUDA graphs."""
        return self._gpu is not None and self._gpu.captures

    def _start_on(self, device: Device, folder: Path, threads: int) -> None:
        manifest, cuda, capacity = self.manifest, device.cuda, self._context + MAX_ROWS
        stream, most = cuda.make_stream(), max(min(self._chunk, self._context), MAX_ROWS)
        largest = _text(most, capacity, MAX_ROWS)
        sizes: dict[str, int] = {}
        profile: list[dict[str, tuple[int, ...]]] = []
        if device.provider == "tensorrt":  # its K/V have one length, as those of an engine
            self._first_room, sizes = self._context, {"capacity": capacity}
            contract = contract_of(manifest.flavour)
            for one in (_text(1, capacity, 1), _text(8, capacity, 8), largest):
                feeds = contract.feeds(one, manifest.shape.window)
                profile.append({name: value.shape for name, value in feeds.items()})
        options = session_options(device.provider, available(), stream, graphs=device.captures, profile=profile)
        self._graph = OnnxGraph(folder, manifest, threads, device.provider, options, sizes)
        self._gpu = OnnxGpu(self._graph, cuda, stream, largest, captures=device.captures)
        self._start_cache()

    def _start_cache(self) -> None:
        self._cache: HostCache | GpuCache = HostCache(self._graph) if self._gpu is None else GpuCache(self._gpu)
        self._make_room(self._first_room)

    def _make_room(self, length: int) -> None:
        room = max(1, self._cache.room)
        while room < length:
            room *= 2
        if room > self._cache.room:
            self._cache.grow(min(room, self._context), self._length)

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        rows = self._padding.rows(len(tokens))
        wanted = 1 if parents is None else rows
        attending = max(rows, self._padding.attending)
        return self._cache.run(Pass(tokens, parents, self._length, rows, attending, self._cache.capacity, wanted))


def _text(rows: int, capacity: int, wanted: int) -> Pass:
    """A pass of so many rows at the end of K/V."""
    return Pass([0] * rows, None, capacity - rows, rows, rows, capacity, wanted)


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads of one core counted once: two of them share the arithmetic units."""
    siblings: set[str] = set()
    usable: Any = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.is_file() else str(cpu))
    return max(1, len(siblings))

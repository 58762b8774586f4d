"""A target bundle on ONNX Runtime: static K/V buffers, grown by doubling, which most graphs write in place.

All K/V of all layers lie in one array, so that keeping the accepted rows of a pass is one copy. What a graph is fed and
how it hands out K/V depends on its flavour: `shared/graph_contract.py`.

Promise 2, row independence: a kernel for one row may round differently from the kernel for many, which of them do
depends on the processor. On opening, the engine measures it and pads passes with the fewest dummy rows that make every
row count agree to the last bit: a dummy for attention alone, or an even number of rows throughout. A dummy sees no
tree node and none sees it. What still differs then is `noise`, and `branch_noise` behind the trunk: a node that others
separate from its ancestors lies in another column than in plain decoding, so attention adds up in another order, and
int8 activations amplify the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.edge import probe
from starsd.edge.cached_target import CachedTarget
from starsd.edge.target import Floats
from starsd.shared.config import Engine
from starsd.shared.errors import BundleError, UsageError
from starsd.shared.graph_contract import DUMMIES, Padding, Pass, contract_of, require_runtime
from starsd.shared.manifest import GRAPH_FILE, Manifest, read

_PROBE_ROWS = (1, 2, 3, 5)  # row counts that are compared with many
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def open_bundle(folder: Path, config: Engine) -> OnnxTarget:
    """Open the bundle in `folder`. Raises BundleError when its files and manifest disagree, or the graph won't load."""
    return OnnxTarget(folder, read(folder), config)


class OnnxTarget(CachedTarget):
    """One model and one conversation's cache; see `Target` for the life of it."""

    def __init__(self, folder: Path, manifest: Manifest, config: Engine) -> None:
        self.manifest = manifest
        most, least = manifest.shape.context, probe.PROMPT
        context = config.max_context or most
        if not least <= context <= most:
            raise UsageError(f"context is {context} tokens, expected {least} to {most}, or 0 for all")
        if config.prefill_chunk < 1:
            raise UsageError(f"prefill chunk is {config.prefill_chunk} tokens, expected at least 1")
        cores = physical_cores()
        if not 0 <= config.threads <= 2 * cores:
            raise UsageError(f"threads are {config.threads}, expected 0 to {2 * cores} with {cores} usable cores")
        require_runtime(manifest.flavour, ort.__version__)
        super().__init__(manifest.shape, manifest.features, context, config.prefill_chunk)
        options = ort.SessionOptions()
        options.intra_op_num_threads = config.threads or cores
        options.log_severity_level = 3
        # attention weights fall below 1e-38, where arithmetic is many times slower; they add nothing to a sum. The
        # runtime sets this for the thread that calls it, and for good: so it gets a thread of its own
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        self._contract = contract_of(manifest.flavour)
        for name, value in self._contract.options.items():
            options.add_session_config_entry(name, value)
        self._thread = ThreadPoolExecutor(1, "target")
        try:
            self._session = self._apart(
                ort.InferenceSession, str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's exceptions share no base but this one
            raise BundleError(
                f"{folder / GRAPH_FILE} does not load in onnxruntime {ort.__version__}: {error}"
            ) from error
        self._cache_type = self._check_graph(folder)
        self._first_room = min(config.initial_context, context)
        self._start_cache()
        self._padding, self._noise = self._choose_padding()
        self._branch_noise = max(self._noise, probe.path_noise(self, probe.COMB))

    def _check_graph(self, folder: Path) -> Any:
        """The type of K/V. Raises BundleError unless the graph has the inputs and outputs of the manifest's shape."""
        shape, features = self._shape, self._features
        self._inputs = inputs = {tensor.name: tensor for tensor in self._session.get_inputs()}
        outputs = {tensor.name: tensor for tensor in self._session.get_outputs()}
        got = {
            "layers": sum(name.startswith("past_k_") for name in inputs),
            "K/V heads": inputs["past_k_0"].shape[1] if "past_k_0" in inputs else None,
            "head_dim": inputs["past_k_0"].shape[3] if "past_k_0" in inputs else None,
            "vocab": outputs["logits"].shape[1] if "logits" in outputs else None,
            "feature width": outputs["features"].shape[1] if "features" in outputs else 0,
            "a window": "local_mask" in inputs,
        }
        expected = (shape.layers, shape.kv_heads, shape.head_dim, shape.vocab, features.width, shape.window > 0)
        for (what, found), value in zip(got.items(), expected, strict=True):
            if found != value:
                raise BundleError(f"{folder / GRAPH_FILE} has {what} {found}, its manifest says {value}")
        return _TYPES[inputs["past_k_0"].type]

    @property
    def noise(self) -> float:
        return self._noise

    @property
    def branch_noise(self) -> float:
        return self._branch_noise

    @property
    def padding(self) -> Padding:
        return self._padding

    @property
    def cache_bytes(self) -> int:
        """Memory that K/V take now."""
        return self._cache.nbytes

    def _choose_padding(self) -> tuple[Padding, float]:
        """The cheapest padding under which row counts agree, and by how much they differ where none makes them."""
        differences = {}
        for padding in self._contract.paddings:
            self._padding = padding
            differences[padding] = max(probe.count_noise(self, _PROBE_ROWS), probe.path_noise(self, probe.TRUNK))
            if differences[padding] == 0:
                break
        best = self._padding = min(differences, key=differences.__getitem__)
        return best, differences[best]

    def _keep(self, rows: Sequence[int]) -> None:
        start = self._length
        self._cache[:, :, start : start + len(rows)] = self._cache[:, :, start + np.asarray(rows)]

    def _copy(self, other: OnnxTarget, length: int) -> None:
        self._cache[:, :, :length] = other._cache[:, :, :length]

    def _start_cache(self) -> None:
        self._binding = self._session.io_binding()
        self._cache: NDArray[Any] = np.empty(0)
        self._room = 0
        self._make_room(self._first_room)

    def _make_room(self, length: int) -> None:
        room = max(1, self._room)
        while room < length:
            room *= 2
        if room > self._room:
            self._grow(min(room, self._context))

    def _grow(self, room: int) -> None:
        """Move K/V into buffers for `room` tokens and the dummies; on any failure the old ones stay."""
        shape, capacity = self.shape, room + DUMMIES
        cache: NDArray[Any] = np.zeros((2 * shape.layers, shape.kv_heads, capacity, shape.head_dim), self._cache_type)
        if self._length:
            cache[:, :, : self._length] = self._cache[:, :, : self._length]
        # the runtime sees these arrays only through addresses: they live as long as self
        self._cache = cache
        self._room = room
        self._values = [ort.OrtValue.ortvalue_from_numpy(cache[i : i + 1]) for i in range(len(cache))]
        for i, value in enumerate(self._values):
            kind, layer = "kv"[i % 2], i // 2
            self._binding.bind_ortvalue_input(f"past_{kind}_{layer}", value)
            if self._contract.in_place:
                self._binding.bind_ortvalue_output(f"present_{kind}_{layer}", value)

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        count, rows = len(tokens), self._padding.rows(len(tokens))
        wanted, capacity = 1 if parents is None else rows, self._room + DUMMIES
        one = Pass(tokens, parents, self._length, rows, max(rows, self._padding.attending), capacity, wanted)
        feeds = self._contract.feeds(one, self.shape.window)
        for name in feeds.keys() & self._inputs.keys():  # each mask only where a layer needs it
            self._binding.bind_cpu_input(name, feeds[name])
        logits = self._bind_result("logits", wanted, self.shape.vocab)
        features = self._bind_result("features", rows, self.features.width)
        new = None if self._contract.in_place else self._bind_new(rows)
        self._apart(self._session.run_with_iobinding, self._binding)
        if new is not None:
            self._cache[:, :, self._length : self._length + rows] = new
        return logits[:count], features[:count]

    def _bind_new(self, rows: int) -> NDArray[Any]:
        """Where the graph puts K/V of a pass when not into the cache: laid out as the cache is."""
        shape = self.shape
        new = np.empty((2 * shape.layers, shape.kv_heads, rows, shape.head_dim), self._cache_type)
        for i, part in enumerate(new):
            self._binding.bind_output(
                f"new_{'kv'[i % 2]}_{i // 2}", "cpu", 0, self._cache_type, (1, *part.shape), part.ctypes.data
            )
        return new

    def _apart(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`call` in the runtime's thread. It is over when this returns, be it by an interrupt."""
        running = self._thread.submit(call, *args, **options)
        try:
            return running.result()
        finally:
            wait([running])

    def _bind_result(self, name: str, rows: int, width: int) -> Floats:
        result = np.empty((rows, width), np.float32)
        if width:
            self._binding.bind_output(name, "cpu", 0, np.float32, result.shape, result.ctypes.data)
        return result


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads of one core counted once: two of them share the arithmetic units."""
    siblings: set[str] = set()
    usable: Any = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.is_file() else str(cpu))
    return max(1, len(siblings))

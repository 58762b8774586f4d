"""A target bundle on ONNX Runtime: static K/V buffers that the graph writes in place, grown by doubling.

All K/V of all layers lie in one array, so that keeping the accepted rows of a pass is one copy.

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
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.edge.cached_target import CachedTarget
from starsd.edge.target import Floats
from starsd.shared import tree
from starsd.shared.config import Engine
from starsd.shared.errors import BundleError, UsageError
from starsd.shared.manifest import GRAPH_FILE, Manifest, read

_HIDDEN = np.float32(-1e9)  # added to an attention score that must not count
_DUMMIES = 2  # rows kept free behind a pass for them
_PROBE_ROWS = (1, 2, 3, 5)  # row counts compared with _PROBE_WIDE rows of the same tree
_PROBE_WIDE = 8
_COMB = (-1, 0, 0, 2, 2, 4, 4, 6)  # a tree whose path to the last row skips every other one
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Padding(NamedTuple):
    """Rows of a pass are a multiple of `multiple`; attention has at least `attending`."""

    multiple: int
    attending: int

    def rows(self, count: int) -> int:
        return -(-count // self.multiple) * self.multiple


_PADDINGS = (Padding(1, 2), Padding(2, 2))  # cheapest first


def open_bundle(folder: Path, config: Engine) -> OnnxTarget:
    """Open the bundle in `folder`. Raises BundleError when its files and manifest disagree, or the graph won't load."""
    return OnnxTarget(folder, read(folder), config)


class OnnxTarget(CachedTarget):
    """One model and one conversation's cache; see `Target` for the life of it."""

    def __init__(self, folder: Path, manifest: Manifest, config: Engine) -> None:
        self.manifest = manifest
        most, least = manifest.shape.context, 2 * _PROBE_WIDE
        context = config.max_context or most
        if not least <= context <= most:
            raise UsageError(f"context is {context} tokens, expected {least} to {most}, or 0 for all")
        if config.prefill_chunk < 1:
            raise UsageError(f"prefill chunk is {config.prefill_chunk} tokens, expected at least 1")
        cores = physical_cores()
        if not 0 <= config.threads <= 2 * cores:
            raise UsageError(f"threads are {config.threads}, expected 0 to {2 * cores} with {cores} usable cores")
        super().__init__(manifest.shape, manifest.features, context, config.prefill_chunk)
        options = ort.SessionOptions()
        options.intra_op_num_threads = config.threads or cores
        options.log_severity_level = 3
        # attention weights fall below 1e-38, where arithmetic is many times slower; they add nothing to a sum. The
        # runtime sets this for the thread that calls it, and for good: so it gets a thread of its own
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
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
        self._branch_noise = max(self._noise, self._probe_path(_COMB))

    def _check_graph(self, folder: Path) -> Any:
        """The type of K/V. Raises BundleError unless the graph has the inputs and outputs of the manifest's shape."""
        shape, features = self._shape, self._features
        inputs = {tensor.name: tensor for tensor in self._session.get_inputs()}
        outputs = {tensor.name: tensor for tensor in self._session.get_outputs()}
        got = {
            "layers": sum(name.startswith("past_k_") for name in inputs),
            "K/V heads": inputs["past_k_0"].shape[1] if "past_k_0" in inputs else None,
            "head_dim": inputs["past_k_0"].shape[3] if "past_k_0" in inputs else None,
            "vocab": outputs["logits"].shape[1] if "logits" in outputs else None,
            "feature width": outputs["features"].shape[1] if "features" in outputs else 0,
        }
        expected = (shape.layers, shape.kv_heads, shape.head_dim, shape.vocab, features.width)
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
        for padding in _PADDINGS:
            self._padding = padding
            differences[padding] = max(self._probe_counts(), self._probe_path(tree.chain(_PROBE_WIDE)))
            if differences[padding] == 0:
                break
        best = self._padding = min(differences, key=differences.__getitem__)
        return best, differences[best]

    def _probe_counts(self) -> float:
        """The largest difference in a logit between passes of few and of many rows over the same tree."""
        tokens, parents = self._prepare_probe(), [-1, 0, 0, 1, 1, 2, 3, 3]
        wide = self.score(tokens, parents)
        worst = max(float(np.abs(self.score(tokens[:n], parents[:n]) - wide[:n]).max()) for n in _PROBE_ROWS)
        self.truncate(0)
        return worst

    def _probe_path(self, parents: Sequence[int]) -> float:
        """The largest difference in a logit between the path to a tree's last row and plain decoding of the same."""
        tokens = self._prepare_probe()
        wide, worst = self.score(tokens, parents), 0.0
        for row in tree.path_to(parents, _PROBE_WIDE - 1):
            worst = max(worst, float(np.abs(self.score([tokens[row]], [-1])[0] - wide[row]).max()))
            self.commit([0])
        self.truncate(0)
        return worst

    def _prepare_probe(self) -> list[int]:
        """Read a prompt; _PROBE_WIDE tokens for a tree behind it."""
        vocab = self.shape.vocab
        self.prefill([(7 * i + 1) % vocab for i in range(min(2 * _PROBE_WIDE, self._context - _PROBE_WIDE))])
        return [(11 * i + 3) % vocab for i in range(_PROBE_WIDE)]

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
        shape, capacity = self.shape, room + _DUMMIES
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
            self._binding.bind_ortvalue_output(f"present_{kind}_{layer}", value)

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        count, length = len(tokens), self._length
        padded = self._padding.rows(count)
        attending = max(padded, self._padding.attending)
        total = length + attending
        # the operator takes a pass without past for a prompt and numbers its rows, unless a column lies behind them
        span = total + (length == 0)
        ids, places = np.zeros(padded, np.int64), np.full((1, attending), length, np.int64)
        ids[:count] = tokens
        places[0, :count] += np.arange(count) if parents is None else tree.depths(parents)
        mask = np.zeros((1, 1, attending, span), np.float32)
        if parents is not None:
            mask[0, 0, :count, length : length + count][~tree.ancestor_mask(parents)] = _HIDDEN
        mask[0, 0, count:, length : length + count] = _HIDDEN
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "attention_rows": np.arange(attending)[None] % padded,
            "own_rows": np.arange(padded),
            "position_ids": places,
            "mask": mask,
            "last_row": np.array([total - 1], np.int32),
            "total": np.array(span, np.int32),
            "logit_rows": np.arange(1 if parents is None else padded),
        }
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)
        logits = self._bind_result("logits", len(feeds["logit_rows"]), self.shape.vocab)
        features = self._bind_result("features", padded, self.features.width)
        self._apart(self._session.run_with_iobinding, self._binding)
        return logits[:count], features[:count]

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

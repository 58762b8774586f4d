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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.edge.target import Floats
from starsd.shared import tree
from starsd.shared.config import Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import BundleError, ContextOverflowError, EngineError, UsageError
from starsd.shared.manifest import FeatureSpec, Manifest, ModelShape, read

GRAPH = "model.onnx"
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


class OnnxTarget:
    """One model and one conversation's cache; see `Target` for the life of it."""

    def __init__(self, folder: Path, manifest: Manifest, config: Engine) -> None:
        self.manifest = manifest
        self._chunk = config.prefill_chunk
        self._context = min(config.max_context or manifest.shape.context, manifest.shape.context)
        if config.prefill_chunk < 1 or self._context < 2 * _PROBE_WIDE:
            raise UsageError(
                f"prefill chunk is {config.prefill_chunk} and context {self._context}, "
                f"expected at least 1 and {2 * _PROBE_WIDE} tokens"
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = config.threads or physical_cores()
        options.log_severity_level = 3
        # attention weights fall below 1e-38, where arithmetic is many times slower; they add nothing to a sum
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        try:
            self._session = ort.InferenceSession(str(folder / GRAPH), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base but this one
            raise BundleError(f"{folder / GRAPH} does not load in onnxruntime {ort.__version__}: {error}") from error
        self._binding = self._session.io_binding()
        types = {tensor.name: tensor.type for tensor in self._session.get_inputs()}
        self._cache_type = _TYPES[types["past_k_0"]]
        self._length = 0
        self._cache: NDArray[Any] = np.empty(0)
        self._pass_parents: list[int] | None = None
        self._pass_features: Floats = np.empty((0, self.features.width), np.float32)
        self._grow(min(config.initial_context, self._context))
        self._padding, self._noise = self._choose_padding()
        self._branch_noise = max(self._noise, self._probe_path(_COMB))

    @property
    def shape(self) -> ModelShape:
        return self.manifest.shape

    @property
    def features(self) -> FeatureSpec:
        return self.manifest.features

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
    def length(self) -> int:
        return self._length

    @property
    def context(self) -> int:
        return self._context

    @property
    def cache_bytes(self) -> int:
        """Memory that K/V take now."""
        return self._cache.nbytes

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Floats:
        self._pass_parents = None
        self._require(tokens)
        features = np.empty((len(tokens), self.features.width), np.float32)
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            positions = np.arange(self._length, self._length + len(chunk))
            _, features[start : start + len(chunk)] = self._run(chunk, positions, None, wanted=0)
            self._length += len(chunk)
            progress("reading the prompt", start + len(chunk), len(tokens))
        return features

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        if len(tokens) != len(parents):
            raise EngineError(f"{len(tokens)} tokens and {len(parents)} parents, expected as many")
        try:
            tree.check(parents)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self._pass_parents = None
        self._require(tokens)
        positions = self._length + tree.depths(parents)
        logits, self._pass_features = self._run(tokens, positions, tree.ancestor_mask(parents), wanted=len(tokens))
        self._pass_parents = list(parents)
        return logits

    def commit(self, rows: Sequence[int]) -> Floats:
        parents = self._pass_parents
        if parents is None:
            raise EngineError("commit without a pass: score a tree first")
        inside = all(0 <= row < len(parents) for row in rows)
        if not rows or not inside or list(rows) != tree.path_to(parents, rows[-1]):
            raise EngineError(f"rows {list(rows)} are not a path from the root of the newest pass")
        self._pass_parents = None
        start, count = self._length, len(rows)
        if rows[-1] != count - 1:
            self._cache[:, :, start : start + count] = self._cache[:, :, start + np.asarray(rows)]
        self._length += count
        return self._pass_features[list(rows)]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise EngineError(f"truncate to {length} rows, expected 0 to {self._length}")
        self._pass_parents = None
        self._length = length

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

    def _require(self, tokens: Sequence[int]) -> None:
        """Make room for `tokens`. Raises ContextOverflowError past the context, UsageError for what is no token."""
        needed = self._length + len(tokens)
        if needed > self._context:
            raise ContextOverflowError(f"{needed} tokens do not fit, the context holds {self._context}")
        if bad := [token for token in tokens if not 0 <= token < self.shape.vocab]:
            raise UsageError(f"token id {bad[0]} is outside the vocabulary, expected 0 to {self.shape.vocab - 1}")
        needed += _DUMMIES
        if needed > self._capacity:
            self._grow(max(needed, min(2 * self._capacity, self._context + _DUMMIES)))

    def _grow(self, capacity: int) -> None:
        """Move K/V into buffers for `capacity` rows; on any failure the old ones stay."""
        shape = self.shape
        cache: NDArray[Any] = np.zeros((2 * shape.layers, shape.kv_heads, capacity, shape.head_dim), self._cache_type)
        if self._length:
            cache[:, :, : self._length] = self._cache[:, :, : self._length]
        # the runtime sees these arrays only through addresses: they live as long as self
        self._cache = cache
        self._capacity = capacity
        self._values = [ort.OrtValue.ortvalue_from_numpy(cache[i : i + 1]) for i in range(len(cache))]
        for i, value in enumerate(self._values):
            kind, layer = "kv"[i % 2], i // 2
            self._binding.bind_ortvalue_input(f"past_{kind}_{layer}", value)
            self._binding.bind_ortvalue_output(f"present_{kind}_{layer}", value)

    def _run(
        self, tokens: Sequence[int], positions: NDArray[np.int64], visible: NDArray[np.bool_] | None, *, wanted: int
    ) -> tuple[Floats, Floats]:
        """One pass of rows behind the committed ones; logits of the first `wanted` rows, features of all.

        `visible` says which rows of the pass each row sees; None means all up to itself.
        """
        count, length = len(tokens), self._length
        padded = self._padding.rows(count)
        attending = max(padded, self._padding.attending)
        total = length + attending
        # the operator takes a pass without past for a prompt and numbers its rows, unless a column lies behind them
        span = total + (length == 0)
        ids, places = np.zeros(padded, np.int64), np.full((1, attending), length, np.int64)
        ids[:count], places[0, :count] = tokens, positions
        mask = np.zeros((1, 1, attending, span), np.float32)
        if visible is not None:
            mask[0, 0, :count, length : length + count][~visible] = _HIDDEN
        mask[0, 0, count:, length : length + count] = _HIDDEN
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "attention_rows": np.arange(attending)[None] % padded,
            "own_rows": np.arange(padded),
            "position_ids": places,
            "mask": mask,
            "last_row": np.array([total - 1], np.int32),
            "total": np.array(span, np.int32),
            "logit_rows": np.arange(self._padding.rows(wanted) if wanted else 1),
        }
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)
        logits = self._bind_result("logits", len(feeds["logit_rows"]), self.shape.vocab)
        features = self._bind_result("features", padded, self.features.width)
        self._session.run_with_iobinding(self._binding)
        return logits[:wanted], features[:count]

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

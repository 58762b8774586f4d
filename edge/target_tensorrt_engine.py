"""A TensorRT engine in memory: contexts for each number of rows, the buffers they read and write, and CUDA graphs.

Every number of rows has a context of its own: a graph that was captured from one is bound to its shapes. They run one
at a time, so they share their scratch memory, and the buffers of everything but K/V.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.edge.cuda import Cuda
from starsd.edge.device_cache import DeviceCache
from starsd.edge.device_io import Results, Staging, release_with
from starsd.shared.errors import BundleError, DeviceError
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.tensorrt_key import EngineKey

_TYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
_SEEN = 0  # instead of a graph: the pass ran once, so the next one can be captured
PREFILL, TREE = 0, 1  # profiles


class TensorrtEngine:
    """Not locked: whoever runs it takes turns. `trt` is TensorRT's module, of which a device has been found."""

    def __init__(
        self, trt: Any, plan: Path, key: EngineKey, shape: ModelShape, features: FeatureSpec, in_place: bool, cuda: Cuda
    ) -> None:
        self._trt, self._key, self._shape, self._cuda, self._in_place = trt, key, shape, cuda, in_place
        self.stream = cuda.make_stream()
        self._log = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._log)
        # mapped, not read: on a Jetson a copy in the system's memory is one in the GPU's
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise DeviceError(f"{plan} does not load in TensorRT {trt.__version__}")
        self._types = self._check(plan, features)
        profiles = range(self._engine.num_optimization_profiles)
        self._scratch_bytes = max(1, *(self._engine.get_device_memory_size_for_profile_v2(i) for i in profiles))
        self._scratch = cuda.allocate(self._scratch_bytes)
        release_with(self, cuda.release, self._scratch)
        self._staging = {
            name: Staging(cuda, self._largest(name, list(profiles))) for name in self._types if self._is_fed(name)
        }
        most_logits = max(point.wanted[2] for point in key.profiles)
        self._results = {"logits": Results(cuda, most_logits, shape.vocab)}
        if features.width:
            self._results["features"] = Results(cuda, key.chunk, features.width)
        self._new_rows = 0
        if not in_place:
            self._new_rows = cuda.allocate(key.chunk * self._parts * self._row_bytes)
            release_with(self, cuda.release, self._new_rows)
        self._steps: dict[tuple[int, int], _Step] = {}

    @property
    def cache_type(self) -> Any:
        return self._types["past_k_0"]

    @property
    def _row_bytes(self) -> int:
        return self._shape.head_dim * int(np.dtype(self.cache_type).itemsize)

    @property
    def _parts(self) -> int:
        return 2 * self._shape.layers * self._shape.kv_heads

    def make_cache(self) -> DeviceCache:
        """Zeros. Raises DeviceError when there is no room."""
        shape = self._shape
        return DeviceCache(self._cuda, self.stream, shape.layers, shape.kv_heads, self._key.capacity, self._row_bytes)

    def run(self, feeds: Mapping[str, NDArray[Any]], profile: int, cache: DeviceCache, start: int, count: int) -> None:
        """One pass on a conversation's K/V. Its first `count` rows are real and lie behind `start` others.

        Raises DeviceError when TensorRT or CUDA fail.
        """
        rows, wanted = len(feeds["input_ids"]), len(feeds["logit_rows"])
        step = self._step(profile, rows)
        for name in self._staging:
            self._staging[name].upload(feeds[name], self.stream)
        if step.shape != (rows, wanted):
            self._set_shapes(step, feeds, rows, wanted)
        if step.bound() is not cache:
            self._bind(step, cache, rows)
        if profile == TREE:
            self._run_captured(step, cache)
        else:
            self._execute(step)
        if not self._in_place:
            cache.place(start, self._new_rows, count, rows)

    def results(self, name: str, rows: int) -> NDArray[np.float32]:
        """The first `rows` rows of an output of the newest pass, once that is over."""
        if name not in self._results:
            return np.empty((rows, 0), np.float32)
        return self._results[name].fetch(rows, self.stream)

    def wait(self) -> None:
        self._cuda.wait(self.stream)

    def _step(self, profile: int, rows: int) -> _Step:
        key = (profile, rows if profile == TREE else 0)
        if key not in self._steps:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
            if context is None:
                raise DeviceError(f"TensorRT makes no context for passes of {rows} rows, expected one")
            self._must(context.set_optimization_profile_async(profile, self.stream), "profile", profile)
            self._cuda.wait(self.stream)
            context.set_device_memory(self._scratch, self._scratch_bytes)
            addresses = {name: staging.address for name, staging in self._staging.items()}
            addresses |= {name: results.address for name, results in self._results.items()}
            for name, address in addresses.items():
                self._must(context.set_tensor_address(name, address), "address of", name)
            self._steps[key] = _Step(context)
        return self._steps[key]

    def _set_shapes(self, step: _Step, feeds: Mapping[str, NDArray[Any]], rows: int, wanted: int) -> None:
        for name in self._staging:
            self._must(step.context.set_input_shape(name, feeds[name].shape), "shape of", name)
        step.shape = rows, wanted
        if not self._in_place:
            step.bound = _nothing  # addresses of new rows depend on how many there are

    def _bind(self, step: _Step, cache: DeviceCache, rows: int) -> None:
        """K/V at their places: read and written at one address, or the pass's rows apart from the others."""
        part = self._shape.kv_heads * rows * self._row_bytes
        for layer in range(self._shape.layers):
            for i, kind in enumerate("kv"):
                past = cache.address(layer, kind)
                out = ("present", past) if self._in_place else ("new", self._new_rows + (2 * layer + i) * part)
                for name, address in ((f"past_{kind}_{layer}", past), (f"{out[0]}_{kind}_{layer}", out[1])):
                    self._must(step.context.set_tensor_address(name, address), "address of", name)
        step.bound = weakref.ref(cache)

    def _run_captured(self, step: _Step, cache: DeviceCache) -> None:
        """The first pass tells TensorRT the shapes, which it does not take note of while a stream is captured."""
        if not step.capturable or cache not in step.graphs:
            self._execute(step)
            step.graphs[cache] = _SEEN
            return
        if step.graphs[cache] == _SEEN:
            try:
                graph = self._capture(step)
            except DeviceError:  # some engines cannot be captured; they still run
                step.capturable = False
                self._execute(step)
                return
            step.graphs[cache] = graph
            release_with(cache, self._cuda.release_graph, graph)
        self._cuda.launch(step.graphs[cache], self.stream)

    def _capture(self, step: _Step) -> int:
        self._cuda.begin_capture(self.stream)
        try:
            self._execute(step)
        except DeviceError:
            self._cuda.end_capture(self.stream)
            raise
        return self._cuda.end_capture(self.stream)

    def _execute(self, step: _Step) -> None:
        if not step.context.execute_async_v3(self.stream):
            raise DeviceError(f"TensorRT failed in a pass of {step.shape[0]} rows")

    def _must(self, done: bool, what: str, which: Any) -> None:
        if not done:
            raise DeviceError(f"TensorRT refuses the {what} {which}")

    def _is_fed(self, name: str) -> bool:
        is_input = self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        return is_input and not name.startswith("past_")

    def _largest(self, name: str, profiles: list[int]) -> int:
        """Bytes of an input at the most rows that a profile allows."""
        shapes = [tuple(self._engine.get_tensor_profile_shape(name, i)[2]) for i in profiles]
        size = max(int(np.prod(shape, dtype=np.int64)) for shape in shapes)
        return size * int(np.dtype(self._types[name]).itemsize)

    def _check(self, plan: Path, features: FeatureSpec) -> dict[str, Any]:
        """Types by name of all inputs and outputs. Raises BundleError unless they are those of this bundle."""
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        kinds = "past", "present" if self._in_place else "new"
        expected = {f"{kind}_{part}_{i}" for kind in kinds for part in "kv" for i in range(self._shape.layers)}
        expected |= {"input_ids", "logit_rows", "logits", *(("features",) if features.width else ())}
        if missing := sorted(expected - set(names)):
            raise BundleError(f"{plan} has no tensor {missing[0]}, expected one")
        on_device = self._trt.TensorLocation.DEVICE
        if elsewhere := [name for name in names if engine.get_tensor_location(name) != on_device]:
            raise BundleError(f"{plan} wants {elsewhere[0]} in the host's memory, expected all on the device")
        got = tuple(engine.get_tensor_shape("past_k_0"))
        cache = (1, self._shape.kv_heads, self._key.capacity, self._shape.head_dim)
        if got != cache:
            raise BundleError(f"{plan} has K/V of {got}, its record says {cache}")
        for name, width in (("logits", self._shape.vocab), ("features", features.width)):
            if width and (found := tuple(engine.get_tensor_shape(name))[-1]) != width:
                raise BundleError(f"{plan} has {name} of width {found}, its manifest says {width}")
        types = {name: engine.get_tensor_dtype(name).name for name in names}
        if strange := [name for name, kind in types.items() if kind not in _TYPES]:
            kind = types[strange[0]]
            raise BundleError(f"{plan} has {strange[0]} of type {kind}, expected one of {', '.join(_TYPES)}")
        for name in ("logits", "features"):
            if types.get(name, "FLOAT") != "FLOAT":
                raise BundleError(f"{plan} has {name} of type {types[name]}, expected FLOAT")
        return {name: _TYPES[kind] for name, kind in types.items()}


def _nothing() -> None:
    """What a reference to a cache gives before there is one."""


class _Step:
    """Of one number of rows: TensorRT's context, what it is bound to, and a graph for every conversation."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.shape = (0, 0)
        self.bound: Any = _nothing
        self.capturable = True
        self.graphs: weakref.WeakKeyDictionary[DeviceCache, int] = weakref.WeakKeyDictionary()

"""A module like `tensorrt`, as far as we use it, that computes with onnxruntime what lies at the addresses it is given.

It is as strict as the real one: shapes within the profiles, a fixed length of K/V, in-place outputs on their inputs,
every address set, a first pass before a capture. `FakeTensorrt(cuda)` stands for the module; names of parameters are
those of the real ones, which a test compares.
"""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
from fake_cuda import FakeCuda
from fake_tensorrt_build import (
    PLAN_MAGIC,
    Builder,
    DataType,
    ExecutionContextAllocationStrategy,
    IBuilderConfig,
    IHostMemory,
    ILogger,
    INetworkDefinition,
    IOptimizationProfile,
    IProgressMonitor,
    ITensor,
    ITimingCache,
    Logger,
    NetworkDefinitionCreationFlag,
    OnnxParser,
    ParserError,
    Shape,
    TensorIOMode,
    TensorLocation,
)

_NUMPY = {"FLOAT": np.float32, "INT32": np.int32, "INT64": np.int64, "HALF": np.float16}
PROFILE_BYTES = (4096, 1024)  # of scratch memory


class ICudaEngine:
    def __init__(self, plan: dict[str, Any], cuda: FakeCuda) -> None:
        self._plan, self.cuda = plan, cuda
        self.tensors: dict[str, tuple[int, str, Shape]] = {
            name: (mode, kind, tuple(shape)) for name, (mode, kind, shape) in plan["tensors"].items()
        }
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self.session = ort.InferenceSession(plan["graph"], options, providers=["CPUExecutionProvider"])
        self.contexts: list[IExecutionContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._plan["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode(self.tensors[name][0])

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name][1]]

    def get_tensor_shape(self, name: str) -> Shape:
        return self.tensors[name][2]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        shape = self.tensors[name][2]
        given = self._plan["profiles"][profile_index].get(name, [shape] * 3)
        return [tuple(one) for one in given]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return PROFILE_BYTES[profile_index]

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext:
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(IExecutionContext(self))
        return self.contexts[-1]


class IExecutionContext:
    fails = False

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._memory = 0
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, Shape] = {}
        self._fresh = True  # shapes have changed since the last pass

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle in self._engine.cuda.streams
        self._profile = profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._engine.cuda.inside(memory, size)
        self._memory = size

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        assert self._profile is not None
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(least) or not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return False
        self._fresh |= self._shapes.get(name) != tuple(shape)
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine.tensors:
            return False
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.fails:
            return False
        engine, cuda = self._engine, self._engine.cuda
        assert self._memory >= PROFILE_BYTES[self._profile or 0]
        assert self._addresses.keys() == engine.tensors.keys()
        for name, (mode, _, shape) in engine.tensors.items():
            assert mode == TensorIOMode.OUTPUT or name in self._shapes or -1 not in shape, f"{name} has no shape"
            if name.startswith("present_"):
                assert self._addresses[name] == self._addresses[name.replace("present", "past")]
        if stream_handle in cuda.capturing:
            assert not self._fresh, "a pass of these shapes has to run once before it is captured"
        self._fresh = False
        addresses, shapes = dict(self._addresses), dict(self._shapes)
        cuda.tell(stream_handle, lambda: self._compute(addresses, shapes), "execute")
        return True

    def _compute(self, addresses: dict[str, int], shapes: dict[str, Shape]) -> None:
        engine = self._engine
        feeds, results = {}, [output.name for output in engine.session.get_outputs()]
        for name, (mode, kind, shape) in engine.tensors.items():
            if mode == TensorIOMode.INPUT:
                feeds[name] = self._view(addresses[name], kind, shapes.get(name, shape)).copy()
        for name, value in zip(results, engine.session.run(results, feeds), strict=True):
            self._view(addresses[name], engine.tensors[name][1], value.shape)[...] = value

    def _view(self, address: int, kind: str, shape: Shape) -> Any:
        size = int(np.prod(shape)) * np.dtype(_NUMPY[kind]).itemsize
        self._engine.cuda.inside(address, size)
        return np.frombuffer((ctypes.c_char * size).from_address(address), _NUMPY[kind]).reshape(shape)


_KINDS: tuple[Any, ...] = (
    *(DataType, ExecutionContextAllocationStrategy, IBuilderConfig, ICudaEngine, IExecutionContext, IHostMemory),
    *(ILogger, INetworkDefinition, IOptimizationProfile, IProgressMonitor, ITensor, ITimingCache, Logger),
    *(NetworkDefinitionCreationFlag, ParserError, TensorIOMode, TensorLocation),
)


class FakeTensorrt(SimpleNamespace):
    """The module, on a device; without one it would crash."""

    def __init__(self, cuda: FakeCuda, version: str = "10.16.2.10") -> None:
        fake = self
        self.engines: list[ICudaEngine] = []

        class Runtime:
            def __init__(self, logger: ILogger) -> None: ...

            def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
                content = bytes(serialized_engine)
                if PLAN_MAGIC.encode() not in content:
                    return None
                fake.engines.append(ICudaEngine(json.loads(content), cuda))
                return fake.engines[-1]

        super().__init__(
            __version__=version,
            Builder=type("Builder", (Builder,), {}),  # of its own: tests change them
            OnnxParser=type("OnnxParser", (OnnxParser,), {}),
            Runtime=Runtime,
            **{kind.__name__: kind for kind in _KINDS},
            engines=self.engines,
        )

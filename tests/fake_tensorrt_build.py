"""The building half of `fake_tensorrt`: what parses a graph, checks profiles, writes a plan; and the enumerations."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum

import onnx

Shape = tuple[int, ...]
_ONNX = {1: "FLOAT", 6: "INT32", 7: "INT64", 10: "HALF"}  # TensorProto.DataType
PLAN_MAGIC = "fake plan"


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    INT64 = 8


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    USER_MANAGED = 2


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    Severity = Severity

    def __init__(self) -> None: ...

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class Logger(ILogger):
    ERROR = Severity.ERROR
    WARNING = Severity.WARNING

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None: ...

    def log(self, severity: Severity, msg: str) -> None: ...


class IProgressMonitor:
    def __init__(self) -> None: ...

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None: ...


class IHostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class ITensor:
    def __init__(self, name: str, kind: str, shape: Shape) -> None:
        self._name, self.kind, self._shape = name, kind, shape

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> Shape:
        return self._shape


class INetworkDefinition:
    def __init__(self) -> None:
        self.inputs: list[ITensor] = []
        self.outputs: list[ITensor] = []
        self.graph_file = ""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> ITensor:
        return self.inputs[index]


class ParserError:
    def desc(self) -> str:
        return "No importer\nregistered for op: Strange"

    def node_operator(self) -> str:
        return "Strange"

    def node_name(self) -> str:
        return "strange_0"


class OnnxParser:
    fails = False

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self.num_errors = network, 0

    def parse(self, model: bytes, path: str | None = None) -> bool:
        if self.fails:
            self.num_errors = 1
            return False
        graph = onnx.load_from_string(model).graph
        assert path, "the weights are beside the graph"
        self._network.graph_file = path
        for values, found in ((graph.input, self._network.inputs), (graph.output, self._network.outputs)):
            for value in values:
                kind = value.type.tensor_type
                shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
                found.append(ITensor(value.name, _ONNX[kind.elem_type], shape))
        for tensor in (*self._network.inputs, *self._network.outputs):
            if tensor.name.startswith(("past_", "present_")):
                assert -1 not in tensor.shape, "The KV cache tensor must have a static sequence length dimension"
        return True

    def get_error(self, index: int) -> ParserError:
        return ParserError()


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Shape, Shape, Shape]] = {}

    def set_shape(self, input: str, min: Shape, opt: Shape, max: Shape) -> None:
        if not len(min) == len(opt) == len(max):
            raise ValueError("inconsistent")
        self.shapes[input] = (min, opt, max)


class ITimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> IHostMemory:
        return IHostMemory(self.content)


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiles: list[IOptimizationProfile] = []
        self.cache: ITimingCache | None = None
        self.progress_monitor: IProgressMonitor | None = None

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache.content == b"of another version":
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self.cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    fails: Callable[[ILogger], None] | None = None  # says why, and no plan comes
    during: Callable[[], None] | None = None  # called in the middle

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        monitor = config.progress_monitor
        if monitor is not None:
            monitor.phase_start("Building Engine", None, 3)
            monitor.phase_start("Tactics", "Building Engine", 100)
            assert monitor.step_complete("Tactics", 0)
            monitor.phase_finish("Tactics")
        if self.during is not None:
            self.during()
        for step in range(3) if monitor is not None else ():
            if not monitor.step_complete("Building Engine", step):  # type: ignore[union-attr]
                return None
        if monitor is not None:
            monitor.phase_finish("Building Engine")
        if self.fails is not None:
            self.fails(self._logger)
            return None
        for profile in config.profiles:
            for tensor in network.inputs:
                self._check(tensor, profile)
        assert config.cache is not None
        config.cache.content += b"+tactics"
        tensors = {
            tensor.name: [mode, tensor.kind, tensor.shape]
            for mode, found in ((TensorIOMode.INPUT, network.inputs), (TensorIOMode.OUTPUT, network.outputs))
            for tensor in found
        }
        shapes = [profile.shapes for profile in config.profiles]
        plan = {"magic": PLAN_MAGIC, "graph": network.graph_file, "tensors": tensors, "profiles": shapes}
        return IHostMemory(json.dumps(plan).encode())

    @staticmethod
    def _check(tensor: ITensor, profile: IOptimizationProfile) -> None:
        if -1 not in tensor.shape:
            return
        for shape in profile.shapes[tensor.name]:
            assert len(shape) == len(tensor.shape)
            assert all(size in (-1, got) for size, got in zip(tensor.shape, shape, strict=True)), tensor.name

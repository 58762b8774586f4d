"""A module like `onnxruntime` on a machine with a GPU, as far as we use it, whose device is a `FakeCuda`.

Sessions compute with the real onnxruntime what lies at the addresses they are given, when the stream is waited for.
They are as strict as the real ones: every input bound, on the device but for what its kernels want in the host's
memory; K/V in place; and a CUDA graph reads and writes where it was captured, whatever is bound later. Names and
parameters are those of the real ones, which a test compares.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pytest
from fake_cuda import FakeCuda

from starsd.edge import onnx_graph, providers, target_onnx

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
ON_HOST = {"total"}  # GroupQueryAttention's total_sequence_length


class Bound(NamedTuple):
    device: str
    kind: Any
    shape: tuple[int, ...]
    address: int


class IOBinding:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs: dict[str, Bound] = {}
        self.outputs: dict[str, Bound] = {}
        self.arrays: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        self.arrays[name] = arr_on_cpu
        shape = arr_on_cpu.shape
        self.inputs[name] = Bound("cpu", arr_on_cpu.dtype.type, shape, arr_on_cpu.ctypes.data)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        assert device_id == 0
        self.inputs[name] = Bound(device_type, element_type, tuple(shape), buffer_ptr)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        assert device_id == 0
        assert buffer_ptr is not None
        self.outputs[name] = Bound(device_type, element_type, tuple(shape), buffer_ptr)


class InferenceSession:
    """Of a `FakeOnnxruntime`, which makes a subclass that knows it."""

    runtime: FakeOnnxruntime

    def __init__(
        self,
        path_or_bytes: str,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        self.options = dict(providers)
        self.made_with = kwargs
        self.runtime.sessions.append(self)
        if self.captures and self.runtime.refuses_graphs:
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        self._real = ort.InferenceSession(path_or_bytes, sess_options, providers=[CPU])
        self.graphs: dict[str, Any] = {}

    @property
    def captures(self) -> bool:
        return self.options.get(CUDA, {}).get("enable_cuda_graph") == "1"

    def get_providers(self) -> list[str]:
        return [CPU] if self.runtime.lacks_libraries else list(self.options)

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def get_provider_graph_assignment_info(self) -> Any:
        def part(name: str, operators: list[str]) -> Any:
            return SimpleNamespace(
                ep_name=name, get_nodes=lambda: [SimpleNamespace(op_type=operator) for operator in operators]
            )

        return [part(CUDA, ["MatMul", "Add"]), part(CPU, self.runtime.left_over)]

    def io_binding(self) -> Any:
        return IOBinding(self) if CUDA in self.options else self._real.io_binding()

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        if not isinstance(iobinding, IOBinding):
            self._real.run_with_iobinding(iobinding, run_options)
            return
        if self.runtime.fails:
            raise RuntimeError("no kernel image is available for execution on the device")
        cuda, stream = self.runtime.cuda, int(self.options[CUDA]["user_compute_stream"])
        inputs, outputs = dict(iobinding.inputs), dict(iobinding.outputs)
        self._check(inputs, outputs)
        number = run_options.get_run_config_entry("gpu_graph_id") if self.captures else "-1"
        if number == "-1":
            cuda.tell(stream, lambda: self._compute(inputs, outputs), "run")
        elif number not in self.graphs:
            self.graphs[number] = inputs, outputs
            for _ in range(2):  # memory is had in the first
                cuda.tell(stream, lambda: self._compute(inputs, outputs), "capture")
        else:
            assert self.graphs[number] == (inputs, outputs), "the graph would read and write elsewhere"
            cuda.tell(stream, lambda: self._compute(inputs, outputs), "replay")
        cuda.wait(stream)

    def _check(self, inputs: dict[str, Bound], outputs: dict[str, Bound]) -> None:
        assert inputs.keys() == {value.name for value in self._real.get_inputs()}
        assert outputs.keys() == {value.name for value in self._real.get_outputs()}
        for name, bound in (*inputs.items(), *outputs.items()):
            assert (bound.device == "cpu") == (name in ON_HOST), name
            if bound.device != "cpu":
                self.runtime.cuda.inside(bound.address, int(np.prod(bound.shape)) * np.dtype(bound.kind).itemsize)
            if name.startswith("present_"):
                assert bound == inputs[name.replace("present", "past")]

    def _compute(self, inputs: dict[str, Bound], outputs: dict[str, Bound]) -> None:
        binding = self._real.io_binding()
        for name, (_, *place) in inputs.items():
            binding.bind_input(name, "cpu", 0, *place)
        for name, (_, *place) in outputs.items():
            binding.bind_output(name, "cpu", 0, *place)
        self._real.run_with_iobinding(binding)


class FakeOnnxruntime(SimpleNamespace):
    """The module."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.lacks_libraries = self.refuses_graphs = self.fails = False
        self.left_over = ["Shape"]  # operators of nodes that the provider leaves to the processor
        self.sessions: list[InferenceSession] = []
        super().__init__(
            __version__="1.31.1",
            InferenceSession=type("InferenceSession", (InferenceSession,), {"runtime": self}),
            SessionOptions=ort.SessionOptions,
            get_available_providers=lambda: [TENSORRT, CUDA, CPU],
        )


def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeOnnxruntime:
    """This machine, from now on: an x86 one with a graphics card, and onnxruntime for it."""
    runtime = FakeOnnxruntime(FakeCuda((9, 0)))
    monkeypatch.setattr(onnx_graph, "ort", runtime)
    monkeypatch.setattr(target_onnx, "VERSION", runtime.__version__)
    monkeypatch.setattr(target_onnx, "open_cuda", lambda: runtime.cuda)
    monkeypatch.setattr(providers, "load_cudart", lambda: runtime.cuda)
    monkeypatch.setattr(providers, "gpu", lambda library: library.gpu())
    monkeypatch.setattr(providers.platform, "machine", lambda: "x86_64")
    return runtime

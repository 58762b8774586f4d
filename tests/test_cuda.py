"""The CUDA runtime by ctypes: what each call hands over, with a library that writes it down."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from starsd.edge.cuda import CudaRuntime
from starsd.shared import cuda_runtime
from starsd.shared.cuda_runtime import Gpu, gpu, load_cudart
from starsd.shared.errors import DeviceError

MADE = 0x7F00_0000_1234  # more than 32 bits: an address cut short would show
CALLS = (  # of the real library
    *("cudaGetDeviceCount", "cudaGetErrorString", "cudaDeviceGetAttribute", "cudaMemGetInfo", "cudaMalloc"),
    *("cudaMemset", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cudaStreamCreateWithFlags"),
    *("cudaStreamSynchronize", "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaStreamBeginCapture"),
    *("cudaStreamEndCapture", "cudaGraphInstantiateWithFlags", "cudaGraphDestroy", "cudaGraphLaunch"),
    "cudaGraphExecDestroy",
)


class Library:
    """Functions that remember their arguments, write MADE to the first where it is a place, and return `status`."""

    def __init__(self, devices: int = 1, **status: int) -> None:
        self.devices, self.status, self.calls = devices, status, []  # type: ignore[var-annotated]
        self.error_string = SimpleNamespace(restype=None)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        if name == "cudaGetErrorString":
            return Text()

        def call(*arguments: Any) -> int:
            self.calls.append((name, *(getattr(one, "value", one) for one in arguments)))
            for place in (one._obj for one in arguments if hasattr(one, "_obj")):
                self._write(name, place, arguments)
            return self.status.get(name, 0)

        return call

    def _write(self, name: str, place: Any, arguments: tuple[Any, ...]) -> None:
        if name == "cudaGetDeviceCount":
            place.value = self.devices
        elif name == "cudaDeviceGetAttribute":
            place.value = {75: 8, 76: 7}[arguments[1]]
        elif name == "cudaMemGetInfo":
            place.value = 5 if place is arguments[0]._obj else 9
        else:
            place.value = MADE


class Text:
    restype: Any = None

    def __call__(self, error: int) -> bytes:
        assert self.restype is ctypes.c_char_p
        return f"error {error} in words".encode()


@pytest.fixture
def library() -> Library:
    return Library()


def places(calls: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Without the places that results are written to."""
    for call in calls:
        yield tuple(one for one in call if isinstance(one, (str, int)))


def test_what_each_call_hands_over(library: Library) -> None:
    cuda, far = CudaRuntime(library), MADE + 8
    assert cuda.allocate(100) == MADE
    assert cuda.allocate_pinned(10) == MADE
    assert cuda.make_stream() == MADE
    cuda.upload(MADE, far, 7, 3)
    cuda.download(far, MADE, 7, 3)
    cuda.move(MADE, 64, far, 32, 16, 5, 3)
    cuda.begin_capture(3)
    assert cuda.end_capture(3) == MADE
    cuda.launch(MADE, 3)
    cuda.wait(3)
    cuda.release_graph(MADE)
    cuda.release(MADE)
    cuda.release_pinned(far)
    assert list(places(library.calls)) == [
        ("cudaMalloc", 100),
        ("cudaMemset", MADE, 0, 100),
        ("cudaMallocHost", 10),
        ("cudaStreamCreateWithFlags", 1),
        ("cudaMemcpyAsync", MADE, far, 7, 1, 3),
        ("cudaMemcpyAsync", far, MADE, 7, 2, 3),
        ("cudaMemcpy2DAsync", MADE, 64, far, 32, 16, 5, 3, 3),
        ("cudaStreamBeginCapture", 3, 1),
        ("cudaStreamEndCapture", 3),
        ("cudaGraphInstantiateWithFlags", MADE, 0),
        ("cudaGraphDestroy", MADE),
        ("cudaGraphLaunch", MADE, 3),
        ("cudaStreamSynchronize", 3),
        ("cudaGraphExecDestroy", MADE),
        ("cudaFree", MADE),
        ("cudaFreeHost", far),
    ]
    assert cuda.gpu() == Gpu((8, 7), 9, 5)
    assert gpu(library).name == "sm87"


def test_addresses_go_over_whole(library: Library) -> None:
    """ctypes takes a plain integer for 32 bits."""
    CudaRuntime(library).release(MADE)
    (call,) = library.calls
    assert call == ("cudaFree", MADE)
    kinds: list[type] = []
    library.__dict__["cudaFree"] = lambda address: kinds.append(type(address)) or 0
    CudaRuntime(library).release(MADE)
    assert kinds == [ctypes.c_void_p]


def test_a_failing_call_says_which() -> None:
    cuda = CudaRuntime(Library(cudaMalloc=2))
    with pytest.raises(DeviceError, match=r"^cudaMalloc failed: error 2 in words \(2\)$"):
        cuda.allocate(1)


def test_a_graph_that_cannot_be_made_leaves_nothing() -> None:
    library = Library(cudaGraphInstantiateWithFlags=1)
    with pytest.raises(DeviceError, match=r"^cudaGraphInstantiateWithFlags failed: "):
        CudaRuntime(library).end_capture(3)
    assert library.calls[-1][0] == "cudaGraphDestroy"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "the CUDA runtime, libcudart.so, is not installed"),
        ({"libcudart.so": Library(devices=0)}, "CUDA finds no device"),
        ({"libcudart.so.12": Library(cudaGetDeviceCount=35)}, "CUDA says error 35 in words (35)"),
    ],
)
def test_why_there_is_no_device(found: dict[str, Library], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", lambda name: found[name] if name in found else unknown())
    with pytest.raises(DeviceError) as caught:
        load_cudart()
    assert str(caught.value) == f"no GPU can be used: {reason}"


def test_the_first_library_with_a_device_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is newer than the driver is passed over; packages for Python may have brought another."""
    packaged = tmp_path / "cu12" / "lib" / "libcudart.so.12"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    found = {"libcudart.so": Library(cudaGetDeviceCount=35), str(packaged): Library()}
    monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", lambda name: found[name] if name in found else unknown())
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cuda_runtime, "find_spec", lambda name: package if name == "nvidia" else None)
    assert load_cudart() is found[str(packaged)]


def unknown() -> Library:
    raise OSError("cannot open shared object file")


def test_the_real_library_has_every_call() -> None:
    for name in cuda_runtime._candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        missing = [call for call in CALLS if not hasattr(library, call)]
        assert not missing
        return
    pytest.skip("no libcudart on this machine to compare with")

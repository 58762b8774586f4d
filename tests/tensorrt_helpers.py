"""A machine with a GPU and TensorRT, both stand-ins, and engines built on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorrt

from starsd.edge import target_tensorrt
from starsd.export import tensorrt_engine
from starsd.export.tensorrt_engine import Options, Report, export_tensorrt

CONTEXT, CHUNK = 64, 64  # of a tiny model's engine


class Machine(SimpleNamespace):
    """`cuda` and `trt` are what edge and export find here; `memory` is what the system says is available."""

    cuda: FakeCuda
    trt: FakeTensorrt
    memory: int
    l4t: str


def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "10.16.2.10") -> Machine:
    """This machine, from now on."""
    cuda = FakeCuda()
    machine = Machine(cuda=cuda, trt=FakeTensorrt(cuda, version), memory=1 << 34, l4t="39.2.0")
    monkeypatch.setattr(tensorrt_engine, "load_cudart", lambda: machine.cuda)
    monkeypatch.setattr(tensorrt_engine, "gpu", lambda library: library.gpu())
    monkeypatch.setattr(tensorrt_engine, "meminfo", lambda: {"MemAvailable": machine.memory})
    monkeypatch.setattr(target_tensorrt, "open_cuda", lambda: machine.cuda)
    for module in (tensorrt_engine, target_tensorrt):
        monkeypatch.setattr(module, "load_tensorrt", lambda: machine.trt)
        monkeypatch.setattr(module, "l4t_release", lambda: machine.l4t)
    return machine


def build(bundle: Path, context: int = CONTEXT, chunk: int = CHUNK) -> Report:
    """The bundle's engine, built by the stand-in."""
    return export_tensorrt(str(bundle), Options(context=context, chunk=chunk))

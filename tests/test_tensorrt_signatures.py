"""The stand-in has the members of the real modules, with their parameters; so what runs on it is what they take."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from typing import Any

import fake_tensorrt_build
import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorrt
from tensorrt_signatures import RECORDED, VERSIONS, recorded, signatures

from starsd.edge.cuda import Cuda, CudaRuntime

MEMBERS = list(json.loads(RECORDED.read_text()))


def parameters(function: Any) -> list[str]:
    """As `signatures` writes them."""
    found = list(inspect.signature(function).parameters.values())[1:]
    return [one.name + ("=" if one.default is not inspect.Parameter.empty else "") for one in found]


@pytest.mark.parametrize("member", MEMBERS)
def test_the_stand_in_is_like_the_real_ones(member: str) -> None:
    owner, _, name = member.partition(".")
    found = getattr(getattr(FakeTensorrt(FakeCuda()), owner, None) or getattr(fake_tensorrt_build, owner), name, None)
    for version in VERSIONS:
        known = recorded(member, version)
        assert known is not None, f"TensorRT {version} has no {member}"
        if known == "value":
            assert not inspect.isfunction(found)
        else:
            assert parameters(found) in known, f"{member} of TensorRT {version}"


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx_bindings"])
def test_the_record_is_that_of_an_installed_one(name: str) -> None:
    """Newer ones may have gained overloads; what we call must be there."""
    try:
        module = import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"no {name} to compare with: {error}")
    for member in MEMBERS:
        known, found = recorded(member, VERSIONS[-1]), signatures(module, *member.split("."))
        assert found is not None, f"{name} has no {member}"
        assert (found == known) if known == "value" else any(one in found for one in known), member


def test_the_device_is_like_the_real_one() -> None:
    calls = [name for name, call in inspect.getmembers(Cuda, inspect.isfunction) if not name.startswith("_")]
    assert len(calls) == 14
    for name in calls:
        expected = inspect.signature(getattr(Cuda, name)).parameters
        for kind in (CudaRuntime, FakeCuda):
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(expected), f"{kind.__name__}.{name}"
